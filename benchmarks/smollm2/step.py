"""
The CPU time of whole training steps (generation, scoring and update), as a share of plain GRPO's.

Methods take turns, each with a short run of its own in a turn: some warm-up steps, then the measured ones. In a turn,
all methods have the same questions and the same initial weights.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback

from benchmarks.lab.counting import counting
from benchmarks.lab.methods import find
from benchmarks.lab.rewards import Tally
from benchmarks.lab.train import machine
from benchmarks.overhead import in_turns
from benchmarks.provenance import provenance
from benchmarks.smollm2.pools import POOLS
from benchmarks.smollm2.train import Spec, load, planned, trainer_arguments
from benchmarks.tables import markdown, title


FIRST_SEED = 100  # of the first turn


@dataclass(frozen=True)
class Steps:
    """What the measured steps of a run took and computed, in all of them together."""

    seconds: float
    """CPU time."""
    generation_s: float
    """The part of it in which completions were generated."""
    before_s: float
    """CPU time of the run before its first step, in which prompts are embedded."""
    rollouts: int
    tokens: int
    """Generated ones."""
    groups: int
    """Generated ones."""
    effective: int
    """Groups among them whose rewards differ."""
    effective_trained: int
    """Groups trained on that have a gradient."""


class StepMeter(TrainerCallback):
    """Measures the steps after the warm-up.

    Args:
        warm_up (`int`): How many steps come first.
        tally (`Tally`): Counts effective groups.
    """

    def __init__(self, warm_up: int, tally: Tally):
        self.warm_up = warm_up
        self.tally = tally
        self.trainer: Any = None  # set by `watch`
        self.seconds = 0.0
        self.generation_s = 0.0
        self.before_s = 0.0
        self.counts_at_start: dict[str, int] = {}
        self.run_start = 0.0
        self.step_start = 0.0
        self.is_measuring = False

    def watch(self, trainer: Any) -> None:
        """Measure this trainer's run, which starts now."""
        self.trainer = trainer
        generate = trainer._generate_single_turn

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            result = generate(*args, **kwargs)
            if self.is_measuring:
                self.generation_s += time.process_time() - start
            return result

        trainer._generate_single_turn = timed
        self.run_start = time.process_time()

    def on_step_begin(self, args, state, control, **kwargs):
        now = time.process_time()
        if state.global_step == 0:
            self.before_s = now - self.run_start
        if state.global_step == self.warm_up:
            self.counts_at_start = self._counts()
        self.is_measuring = state.global_step >= self.warm_up
        self.step_start = now

    def on_step_end(self, args, state, control, **kwargs):
        if self.is_measuring:
            self.seconds += time.process_time() - self.step_start

    def result(self) -> Steps:
        """What was measured; call it after the run."""
        counts = {name: count - self.counts_at_start[name] for name, count in self._counts().items()}
        return Steps(self.seconds, self.generation_s, self.before_s, **counts)

    def _counts(self) -> dict[str, int]:
        return {
            "rollouts": self.trainer.rollouts_generated,
            "tokens": self.trainer.tokens_generated,
            "groups": self.tally.groups,
            "effective": self.tally.effective,
            "effective_trained": self.trainer.effective_trained,
        }


def measure_run(spec: Spec, warm_up: int, weights: Path, folder: str) -> Steps:
    """Train a spec, and measure its steps after the warm-up."""
    pool = POOLS[spec.pool]
    model, tokenizer = load(weights, pool.end)
    tally = Tally(pool.reward, spec.group_size)
    meter = StepMeter(warm_up, tally)
    trainer_class, _ = find(spec.method).classes()
    arguments = trainer_arguments(spec, model, tokenizer, folder)
    trainer = counting(trainer_class)(reward_funcs=tally, callbacks=[meter], **arguments)
    trainer.remove_callback(PrinterCallback)
    meter.watch(trainer)
    trainer.train()
    return meter.result()


def measure_pool(
    pool: str,
    methods: Sequence[str],
    *,
    prompts: int,
    steps: int,
    warm_up: int,
    turns: int,
    learning_rate: float,
    weights: Path,
) -> list[dict[str, Any]]:
    """Measure the steps of methods on a pool.

    Args:
        pool (`str`): One of `POOLS`.
        methods (`Sequence[str]`): See [`find`]. The first one is what the others are compared with.
        prompts (`int`): Groups a step.
        steps (`int`): Measured steps of a run.
        warm_up (`int`): Steps of a run before these.
        turns (`int`): Runs of each method. Each turn has its own seed.
        learning_rate (`float`): It is constant.
        weights (`Path`): The folder of the pretrained weights, see [`load`].

    Returns:
        A row for each method, see [`row_of`].
    """
    torch.set_num_threads(1)
    settings = {
        "pool": pool,
        "prompts": prompts,
        "steps": steps,
        "warm_up": warm_up,
        "learning_rate": learning_rate,
        "machine": machine(),
        # Before the runs, so that it is the commit of the imported code
        **provenance(),
    }
    runs_so_far = dict.fromkeys(methods, 0)

    def run(method: str, folder: str) -> list[Steps]:
        seed = FIRST_SEED + runs_so_far[method]
        runs_so_far[method] += 1
        spec = planned(method, seed, pool, learning_rate, prompts=prompts)
        spec = replace(spec, steps=warm_up + steps, max_rollouts=None, schedule="constant")
        return [measure_run(spec, warm_up, weights, folder)]

    measured = in_turns(methods, turns, run)
    baseline = measured[methods[0]]
    return [row_of(method, settings, own, baseline) for method, own in measured.items()]


def row_of(method: str, settings: dict[str, Any], own: Sequence[Steps], baseline: Sequence[Steps]) -> dict[str, Any]:
    """The line of the results.

    Args:
        method (`str`): See [`find`].
        settings (`dict`): What all methods share: `pool`, `steps` and others.
        own (`Sequence[Steps]`): Those of the method, by turn.
        baseline (`Sequence[Steps]`): Those of plain GRPO, by turn.

    Returns:
        The settings; the median `ratio` of the method's CPU time to plain GRPO's in the same turn, with the least and
        the largest; and each field of [`Steps`] by turn.
    """
    ratios = [steps.seconds / plain.seconds for steps, plain in zip(own, baseline, strict=True)]
    row: dict[str, Any] = {
        "method": method,
        **settings,
        "ratio": round(statistics.median(ratios), 4),
        "ratio_least": round(min(ratios), 4),
        "ratio_largest": round(max(ratios), 4),
    }
    for name in Steps.__dataclass_fields__:
        row[name] = [round(getattr(steps, name), 3) for steps in own]
    return row


def append_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Append rows to a file, a JSON line each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, see [`append_rows`]."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as Markdown: means over all measured steps, and ratios with the least and the largest of the turns."""
    header = [
        "pool",
        "method",
        "steps",
        "effective groups",
        "tokens of a completion",
        "seconds of a step",
        "of them generation",
        "ratio to plain GRPO",
    ]
    lines = []
    for row in rows:
        steps = row["steps"] * len(row["seconds"])
        lines.append(
            [
                row["pool"],
                title(row["method"]),
                str(steps),
                f"{sum(row['effective']) / sum(row['groups']):.2f}",
                f"{sum(row['tokens']) / sum(row['rollouts']):.0f}",
                f"{sum(row['seconds']) / steps:.1f}",
                f"{sum(row['generation_s']) / steps:.1f}",
                f"{row['ratio']:.2f} ({row['ratio_least']:.2f}-{row['ratio_largest']:.2f})",
            ]
        )
    return markdown(header, lines)
