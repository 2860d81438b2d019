"""`RecordedRun`: the logs and groups that a run has left in its `output_dir`, ours or plain TRL's."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trl_dataeff.tracking.groups import GROUPS_FILE, read_groups
from trl_dataeff.tracking.metrics import METRICS_FILE, PREFIX, RUN_FILE
from trl_dataeff.utils import UserError, is_number


STATE_FILE = "trainer_state.json"


@dataclass(frozen=True)
class RecordedRun:
    """
    A run as its files have it.

    Attributes:
        path (`Path`): its `output_dir`.
        about (`dict`): of `run.json`: selector, model and number of prompts; empty for a run of plain TRL.
        lines (`list[dict]`): its logs in order, each with `step` and, where it is known, `rollouts`.
        groups (`pa.Table` or `None`): of `groups.parquet`.
    """

    path: Path
    about: dict[str, Any]
    lines: list[dict[str, Any]]
    groups: pa.Table | None

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def series(self, metric: str, x: str = "step") -> tuple[np.ndarray, np.ndarray]:
        """Positions and values `(n,)` of a metric, in order; logs without it, or without the axis `x`, are left out."""
        points = [(line[x], line[metric]) for line in self.lines if is_number(line.get(metric)) and x in line]
        at, values = np.array(points, dtype=float).reshape(-1, 2).T
        return at, values

    def last(self, metric: str) -> float:
        """The last value of a metric; NaN if it was never logged."""
        values = self.series(metric)[1]
        return float(values[-1]) if len(values) else math.nan

    @property
    def held_out(self) -> str | None:
        """The metric of held-out data: `eval_reward`, or the first other reward of an evaluation."""
        names = [name for line in self.lines for name in line if name.startswith("eval_") and "reward" in name]
        return "eval_reward" if "eval_reward" in names else next((n for n in names if not n.endswith("std")), None)

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
    if (folder / METRICS_FILE).exists():
        lines = read_metrics(folder / METRICS_FILE)
    else:
        lines = [dict(log) for log in read_log_history(folder)]
        for line in lines if rollouts_per_step else ():
            line["rollouts"] = line["step"] * rollouts_per_step
    groups = read_groups(folder / GROUPS_FILE) if (folder / GROUPS_FILE).exists() else None
    return RecordedRun(folder, about, lines, groups)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`; an incomplete last line, which a killed process leaves, is left out."""
    lines = []
    texts = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            assert isinstance(line["step"], int)
        except (ValueError, TypeError, KeyError, AssertionError) as error:
            if number == len(texts):
                break
            raise UserError(f"{path}, line {number} is corrupt: it is no JSON object with a `step`.") from error
        lines.append(line)
    if not lines:
        raise UserError(f"{path} holds no logs yet.")
    return lines


def read_log_history(folder: Path) -> list[dict[str, Any]]:
    """`log_history` of the Trainer's state in a folder or in its latest checkpoint."""
    numbered = {int(p.name.split("-")[1]): p for p in folder.glob("checkpoint-*") if re.fullmatch(r"\w+-\d+", p.name)}
    for place in [folder, *(numbered[step] for step in sorted(numbered, reverse=True))]:
        if (place / STATE_FILE).exists():
            history = _json(place / STATE_FILE).get("log_history") or []
            return [log for log in history if isinstance(log.get("step"), int)]
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
