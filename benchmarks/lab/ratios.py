"""What each method needs to reach the accuracy that uniform sampling ends with, as a share of what that needed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks import tables
from benchmarks.curves import final, isotonic, reach


BASELINE = "uniform"
ACCURACY = "accuracy_sampled"
TIME = "cpu_s"
COSTS = {"rollouts": "rollouts", "step": "steps", TIME: "CPU time"}
BUDGET = 5_000  # rollouts, after which accuracies are compared


@dataclass(frozen=True)
class Curve:
    """One run, by evaluation. Arrays of shape (evaluations,)."""

    pool: str
    learning_rate: float
    method: str
    seed: int
    rows: list[dict]

    def column(self, name: str) -> np.ndarray:
        return np.array([row[name] for row in self.rows], dtype=float)

    def machine(self) -> str | None:
        """Where it was made, as far as that was recorded."""
        return self.rows[0].get("machine")

    def effective_share(self) -> float:
        """Effective share of all groups generated; NaN without groups."""
        groups = self.column("groups").sum()
        return float(self.column("effective_groups").sum() / groups) if groups else math.nan

    def after(self, rollouts: float) -> float:
        """Accuracy after so many rollouts, linear between evaluations; NaN beyond the run's end."""
        made = self.column("rollouts")
        return float(np.interp(rollouts, made, self.column(ACCURACY))) if rollouts <= made[-1] else math.nan


def curves_of(rows: Iterable[dict]) -> list[Curve]:
    """The runs in `rows`, in the order in which they stand."""
    runs: dict[str, list[dict]] = {}
    for row in rows:
        runs.setdefault(row["run"], []).append(row)
    first = ((points[0], points) for points in runs.values())
    return [Curve(row["pool"], row["learning_rate"], row["method"], row["seed"], points) for row, points in first]


def ratios(curves: Iterable[Curve], baseline: Iterable[Curve], x: str) -> list[float]:
    """
    Of each run, the `x` (rollouts, steps, seconds) at which it reaches what the baseline's run of the same seed ends with, by
    the `x` at which that run does; infinite if it never does. Runs without a baseline of their seed are left out, and for
    seconds those of which it is not recorded that both were made on one machine.
    """
    base = {curve.seed: curve for curve in baseline}
    found = []
    for curve in curves:
        other = base.get(curve.seed)
        if other and (x != TIME or (curve.machine() and curve.machine() == other.machine())):
            target = final(other.column(ACCURACY))
            own, its = (reach(c.column(x), c.column(ACCURACY), target) for c in (curve, other))
            found.append(own / its if its else math.nan)
    return found


def cost(curves: Sequence[Curve], baseline: Sequence[Curve], x: str) -> str:
    """
    [`ratios`] in words: geometric mean with its interval; at most the mean, without one, if a run was already there when it was
    first evaluated; `-` if the baseline was, since its own need is then not known.
    """
    found = ratios(curves, baseline, x)
    target = {curve.seed: final(curve.column(ACCURACY)) for curve in baseline}
    seeds = {curve.seed for curve in curves if curve.method != BASELINE}

    def early(runs: Sequence[Curve]) -> bool:
        return any(isotonic(run.column(ACCURACY))[0] >= target.get(run.seed, math.inf) for run in runs)

    words = tables.ratio(found)
    if not found or math.inf in found or not seeds:
        return words
    if early([curve for curve in baseline if curve.seed in seeds]):
        return "-"
    return f"at most {words.partition(' ')[0]}" if early(curves) else words


def lead(own: Iterable[Curve], other: Iterable[Curve], budget: float) -> list[float]:
    """Differences of accuracy after `budget` rollouts to the runs `other` with the same seeds; of runs that have so many."""
    theirs = {curve.seed: curve.after(budget) for curve in other}
    differences = [curve.after(budget) - theirs.get(curve.seed, math.nan) for curve in own]
    return [difference for difference in differences if not math.isnan(difference)]


def ratio_table(curves: list[Curve], rivals: Sequence[str] = (BASELINE,), budget: int = BUDGET) -> str:
    """
    A row for each pool, learning rate and method: what it needs as a share of what the baseline, if there is one, needs on the
    same pool at the same rate, and its accuracy after `budget` rollouts, with the paired differences from `rivals`.
    """
    groups: dict[tuple[str, float, str], list[Curve]] = {}
    for curve in curves:
        groups.setdefault((curve.pool, curve.learning_rate, curve.method), []).append(curve)
    one_pool, one_rate = (len({key[i] for key in groups}) == 1 for i in (0, 1))
    compared = COSTS if any(method == BASELINE for _, _, method in groups) else {}
    rows = []
    for (pool, rate, method), own in groups.items():
        base = groups.get((pool, rate, BASELINE), [])
        name = [
            *([] if one_pool else [pool]),
            *([] if one_rate else [f"{rate:g}"]),
            tables.title(method),
            str(len(own)),
        ]
        costs = [cost(own, base, x) for x in compared]
        effective = tables.mean([curve.effective_share() for curve in own], 2)
        accuracy = tables.mean([curve.after(budget) for curve in own])
        others = ([] if method == rival else groups.get((pool, rate, rival), []) for rival in rivals)
        differences = (tables.difference(lead(own, other, budget)) for other in others)
        rows.append([*name, *costs, effective, accuracy, *differences])
    name = [*([] if one_pool else ["pool"]), *([] if one_rate else ["learning rate"]), "method", "seeds"]
    ends = [f"difference from {tables.title(rival)}" for rival in rivals]
    accuracy = f"accuracy after {budget:,} rollouts"
    return tables.markdown([*name, *compared.values(), "effective groups", accuracy, *ends], rows)
