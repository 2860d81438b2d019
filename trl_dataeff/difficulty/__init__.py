"""What a prompt's success rate is likely to be, from its embedding."""
