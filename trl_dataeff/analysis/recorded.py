"""`RecordedRun`: the logs and groups that a run has left in its `output_dir`, ours or plain TRL's; and a table of several."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trl_dataeff.tracking.card import methods_used
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
        """The names of the run's folder and of its parent: several runs may be called `default` or `out`."""
        return "/".join(self.path.resolve().parts[-2:])

    def series(self, metric: str, x: str = "step") -> tuple[np.ndarray, np.ndarray]:
        """
        Positions and values `(n,)` of a metric, in order: means over logs at one position, such as of several held-out datasets.
        Logs without it, or without the axis `x`, are left out.
        """
        means = self.logs.reindex(columns=[x, metric]).dropna().groupby(x, sort=False)[metric].mean()
        return means.index.to_numpy(dtype=float), means.to_numpy(dtype=float)

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
        """
        Steps and the share of effective groups among those generated; of plain TRL by its `frac_reward_zero_std`, which counts batches
        with `scale_rewards="batch"`.
        """
        steps, shares = self.series(f"{PREFIX}effective_ratio")
        if len(steps):
            return steps, shares
        steps, zero = self.series("frac_reward_zero_std")
        return steps, 1 - zero


def read_run(path: str | Path, rollouts_per_step: int | None = None) -> RecordedRun:
    """
    Read a run's `output_dir`, or a checkpoint of plain TRL, which does not log its completions of a step (`rollouts_per_step`).
    Raises a [`UserError`] if nothing of a run is there, or a file is corrupt.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise UserError(f"{path} is not a folder. Give the `output_dir` of a run.")
    about = _json(folder / RUN_FILE) if (folder / RUN_FILE).exists() else {}
    ours = (folder / METRICS_FILE).exists()
    lines = read_metrics(folder / METRICS_FILE) if ours else _log_history(folder)
    if not lines:
        raise UserError(
            f"{folder} has no logs of a run yet, in `{METRICS_FILE}` or, of plain TRL, in a checkpoint's `{STATE_FILE}`. Give an "
            "`output_dir`; a run logs every `logging_steps` steps."
        )
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
    return []


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is corrupt ({error}). Remove it, and try again.") from error
    return content if isinstance(content, dict) else {}


def summary(runs: Sequence[RecordedRun]) -> str:
    """A table for the terminal, with a column of facts for each run."""
    table = pd.DataFrame([facts(run) for run in runs], index=[run.name for run in runs])
    return table.fillna("").T.to_string()


def facts(run: RecordedRun) -> dict[str, str]:
    """What happened in a run, in words; what its files do not tell is left out."""
    steps, times = run.series("step_time")
    shares = run.effective_share()[1]
    numbers = {
        "prompts": (run.about.get("prompts") or None, ",.0f"),
        "optimizer steps": (run.logs["step"].max(), ",.0f"),
        "rollouts generated": (run.last.get("rollouts"), ",.0f"),
        "rollouts replayed": (run.last.get(f"{PREFIX}rollouts_replayed"), ",.0f"),
        "effective groups": (shares.mean() if len(shares) else None, ".0%"),
        "hours": (times.mean() * steps[-1] / 3600 if len(steps) else None, ".2f"),  # plain TRL has no other times
    }
    found = {
        "model": str(run.about.get("model") or ""),
        "method": ", ".join(methods_used(run.about, run.last)),
        **{name: f"{value:{form}}" for name, (value, form) in numbers.items() if value is not None},
        "reward in training, first and last": _ends(run, "reward"),
        "held-out reward, first and last": _ends(run, run.held_out),
    }
    return {name: text for name, text in found.items() if text}


def _ends(run: RecordedRun, metric: str) -> str:
    """Means of the first and the last tenth of a metric."""
    values = run.series(metric)[1]
    tenth = max(1, len(values) // 10)
    return f"{values[:tenth].mean():.3f}, {values[-tenth:].mean():.3f}" if len(values) else ""
