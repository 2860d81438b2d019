"""What passes through TRL's generation: rounds that are recorded, and groups that were generated before."""
