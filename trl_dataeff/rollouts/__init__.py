"""What a rollout is: groups of completions as data, how they are classified, and how they pass through TRL."""
