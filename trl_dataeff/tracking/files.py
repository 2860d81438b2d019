"""Files of a run that share a folder with those of other runs."""

from __future__ import annotations

from pathlib import Path


def use_file_of_run(path: Path, written_by: str | None, run: str) -> None:
    """
    Make `path` the file of `run`: that of another run is renamed to `STEM-RUN.SUFFIX`, and back when that run is resumed.

    Args:
        path (`Path`): the file, present or not.
        written_by (`str` or `None`): id of the run that wrote it; `None` if it is not there.
        run (`str`): id of the present run.
    """
    if written_by == run:
        return
    if written_by is not None:
        path.replace(_aside(path, written_by))
    if _aside(path, run).exists():
        _aside(path, run).replace(path)


def _aside(path: Path, run: str) -> Path:
    return path.with_name(f"{path.stem}-{run}{path.suffix}")
