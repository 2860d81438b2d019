"""Where finished runs are kept: JSON Lines files that only grow, with a line for each run.

A line has what is the same for the whole run once, and under `evaluations` the rows of the run, as a list for each
column:

    {"run": "first-uniform-...", "seed": 52, ..., "evaluations": {"step": [0, 5, ...], "rollouts": [0, 640, ...], ...}}

A column without values is left out. A field that a run lacks was not recorded when it was made.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


#: Fields that have one value for the whole run
RUN_FIELDS = (
    "run",
    "pool",
    "method",
    "seed",
    "learning_rate",
    "prompts",
    "group_size",
    "start",
    "machine",
    "commit",
    "trl_dataeff",
    "trl",
    "transformers",
    "torch",
)


def append_run(path: Path, rows: list[dict[str, Any]]) -> None:
    """Append a finished run to a file, which is created if need be.

    Args:
        path (`Path`): The file.
        rows (`list[dict]`): A row for each evaluation of the run. Fields in `RUN_FIELDS` are those of the first row.
    """
    line = {name: rows[0][name] for name in RUN_FIELDS if name in rows[0]}
    line["evaluations"] = {}
    for name in rows[0]:
        column = [row[name] for row in rows]
        if name not in RUN_FIELDS and any(value is not None for value in column):
            line["evaluations"][name] = column

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        _remove_half_line(file)
        file.write(json.dumps(line).encode() + b"\n")


def read_runs(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Read the runs of a file.

    Args:
        path (`Path`): The file; without it there are no runs.

    Returns:
        The rows of each run, by its name. Of a run that was made again, those of the last line.
    """
    if not path.exists():
        return {}
    runs: dict[str, list[dict[str, Any]]] = {}
    for text in path.read_text(encoding="utf-8").splitlines(keepends=True):
        # A writer that was killed leaves half a line, the last one
        if text.endswith("\n"):
            line = json.loads(text)
            runs[line["run"]] = _rows(line)
    return runs


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of all runs of a file."""
    return [row for rows in read_runs(path).values() for row in rows]


def _rows(line: dict[str, Any]) -> list[dict[str, Any]]:
    evaluations = line.pop("evaluations")
    names = list(evaluations)
    return [{**line, **dict(zip(names, values, strict=True))} for values in zip(*evaluations.values(), strict=True)]


def _remove_half_line(file: Any) -> None:
    """Cut off what follows the last end of line. `file` is open for reading and appending."""
    file.seek(0)
    content = file.read()
    complete = content.rfind(b"\n") + 1
    if complete < len(content):
        file.truncate(complete)
