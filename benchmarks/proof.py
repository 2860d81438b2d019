"""
The tables and the pictures of the results, from committed runs. Nothing is run here.

    python -m benchmarks.proof            # prints the tables as Markdown
    python -m benchmarks.proof --write    # puts them into the pages, and draws the pictures

A page holds a table between `<!-- table NAME -->` and `<!-- end -->`. The runs are made by
`python -m benchmarks.lab study NAME` and `python -m benchmarks.smollm2 study`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import tables, update
from benchmarks.curves import on_grid
from benchmarks.figures import BLUE, GREEN, GREY, ORANGE, axis_of
from benchmarks.lab.ratios import ACCURACY, BASELINE, TIME, Curve, above, cost, curves_of, ends, ratio_table
from benchmarks.lab.store import read_rows
from benchmarks.lab.studies import CONDITIONS, runs_of_study
from benchmarks.lab.train import RunSpec
from benchmarks.savings import (
    USUAL_PROMPTS,
    Settings,
    best_of,
    by_setting,
    costs_table,
    group_sizes_table,
    kinds_table,
    learning_table,
    rates_table,
    savings_table,
    short_runs_table,
    steps_table,
)
from benchmarks.smollm2 import RUNS
from benchmarks.smollm2.__main__ import COMPARED, COMPARED_WORKED, HIGHER_RATE, RATE, TRIAL


ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "img"
PAGES = (
    ROOT / "README.md",
    ROOT / "docs" / "results.md",
    ROOT / "docs" / "update.md",
    ROOT / "benchmarks" / "RESULTS.md",
)
UPDATES = update.RESULTS / "cpu.jsonl"
COLOURS = {"compact": GREY, "selection": ORANGE, "fill": BLUE, "share": GREEN}


# The synthetic benchmark


def conditions_table() -> str:
    """
    Plain GRPO, and selection and replay, at equal rollouts and steps, in settings in which the latter might not help.
    """
    runs = runs_of_study("conditions")
    rows = []
    for name, (pool, fields) in CONDITIONS.items():
        spec = RunSpec(BASELINE, 0, pool, "", **fields)
        own = [run for run in runs if _has_setting(run, spec)]
        baseline = [run for run in own if run.method == BASELINE]
        both = [run for run in own if run.method == "fill"]
        if both:
            rows.append(
                [
                    name,
                    f"{spec.learning_rate:g}",
                    tables.mean([run.effective_share() for run in baseline], digits=2),
                    tables.mean(ends(baseline)),
                    tables.mean(ends(both)),
                    tables.difference(above(both, baseline)),
                ]
            )
    methods = [tables.title(BASELINE), tables.title("fill")]
    header = ["setting", "learning rate", "effective groups", *methods, "difference"]
    return tables.markdown(header, rows)


def _has_setting(run: Curve, spec: RunSpec) -> bool:
    end = run.rows[-1]
    shared = ("pool", "learning_rate", "prompts", "group_size")
    return all(end[field] == getattr(spec, field) for field in shared)


def again_table() -> str:
    """Two seeds of the study `time`: with the selection of that time, and with a later one."""
    later = by_setting(runs_of_study("again"))
    seeds = {run.seed for runs in later.values() for run in runs}
    earlier = by_setting(run for run in runs_of_study("time") if run.seed in seeds)
    rows = []
    for setting, runs in later.items():
        row = [tables.title(setting.method), f"{setting.rate:g}"]
        for settings, own in ((earlier, earlier[setting]), (later, runs)):
            row += [
                cost(own, best_of(BASELINE, settings), "rollouts"),
                tables.mean(ends(own)),
                tables.mean([run.effective_share() for run in own], digits=2),
            ]
        rows.append(row)
    columns = ("rollouts", "success", "effective groups")
    header = ["method", "learning rate", *(f"{name} {when}" for when in ("before", "now") for name in columns)]
    return tables.markdown(header, rows)


def runs_by_group_size() -> Settings:
    """The study `groups`, and those runs of the study `time` that have the same methods, rates and seeds."""
    runs = runs_of_study("groups")
    chosen = {(run.method, run.learning_rate, run.seed) for run in runs}
    of_groups_of_8 = [run for run in runs_of_study("time") if (run.method, run.learning_rate, run.seed) in chosen]
    return by_setting([*runs, *of_groups_of_8])


# The pretrained model


def pretrained_runs(pool: str, trials: bool = False) -> Settings:
    """The committed runs on a pool, by setting; or its `trials`, by which learning rates were chosen."""
    runs = []
    for run in curves_of(read_rows(RUNS)):
        if run.pool == pool and (run.seed in TRIAL) == trials:
            runs.append(run)
    return by_setting(runs)


def short_suites() -> dict[str, Settings]:
    """The runs of the pretrained model that have less than one pass, by suite."""
    return {
        "short questions": pretrained_runs("mixed"),
        "reasoning-gym": pretrained_runs("gym"),
        "worked solutions": pretrained_runs("worked"),
    }


def several(rate: float = RATE, usual: bool = False) -> Settings:
    """The runs of several passes at a rate; or of these the `usual` ones, with as many prompts a step as most."""
    chosen = {}
    for setting, runs in in_order(pretrained_runs("several"), COMPARED).items():
        if setting.rate == rate and (setting.prompts == USUAL_PROMPTS or not usual):
            chosen[setting] = runs
    return chosen


def several_worked() -> Settings:
    """The runs of several passes over worked solutions."""
    return in_order(pretrained_runs("several_worked"), COMPARED_WORKED)


def in_order(runs: Settings, methods: Sequence[str]) -> Settings:
    """Runs in the order of their `methods`, those with an unusual number of prompts a step last."""
    chosen = sorted(runs, key=lambda setting: (setting.prompts != USUAL_PROMPTS, methods.index(setting.method)))
    return {setting: runs[setting] for setting in chosen}


# Pages and pictures


TABLES: dict[str, Callable[[], str]] = {
    "synthetic": lambda: savings_table(by_setting(runs_of_study("time"))),
    "synthetic, again": again_table,
    "tried rates": lambda: savings_table(by_setting(runs_of_study("trials")), baseline_method="compact"),
    "group sizes": lambda: group_sizes_table(runs_by_group_size(), target=0.5),
    "update": lambda: update.page_table(update.read_results(UPDATES)),
    "update in short": lambda: update.page_table(update.read_results(UPDATES), update.IN_SHORT),
    "update on the page": lambda: update.page_table(update.read_results(UPDATES), update.ON_PAGE),
    "steps": lambda: steps_table(short_suites()),
    "conditions": conditions_table,
    "text": lambda: ratio_table(runs_of_study("text"), budget=12_800),
    "several": lambda: learning_table(several()),
    "several, steps": lambda: costs_table(several()),
    "several, higher rate": lambda: learning_table(several(HIGHER_RATE)),
    "several, trials": lambda: rates_table(pretrained_runs("several", trials=True)),
    "several, kinds": lambda: kinds_table(several(usual=True), COMPARED[1:], only_notable=True),
    "short runs": lambda: short_runs_table(short_suites()),
    "worked, several": lambda: learning_table(several_worked()),
    "worked, several, steps": lambda: costs_table(several_worked()),
    "worked, several, kinds": lambda: kinds_table(several_worked(), COMPARED_WORKED[1:], only_notable=True),
}
MARKED = re.compile(r"<!-- table (?P<name>[\w, -]+) -->\n(?P<body>.*?)<!-- end -->", re.DOTALL)


def fill(page: str) -> str:
    """The page with its tables as the results have them."""

    def replacement(found: re.Match[str]) -> str:
        name = found["name"]
        return f"<!-- table {name} -->\n\n{TABLES[name]()}\n\n<!-- end -->"

    return MARKED.sub(replacement, page)


def draw(path: Path, x: str, label: str, curves: list[Curve], dashed: list[Curve], of_dashed: str) -> None:
    """Draw success over the rollouts or the time of a run, as far as all seeds go.

    Args:
        path (`Path`): Where the picture goes, an SVG without background.
        x (`str`): The column that is the horizontal axis.
        label (`str`): What that axis is called.
        curves (`list[Curve]`): The runs. Each method of `COLOURS` is shown by its mean over seeds. There are no bands:
            runs are compared in pairs of a seed, and seeds differ as much as methods.
        dashed (`list[Curve]`): Other runs, whose lines are dashed.
        of_dashed (`str`): What the legend says of these.
    """
    with axis_of(path) as axis:
        _draw_methods(axis, curves, x)
        _draw_methods(axis, dashed, x, linestyle="--", addition=f", {of_dashed}")
        axis.set(xlabel=label, ylabel="success on held-out prompts", xlim=(0, None))
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.legend(frameon=False, loc="lower right")


def _draw_methods(axis: Any, curves: list[Curve], x: str, linestyle: str = "-", addition: str = "") -> None:
    """A line for each method over the column `x`."""
    for method, colour in COLOURS.items():
        runs = [(curve.column(x), curve.column(ACCURACY)) for curve in curves if curve.method == method]
        if not runs:
            continue
        grid, values = on_grid(runs)
        name = tables.title(method) + addition
        axis.plot(grid, values.mean(axis=0), color=colour, linewidth=2, linestyle=linestyle, label=name)


def print_tables() -> None:
    for name, make in TABLES.items():
        print(f"## {name}\n\n{make()}\n")


def write_pages_and_pictures() -> None:
    for page in PAGES:
        page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")
    runs = [run for of_setting in several(usual=True).values() for run in of_setting]
    at_higher_rate = [run for of_setting in several(HIGHER_RATE).values() for run in of_setting]
    draw(PICTURES / "several.svg", TIME, "CPU time in seconds", runs, at_higher_rate, "twice the rate")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into the pages, and draw the pictures")
    options = parser.parse_args()
    if options.write:
        write_pages_and_pictures()
    else:
        print_tables()


if __name__ == "__main__":
    main()
