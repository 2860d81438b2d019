"""What a run will save or has wasted: questions to the package's own selectors and logs, asked away from training."""
