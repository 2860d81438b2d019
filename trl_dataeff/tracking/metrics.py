"""
The metrics of the package: name, unit and meaning, in one table. A new metric is a line in it.

All of them go through `Trainer.log`, under the prefix `dataeff/`. What a selector reports is logged under
`dataeff/selector/`, by the selector's own names.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import TrainerState
from transformers.utils import logging
from trl.trainer.utils import nanstd

from trl_dataeff.rollouts.classification import total_rewards
from trl_dataeff.rollouts.group import RolloutGroup
from trl_dataeff.utils import write_atomically


logger = logging.get_logger(__name__)
PREFIX = "dataeff/"
METRICS_FILE, RUN_FILE = "dataeff/metrics.jsonl", "dataeff/run.json"
END = "train_runtime"  # in the last log of a call of `train`
SELECTOR_PREFIX = PREFIX + "selector/"


class Metric(NamedTuple):
    """
    `cumulative` metrics count since the start of training; the others are means over a logging interval. Those of a
    `fault` are logged from the first one on.
    """

    unit: str
    meaning: str
    cumulative: bool = False
    fault: bool = False


METRICS: dict[str, Metric] = {
    "rollouts_generated": Metric("completions", "Generated so far by all processes, dropped ones included.", True),
    "rollouts_trained": Metric("completions", "Trained on so far.", True),
    "rollouts_replayed": Metric(
        "completions", "Of those trained on, generated for an earlier generation batch.", True
    ),
    "rollouts_discarded": Metric(
        "completions",
        "Generated so far and dropped: of zero-variance groups, or of references that found no room.",
        True,
    ),
    "tokens_generated": Metric("tokens", "Generated so far by all processes, dropped completions included.", True),
    "rounds": Metric("rounds per generation batch", "Rounds of rollouts (with `max_rollout_rounds` above 1)."),
    "success_rate": Metric("share", "Mean success rate of the groups generated now."),
    "effective_ratio": Metric("share", "Effective groups among those generated now."),
    "easy_ratio": Metric("share", "Groups generated now in which every completion has the highest reward."),
    "hard_ratio": Metric("share", "Zero-variance groups generated now that are not easy."),
    "replay/age_mean": Metric(
        "steps", "Age of the groups trained on that were generated for an earlier generation batch."
    ),
    "replay/ess": Metric(
        "share",
        "Effective sample size of pi_old / pi_behavior over replayed tokens: (sum w)^2 / (n sum w^2) in a micro-batch; 1 if all are equal.",
    ),
    "replay/clipped_share": Metric(
        "share", "Of replayed tokens, those whose gradient was removed by the clip, or with 'behavior' by the cap."
    ),
    "overlong_prompts": Metric(
        "completions", "So far, those whose prompt leaves no room for a completion in the model's context.", True, True
    ),
    "time/selection_s": Metric("seconds per step", "Selecting prompts and groups, on the main process."),
    "time/generation_s": Metric("seconds per step", "Generating and scoring rollouts, on the main process."),
}


def record_selector(store: dict[str, list[float]], values: dict[str, float]) -> None:
    """
    Hand a selector's metrics to TRL's store. The log has the latest value of each; NaN ones are left out.

    Args:
        store (`dict`): `trainer._metrics["train"]`.
        values (`dict`): by the selector's names, without the prefix.
    """
    for name, value in values.items():
        if value == value:
            store[SELECTOR_PREFIX + name] = [float(value)]


def record(store: dict[str, list[float]], values: dict[str, float]) -> None:
    """
    Hand metrics to TRL's store, which logs the mean of each list and then empties it.

    Args:
        store (`dict`): `trainer._metrics["train"]`.
        values (`dict`): by name in `METRICS`, without the prefix.
    """
    for name, value in values.items():
        if METRICS[name].cumulative:
            store[PREFIX + name] = [value]
        else:
            store[PREFIX + name].append(value)


@contextmanager
def without_rounds(store: dict[str, list[float]], state: TrainerState) -> Iterator[None]:
    """
    Keeps what TRL logs while it generates (lengths, token counts) out of its metrics. Rounds of rollouts run in this
    context: their completions are logged when the kept ones are played back, and dropped ones by `METRICS` alone.

    Args:
        store (`dict`): `trainer._metrics["train"]`.
        state ([`~transformers.TrainerState`]): its `num_input_tokens_seen` is restored.
    """
    tokens = state.num_input_tokens_seen
    before = {name: list(values) for name, values in store.items() if name.startswith("completions/")}
    yield
    for name in [name for name in store if name.startswith("completions/") or name == "num_tokens"]:
        store[name] = before.get(name, [])
    state.num_input_tokens_seen = tokens


def group_metrics(groups: Sequence[RolloutGroup], names: Sequence[str], weights: np.ndarray) -> dict[str, float]:
    """
    TRL's metrics of rewards and lengths, over these groups only. NaN, which TRL leaves out, if there are none.

    Args:
        groups: groups of the present policy.
        names (`list[str]`), weights (`np.ndarray` of shape `(F,)`): the reward functions.
    """
    nothing = np.full((1, len(names)), np.nan, dtype=np.float32)
    rewards = np.concatenate([group.rewards for group in groups] or [nothing])
    totals = torch.from_numpy(total_rewards(rewards, weights))
    lengths = np.concatenate([group.lengths for group in groups] or [nothing[:, 0]]).astype(np.float64)
    truncated = np.concatenate([group.truncated for group in groups] or [nothing[:, 0]]).astype(np.float64)
    ended = lengths[truncated != 1] if (truncated != 1).any() else np.zeros(1)
    values = {"reward": totals.nanmean().item(), "reward_std": nanstd(totals).item()}
    for name, column in zip(names, torch.from_numpy(rewards).T, strict=True):
        values[f"rewards/{name}/mean"] = column.nanmean().item()
        values[f"rewards/{name}/std"] = nanstd(column).item()
    each = totals.split([group.size for group in groups]) if groups else ()
    zero = [bool(np.isclose(nanstd(own).item(), 0)) for own in each]
    values["frac_reward_zero_std"] = float(np.mean(zero)) if zero else float("nan")
    values["completions/clipped_ratio"] = float(truncated.mean())
    for kind, tokens in (("", lengths), ("terminated_", ended)):
        for statistic in ("mean", "min", "max"):
            values[f"completions/{statistic}_{kind}length"] = float(getattr(tokens, statistic)())
    return values


def replace_last(store: dict[str, list[float]], values: dict[str, float]) -> None:
    """Replace the values that were entered last under these names."""
    for name, value in values.items():
        store[name][-1] = value


class Counters:
    """The cumulative metrics of a run, all starting at 0."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {name: 0 for name, metric in METRICS.items() if metric.cumulative}

    def logged(self) -> dict[str, int]:
        """What is logged: all counts but those of faults that have not occurred."""
        return {name: value for name, value in self.values.items() if value or not METRICS[name].fault}

    def state_dict(self) -> dict[str, int]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.values.update(state)

    def add(self, **amounts: int) -> None:
        """Add to the counts of these names."""
        for name, amount in amounts.items():
            self.values[name] += int(amount)


