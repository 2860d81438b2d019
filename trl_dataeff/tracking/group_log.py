"""`GroupLog`: one row per generated group, in `<output_dir>/dataeff/groups.parquet`."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from transformers.utils import logging

from trl_dataeff.rollouts.classification import total_rewards
from trl_dataeff.rollouts.group import KINDS, RolloutGroup
from trl_dataeff.tracking.group_table import DATASET, RUN, SCHEMA
from trl_dataeff.utils import use_file_of_run, write_atomically


logger = logging.get_logger(__name__)
FLUSH_SECONDS = 10.0


class GroupLog:
    """
    Collects rows and writes them, during training, to a parquet file that is complete at every moment.

    The file is rewritten at every checkpoint, at the end, and in between when the last time is `FLUSH_SECONDS` ago and
    the rows that wait are a twentieth of those written, so that what a run writes stays proportional to the file's size.

    The file's metadata name the run and its dataset. Before the first rows are written, [`begin`] says which one that is.

    Args:
        path (`Path`): the file.
    """

    def __init__(self, path: Path):
        self.path = path
        self._run, self._metadata = "", {RUN: "", DATASET: ""}
        self._written = SCHEMA.empty_table()
        self._waiting: list[dict[str, Any]] = []
        self._flushed_at = time.monotonic()
        self._warned = False

    def begin(self, run: str, step: int, dataset: str = "") -> None:
        """
        Continue the run `run` at optimizer step `step`: of its own table, rows generated before are kept. The table of
        another run is renamed to `groups-RUN.parquet`, and back when that run is resumed. A file that cannot be read is
        renamed, with a warning: training does not depend on it. `dataset` is the content hash of the prompts, if that is known.
        """
        self._run, self._metadata = run, {RUN: run, DATASET: dataset}
        try:
            self._set_aside_other_run()
            if self.path.exists():
                table = pq.read_table(self.path)
                self._written = table.filter(pc.less(table["step"], step)).cast(SCHEMA)
        except (OSError, KeyError, ValueError, pa.ArrowException) as error:  # ValueError: other columns
            aside = self.path.with_suffix(".corrupt.parquet")
            with suppress(OSError):
                self.path.replace(aside)
            logger.warning(
                f"{self.path} cannot be read ({type(error).__name__}: {error}) and was renamed to {aside.name}. A new table "
                f"begins with step {step}; training is not affected."
            )

    def _set_aside_other_run(self) -> None:
        written_by = None
        if self.path.exists():
            written_by = (pq.read_schema(self.path).metadata or {}).get(RUN, b"unknown").decode()
        use_file_of_run(self.path, written_by, self._run)

    def prompt_ids(self) -> np.ndarray:
        """Ids of the prompts in the rows that are written, each once."""
        return np.unique(self._written["prompt_id"].to_numpy())

    def since(self, step: int) -> pa.Table:
        """The groups generated at optimizer step `step` or later, written or not."""
        table = pa.concat_tables([self._written, pa.Table.from_pylist(self._waiting, schema=SCHEMA)])
        return table.filter(pc.greater_equal(table["step"], step))

    def add(self, groups: Iterable[RolloutGroup], weights: np.ndarray) -> None:
        """Enter groups. `weights` `(F,)` are those of the reward functions."""
        for group in groups:
            totals = total_rewards(group.rewards, weights)
            scored = totals[totals == totals]
            self._waiting.append(
                {
                    "step": group.step,
                    "prompt_id": group.prompt_id,
                    "round": group.round,
                    "success_rate": _number_or_none(group.success_rate),
                    "reward": float(scored.mean()) if len(scored) else None,
                    "kind": KINDS[group.kind],
                    "predicted": _number_or_none(group.predicted),
                    "explored": group.explored,
                    "origin": group.origin,
                    "disposition": group.disposition,
                    "completions": group.size,
                    "tokens": group.tokens,
                    "seconds": group.seconds,
                }
            )

    def flush(self, force: bool = False) -> None:
        """Write what waits, if it is time or `force` is set."""
        due = time.monotonic() - self._flushed_at >= FLUSH_SECONDS and len(self._waiting) >= len(self._written) / 20
        if not self._waiting or not (force or due):
            return
        table = pa.concat_tables([self._written, pa.Table.from_pylist(self._waiting, schema=SCHEMA)])
        table = table.replace_schema_metadata(self._metadata)
        self._flushed_at = time.monotonic()
        try:
            write_atomically(self.path, lambda path: pq.write_table(table, path, write_page_checksum=True))
        except OSError as error:
            self._warn_once(error)
        else:
            self._written, self._waiting = table, []
            self._warned = False

    def _warn_once(self, error: OSError) -> None:
        """The table is not worth a run: its rows are kept for the next time."""
        if not self._warned:
            logger.warning(
                f"{self.path} could not be written ({error}). Training continues; the rows are kept in memory and written "
                "when there is room. This warning is shown once."
            )
        self._warned = True


def _number_or_none(value: float) -> float | None:
    return None if value != value else float(value)
