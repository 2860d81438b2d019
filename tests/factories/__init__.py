"""Helpers shared by the tests: models, datasets, groups and runs, made in code; nothing is downloaded."""
