"""`RecordedRun`: the logs and groups that a run has left in its `output_dir`, ours or plain TRL's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trl_dataeff.tracking.groups import GROUPS_FILE, read_groups
from trl_dataeff.tracking.metrics import METRICS_FILE, PREFIX, RUN_FILE, read_metrics
from trl_dataeff.utils import UserError, is_number


STATE_FILE = "trainer_state.json"


@dataclass(frozen=True)
class RecordedRun:
    """
    A run as its files have it.

    Attributes:
        path (`Path`): its `output_dir`.
        about (`dict`): of `run.json`: selector, model and number of prompts; empty for a run of plain TRL.
        logs (`pd.DataFrame`): a row for each log, in order: `step`, metrics, and `rollouts` where it is known; NaN where a
            log has no finite number.
        groups (`pd.DataFrame` or `None`): of `groups.parquet`.
    """

    path: Path
    about: dict[str, Any]
    logs: pd.DataFrame
    groups: pd.DataFrame | None

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def series(self, metric: str, x: str = "step") -> tuple[np.ndarray, np.ndarray]:
        """Positions and values `(n,)` of a metric, in order; logs without it, or without the axis `x`, are left out."""
        at, values = self.logs.reindex(columns=[x, metric]).dropna().to_numpy(dtype=float).T
        return at, values

    @property
    def last(self) -> dict[str, float]:
        """The last value of each metric."""
        return dict(self.logs.ffill().iloc[-1])

    @property
    def held_out(self) -> str:
        """The metric of held-out data: `eval_reward`, or the first other reward of an evaluation; empty if there is none."""
        names = [name for name in self.logs if name.startswith("eval_") and "reward" in name]
        return "eval_reward" if "eval_reward" in names else next((n for n in names if not n.endswith("std")), "")

    def effective_share(self) -> tuple[np.ndarray, np.ndarray]:
        """Steps and the share of effective groups among those generated; of plain TRL by `frac_reward_zero_std`."""
        steps, shares = self.series(f"{PREFIX}effective_ratio")
        if len(steps):
            return steps, shares
        steps, zero = self.series("frac_reward_zero_std")
        return steps, 1 - zero


def read_run(path: str | Path, rollouts_per_step: int | None = None) -> RecordedRun:
    """
    Read what a run has left in its `output_dir`; for plain TRL, `path` may be a checkpoint, and `rollouts_per_step` the completions
    of an optimizer step, which it does not log. Raises a [`UserError`] if nothing of a run is there, or a file is corrupt.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise UserError(f"{path} is not a folder. Give the `output_dir` of a run.")
    about = _json(folder / RUN_FILE) if (folder / RUN_FILE).exists() else {}
    ours = (folder / METRICS_FILE).exists()
    lines = read_metrics(folder / METRICS_FILE) if ours else _log_history(folder)
    if not lines:
        raise UserError(f"{folder / METRICS_FILE} holds no logs yet.")
    logs = pd.DataFrame([{name: value for name, value in line.items() if is_number(value)} for line in lines])
    if rollouts_per_step and not ours:
        logs["rollouts"] = logs["step"] * rollouts_per_step
    groups = read_groups(folder / GROUPS_FILE).to_pandas() if (folder / GROUPS_FILE).exists() else None
    return RecordedRun(folder, about, logs, groups)


def _log_history(folder: Path) -> list[dict[str, Any]]:
    """`log_history` of the Trainer's state in a folder or in its latest checkpoint."""
    # By length first: `checkpoint-9` is older than `checkpoint-10`
    saved = sorted(folder.glob(f"checkpoint-*/{STATE_FILE}"), key=lambda path: (len(path.parent.name), path))
    for path in [folder / STATE_FILE, *reversed(saved)]:
        history = _json(path).get("log_history") if path.exists() else None
        if lines := [log for log in history or [] if isinstance(log.get("step"), int)]:
            return lines
    raise UserError(
        f"{folder} has no logs of a run: neither `{METRICS_FILE}` nor `{STATE_FILE}`. Give the `output_dir` of a run, of plain "
        "TRL with a checkpoint."
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is corrupt ({error}).") from error
    return content if isinstance(content, dict) else {}
