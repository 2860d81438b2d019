"""
The tables and the pictures of the results, from committed runs. Nothing is run here.

    python -m benchmarks.proof            # prints the tables as Markdown
    python -m benchmarks.proof --write    # puts them into the pages, and draws the pictures

A page holds a table between `<!-- table NAME -->` and `<!-- end -->`. The runs are made by `python -m benchmarks.lab study NAME`
and `python -m benchmarks.smollm2 study`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path

from benchmarks import tables
from benchmarks.curves import band, on_grid
from benchmarks.lab.ratios import ACCURACY, BASELINE, Curve, curves_of, ratio_table
from benchmarks.lab.store import RunFile, read_rows
from benchmarks.lab.studies import CONDITIONS
from benchmarks.lab.train import RunSpec


ROOT = Path(__file__).parents[1]
LAB = ROOT / "benchmarks" / "results" / "lab"
SMOLLM2 = ROOT / "benchmarks" / "results" / "smollm2" / "runs"
PICTURES = ROOT / "docs" / "img"
PAGES = (ROOT / "README.md", ROOT / "docs" / "results.md", ROOT / "benchmarks" / "RESULTS.md")
POOLS = ("mixed", "gym", "unsolvable", "learnable")
METHODS = (BASELINE, "selection", "default")  # in this order, and before all others
WORDS = {BASELINE: "plain GRPO", "selection": "selection alone", "default": "default"}
#: Grey, vermilion and blue, which colour-blind readers can tell apart; each is legible on white and on black
COLOURS = {BASELINE: "#808080", "selection": "#D55E00", "default": "#2F8FD8"}
FEWEST_FOR_A_BAND = 5  # runs; of fewer, each is a thin line
README_POOLS = {"mixed": "a third unsolvable", "unsolvable": "70 % unsolvable", "gym": "reasoning-gym"}
INK = "#7A7A7A"  # of text and axes, for the same reason
PLANS = (512, 1024, 2400, 4800, 9600)  # rollouts, of runs on the pretrained model
GROUPS = 8  # a step, unless a run says otherwise


# The synthetic benchmark


def study(name: str) -> list[Curve]:
    """The committed runs of a study; none if there is no table yet."""
    path = LAB / name / "results.parquet"
    return curves_of(read_rows(path)) if path.exists() else []


def conditions_table() -> str:
    """Plain GRPO and the default at equal rollouts and steps, in settings in which it might not help."""
    path = LAB / "conditions" / "results.parquet"
    ends = {row["run"]: row for row in (read_rows(path) if path.exists() else [])}.values()  # the last row of each run
    rows = []
    for name, (pool, fields) in CONDITIONS.items():
        spec = RunSpec(BASELINE, 0, pool, "", **fields)
        shared = ("pool", "learning_rate", "prompts", "group_size")
        own = [end for end in ends if all(end[field] == getattr(spec, field) for field in shared)]
        base, ours = ([end for end in own if end["method"] == method] for method in (BASELINE, "default"))
        cells = (_mean(base, "accuracy_sampled", 3), _mean(ours, "accuracy_sampled", 3))
        rows.append([name, str(len(ours)), *cells, tables.difference(above(ours, base))])
    header = ["setting", "seeds", "accuracy of plain GRPO", "of the default", "difference"]
    return tables.markdown(header, [row for row in rows if row[1] != "0"])


# The pretrained model


def finished(folder: Path = SMOLLM2) -> list[dict]:
    """The last row of each finished run."""
    files = [RunFile(folder, path.stem) for path in sorted(folder.glob("*.jsonl"))]
    return [file.rows()[-1] for file in files if file.finished()]


def plan(end: dict) -> int:
    """The rollouts that a run was planned for: it ends with the step that reaches them. Those that it made, for a plan of your own."""
    made = end["rollouts"]
    return next((rollouts for rollouts in PLANS if rollouts <= made < 1.1 * rollouts), made)


def groups_a_step(end: dict) -> int:
    return end.get("prompts", GROUPS)


def settings_of(ends: Iterable[dict]) -> list[list[dict]]:
    """
    The ends of runs that differ in the seed alone, in the order of the tables.

    Raises:
        `ValueError`: two runs have the same seed, too.
    """

    def place(end: dict) -> tuple:
        method = METHODS.index(end["method"]) if end["method"] in METHODS else len(METHODS)
        return POOLS.index(end["pool"]), groups_a_step(end), end["learning_rate"], -plan(end), method, end["method"]

    found = [list(own) for _, own in groupby(sorted(ends, key=lambda end: (place(end), end["seed"])), key=place)]
    for own in found:
        if len({end["seed"] for end in own}) < len(own):
            names = ", ".join(end["run"] for end in own)
            raise ValueError(f"Runs with the same seed, made with other settings: keep one of each seed of {names}.")
    return found


def above(own: Iterable[dict], other: Iterable[dict]) -> list[float]:
    """Differences of success to the runs `other` with the same seeds."""
    base = {end["seed"]: end["accuracy_sampled"] for end in other}
    return [end["accuracy_sampled"] - base[end["seed"]] for end in own if end["seed"] in base]


def rivals(own: list[dict], settings: list[list[dict]]) -> dict[str, list[dict]]:
    """
    What runs are compared with, by method: plain GRPO on their pool with as many groups a step, at their rate and plan or else
    at the next, and, for the default, selection alone at their rate and plan.
    """

    def unlike(other: list[dict]) -> tuple[bool, int]:
        return other[0]["learning_rate"] != own[0]["learning_rate"], abs(plan(other[0]) - plan(own[0]))

    def place(runs: list[dict]) -> tuple[str, int]:
        return runs[0]["pool"], groups_a_step(runs[0])

    method, found = own[0]["method"], {}
    for other in sorted((other for other in settings if place(other) == place(own)), key=unlike):
        rival = other[0]["method"]
        selection_alone = rival == "selection" and method == "default" and unlike(other) == (False, 0)
        if (rival == BASELINE != method) or selection_alone:
            found.setdefault(rival, other)
    return found


def curves_at(pool: str, rollouts: int, folder: Path = SMOLLM2) -> list[Curve]:
    """The finished runs on a pool that were planned for so many rollouts, at all learning rates."""
    place = pool, rollouts, GROUPS
    found = [
        own for own in settings_of(finished(folder)) if (own[0]["pool"], plan(own[0]), groups_a_step(own[0])) == place
    ]
    return curves_of(row for own in found for end in own for row in RunFile(folder, end["run"]).rows())


def best_of_baseline(settings: Iterable[list[dict]]) -> dict[tuple[str, int, int], list[dict]]:
    """By pool, groups a step and plan, plain GRPO's runs at the rate at which it ends highest, in the mean over seeds."""
    best: dict[tuple[str, int, int], list[dict]] = {}
    for own in settings:
        if own[0]["method"] == BASELINE:
            place = own[0]["pool"], groups_a_step(own[0]), plan(own[0])
            best[place] = max(best.get(place, own), own, key=_success)
    return best


