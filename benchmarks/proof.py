"""
The tables and pictures of docs/results.md, from the committed results of the lab's studies.

    python -m benchmarks.proof            # prints the tables as Markdown
    python -m benchmarks.proof --write    # puts them into the pages, and draws the pictures

A page holds a table between `<!-- table NAME -->` and `<!-- end -->`. Nothing is run here: `python -m benchmarks.lab study
NAME` makes the results.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.curves import band, final, geometric_mean, isotonic, reach, t_95
from benchmarks.lab.ratios import BASELINE, Curve, curves_by_setting, methods_of, ratios, show
from benchmarks.lab.report import draw, pyplot
from benchmarks.lab.store import read_rows
from benchmarks.lab.studies import BEFORE
from benchmarks.smollm2 import ends
from benchmarks.smollm2.__main__ import LINEAR, LINEAR_TUNING, RUNS, STEPS, own_rate_runs, study_runs, tuning_runs
from benchmarks.smollm2.report import at_own_rates, by_rate, recorded, short
from benchmarks.smollm2.report import tables as pretrained_tables


RESULTS = Path(__file__).parent / "results" / "lab"
COLD = RESULTS.parent / "cold_start.txt"  # what `python -m benchmarks.cold_start` printed
PICTURES = Path(__file__).parents[1] / "docs" / "img"
PAGES = [Path(__file__).parents[1] / "README.md", *sorted(PICTURES.parent.glob("*.md"))]
ACCURACY = "accuracy_sampled"
PADS = ("cgrpo",)  # completions that it makes up are scored with the others: no telling here what was effective
README_METHODS = {
    "uniform": "`GRPOTrainer` (uniform)",
    "dynamic": "dynamic sampling (DAPO)",
    "default": "**DOTS and replay (the default)**",
    "fewest_rollouts": "**fewest rollouts (sequential rollouts, more replay)**",
    "oracle": "plain GRPO on the learnable prompts alone",
}
SHOWN = ("uniform", "dynamic", "greso", "dots", "dots_paper", "default", "oracle")


def load(study: str, pool: str | None = None, root: Path = RESULTS) -> dict[float, list[Curve]]:
    """The runs of a study, by learning rate; those on one pool, where it has several."""
    settings = curves_by_setting(read_rows(root / study / "results.parquet"))
    return {rate: curves for (of, rate), curves in settings.items() if of == (pool or of)}


def on_first() -> list[Curve]:
    """The runs of the proof on the first pool, all methods."""
    return [*together(load("proof", "first")), *together(load("proof_rest"))]


def every_run(study: str) -> list[Curve]:
    """The runs of a study on all its pools, at all rates."""
    settings = curves_by_setting(read_rows(RESULTS / study / "results.parquet"))
    return [curve for curves in settings.values() for curve in curves]


def together(studies: dict[float, list[Curve]]) -> list[Curve]:
    """All runs; those at another learning rate than the first have it in their method's name."""
    first = next(iter(studies))
    return [
        curve if rate == first else replace(curve, method=f"{curve.method}, learning rate {rate:g}")
        for rate, curves in studies.items()
        for curve in curves
    ]


def at(curve: Curve, x: str, where: float, column: str = ACCURACY) -> float:
    """A column of a run where `x` is `where`, linear between evaluations; NaN beyond the run's end."""
    xs, ys = curve.column(x), curve.column(column)
    known = ~np.isnan(ys)
    if where > xs[-1] * 1.03:  # a run ends with a whole step
        return math.nan
    return float(np.interp(where, xs[known], ys[known]))


def mean_and_half(values: Iterable[float]) -> tuple[float, float]:
    mean, half = band(np.array(list(values), dtype=float)[:, None])
    return float(mean[0]), float(half[0])


def number(values: Iterable[float], digits: int = 3) -> str:
    """Mean over seeds and half-width of its 95 % interval; empty if a run does not go so far."""
    values = list(values)
    if not values or any(map(math.isnan, values)):
        return ""
    mean, half = mean_and_half(values)
    return f"{mean:.{digits}f}" if math.isnan(half) else f"{mean:.{digits}f} ± {half:.{digits}f}"


