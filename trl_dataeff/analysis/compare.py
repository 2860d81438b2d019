"""What several runs needed to reach the same accuracy: of rollouts, tokens, steps and seconds."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from trl_dataeff.analysis.compare_plot import Curve, comparison
from trl_dataeff.analysis.curves import band, final, geometric_mean, on_grid, reach
from trl_dataeff.analysis.page import Cell, Column, Page, Table
from trl_dataeff.tracking.drawing import AXIS_NAMES, Plot, count, duration
from trl_dataeff.tracking.recorded import AXES, RecordedRun, with_step_seconds
from trl_dataeff.utils import UserError


#: Arguments in which repetitions of a run may differ
_OF_A_RUN = (
    *("seed", "data_seed", "output_dir", "run_name", "hub_model_id", "logging_dir", "report_to", "project"),
    "resume_from_checkpoint",
)


class NothingToCompare(UserError):
    """The runs have no metric in common."""


class Need(NamedTuple):
    """What a method needs to reach the target on one axis: geometric mean and 95 % interval; infinite: not all runs did."""

    mean: float
    low: float
    high: float
    ratio: float
    ratio_low: float
    ratio_high: float


class Method(NamedTuple):
    """Runs that repeat each other, with a name for them."""

    name: str
    runs: list[RecordedRun]


class Comparison(NamedTuple):
    """
    Attributes:
        methods (`list[Method]`): in the order in which they were given; the first one is the baseline.
        metric (`str`): what is compared.
        target (`float`): its value that is to be reached.
        needs (`list[dict]`): of each method, by axis in `AXES`; without axes that a run does not know.
        notes (`list[str]`): what to know of it, a sentence each.
    """

    methods: list[Method]
    metric: str
    target: float
    needs: list[dict[str, Need]]
    notes: list[str]


def methods_of(runs: Sequence[RecordedRun]) -> list[Method]:
    """
    Runs together whose settings, reward functions, processes and number of prompts are equal but for the seed or, where they are
    not known, whose names are but for a number.
    """
    groups: dict[Any, list[RecordedRun]] = {}
    for run in runs:
        arguments = {name: run.argument(name) for name in run.about.get("changed", []) if name not in _OF_A_RUN}
        settings = run.about.get("settings", {})
        same = (
            *(sorted(arguments.items()), run.about.get("model"), (run.about.get("dataset") or {}).get("size")),
            *(settings.get("reward_functions"), settings.get("number of processes")),
        )
        groups.setdefault(repr(same) if run.about.get("arguments") else _stem(run.name), []).append(run)
    methods = [Method(own[0].name if len(own) == 1 else _stem(own[0].name), own) for own in groups.values()]
    taken = [method.name for method in methods]
    return [
        method if taken.count(method.name) == 1 else Method(method.runs[0].path.as_posix(), method.runs)
        for method in methods
    ]


def _stem(name: str) -> str:
    return re.sub(r"[-_.](seed|run|s)?[-_.]?\d+$", "", name) or name


def compare(runs: Sequence[RecordedRun], metric: str | None = None, target: float | None = None) -> Comparison:
    """
    Compare runs.

    Args:
        runs (`Sequence[RecordedRun]`): at least one; the method of the first one is the baseline.
        metric (`str`, *optional*): what to compare; by default the reward on held-out data if all runs have one, else the
            reward in training.
        target (`float`, *optional*): the value to reach; by default the highest one that all runs reach.

    Raises:
        [`NothingToCompare`]: a run does not have the metric.
    """
    notes = [f"{run.name}: {text}" for run in runs for text in run.missing if "Rollouts" in text]
    if len({run.plain for run in runs}) > 1:
        runs = [run if run.plain else with_step_seconds(run) for run in runs]
        notes.append("Time is that of optimizer steps alone, which is what plain TRL logs.")
    if metric is None:
        held_out = {run.held_out for run in runs}
        metric = held_out.pop() if len(held_out) == 1 else None
        if metric is None:
            metric = "reward"
            notes.append(
                "Compared by the reward in training, since not all runs have an evaluation: it is that of selected prompts, and favours "
                "selection. Evaluate on held-out prompts to compare methods."
            )
    without = [run.name for run in runs if not len(run.series(metric)[1])]
    if without:
        common = set.intersection(*(set(run.metric_names) for run in runs))
        known = sorted(name for name in common if "reward" in name or "accuracy" in name)
        raise NothingToCompare(
            f"{', '.join(without)} never logged a number as `{metric}`. "
            + (f"All runs have: {', '.join(known)}." if known else "The runs have no reward in common.")
        )
    methods = methods_of(runs)
    ends = [final(run.series(metric)[1]) for run in runs]
    goal = min(ends) if target is None else target
    needs = [
        {x: _need(method, methods[0], x, metric, goal) for x in AXES if _has(runs, x, metric)} for method in methods
    ]
    if target is not None and target > max(ends):
        notes.append(f"No run reaches {target:.3g}: the best one ends at {max(ends):.3g}.")
    if all(target_at_start(run, metric, goal) for run in runs):
        notes.append("All runs begin at the target already: what they needed says nothing. Give a higher one.")
    return Comparison(methods, metric, goal, needs, notes)


def target_at_start(run: RecordedRun, metric: str, target: float) -> bool:
    """Whether a run reaches the target with its first log."""
    x, y = run.series(metric)
    return reach(x, y, target) <= float(x[0])


def _has(runs: Sequence[RecordedRun], x: str, metric: str) -> bool:
    return all(len(run.series(metric, x)[1]) for run in runs)


def _reached(run: RecordedRun, x: str, metric: str, target: float) -> float:
    at, values = run.series(metric, x)
    return reach(at, values, target)


def _need(method: Method, baseline: Method, x: str, metric: str, target: float) -> Need:
    own = [_reached(run, x, metric, target) for run in method.runs]
    if min(own) <= 0:  # there before anything was generated
        return Need(float(np.mean(own)), math.nan, math.nan, math.nan, math.nan, math.nan)
    others = [_reached(run, x, metric, target) for run in baseline.runs]
    by_seed = dict(zip((run.argument("seed") for run in baseline.runs), others, strict=True))
    pairs = [(value, by_seed.get(run.argument("seed"))) for run, value in zip(method.runs, own, strict=True)]
    own_seeds = {run.argument("seed") for run in method.runs}
    paired = len(by_seed) == len(others) and len(own_seeds) == len(own) and None not in by_seed
    if method is baseline:
        ratio = (1.0, math.nan, math.nan)
    elif paired and all(other is not None and 0 < other < math.inf for _, other in pairs):
        ratio = geometric_mean([value / other for value, other in pairs if other])
    elif min(others) > 0 and max(others) < math.inf:
        ratio = (geometric_mean(own)[0] / geometric_mean(others)[0], math.nan, math.nan)
    else:
        ratio = (math.nan,) * 3
    return Need(*geometric_mean(own), *ratio)


def plots_of(comparison_: Comparison) -> list[Plot]:
    """The curves of all methods against each axis."""
    plots = []
    for x in comparison_.needs[0]:
        curves = []
        for method in comparison_.methods:
            each = [run.series(comparison_.metric, x) for run in method.runs]
            if len(each) == 1:
                curves.append(Curve(method.name, *each[0]))
            else:
                grid, values = on_grid(each)
                curves.append(Curve(method.name, grid, *band(values)))
        title = "held-out reward" if comparison_.metric == "eval_reward" else comparison_.metric
        plots.append(comparison(curves, x, title, comparison_.target))
    return plots


def table_of(result: Comparison) -> Table:
    """What each method needs, and how much that is of what the first one needs."""
    axes = list(result.needs[0])
    columns = [Column("method"), Column("runs", True), Column(f"{result.metric}, start → end")]
    for x in axes:
        columns += [Column(f"{AXIS_NAMES[x]} to {result.target:.3g}", True), Column("ratio", True)]
    rows = []
    for method, needs in zip(result.methods, result.needs, strict=True):
        values = [run.series(result.metric)[1] for run in method.runs]
        start, end = (float(np.mean(part)) for part in ([v[0] for v in values], [final(v) for v in values]))
        cells = [
            Cell(method.name),
            Cell(str(len(method.runs)), len(method.runs)),
            Cell(f"{start:.3f} → {end:.3f}", end),
        ]
        for x in axes:
            need, text = needs[x], duration if x == "seconds" else count
            cells.append(Cell(_with_interval(need.mean, need.low, need.high, text), need.mean))
            ratio = _with_interval(need.ratio, need.ratio_low, need.ratio_high, lambda value: f"{value:.2f}")
            cells.append(Cell(ratio, need.ratio if math.isfinite(need.ratio) else None))
        rows.append(cells)
    note = (
        f"What each method needed until the isotonic fit of its curve reached {result.target:.3g}. Ratios are to {result.methods[0].name}, run "
        "by run where seeds are equal; in brackets, 95 % confidence intervals over runs."
    )
    return Table(f"To reach {result.target:.3g}", columns, rows, note)


def _with_interval(value: float, low: float, high: float, text: Any) -> str:
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return "never"
    return text(value) if math.isnan(low) else f"{text(value)} ({text(low)}-{text(high)})"


def markdown(result: Comparison) -> str:
    """The table for a pull request, with notes below it."""
    table = table_of(result)
    lines = [
        [column.title for column in table.columns],
        ["---:" if column.number else "---" for column in table.columns],
    ]
    lines += [[cell.text.replace("|", "\\|") for cell in row] for row in table.rows]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return "\n\n".join([text, table.note, *result.notes])


def plain(result: Comparison) -> str:
    """The table for a terminal: one block for each method."""
    table = table_of(result)
    lines = [f"{result.metric}, target {result.target:.3g}"]
    for row in table.rows:
        lines.append(f"{row[0].text} ({row[1].text} run{'s' * (row[1].text != '1')}): {row[2].text}")
        for i in range(3, len(row), 2):
            ratio = "" if row[i + 1].text == "-" else f"  x {row[i + 1].text}"
            lines.append(f"  {table.columns[i].title:<24}{row[i].text:>24}{ratio}")
    return "\n".join([*lines, *(f"- {note}" for note in result.notes)])


def make_page(result: Comparison) -> Page:
    """The comparison as a page."""
    return Page(
        title=f"Comparison of {', '.join(method.name for method in result.methods)}"[:120],
        subtitle=f"{sum(len(method.runs) for method in result.methods)} runs by {result.metric}",
        missing=result.notes,
        lead=[table_of(result)],
        plots=plots_of(result),
    )
