"""`python -m benchmarks.lab`: `run`, `study`, `quick`, `pools`."""

from .cli import main


if __name__ == "__main__":
    main()
