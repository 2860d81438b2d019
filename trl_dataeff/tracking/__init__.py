"""What a run records about itself: metrics, and one row per group."""
