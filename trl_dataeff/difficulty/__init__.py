"""How likely each prompt is solved now: prompts as vectors, and predictors of their success rates."""