def interval(row: dict, x: str) -> str:
    """A ratio and its interval, as `0.24 (0.18-0.31)`; or in how many runs the target was not reached."""
    ratio, low, high = (row[f"{x}_{what}"] for what in ("ratio", "low", "high"))
    late = sum(map(math.isinf, row[f"{x}_ratios"]))
    if late:
        return f"never, in {late} of {row['seeds']}"
    if math.isnan(low):
        return show(ratio)
    return f"{ratio:.2f} ({low:.2f}-{high:.2f})"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def by_method(curves: list[Curve]) -> dict[str, list[Curve]]:
    return {method: [c for c in curves if c.method == method] for method in methods_of(curves)}


def chosen(curves: list[Curve], *methods: str) -> list[Curve]:
    """The runs of these methods, in their order."""
    return [c for method in methods for c in curves if c.method == method]


def reach_table(curves: list[Curve], at_step: int) -> str:
    """What each method takes to come to what uniform has at `at_step`, against what uniform takes."""
    rows = [
        (
            f"`{row['method']}`",
            str(row["seeds"]),
            show(row["reach"], 0),
            interval(row, "rollouts"),
            ", ".join(map(show, row["rollouts_ratios"])),
            interval(row, "step"),
            interval(row, "wall_s"),
            interval(row, "cpu_s"),
        )
        for row in ratios(curves, at_step=at_step)
    ]
    return table(
        ("method", "seeds", "rollouts", "ratio of rollouts", "per seed", "of steps", "of time", "of CPU time"), rows
    )


def equal_table(curves: list[Curve], rollouts: Sequence[int], steps: Sequence[int]) -> str:
    """Accuracy after equal rollouts and after equal steps, and what the policy is then."""
    header = [
        "method",
        *(f"after {n:,} rollouts" for n in rollouts),
        *(f"after {n} steps" for n in steps),
        f"greedy, {rollouts[0]:,} rollouts",
        f"on easy prompts, {rollouts[0]:,} rollouts",
        "effective of generated",
    ]
    rows = []
    for method, own in by_method(curves).items():
        cells = [number(at(c, "rollouts", n) for c in own) for n in rollouts]
        cells += [number(at(c, "step", n) for c in own) for n in steps]
        cells += [
            number(at(c, "rollouts", rollouts[0], name) for c in own) for name in ("accuracy_greedy", "accuracy_easy")
        ]
        effective = "" if method in PADS else f"{np.mean([c.effective_share() for c in own]):.2f}"
        rows.append((f"`{method}`", *cells, effective))
    return table(header, rows)


def differences_table(pools: Mapping[str, list[Curve]], rollouts: Sequence[int]) -> str:
    """Accuracy after equal rollouts, by pool: uniform's, and by how much each method is above it, paired by seed."""
    rows = []
    for pool, curves in pools.items():
        groups = by_method(curves)
        base = {c.seed: [at(c, "rollouts", n) for n in rollouts] for c in groups.pop(BASELINE)}
        means = np.mean(list(base.values()), axis=0)
        rows.append((pool, f"`{BASELINE}`", str(len(base)), *(f"{mean:.3f}" for mean in means)))
        for method, own in groups.items():
            above = [[at(c, "rollouts", n) - base[c.seed][i] for c in own] for i, n in enumerate(rollouts)]
            cells = [f"{mean:+.3f} ± {half:.3f}" for mean, half in map(mean_and_half, above)]
            rows.append((pool, f"`{method}`", str(len(own)), *cells))
    return table(("pool", "method", "seeds", *(f"{n:,} rollouts" for n in rollouts)), rows)


def entropy_table(curves: list[Curve], accuracies: Sequence[float]) -> str:
    """Entropy on held-out prompts where each method's accuracy first is so much: a collapse shows at equal accuracy."""
    rows = []
    for method, own in by_method(curves).items():
        cells = []
        for accuracy in accuracies:
            places = [reach(c.column("step"), c.column(ACCURACY), accuracy) for c in own]
            values = [
                at(c, "step", step, "entropy_held_out") for c, step in zip(own, places, strict=True) if step < math.inf
            ]
            cells.append(f"{np.mean(values):.3f} ({len(values)})" if values else "never")
        rows.append((f"`{method}`", *cells))
    return table(("method", *(f"at accuracy {a:g}" for a in accuracies)), rows)


