"""The package's version and the version of its file formats."""

__version__ = "0.1.0"

#: Version of every file format that this package writes: checkpoints, embedding caches and saved predictors.
FORMAT = 1