def at_best_rate(curves: list[Curve]) -> list[Curve]:
    """Of the longest runs, those at plain GRPO's best rate."""
    best = best_of_baseline(settings_of(finished()))
    return [c for c in curves if c.learning_rate == best[c.pool, GROUPS, PLANS[-1]][0]["learning_rate"]]


def cost_table(pool: str, rollouts: int) -> str:
    """What runs need to reach what plain GRPO ends with, and what they end with."""
    return ratio_table(curves_at(pool, rollouts), budget=rollouts)


def pretrained_table(ends: Iterable[dict]) -> str:
    """Every setting: where its runs end, what they take, and paired differences of success at temperature 1."""
    settings = settings_of(ends)
    rows = []
    for own in settings:
        end, others = own[0], rivals(own, settings)
        rows.append(
            [
                *(end["pool"], str(groups_a_step(end)), f"{end['learning_rate']:g}", f"{plan(end):,}"),
                *(f"`{end['method']}`", str(len(own))),
                *(_mean(own, name, digits) for name, digits in ENDS.items()),
                *(tables.difference(above(own, others.get(name, []))) for name in (BASELINE, "selection")),
            ]
        )
    header = ["pool", "groups a step", "learning rate", "rollouts", "method", "seeds"]
    header += ["success", "greedy", "steps", "CPU seconds"]
    return tables.markdown([*header, "difference from plain GRPO", "from selection alone"], rows)