def against(curves: list[Curve], other: str, at_step: int, own: str = "default") -> str:
    """Rollouts to uniform's accuracy, of a method against another one: ratio and its interval."""
    rows = {row["method"]: row for row in ratios(curves, at_step=at_step)}
    groups = by_method(curves)
    ratio_of = {
        name: dict(zip([c.seed for c in groups[name]], rows[name]["rollouts_ratios"], strict=True))
        for name in (own, other)
    }
    seeds = [seed for seed in ratio_of[own] if seed in ratio_of[other]]
    late = {name: sum(math.isinf(ratio_of[name][seed]) for seed in seeds) for name in (own, other)}
    if any(late.values()):
        return "; ".join(f"{name} never, in {n} of {len(seeds)} seeds" for name, n in late.items() if n)
    mean, low, high = geometric_mean([ratio_of[own][seed] / ratio_of[other][seed] for seed in seeds])
    return f"{show(mean)} ({show(low)}-{show(high)})"


def pooled_deviation(differences: Mapping[str, Mapping[int, float]]) -> tuple[float, int]:
    """
    Deviation of one difference to the base, and its degrees of freedom, from all variations together: two seeds say little
    of one variation, twenty variations of two seeds each say more. The base's own luck on a seed is in all differences of
    that seed, so that seeds, as well as variations, have means of their own (two-way residuals).
    """
    found = {key: values for key, values in differences.items() if len(values) > 1}
    common = sorted(set.intersection(*(set(values) for values in found.values())))
    table = np.array([[values[seed] for seed in common] for values in found.values()])
    residuals = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
    degrees = (table.shape[0] - 1) * (table.shape[1] - 1)
    alone = float((residuals**2).sum() / degrees)  # variance of a variation's run; the base's is as large
    return math.sqrt(2 * alone), degrees


def variations_table(curves: list[Curve], base: str = BEFORE, rollouts: int = 2400, target: float = 0.5) -> str:
    """Each variation at equal rollouts, and the difference to the base over the same seeds."""
    groups = by_method(curves)
    ends = {method: {c.seed: at(c, "rollouts", rollouts) for c in own} for method, own in groups.items()}
    differences = {
        method: {seed: value - ends[base][seed] for seed, value in values.items()}
        for method, values in ends.items()
        if method != base
    }
    deviation, degrees = pooled_deviation(differences)
    rows = []
    for method, own in groups.items():
        paired = float(np.mean(list(differences[method].values()))) if method != base else 0.0
        half = t_95(degrees) * deviation / math.sqrt(len(own))
        to_target = [reach(c.column("rollouts"), c.column(ACCURACY), target) for c in own]
        cells = (
            f"`{_changes(method, base)}`" if method != base else "base",
            str(len(own)),
            f"{np.mean(list(ends[method].values())):.3f}",
            "" if method == base else f"{paired:+.3f} ± {half:.3f}",
            number(at(c, "rollouts", rollouts, "accuracy_greedy") for c in own).split(" ")[0],
            show(float(np.mean(to_target)), 0),
        )
        rows.append((paired, cells))
    header = (
        "changed", "seeds", f"accuracy after {rollouts:,} rollouts", "against the base, same seeds", "greedy",
        f"rollouts to {target:g}",
    )  # fmt: skip
    return table(header, [cells for _, cells in sorted(rows, key=lambda row: -row[0])])


def to_target_table(curves: list[Curve], base: str, target: float, seeds: int) -> str:
    """Rollouts, steps and CPU time to an accuracy, as ratios to `base` with the same seed; variations with so many seeds."""
    groups = {method: own for method, own in by_method(curves).items() if len(own) >= seeds}
    reached = {
        method: {
            x: {c.seed: reach(c.column(x), c.column(ACCURACY), target) for c in own}
            for x in ("rollouts", "step", "cpu_s")
        }
        for method, own in groups.items()
    }
    rows = []
    for method, own in groups.items():
        cells, order = [], math.nan
        for x, values in reached[method].items():
            paired = [value / reached[base][x][seed] for seed, value in values.items() if seed in reached[base][x]]
            ratio, low, high = geometric_mean(paired)
            cells.append(show(ratio) if math.isnan(low) or method == base else f"{ratio:.2f} ({low:.2f}-{high:.2f})")
            order = ratio if x == "rollouts" else order
        name = f"`{_changes(method, base)}`" if method != base else "base"
        rows.append((order, [name, str(len(own)), *cells]))
    header = ("changed", "seeds", f"rollouts to {target:g}, of the base's", "steps", "CPU time")
    return table(header, [cells for _, cells in sorted(rows, key=lambda row: row[0])])


def _changes(method: str, base: str) -> str:
    """What a variation changes: what its name says and the base's does not."""
    return ",".join(change for change in method.split(",") if change not in base.split(","))


