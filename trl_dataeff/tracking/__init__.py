"""What a run records about itself: metrics, one row per group, and its model card."""
