"""What keeps a run alive when something outside of it fails. Each part is off unless chosen."""