def noise(curves: list[Curve], method: str = BASELINE, step: int = 100) -> tuple[float, float]:
    """Of a method: deviation between seeds at a step, and that of a run's points from its isotonic fit (RMS)."""
    own = by_method(curves)[method]
    between = float(np.std([at(c, "step", step) for c in own], ddof=1))
    residuals = np.concatenate([c.column(ACCURACY) - isotonic(c.column(ACCURACY)) for c in own])
    return between, float(np.sqrt(np.mean(residuals**2)))


def long_table(curves: list[Curve], rollouts: Sequence[int]) -> str:
    """Accuracy along the way, mean over seeds, and the effective share of what is generated in the last quarter of it."""
    rows = []
    for method, own in by_method(curves).items():
        shares = []
        for c in own:
            late = c.column("rollouts") > 0.75 * rollouts[-1]
            shares.append(c.column("effective_groups")[late].sum() / c.column("groups")[late].sum())
        cells = [number(at(c, "rollouts", n) for c in own) for n in rollouts]
        rows.append((f"`{method}`", str(len(own)), *cells, f"{np.mean(shares):.2f}"))
    return table(("method", "seeds", *(f"{n:,} rollouts" for n in rollouts), "effective at last"), rows)


def rate_table(studies: dict[float, list[Curve]], rollouts: int) -> str:
    """Accuracy after equal rollouts, by learning rate."""
    methods = list(dict.fromkeys(method for curves in studies.values() for method in methods_of(curves)))
    rows = []
    for method in methods:
        cells = []
        for curves in studies.values():
            cells.append(number(at(c, "rollouts", rollouts) for c in by_method(curves).get(method, [])))
        rows.append((f"`{method}`", *cells))
    return table(("method", *(f"{rate:g}" for rate in studies)), rows)


def picture(curves: list[Curve], path: Path, methods: Sequence[str] = SHOWN, rollouts: int = 12_800) -> None:
    """Accuracy over rollouts and over steps, and the effective share, with 95 % bands over seeds; an SVG file."""
    plt = pyplot()
    fig, grid = plt.subplots(2, 2, figsize=(8, 6.4), layout="constrained")
    *axes, last = grid.flat
    panels = (("rollouts", ACCURACY, rollouts), ("step", ACCURACY, 100), ("step", "effective", 100))
    for axis, (x, y, end) in zip(axes, panels, strict=True):
        draw(axis, curves, methods, x, y)
        axis.set(xlim=(0, end), ylim=(0, 1))
        axis.grid(alpha=0.25)
    axes[0].set(xlabel="rollouts generated", ylabel="held-out accuracy, sampled")
    axes[0].set_xticks(range(0, rollouts, 4_000))
    axes[0].xaxis.set_major_formatter("{x:,.0f}")
    axes[1].set(xlabel="optimizer steps", ylabel="held-out accuracy, sampled")
    axes[2].set(xlabel="optimizer steps", ylabel="effective share of groups")
    last.legend(*axes[0].get_legend_handles_labels(), frameon=False, title="method (seeds)", loc="center left")
    last.axis("off")
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, format="svg", metadata={"Date": None})
    plt.close(fig)


def readme_picture(curves: list[Curve], path: Path) -> None:
    """Accuracy over rollouts, a few methods in words; legible at the width of a README."""
    plt = pyplot()
    fig, axis = plt.subplots(figsize=(6, 4.6), layout="constrained")
    draw(axis, curves, README_METHODS, "rollouts", ACCURACY)
    axis.set(xlim=(0, 12_800), ylim=(0, 1), xlabel="rollouts generated", ylabel="accuracy on held-out prompts")
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.grid(alpha=0.25)
    seeds = {method: len(own) for method, own in by_method(curves).items()}
    lines = [f"{text.replace('*', '').replace('`', '')}, {seeds[name]} seeds" for name, text in README_METHODS.items()]
    fig.legend(axis.get_lines(), lines, frameon=False, loc="outside lower center", fontsize=9)
    fig.savefig(path, format="svg", metadata={"Date": None})
    plt.close(fig)


