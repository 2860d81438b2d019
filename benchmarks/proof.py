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
from collections.abc import Callable
from pathlib import Path

from benchmarks import tables
from benchmarks.curves import band, on_grid
from benchmarks.lab.ratios import ACCURACY, BASELINE, Curve, curves_of, ratio_table
from benchmarks.lab.store import read_rows
from benchmarks.lab.studies import CONDITIONS
from benchmarks.lab.train import RunSpec
from benchmarks.smollm2.tables import (
    FIRST_SEED,
    GROUPS,
    PLANS,
    POOLS,
    Settings,
    above,
    best_of_baseline,
    claims_table,
    effective,
    ends,
    finished,
    full_table,
    kinds_table,
    readme_table,
    rivals_table,
    runs_table,
    settings_of,
    trials_table,
)


ROOT = Path(__file__).parents[1]
LAB = ROOT / "benchmarks" / "results" / "lab"
SMOLLM2 = ROOT / "benchmarks" / "results" / "smollm2" / "runs"
PICTURES = ROOT / "docs" / "img"
PAGES = tuple(ROOT / page for page in ("README.md", "docs/results.md", "benchmarks/RESULTS.md"))
#: Grey, vermilion and blue, which colour-blind readers can tell apart; each is legible on white and on black
COLOURS = {BASELINE: "#808080", "selection": "#D55E00", "default": "#2F8FD8"}
ENDS = {12_800: ("first", "second", "third"), 6_400: ("graded", "learnable")}  # of the study `best`, in rollouts
FEWEST_FOR_A_BAND = 5  # runs; of fewer, each is a thin line
INK = "#7A7A7A"  # of text and axes, for the same reason


# The synthetic benchmark


def study(name: str) -> list[Curve]:
    """The committed runs of a study; none if there is no table yet."""
    path = LAB / name / "results.parquet"
    return curves_of(read_rows(path)) if path.exists() else []


def at_rates(*pools: str) -> list[Curve]:
    """The study `best` on these pools, by pool and rate, and plain GRPO's runs of the other studies with the same seeds."""
    best = [run for run in study("best") if run.pool in pools]
    seeds = {(run.pool, run.seed) for run in best}
    others = (run for run in (*study("methods"), *study("pools")) if run.method == BASELINE)
    runs = [*best, *(run for run in others if (run.pool, run.seed) in seeds)]
    return sorted(runs, key=lambda run: (pools.index(run.pool), run.learning_rate))


def conditions_table() -> str:
    """Plain GRPO and the default at equal rollouts and steps, in settings in which the default might not help."""
    runs, rows = study("conditions"), []
    for name, (pool, fields) in CONDITIONS.items():
        spec = RunSpec(BASELINE, 0, pool, "", **fields)
        shared = ("pool", "learning_rate", "prompts", "group_size")
        own = [run for run in runs if all(run.rows[-1][field] == getattr(spec, field) for field in shared)]
        base, ours = ([run for run in own if run.method == method] for method in (BASELINE, "default"))
        means = effective(base), tables.mean(ends(base)), tables.mean(ends(ours))
        if ours:
            rows.append([name, f"{spec.learning_rate:g}", *means, tables.difference(above(ours, base))])
    header = ["setting", "learning rate", "effective groups", "plain GRPO", "default", "difference"]
    return tables.markdown(header, rows)


# The pretrained model


def settings(trials: bool = False) -> Settings:
    """The committed runs on the pretrained model, by what they share; or `trials`, by which learning rates were chosen."""
    return settings_of(run for run in finished(SMOLLM2) if (run.seed < FIRST_SEED) == trials)


def longest_runs() -> list[Curve]:
    """The longest runs on *mixed* of plain GRPO at its best rate, and of the other methods at the same."""
    found = settings()
    best = best_of_baseline(found)[list(POOLS).index("mixed"), GROUPS, -PLANS[-1]]
    return [run for setting, own in found.items() if setting[:4] == best[:4] for run in own]


def time_table() -> str:
    """Hours on typical GPUs, by a model."""
    from benchmarks.time_model import TYPICAL, table  # which reads the runs from here

    return table(TYPICAL)


# Pages and pictures

TABLES: dict[str, Callable[[], str]] = {
    "methods": lambda: ratio_table(study("methods"), rivals=("default", BASELINE), budget=12_800),
    "conditions": conditions_table,
    "best": lambda: "\n\n".join(ratio_table(at_rates(*pools), budget=n) for n, pools in ENDS.items()),
    "rates": lambda: ratio_table(study("rates"), rivals=("selection",)),
    "text": lambda: ratio_table(study("text"), budget=12_800),
    "pools": lambda: ratio_table(study("pools"), rivals=("default", BASELINE)),
    "time": time_table,
    "claims": lambda: claims_table(settings()),
    "pretrained": lambda: full_table(settings()),
    "rivals": lambda: rivals_table(settings()),
    "kinds": lambda: kinds_table(settings()),
    "trials": lambda: trials_table(settings(trials=True)),
    "readme": lambda: readme_table(settings()),
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
                    axis.plot(
                        grid, mean, color=colour, linewidth=2, label=f"{tables.title(method)}, {len(runs)} seeds"
                    )
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
        for name, curves in {"readme": study("methods"), "pretrained": longest_runs()}.items():
            if curves:
                draw(curves, PICTURES / f"{name}.svg")
        return
    for name, make in TABLES.items():
        print(f"## {name}\n\n{make()}\n")
    print(f"## each run on the pretrained model\n\n{runs_table(settings())}")


if __name__ == "__main__":
    main()