def readme_table(ends: Iterable[dict]) -> str:
    """Success of plain GRPO at its best rate, and of the default at the same rate, for each length of runs."""
    settings = settings_of(ends)
    best, rows = best_of_baseline(settings), []
    for own in settings:
        end = own[0]
        base = best.get((end["pool"], groups_a_step(end), plan(end)))
        rated = base is not None and base[0]["learning_rate"] == end["learning_rate"]
        if rated and end["pool"] in README_POOLS and end["method"] == "default":
            groups = f", {groups_a_step(end)} groups a step" if groups_a_step(end) != GROUPS else ""
            means = (_mean(runs, "accuracy_sampled", 3) for runs in (base, own))
            name = README_POOLS[end["pool"]] + groups
            rows.append([name, str(len(own)), _mean(own, "step", 0), *means, tables.difference(above(own, base))])
    header = ["questions", "seeds", "steps", "plain GRPO", "default", "difference"]
    return tables.markdown(header, rows)


def _success(own: list[dict]) -> float:
    return sum(end["accuracy_sampled"] for end in own) / len(own)


ENDS = {"accuracy_sampled": 3, "accuracy_greedy": 3, "step": 0, "cpu_s": 0}  # columns, and digits after the point


def _mean(ends: Sequence[dict], name: str, digits: int) -> str:
    return tables.mean([end[name] for end in ends], digits)


def time_table() -> str:
    """Hours on typical GPUs, by a model."""
    from benchmarks.time_model import TYPICAL, table  # which reads the runs from here

    return table(TYPICAL)


# Pages and pictures

TABLES: dict[str, Callable[[], str]] = {
    "rule": lambda: ratio_table(study("rule"), rival="default"),
    "conditions": conditions_table,
    "rates": lambda: ratio_table(study("rates"), rival="selection"),
    "time": time_table,
    "long": lambda: cost_table("mixed", PLANS[-1]),
    "unsolvable": lambda: cost_table("unsolvable", 2400),
    "pretrained": lambda: pretrained_table(finished()),
    "readme": lambda: readme_table(finished()),
}
MARKED = re.compile(r"<!-- table (?P<name>[\w-]+) -->\n(?P<body>.*?)<!-- end -->", re.DOTALL)


def fill(page: str) -> str:
    """The page with its tables as the results have them."""
    return MARKED.sub(
        lambda found: f"<!-- table {found['name']} -->\n\n{TABLES[found['name']]()}\n\n<!-- end -->", page
    )


def draw(curves: list[Curve], path: Path) -> None:
    """Accuracy over rollouts and over steps, mean over seeds with its 95 % band or with the single runs, as far as all seeds go; an SVG without background."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    inked = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
    fixed = {"svg.hashsalt": path.stem, "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(inked | fixed):
        fig, axes = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True, layout="constrained")
        for axis, (x, label) in zip(axes, {"rollouts": "rollouts", "step": "optimizer steps"}.items(), strict=True):
            for method, colour in COLOURS.items():
                runs = [(c.column(x), c.column(ACCURACY)) for c in curves if c.method == method]
                if runs:
                    grid, values = on_grid(runs)
                    mean, half = band(values)
                    axis.plot(grid, mean, color=colour, linewidth=2, label=f"{WORDS[method]}, {len(runs)} seeds")
                    if len(runs) >= FEWEST_FOR_A_BAND:
                        axis.fill_between(grid, mean - half, mean + half, color=colour, alpha=0.25, linewidth=0)
                        continue
                    for run in runs:
                        axis.plot(*run, color=colour, linewidth=0.7, alpha=0.7)
            axis.set(xlabel=label, xlim=(0, None))
            axis.xaxis.set_major_formatter("{x:,.0f}")
            axis.grid(color=INK, alpha=0.25)
        axes[0].set(ylabel="accuracy on held-out prompts", ylim=(0, None))
        fig.legend(*axes[0].get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=3)
        fig.savefig(path, format="svg", metadata={"Date": None}, transparent=True)
        plt.close(fig)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into the pages, and draw the pictures")
    if parser.parse_args().write:
        for page in PAGES:
            page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")
        for name, curves in {
            "readme": study("rule"),
            "pretrained": at_best_rate(curves_at("mixed", PLANS[-1])),
        }.items():
            if curves:
                draw(curves, PICTURES / f"{name}.svg")
        return
    for name, make in TABLES.items():
        print(f"## {name}\n\n{make()}\n")


if __name__ == "__main__":
    main()
