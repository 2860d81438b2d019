"""Files of a checkpoint: complete or absent, checked on load."""
