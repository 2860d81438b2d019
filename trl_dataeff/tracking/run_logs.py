"""`RunLogs`: the files that a run writes to `<output_dir>/dataeff` while it trains, beside `run.json`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from trl_dataeff.tracking.group_log import GroupLog
from trl_dataeff.tracking.metrics_log import MetricsLog
from trl_dataeff.tracking.prompt_table import PromptTable


class RunLogs:
    """
    Of a run's main process alone.

    Args:
        folder (`Path`): `<output_dir>/dataeff`.
        rows (`Callable`, *optional*): prompt ids `(k,)` -> a table of their columns; `None` where prompts are not known by
            row.

    Attributes:
        groups ([`GroupLog`]): `groups.parquet`, a row for each generated group.
        metrics ([`MetricsLog`]): `metrics.jsonl`, a line for each log.
        prompts ([`PromptTable`]): `prompts.parquet`, a row for each prompt in `groups`.
    """

    def __init__(self, folder: Path, rows: Callable[[np.ndarray], pa.Table] | None = None):
        self.groups = GroupLog(folder / "groups.parquet")
        self.metrics = MetricsLog(folder / "metrics.jsonl")
        self.prompts = PromptTable(folder / "prompts.parquet", rows)

    def begin(self, run: str, step: int, dataset: str = "") -> None:
        """Continue the run `run` at optimizer step `step`: what was written after that step is removed."""
        self.groups.begin(run, step, dataset)
        self.metrics.begin(run, step)

    def flush(self, force: bool = False) -> None:
        """Write what waits, if it is time or `force` is set."""
        self.groups.flush(force)
        if force:
            self.prompts.write(self.groups.prompt_ids())
