"""Where results are kept: one JSON-lines file a run while it goes, one parquet table of all finished runs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


DONE = {"done": True}
PACKAGES = ("trl-dataeff", "trl", "transformers", "torch", "numpy")


class RunFile:
    """The rows of one run, appended as they come. A run counts as finished once its last line says so."""

    def __init__(self, folder: Path, name: str):
        self.path = folder / f"{name}.jsonl"

    def _lines(self) -> list[dict]:
        if not self.path.exists():
            return []
        lines = []
        for line in self.path.read_text().splitlines():
            try:
                lines.append(json.loads(line))
            except json.JSONDecodeError:  # killed while it wrote: the run is not finished, and starts again
                break
        return lines

    def finished(self) -> bool:
        return self._lines()[-1:] == [DONE]

    def rows(self) -> list[dict]:
        return [line for line in self._lines() if line != DONE]

    def begin(self) -> None:
        """Forget the rows of an attempt that did not finish."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("")

    def append(self, row: dict) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def end(self) -> None:
        self.append(DONE)


def write_table(rows: Iterable[dict], path: Path, command: str) -> None:
    """Write `rows` as parquet, with the command and the versions of the packages in the schema."""
    rows = list(rows)
    names = dict.fromkeys(name for row in rows for name in row)  # pyarrow takes the columns of the first row alone
    metadata = {"command": command} | {name: version(name) for name in PACKAGES}
    table = pa.Table.from_pylist([dict.fromkeys(names) | row for row in rows]).replace_schema_metadata(metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    pq.write_table(table, partial)
    partial.replace(path)


def read_rows(path: Path) -> list[dict]:
    """The rows of a table, runs in the order in which they stand."""
    return pq.read_table(path).to_pylist()
