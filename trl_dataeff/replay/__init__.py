"""Training on rollouts of an earlier policy."""
