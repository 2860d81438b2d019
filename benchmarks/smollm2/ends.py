"""Tables of runs whose learning rate falls to 0, as with TRL's default: compared at their ends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from benchmarks.curves import geometric_mean
from benchmarks.lab.ratios import BASELINE, show
from benchmarks.lab.store import RunFile
from benchmarks.smollm2.pools import POOLS
from benchmarks.smollm2.report import difference, markdown


OURS = "default"
#: The better one of 1e-3 and 2e-3 for each method, on other seeds
RATES = {BASELINE: 2e-3, OURS: 1e-3}


def by_budget(folder: Path) -> str:
    """Success, by pool, method, learning rate and rollouts."""
    header = ["rollouts", "seeds", "success", "by seed", "steps", "greedy", "entropy", "CPU seconds"]
    measured = [("step", 1), ("accuracy_greedy", 3), ("entropy_held_out", 2), ("cpu_s", 0)]
    lines = [
        [*_name(ends), f"{_budget(ends[0]):,}", str(len(ends)), *_success(ends), *(_mean(ends, *m) for m in measured)]
        for ends in _runs(folder)
    ]
    return markdown(["pool", "method", "learning rate", *header], lines)


def in_short(folder: Path) -> str:
    """The same of uniform sampling and the defaults alone, each at its own learning rate, with what a newcomer looks at."""
    lines = [
        [*_name(ends), f"{_budget(ends[0]):,}", str(len(ends)), _success(ends)[0], _mean(ends, "cpu_s", 0)]
        for ends in _runs(folder)
        if ends[0]["learning_rate"] == RATES.get(ends[0]["method"])
    ]
    return markdown(["pool", "method", "learning rate", "rollouts", "seeds", "success", "CPU seconds"], lines)


def by_rate(folder: Path) -> str:
    """The same, where only the learning rate is chosen."""
    lines = [[*_name(ends)[1:], str(len(ends)), *_success(ends)] for ends in _runs(folder)]
    return markdown(["method", "learning rate", "seeds", "success", "by seed"], lines)


def by_kind(folder: Path) -> str:
    """The same by kind of question, as the mean over seeds."""
    runs = _runs(folder)
    kinds = list(runs[0][0]["accuracy_by_kind"])
    lines = [
        [
            *_name(ends),
            f"{_budget(ends[0]):,}",
            *(f"{np.mean([e['accuracy_by_kind'][k] for e in ends]):.2f}" for k in kinds),
        ]
        for ends in runs
    ]
    return markdown(["pool", "method", "learning rate", "rollouts", *kinds], lines)


def needed(folder: Path) -> str:
    """
    Rollouts, steps and CPU time with which the defaults at their own rate end where uniform sampling's longest run of the same
    seed ended, as a share of its own: interpolated between their runs of fewer and more rollouts. Those of their shortest run
    are the least that can be seen. `difference`: of both methods' longest runs.
    """
    of = {
        (ends[0]["pool"], ends[0]["method"], ends[0]["learning_rate"], _budget(ends[0])): ends
        for ends in _runs(folder)
    }
    lines = []
    for (pool, method, rate, budget), targets in of.items():
        if method != BASELINE or budget != max(key[3] for key in of if key[:3] == (pool, method, rate)):
            continue
        own = [end for key, ends in of.items() if key[:3] == (pool, OURS, RATES[OURS]) for end in ends]
        longest = {end["seed"]: end for end in sorted(own, key=lambda end: end["rollouts"])}
        gains = [longest[end["seed"]]["accuracy_sampled"] - end["accuracy_sampled"] for end in targets]
        cells = [pool, f"{rate:g}", str(len(targets)), difference(gains)]
        for name in ("rollouts", "step", "cpu_s"):
            each = [_at(own, end, name) / end[name] for end in targets]
            mean, low, high = geometric_mean(each)
            cells.append(show(mean) + ("" if math.isnan(low) else f" ({low:.2f}-{high:.2f})"))
            if name == "rollouts":
                cells.append(", ".join(map(show, each)))
        lines.append(cells)
    header = ["seeds", "difference", "rollouts", "by seed", "steps", "CPU time"]
    return markdown(["pool", "rate of plain GRPO", *header], lines)


def _at(own: Iterable[dict], target: dict, name: str) -> float:
    """`name` at the target's success, between the ends of runs of its seed; infinite if none has come to it."""
    ends = sorted((e for e in own if e["seed"] == target["seed"]), key=lambda e: e["accuracy_sampled"])
    xs = [e["accuracy_sampled"] for e in ends]
    return float(np.interp(target["accuracy_sampled"], xs, [e[name] for e in ends], right=math.inf))


def by_steps(folder: Path, baseline: Path) -> str:
    """
    Runs that were planned for as many steps as those of uniform sampling in the folder `baseline`, of the same pools, learning
    rates and seeds. The difference is paired by seed, with its 95 % interval.
    """
    fields = ("pool", "learning_rate", "seed", "step")
    plain = {tuple(end[f] for f in fields): end for end in _ends(baseline) if end["method"] == BASELINE}
    lines = []
    for own in _runs(folder, budgets=False):
        base = [plain[tuple(end[f] for f in fields)] for end in own]
        gains = [end["accuracy_sampled"] - b["accuracy_sampled"] for end, b in zip(own, base, strict=True)]
        for ends, gain in ((base, ""), (own, difference(gains))):
            rollouts = f"{np.mean([end['rollouts'] for end in ends]):,.0f}"
            lines.append(
                [
                    *_name(ends),
                    str(len(ends)),
                    _mean(ends, "step", 0),
                    rollouts,
                    _success(ends)[0],
                    gain,
                    _mean(ends, "cpu_s", 0),
                ]
            )
    header = ["seeds", "steps", "rollouts", "success", "difference", "CPU seconds"]
    return markdown(["pool", "method", "learning rate", *header], lines)


def _ends(folder: Path) -> list[dict]:
    """The last row of each finished run."""
    files = [RunFile(folder, path.stem) for path in sorted(folder.glob("*.jsonl"))]
    return [file.rows()[-1] for file in files if file.finished()]


def _runs(folder: Path, budgets: bool = True) -> list[list[dict]]:
    """The ends of runs that differ in the seed alone, by pool, method, learning rate and, with `budgets`, rollouts."""

    def place(end: dict) -> tuple:
        method = end["method"]
        own = (list(POOLS).index(end["pool"]), method != BASELINE, method != OURS, method, end["learning_rate"])
        return (*own, _budget(end)) if budgets else own

    ends = sorted(_ends(folder), key=lambda end: (place(end), end["seed"]))
    return [list(own) for _, own in groupby(ends, key=place)]


def _budget(end: dict) -> int:
    """The rollouts that a run was planned for: it ends with the step that reaches them."""
    return 128 * (end["rollouts"] // 128)


def _name(ends: Sequence[dict]) -> list[str]:
    return [ends[0]["pool"], f"`{ends[0]['method']}`", f"{ends[0]['learning_rate']:g}"]


def _success(ends: Sequence[dict]) -> list[str]:
    return [_mean(ends, "accuracy_sampled", 3), ", ".join(f"{end['accuracy_sampled']:.3f}" for end in ends)]


def _mean(ends: Sequence[dict], name: str, digits: int) -> str:
    return f"{np.mean([end[name] for end in ends]):.{digits}f}"