def share_of_selection(curves: list[Curve]) -> dict[str, float]:
    """By method: share of a step's time that choosing prompts takes, mean over the runs' evaluations."""
    shares = {}
    for method, own in by_method(curves).items():
        parts = np.concatenate(
            [np.stack([c.column(f"{part}_s") for part in ("selection", "generation", "training")], 1) for c in own]
        )
        parts = parts[~np.isnan(parts).any(1)]
        if len(parts):
            shares[method] = float(parts[:, 0].sum() / parts.sum())
    return shares


def replay_table(curves: list[Curve]) -> str:
    """Of the methods that replay: means over the runs of age and ratio."""
    rows = []
    for method, own in by_method(curves).items():
        columns = [
            np.concatenate([c.column(name) for c in own])
            for name in ("replay_age", "replay_ratio", "replay_ratio_max")
        ]
        if not np.isnan(columns[0]).all():
            rows.append((f"`{method}`", *(f"{np.nanmean(values):.2f}" for values in columns)))
    return table(("method", "age, steps", "ratio, mean", "ratio, largest of a step"), rows)


def rollouts_per_effective_group(curves: list[Curve]) -> dict[str, float]:
    """By method: rollouts generated for one group with a gradient, over all runs."""
    return {
        method: sum(c.column("rollouts")[-1] for c in own) / sum(c.column("effective_groups").sum() for c in own)
        for method, own in by_method(curves).items()
        if method not in PADS
    }


def effective_alone(curves: list[Curve], at_step: int, group_size: int = 8) -> str:
    """
    What the rollouts of effective groups alone come to, as a share of what uniform takes: the ratio that the same learning
    would have if no other rollout were generated. With the ratio itself, as in `reach_table`.
    """
    rows = []
    whole = {row["method"]: row for row in ratios(curves, at_step=at_step)}
    base = {c.seed: c.until(at_step) for c in curves if c.method == BASELINE}
    for method, own in by_method(curves).items():
        shares = []
        for c in own:
            target = final(base[c.seed].column(ACCURACY))
            needed = reach(c.column("rollouts"), c.column(ACCURACY), target)
            effective = np.interp(needed, c.column("rollouts"), np.cumsum(c.column("effective_groups")))
            uniform = reach(base[c.seed].column("rollouts"), base[c.seed].column(ACCURACY), target)
            shares.append(group_size * effective / uniform if needed < math.inf else math.inf)
        ratio, low, high = geometric_mean(shares)
        cell = show(ratio) if math.isnan(low) else f"{ratio:.2f} ({low:.2f}-{high:.2f})"
        rows.append((f"`{method}`", str(len(own)), interval(whole[method], "rollouts"), cell))
    return table(("method", "seeds", "ratio of rollouts", "of those in effective groups alone"), rows)


def readme_table(curves: list[Curve]) -> str:
    """The few lines that say it all."""
    rows = {row["method"]: row for row in ratios(curves, at_step=100)}
    groups = by_method(curves)
    body = [
        (text, number(at(c, "rollouts", 3_200) for c in groups[name]), interval(rows[name], "rollouts"), interval(rows[name], "step"),
         interval(rows[name], "cpu_s"))
        for name, text in README_METHODS.items()
    ]  # fmt: skip
    header = ("", "accuracy after 3,200 rollouts", "rollouts to uniform's accuracy at step 100", "steps", "CPU time")
    return table(header, body)


