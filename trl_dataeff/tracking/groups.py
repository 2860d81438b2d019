"""The table of generated groups, `<output_dir>/dataeff/groups.parquet`, and all the files that a run writes there."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from transformers.utils import logging

from trl_dataeff.rollouts.group import KINDS, RolloutGroup
from trl_dataeff.rollouts.scale import RewardScale
from trl_dataeff.tracking.files import ABOUT, GROUPS_FILE, METRICS_FILE, RUN_FILE, SCHEMA
from trl_dataeff.tracking.metrics import MetricsLog, try_to_write
from trl_dataeff.utils import write_atomically


logger = logging.get_logger(__name__)
#: Least seconds between two writes, each of which rewrites the whole file
FLUSH_SECONDS = 10.0
#: A write also waits until there is one new row for this many that are written
FLUSH_FRACTION = 20


class GroupLog:
    """
    Collects a row per generated group for a Parquet file. The file is rewritten at every checkpoint, at the end of a
    run, and from time to time in between.

    Args:
        path (`Path`): the file.
    """

    def __init__(self, path: Path):
        self.path = path
        self._dataset = ""
        self._scale = RewardScale()
        self._waiting: list[dict[str, Any]] = []
        self._written = SCHEMA.empty_table()
        self._flushed_at = time.monotonic()

    def begin(self, step: int, dataset: str, scale: RewardScale) -> None:
        """
        Continue at an optimizer step, with the rows that were generated before it.

        Args:
            step (`int`): optimizer steps that are done; with 0 the table begins empty.
            dataset (`str`): content hash of the prompts.
            scale ([`RewardScale`]): the range of total rewards, which widens during the run.
        """
        self._dataset = dataset
        self._scale = scale
        self._waiting = []
        self._written = SCHEMA.empty_table()
        if step and self.path.exists():
            try:
                is_earlier = pc.field("step") < step
                self._written = pq.read_table(self.path, filters=is_earlier).cast(SCHEMA)
            except (OSError, ValueError, pa.ArrowException) as error:  # ValueError: other columns
                logger.warning(f"{self.path} cannot be read ({error}): a new table begins with step {step}.")

    def add(
        self,
        groups: Sequence[RolloutGroup],
        *,
        success_rates: Sequence[float] | np.ndarray,
        predicted: Sequence[float],
        seconds: Sequence[float],
        origins: Sequence[str],
        dispositions: Sequence[str],
    ) -> None:
        """
        Enter the groups of a generation batch.

        Args:
            groups (`Sequence[RolloutGroup]`): n groups.
            success_rates (`np.ndarray` of shape `(n,)`): success rate of each, or NaN.
            predicted (`Sequence[float]`): success rate that was predicted for each, or NaN.
            seconds (`Sequence[float]`): each group's share of the time in which it was generated.
            origins (`Sequence[str]`): where each comes from.
            dispositions (`Sequence[str]`): what becomes of each.
        """
        for i, group in enumerate(groups):
            reward = float(np.nanmean(group.totals)) if group.num_scored > 0 else math.nan
            row = {
                "step": group.step,
                "prompt_id": group.prompt_id,
                "round": group.round,
                "success_rate": _null_if_nan(success_rates[i]),
                "reward": _null_if_nan(reward),
                "kind": KINDS[group.kind],
                "predicted": _null_if_nan(predicted[i]),
                "origin": origins[i],
                "disposition": dispositions[i],
                "completions": group.size,
                "tokens": group.tokens,
                "seconds": _null_if_nan(seconds[i]),
            }
            self._waiting.append(row)

    def flush(self, force: bool = False) -> None:
        """
        Write the rows that wait, if there are any and a write is due.

        Args:
            force (`bool`, *optional*, defaults to `False`): write now, due or not.
        """
        if not self._waiting:
            return
        seconds = time.monotonic() - self._flushed_at
        is_due = seconds >= FLUSH_SECONDS and len(self._waiting) >= len(self._written) / FLUSH_FRACTION
        if not force and not is_due:
            return
        new_rows = pa.Table.from_pylist(self._waiting, schema=SCHEMA)
        about = {"dataset": self._dataset, "reward_range": self._scale.state_dict()}
        # In one piece: else the rows of each write stay apart, and writing them takes ever longer
        table = pa.concat_tables([self._written, new_rows]).combine_chunks()
        table = table.replace_schema_metadata({ABOUT: json.dumps(about)})

        def write() -> None:
            write_atomically(self.path, lambda temporary: pq.write_table(table, temporary))

        self._flushed_at = time.monotonic()
        if try_to_write(self.path, write):
            self._written = table
            self._waiting = []


def _null_if_nan(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


class RunLogs:
    """
    The files that the main process writes to `<output_dir>/dataeff`.

    Args:
        output_dir (`str`): the run's folder.

    Attributes:
        groups ([`GroupLog`]): the table of groups.
        metrics ([`MetricsLog`]): the logs.
        about (`dict`): what `run.json` says, in JSON values; empty before [`begin`].
    """

    def __init__(self, output_dir: str):
        self._run_file = Path(output_dir, RUN_FILE)
        self.groups = GroupLog(Path(output_dir, GROUPS_FILE))
        self.metrics = MetricsLog(Path(output_dir, METRICS_FILE))
        self.about: dict[str, Any] = {}

    def begin(self, step: int, dataset: str, scale: RewardScale, about: dict[str, Any]) -> None:
        """
        Continue at an optimizer step: what was written after it, or by an earlier run, is removed.

        Args:
            step (`int`), dataset (`str`), scale ([`RewardScale`]): see [`GroupLog.begin`].
            about (`dict`): what `run.json` is to say, in JSON values.
        """
        self.about = about
        self.groups.begin(step, dataset, scale)
        self.metrics.begin(step)
        text = json.dumps(about, indent=2)

        def write() -> None:
            write_atomically(self._run_file, lambda temporary: temporary.write_text(text))

        try_to_write(self._run_file, write)
