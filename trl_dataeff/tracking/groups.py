"""`GroupLog`: one row per generated group, in `<output_dir>/dataeff/groups.parquet`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from transformers.utils import logging

from trl_dataeff.rollouts.group import KINDS, RolloutGroup
from trl_dataeff.rollouts.scale import RewardScale
from trl_dataeff.tracking.metrics import METRICS_FILE, RUN_FILE, MetricsLog, try_to_write
from trl_dataeff.utils import UserError, write_atomically


logger = logging.get_logger(__name__)
GROUPS_FILE = "dataeff/groups.parquet"
FLUSH_SECONDS = 10.0
ABOUT = b"trl_dataeff"  # key of the file's metadata: what [`about_groups`] returns, as JSON
SCHEMA = pa.schema(
    {
        "step": pa.int32(),  # optimizer steps that were done when the group was generated
        "prompt_id": pa.int64(),  # row of the training dataset; -1 if not known
        "round": pa.int16(),  # of its generation batch, from 0
        "success_rate": pa.float32(),  # in [0, 1]; null if no completion was scorable
        "reward": pa.float32(),  # mean total reward of the scorable completions
        "kind": pa.string(),  # of `KINDS`
        "predicted": pa.float32(),  # success rate predicted before the rollout
        "origin": pa.string(),  # fresh | reference
        "disposition": pa.string(),  # trained | leftover | dropped, in its own batch
        "completions": pa.int16(),  # generated for it
        "tokens": pa.int32(),  # generated for its completions
        "seconds": pa.float32(),  # its share of the time its round took
    }
)


class GroupLog:
    """Collects rows for a Parquet file, which is rewritten at every checkpoint, at the end, and in between now and then."""

    def __init__(self, path: Path):
        self.path = path
        self._dataset, self._scale = "", RewardScale()
        self._waiting: list[dict[str, Any]] = []
        self._written = SCHEMA.empty_table()
        self._flushed_at = time.monotonic()

    def begin(self, step: int, dataset: str, scale: RewardScale) -> None:
        """
        Continue at optimizer step `step`, with the rows generated before. `dataset` is the content hash of the prompts, and `scale`
        the range of total rewards, which widens during the run.
        """
        self._dataset, self._scale, self._written, self._waiting = dataset, scale, SCHEMA.empty_table(), []
        if step and self.path.exists():
            try:
                self._written = pq.read_table(self.path, filters=pc.field("step") < step).cast(SCHEMA)
            except (OSError, ValueError, pa.ArrowException) as error:  # ValueError: other columns
                logger.warning(f"{self.path} cannot be read ({error}): a new table begins with step {step}.")

    def add(
        self,
        groups: Sequence[RolloutGroup],
        success_rates: Sequence[float] | np.ndarray,
        predicted: Sequence[float],
        seconds: Sequence[float],
        origins: Sequence[str],
        dispositions: Sequence[str],
    ) -> None:
        """Enter groups, with their success rates, those that were predicted, and their shares of the generation time."""
        columns = (groups, success_rates, predicted, seconds, origins, dispositions)
        for group, success_rate, prediction, duration, origin, disposition in zip(*columns, strict=True):
            row = {
                "step": group.step,
                "prompt_id": group.prompt_id,
                "round": group.round,
                "success_rate": float(success_rate),
                "reward": float(np.nanmean(group.totals)) if group.scored else None,
                "kind": KINDS[group.kind],
                "predicted": float(prediction),
                "origin": origin,
                "disposition": disposition,
                "completions": group.size,
                "tokens": group.tokens,
                "seconds": float(duration),
            }
            self._waiting.append({name: None if value != value else value for name, value in row.items()})  # NaN: null

    def flush(self, force: bool = False) -> None:
        """Write what waits, if `force` is set or after `FLUSH_SECONDS`, once it is a twentieth of what is written."""
        due = time.monotonic() - self._flushed_at >= FLUSH_SECONDS and len(self._waiting) >= len(self._written) / 20
        if not self._waiting or not (force or due):
            return
        table = pa.concat_tables([self._written, pa.Table.from_pylist(self._waiting, schema=SCHEMA)])
        about = {"dataset": self._dataset, "reward_range": self._scale.state_dict()}
        table = table.replace_schema_metadata({ABOUT: json.dumps(about)})
        self._flushed_at = time.monotonic()
        if try_to_write(self.path, partial(write_atomically, self.path, partial(pq.write_table, table))):
            self._written, self._waiting = table, []


class RunLogs:
    """The files that the main process writes to `<output_dir>/dataeff`; `about` is what `run.json` says, JSON values."""

    def __init__(self, output_dir: str):
        self._run = Path(output_dir, RUN_FILE)
        self.groups = GroupLog(Path(output_dir, GROUPS_FILE))
        self.metrics = MetricsLog(Path(output_dir, METRICS_FILE))
        self.about: dict[str, Any] = {}

    def begin(self, step: int, dataset: str, scale: RewardScale, about: dict[str, Any]) -> None:
        """Continue at optimizer step `step`: what was written after it, or by an earlier run, is removed."""
        self.about, text = about, json.dumps(about, indent=2)
        self.groups.begin(step, dataset, scale)
        self.metrics.begin(step)
        try_to_write(self._run, partial(write_atomically, self._run, lambda path: path.write_text(text)))


def read_groups(path: Path) -> pa.Table:
    """The table of a run, with a success rate of NaN where there is none. Raises a [`UserError`] if it cannot be read."""
    try:
        table = pq.read_table(path).select(SCHEMA.names)
        rates = pc.fill_null(table["success_rate"].cast(pa.float64()), float("nan"))
        return table.set_column(SCHEMA.get_field_index("success_rate"), "success_rate", rates)
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        raise UserError(f"{path} is no table of groups of this package ({type(error).__name__}: {error}).") from error


def about_groups(path: Path) -> dict[str, Any]:
    """`dataset`, the content hash of the prompts of a table of groups, and `reward_range`, its last ends `low` and `high`, if any."""
    metadata: dict[bytes, bytes] = pq.read_schema(path).metadata or {}
    about: dict[str, Any] = json.loads(metadata.get(ABOUT, b"{}"))
    return about