#: What pages may hold, by name
TABLES: dict[str, Callable[[], str]] = {
    **{
        f"{pool}-{step}": partial(lambda pool, step: reach_table(together(load(pool)), step), pool, step)
        for pool, step in (("first", 100), ("first", 300), ("second", 100), ("third", 100), ("graded", 50))
    },
    **{
        f"{pool}-equal": partial(lambda pool: equal_table(together(load(pool)), (6_400, 12_800), (50, 100)), pool)
        for pool in ("first", "second", "third")
    },
    "first-entropy": lambda: entropy_table(together(load("first")), (0.4, 0.5, 0.6)),
    "halving": lambda: variations_table(together(load("halving"))),
    "halving-best": lambda: to_target_table(together(load("halving")), BEFORE, 0.5, seeds=3),
    **{
        f"proof-{pool}": partial(
            lambda study, pool, step: reach_table(together(load(study, pool)), step), study, pool, step
        )
        for study, step, pools in (
            ("proof", 100, ("third",)),
            ("proof", 50, ("second",)),
            ("proof_half", 50, ("graded", "learnable")),
        )
        for pool in pools
    },
    "proof-differences": lambda: differences_table(
        {pool: together(load("proof_half", pool)) for pool in ("graded", "learnable")}, (3_200, 6_400)
    ),
    "proof-first": lambda: reach_table(on_first(), 100),
    "proof-effective": lambda: effective_alone(on_first(), 100),
    "proof-long": lambda: long_table(together(load("proof_long")), (3_200, 6_400, 9_600, 12_800)),
    "rates": lambda: rate_table(load("rates"), 3_300),
    "long": lambda: long_table(
        [
            *together(load("long")),
            *chosen(together(load("first")), "dots", "oracle", "uniform"),
        ],
        (6_400, 8_000, 9_600, 11_200, 12_800),
    ),
    "replay": lambda: replay_table(together(load("first"))),
    "greso": lambda: reach_table(
        chosen(together(load("first")), "uniform", "greso", "dynamic", "greso_dynamic", "oracle"), 100
    ),
    "dots": lambda: equal_table(
        chosen(together(load("first")), "uniform", "dots", "dots_paper", "default", "oracle"),
        (3_000, 6_400),
        (50, 100),
    ),
    "cold-start": lambda: COLD.read_text(encoding="utf-8").strip(),
    "pretrained": lambda: pretrained_tables(recorded(RUNS, study_runs())),
    "pretrained-rates": lambda: by_rate(recorded(RUNS, tuning_runs())),
    "pretrained-linear": lambda: ends.by_budget(LINEAR),
    "pretrained-linear-kinds": lambda: ends.by_kind(LINEAR),
    "pretrained-linear-needed": lambda: ends.needed(LINEAR),
    "pretrained-linear-rates": lambda: ends.by_rate(LINEAR_TUNING),
    "pretrained-linear-short": lambda: ends.in_short(LINEAR),
    "pretrained-steps": lambda: ends.by_steps(STEPS, LINEAR),
    "pretrained-own-rates": lambda: at_own_rates(recorded(RUNS, own_rate_runs())),
    "pretrained-short": lambda: short(recorded(RUNS, study_runs())),
    "readme": lambda: readme_table(on_first()),
}


def in_words() -> str:
    """What the pages quote of the first pool beside its tables."""
    curves = together(load("first"))
    between, within = noise(curves)
    lines = [
        f"uniform at step 100: {between:.3f} between seeds; points are {within:.3f} off the isotonic fit of their run"
    ]
    for other in ("oracle", "dynamic"):
        lines.append(
            f"default against {other}, rollouts to uniform's accuracy at step 100: {against(curves, other, 100)}"
        )
    proven = on_first()
    sequential = f"{BEFORE},sequential_rollouts=true"
    for own, other in (
        *((own, BEFORE) for own in ("default", "sharp_selection", sequential)),
        ("fewest_rollouts", "default"),
        *((own, "oracle") for own in ("default", "fewest_rollouts")),
    ):
        lines.append(
            f"proof, {own} against {other}, rollouts to uniform's accuracy at step 100: {against(proven, other, 100, own)}"
        )
    for method, share in share_of_selection(curves).items():
        lines.append(f"{method}: {share:.1%} of a step is selection")
    for studies in (("halving",), ("proof", "proof_rest", "proof_half", "proof_long")):
        runs = [curve for study in studies for curve in every_run(study)]
        hours = sum(curve.column("cpu_s")[-1] for curve in runs) / 3600
        lines.append(f"{', '.join(studies)}: {len(runs)} runs, {hours:.1f} CPU hours of training")
    for text, runs in (("", curves), ("proof, ", proven)):
        for method, value in rollouts_per_effective_group(runs).items():
            lines.append(f"{text}{method}: {value:.1f} rollouts per effective group")
    return "\n".join(lines)


MARKED = re.compile(r"<!-- table (?P<name>[\w-]+) -->\n(?P<body>.*?)<!-- end -->", re.DOTALL)


def fill(page: str) -> str:
    """The page with its tables as the results have them."""
    return MARKED.sub(
        lambda found: f"<!-- table {found['name']} -->\n\n{TABLES[found['name']]()}\n\n<!-- end -->", page
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into the pages, and draw the pictures")
    write = parser.parse_args().write
    if write:
        for page in PAGES:
            page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")
        picture(together(load("first")), PICTURES / "results-first.svg")
        readme_picture(on_first(), PICTURES / "readme.svg")
        return
    for name, make in TABLES.items():
        print(f"## {name}\n\n{make()}\n")
    print(in_words())


if __name__ == "__main__":
    main()
