"""The metrics of the package, logged under `dataeff/` and explained in `docs/metrics.md`; a selector's own are under `dataeff/selector/`."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

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


#: By name, whether a metric counts since the start of training; the others are means over a logging interval
METRICS: dict[str, bool] = {
    "rollouts_generated": True,
    "rollouts_trained": True,
    "rollouts_replayed": True,
    "rollouts_discarded": True,
    "tokens_generated": True,
    "rounds": False,
    "success_rate": False,
    "effective_ratio": False,
    "easy_ratio": False,
    "hard_ratio": False,
    "replay/age_mean": False,
    "replay/ess": False,
    "replay/clipped_share": False,
    "time/selection_s": False,
    "time/generation_s": False,
}


def record_selector(store: dict[str, list[float]], values: dict[str, float]) -> None:
    """Hand a selector's metrics to TRL's `store`. The log has the latest value of each; NaN ones are left out."""
    for name, value in values.items():
        if value == value:
            store[SELECTOR_PREFIX + name] = [float(value)]


def record(store: dict[str, list[float]], values: dict[str, float]) -> None:
    """Hand metrics, by their names in `METRICS`, to TRL's `store`, which logs the mean of each list and then empties it."""
    for name, value in values.items():
        if METRICS[name]:
            store[PREFIX + name] = [value]
        else:
            store[PREFIX + name].append(value)


@contextmanager
def without_rounds(store: dict[str, list[float]], state: TrainerState) -> Iterator[None]:
    """Keeps TRL's logs of generated completions out of its `store` and `state`: it logs those that it trains on once more."""
    tokens = state.num_input_tokens_seen
    before = {name: list(values) for name, values in store.items() if name.startswith("completions/")}
    yield
    for name in [name for name in store if name.startswith("completions/") or name == "num_tokens"]:
        store[name] = before.get(name, [])
    state.num_input_tokens_seen = tokens


def group_metrics(groups: Sequence[RolloutGroup], names: Sequence[str], weights: np.ndarray) -> dict[str, float]:
    """TRL's metrics of rewards and lengths, over these groups only; `names` and `weights` `(F,)` are of the reward functions."""
    rewards = np.concatenate([group.rewards for group in groups])
    totals = torch.from_numpy(total_rewards(rewards, weights))
    lengths = np.concatenate([group.lengths for group in groups])
    truncated = np.concatenate([group.truncated for group in groups])
    values = {"reward": totals.nanmean().item(), "reward_std": nanstd(totals).item()}
    for name, column in zip(names, torch.from_numpy(rewards).T, strict=True):
        values[f"rewards/{name}/mean"] = column.nanmean().item()
        values[f"rewards/{name}/std"] = nanstd(column).item()
    deviations = [nanstd(own).item() for own in totals.split([group.size for group in groups])]
    values["frac_reward_zero_std"] = float(np.isclose(deviations, 0).mean())
    values["completions/clipped_ratio"] = float(truncated.mean())
    ended = np.zeros(1) if truncated.all() else lengths[~truncated]
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
        self.values: dict[str, int] = {name: 0 for name, is_cumulative in METRICS.items() if is_cumulative}

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


def try_to_write(path: Path, write: Callable[[], object]) -> bool:
    """Whether `write` could write a file that training does not depend on. The first failure of a file is a warning."""
    try:
        write()
    except OSError as error:
        _warn_once(path, str(error.strerror or error))
        return False
    return True


@cache
def _warn_once(path: Path, reason: str) -> None:
    logger.warning(
        f"{path} could not be written ({reason}). Training continues; what is missing is kept in memory and written when there is "
        "room. This warning is shown once."
    )


class MetricsLog:
    """
    `metrics.jsonl`: what the Trainer logs, evaluations too. A line is a JSON object of the metrics, the `step`, and `rollouts`,
    `tokens` and `seconds` so far (of training, without the time between a stop and a resume).
    """

    def __init__(self, path: Path):
        self.path = path
        self._waiting: list[str] = []
        self._began = time.monotonic()

    def begin(self, step: int) -> None:
        """Continue at optimizer step `step`: lines up to that step are kept, and an earlier run's are removed."""
        lines = read_metrics(self.path) if step else []
        kept = [line for line in lines if line["step"] <= step and END not in line]
        self._began = time.monotonic() - max((line["seconds"] for line in kept), default=0.0)
        if self.path.exists():
            text = "".join(json.dumps(line) + "\n" for line in kept)
            try_to_write(self.path, partial(write_atomically, self.path, lambda path: path.write_text(text)))

    def add(self, logs: Mapping[str, Any], *, step: int, rollouts: int, tokens: int) -> None:
        """Write a line. What is not a number is left out; a number that is not finite is null."""
        numbers = {name: v if math.isfinite(v) else None for name, v in logs.items() if isinstance(v, (int, float))}
        seconds = round(time.monotonic() - self._began, 3)
        line = {"step": step, "rollouts": rollouts, "tokens": tokens, "seconds": seconds, **numbers}
        self._waiting.append(json.dumps(line) + "\n")
        if try_to_write(self.path, self._append):
            self._waiting = []

    def _append(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write("".join(self._waiting))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The complete lines of `metrics.jsonl`: a process that was killed while it wrote leaves half of one. None without a file."""
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        with suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict) and {"step", "seconds"} <= line.keys():
                lines.append(line)
    return lines
