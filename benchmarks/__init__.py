"""What produces every figure that the documentation quotes."""
