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
        """Where the run was made, if that was recorded."""
        return self.rows[0].get("machine")

    def effective_share(self) -> float:
        """Effective share of all groups generated; NaN without groups."""
        groups = self.column("groups").sum()
        if groups == 0:
            return math.nan
        return float(self.column("effective_groups").sum() / groups)

    def after(self, rollouts: float) -> float:
        """Accuracy after so many rollouts, linear between evaluations; NaN beyond the run's end."""
        generated = self.column("rollouts")
        if rollouts > generated[-1]:
            return math.nan
        return float(np.interp(rollouts, generated, self.column(ACCURACY)))


def curves_of(rows: Iterable[dict]) -> list[Curve]:
    """The runs in `rows`, in the order in which they stand."""
    runs: dict[str, list[dict]] = {}
    for row in rows:
        runs.setdefault(row["run"], []).append(row)
    curves = []
    for evaluations in runs.values():
        first = evaluations[0]
        curves.append(Curve(first["pool"], first["learning_rate"], first["method"], first["seed"], evaluations))
    return curves


def ratios(curves: Iterable[Curve], baseline: Iterable[Curve], x: str) -> list[float]:
    """What runs need to reach the end of plain GRPO, paired by seed.

    Args:
        curves (`Iterable[Curve]`): The runs. Those without a baseline of their seed are left out; so are, for CPU
            time, those of which it is not recorded that both were made on one machine.
        baseline (`Iterable[Curve]`): The runs of plain GRPO.
        x (`str`): The column to compare: rollouts, steps or seconds.

    Returns:
        For each run, the `x` at which it reaches the final accuracy of the baseline, divided by the `x` at which the
        baseline does. Infinite if the run never does; NaN if the baseline has it at 0.
    """
    baseline_of = {curve.seed: curve for curve in baseline}
    found = []
    for curve in curves:
        other = baseline_of.get(curve.seed)
        if other is None:
            continue
        same_machine = curve.machine() is not None and curve.machine() == other.machine()
        if x == TIME and not same_machine:
            continue
        target = final(other.column(ACCURACY))
        own_need = reach(curve.column(x), curve.column(ACCURACY), target)
        other_need = reach(other.column(x), other.column(ACCURACY), target)
        found.append(own_need / other_need if other_need else math.nan)
    return found


def cost(curves: Sequence[Curve], baseline: Sequence[Curve], x: str) -> str:
    """The cell of a table for [`ratios`].

    Returns:
        The geometric mean with its interval. "at most" the mean, without an interval, if a run was already there when
        it was first evaluated. `-` if the baseline was, since its own need is then not known.
    """
    found = ratios(curves, baseline, x)
    cell = tables.ratio(found)
    other_seeds = {curve.seed for curve in curves if curve.method != BASELINE}
    if not found or math.inf in found or not other_seeds:
        return cell
    targets = {curve.seed: final(curve.column(ACCURACY)) for curve in baseline}
    if _any_starts_above([curve for curve in baseline if curve.seed in other_seeds], targets):
        return "-"
    if _any_starts_above(curves, targets):
        middle = cell.partition(" ")[0]
        return f"at most {middle}"
    return cell


def _any_starts_above(curves: Iterable[Curve], targets: dict[int, float]) -> bool:
    """Whether a run has the target of its seed when it is first evaluated."""
    return any(isotonic(curve.column(ACCURACY))[0] >= targets.get(curve.seed, math.inf) for curve in curves)


def ends(runs: Iterable[Curve], name: str = ACCURACY) -> list[float]:
    """The last value of a column in each run."""
    return [run.rows[-1][name] for run in runs]


def above(own: Iterable[Curve], other: Iterable[Curve], name: str = ACCURACY) -> list[float]:
    """Differences of the ends of runs to those of `other` with the same seeds."""
    end_of = {run.seed: run.rows[-1][name] for run in other}
    return [run.rows[-1][name] - end_of[run.seed] for run in own if run.seed in end_of]


def lead(own: Iterable[Curve], other: Iterable[Curve], budget: float) -> list[float]:
    """Differences of accuracy after `budget` rollouts to runs with the same seeds.

    Runs without so many rollouts are left out.
    """
    others_accuracy = {curve.seed: curve.after(budget) for curve in other}
    differences = [curve.after(budget) - others_accuracy.get(curve.seed, math.nan) for curve in own]
    return [difference for difference in differences if not math.isnan(difference)]


def ratio_table(curves: list[Curve], rivals: Sequence[str] = (BASELINE,), budget: int = BUDGET) -> str:
    """A table with a row for each pool, learning rate and method.

    Args:
        curves (`list[Curve]`): The runs.
        rivals (`Sequence[str]`, *optional*): Methods to which differences are shown.
        budget (`int`, *optional*, defaults to `5000`): The rollouts after which accuracies are compared.

    Returns:
        The table: what a method needs as a share of what the baseline, if there is one, needs on the same pool at the
        same rate, its accuracy after `budget` rollouts, and the paired differences from `rivals`.
    """
    groups: dict[tuple[str, float, str], list[Curve]] = {}
    for curve in curves:
        key = (curve.pool, curve.learning_rate, curve.method)
        groups.setdefault(key, []).append(curve)
    several_pools = len({pool for pool, _, _ in groups}) > 1
    several_rates = len({rate for _, rate, _ in groups}) > 1
    any_baseline = any(method == BASELINE for _, _, method in groups)
    compared = COSTS if any_baseline else {}

    header = []
    if several_pools:
        header.append("pool")
    if several_rates:
        header.append("learning rate")
    header += ["method", "seeds", *compared.values(), "effective groups", f"success after {budget:,} rollouts"]
    header += [f"difference from {tables.title(rival)}" for rival in rivals]

    rows = []
    for (pool, rate, method), own in groups.items():
        baseline = groups.get((pool, rate, BASELINE), [])
        row = []
        if several_pools:
            row.append(pool)
        if several_rates:
            row.append(f"{rate:g}")
        row += [tables.title(method), str(len(own))]
        row += [cost(own, baseline, x) for x in compared]
        row.append(tables.mean([curve.effective_share() for curve in own], digits=2))
        row.append(tables.mean([curve.after(budget) for curve in own]))
        for rival in rivals:
            others = groups.get((pool, rate, rival), []) if rival != method else []
            row.append(tables.difference(lead(own, others, budget)))
        rows.append(row)
    return tables.markdown(header, rows)
