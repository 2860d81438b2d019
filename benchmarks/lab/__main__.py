"""`python -m benchmarks.lab`: `run`, `quick`, `report`, `pools`."""

from .cli import main


if __name__ == "__main__":
    main()