class StepTimer:
    """Splits the time of a step into selection, generation (with scoring), and the rest, which is training."""

    def __init__(self) -> None:
        self._selection = self._generation = 0.0

    @contextmanager
    def selection(self) -> Iterator[None]:
        """Times what is done in this context, without the generation in it."""
        started = time.perf_counter() - self._generation
        yield
        self._selection += time.perf_counter() - self._generation - started

    def add_generation(self, seconds: float) -> None:
        """Enter the seconds of a round of rollouts."""
        self._generation += seconds

    def take(self) -> dict[str, float]:
        """Metrics of the optimizer step that has ended; the next one starts at 0."""
        selection, generation = self._selection, self._generation
        self._selection = self._generation = 0.0
        return {"time/selection_s": selection, "time/generation_s": generation}


class MetricsLog:
    """
    Appends what the Trainer logs, evaluations too, to `metrics.jsonl`. A line is a JSON object of numbers with, besides the
    metrics, `step`; `rollouts` and `tokens` generated so far; and `seconds` of training so far, without the time between a
    stop and a resume.

    Args:
        path (`Path`): the file.
    """

    def __init__(self, path: Path):
        self.path = path
        self._waiting: list[str] = []
        self._began = time.monotonic()
        self._warned = False

    def begin(self, step: int) -> None:
        """Continue at optimizer step `step`: lines up to that step are kept, and an earlier run's are removed."""
        self._began = time.monotonic()
        if not self.path.exists():
            return
        kept = [line for line in _lines(self.path) if step and line["step"] <= step and END not in line]
        self._began -= max((line["seconds"] for line in kept), default=0.0)
        text = "".join(json.dumps(line) + "\n" for line in kept)
        self._write(lambda: write_atomically(self.path, lambda path: path.write_text(text, encoding="utf-8")))

    def add(self, logs: Mapping[str, Any], *, step: int, rollouts: int, tokens: int) -> None:
        """Write a line. What is not a number is left out; a number that is not finite is null."""
        numbers = {name: v if math.isfinite(v) else None for name, v in logs.items() if isinstance(v, (int, float))}
        seconds = round(time.monotonic() - self._began, 3)
        line = {"step": step, "rollouts": rollouts, "tokens": tokens, "seconds": seconds, **numbers}
        self._waiting.append(json.dumps(line) + "\n")
        if self._write(self._append):
            self._waiting = []

    def _append(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write("".join(self._waiting))

    def _write(self, write: Callable[[], None]) -> bool:
        """Whether the file could be written: it is not worth a run."""
        try:
            write()
        except OSError as error:
            if not self._warned:
                logger.warning(
                    f"{self.path} could not be written ({error}). Training continues; the lines are kept in memory and "
                    "written when there is room. This warning is shown once."
                )
            self._warned = True
            return False
        self._warned = False
        return True


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Complete lines: a process that was killed while it wrote leaves half of one."""
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict) and {"step", "seconds"} <= line.keys():
                yield line
