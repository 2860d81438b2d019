"""The tables, as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.curves import band
from benchmarks.lab.evaluate import success
from benchmarks.lab.ratios import BASELINE, Curve, curves_by_setting, methods_of, ratios, show
from benchmarks.lab.store import RunFile
from benchmarks.lab.tasks import Task
from benchmarks.smollm2.pools import POOLS, training_questions
from benchmarks.smollm2.questions import KINDS
from benchmarks.smollm2.train import load


def tables(rows: Iterable[dict]) -> str:
    """What each method needs, what it comes to, and what was measured on the way, by pool and learning rate."""
    parts = []
    for (pool, rate), curves in curves_by_setting(rows).items():
        parts.append(
            f"Pool *{pool}*, learning rate {rate:g}. Ratios to `{BASELINE}` of the same seed.\n\n{_needs(curves)}"
        )
        parts.append(f"Held-out success by kind at the end of the runs:\n\n{_by_kind(curves)}")
        parts.append(f"Means over the runs:\n\n{_measured(curves)}")
    return "\n\n".join(parts) or "No run is finished."


Key = tuple[str, float, str, int]  # pool, learning rate, method, seed


def finished_runs(folder: Path) -> dict[Key, Path]:
    """
    The files of the finished runs in a folder.

    Raises:
        `ValueError`: two files are of the same run, with other settings.
    """
    found: dict[Key, Path] = {}
    for path in sorted(folder.glob("*.jsonl")):
        file = RunFile(folder, path.stem)
        if file.finished():
            row = file.rows()[0]
            key = row["pool"], row["learning_rate"], row["method"], row["seed"]
            if key in found:
                raise ValueError(f"{found[key]} and {path} are the same run with other settings. Keep one of them.")
            found[key] = path
    return found


def recorded(folder: Path, runs: Iterable[Key]) -> list[dict]:
    """The rows of the finished ones of `runs`, in their order."""
    found = finished_runs(folder)
    return [row for run in runs if run in found for row in RunFile(folder, found[run].stem).rows()]


def short(rows: Iterable[dict]) -> str:
    """What a newcomer looks at first: success after half and all of uniform sampling's rollouts, and the ratios. Methods with 3 seeds."""
    return _short([(pool, curves) for (pool, _), curves in curves_by_setting(rows).items()])


def at_own_rates(rows: Iterable[dict]) -> str:
    """The same where the methods of a pool have learning rates of their own."""
    by_pool: dict[str, list[Curve]] = {}
    for (pool, _), curves in curves_by_setting(rows).items():
        by_pool.setdefault(pool, []).extend(curves)
    return _short(by_pool.items())


def _short(settings: Iterable[tuple[str, list[Curve]]]) -> str:
    parts = []
    for pool, curves in settings:
        base = [curve for curve in curves if curve.method == BASELINE]
        end = max(curve.column("rollouts")[-1] for curve in base)
        for row, halfway in zip(ratios(curves), _halfway(curves), strict=True):
            if row["seeds"] < 3:
                continue
            own = [curve for curve in curves if curve.method == row["method"]]
            at = [float(np.mean([_success(c, x) for c in own])) for x in (end / 2, end)]
            paired = [_success(c, end) - _success(b, end) for c in own for b in base if b.seed == c.seed]
            parts.append(
                [
                    pool,
                    f"{own[0].rows[0]['learning_rate']:g}",
                    f"`{row['method']}`",
                    str(row["seeds"]),
                    *(show(value, 3) for value in at),
                    "" if row["method"] == BASELINE else difference(paired),
                    _with_interval(halfway, "rollouts"),
                    " ".join(map(show, row["rollouts_ratios"])),
                    _with_interval(row, "rollouts"),
                    _with_interval(row, "cpu_s"),
                ]
            )
    header = [
        "pool",
        "learning rate",
        "method",
        "seeds",
        "after 512",
        "after 1,024",
        "difference",
        "to half-way",
        "to the end, by seed",
        "to the end",
        "CPU time",
    ]
    return markdown(header, parts)


def difference(paired: Sequence[float]) -> str:
    """Mean and 95 % interval of differences that are paired by seed."""
    (mean,), (half,) = band(np.array(paired)[:, None])
    interval = "" if math.isnan(half) else f" ± {half:.3f}"
    return "-" if math.isnan(mean) else f"{mean:+.3f}{interval}"


def _success(curve: Curve, rollouts: float) -> float:
    """Success after so many rollouts; NaN if a run ended well before."""
    made = curve.column("rollouts")
    return (
        float(np.interp(rollouts, made, curve.column("accuracy_sampled"))) if rollouts < 1.05 * made[-1] else math.nan
    )


def _halfway(curves: list[Curve]) -> list[dict]:
    """[`ratios`] to what the baseline has come to after half of its steps."""
    ends = [int(curve.column("step")[-1]) for curve in curves if curve.method == BASELINE]
    return ratios(curves, at_step=max(ends) // 2 if ends else None)


def by_rate(rows: Iterable[dict]) -> str:
    """Success after half and all of the rollouts, by learning rate."""
    parts = []
    for (_, rate), curves in curves_by_setting(rows).items():
        end = max(curve.column("rollouts")[-1] for curve in curves)
        ends = [curve.column("accuracy_sampled")[-1] for curve in curves]
        half = [np.interp(end / 2, c.column("rollouts"), c.column("accuracy_sampled")) for c in curves]
        seeds = ", ".join(f"{value:.3f}" for value in ends)
        parts.append([f"{rate:g}", str(len(curves)), f"{np.mean(half):.3f}", f"{np.mean(ends):.3f}", seeds])
    return markdown(["learning rate", "seeds", "after 512", "after 1,024", "by seed"], parts)


def _with_interval(row: dict, name: str) -> str:
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    interval = "" if math.isnan(low) or row["method"] == BASELINE else f" ({low:.2f}-{high:.2f})"
    return show(row[f"{name}_ratio"]) + interval


def worst_kind(curve: Curve, base: Curve) -> float:
    """
    The lowest difference of a kind's success to that of `base` where both have generated as many rollouts, averaged
    over the second half of the shorter run.
    """
    end = min(curve.column("rollouts")[-1], base.column("rollouts")[-1])
    grid = np.linspace(end / 2, end, 20)
    differences = [_at(curve, kind, grid) - _at(base, kind, grid) for kind in curve.rows[0]["accuracy_by_kind"]]
    return float(np.mean(differences, axis=1).min())


def _at(curve: Curve, kind: str, rollouts: np.ndarray) -> np.ndarray:
    values = [row["accuracy_by_kind"][kind] for row in curve.rows]
    return np.interp(rollouts, curve.column("rollouts"), values)


def _needs(curves: list[Curve]) -> str:
    base = {curve.seed: curve for curve in curves if curve.method == BASELINE}
    half = max(c.column("rollouts")[-1] for c in base.values()) / 2 if base else math.nan
    lines = []
    for row, halfway in zip(ratios(curves), _halfway(curves), strict=True):
        own = [c for c in curves if c.method == row["method"]]
        paired = [c for c in own if c.seed in base]
        worst = [worst_kind(c, base[c.seed]) for c in paired]
        interval = "-" if math.isnan(row["rollouts_low"]) else f"{row['rollouts_low']:.2f}-{row['rollouts_high']:.2f}"
        lines.append(
            [
                f"`{row['method']}`",
                str(row["seeds"]),
                f"{row['start']:.3f} -> {np.mean([c.column('accuracy_sampled')[-1] for c in own]):.3f}",
                f"{np.mean([np.interp(half, c.column('rollouts'), c.column('accuracy_sampled')) for c in own]):.3f}",
                _with_interval(halfway, "rollouts"),
                " ".join(map(show, halfway["rollouts_ratios"])),
                show(row["rollouts_ratio"]),
                interval,
                " ".join(map(show, row["rollouts_ratios"])),
                show(row["step_ratio"]),
                show(row["cpu_s_ratio"]),
                f"{np.mean(worst):+.3f}" if worst and row["method"] != BASELINE else "-",
            ]
        )
    header = ["method", "seeds", "success", f"after {half:.0f}", "to half-way", "per seed", "to the end"]
    header += ["95 %", "per seed", "steps", "CPU", "worst kind"]
    return markdown(header, lines)


def _by_kind(curves: list[Curve]) -> str:
    kinds = list(curves[0].rows[0]["accuracy_by_kind"])
    lines = []
    for method in methods_of(curves):
        ends = [c.rows[-1]["accuracy_by_kind"] for c in curves if c.method == method]
        lines.append([f"`{method}`", *(f"{np.mean([end[kind] for end in ends]):.2f}" for kind in kinds)])
    return markdown(["method", *kinds], lines)


#: Columns of a run's rows, by what the table calls them
MEASURED = {
    "explored": "effective_explored",
    "selected": "effective_selected",
    "error": "prediction_error",
    "calibration": "calibration_error",
    "clipped": "replay_clipped",
    "ESS": "replay_ess",
    "age": "replay_age",
    "entropy": "entropy",
}


def _measured(curves: list[Curve]) -> str:
    lines = []
    for method in methods_of(curves):
        own = [c for c in curves if c.method == method]
        shares = [c.effective_share() for c in own]
        means = [
            _mean(value for c in own for value in (row.get(name) for row in c.rows[1:])) for name in MEASURED.values()
        ]
        lines.append([f"`{method}`", show(float(np.mean(shares))), *map(show, means)])
    return markdown(["method", "effective", *MEASURED], lines)


def _mean(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else math.nan


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[i]) for line in [header, *lines]) for i in range(len(header))]
    text = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in [header, *lines]
    ]
    text.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(text)


def describe_pools(weights: Path, seed: int = 0) -> str:
    """Initial success rates of the three pools: chance of a right completion, exact, by kind and in all."""
    model, tokenizer = load(weights)
    parts = []
    known: dict[str, float] = {}
    for name, pool in POOLS.items():
        asked = training_questions(pool, seed)
        new = [q for q in asked if q.prompt not in known]
        rates = success(model.eval(), tokenizer, [Task(q.kind, 0, q.prompt, q.answer) for q in new]).sampled
        known |= dict(zip((q.prompt for q in new), rates.tolist(), strict=True))
        lines = []
        for kind in (*KINDS, "all"):
            p = np.array([known[q.prompt] for q in asked if kind in (q.kind, "all")])
            if len(p):
                quantiles = np.quantile(p, [0.1, 0.25, 0.5, 0.75, 0.9])
                effective = 1 - p**8 - (1 - p) ** 8
                lines.append(
                    [kind, str(len(p)), f"{p.mean():.3f}", *(f"{q:.3f}" for q in quantiles), f"{effective.mean():.2f}"]
                )
        header = ["kind", "questions", "mean", "10 %", "25 %", "50 %", "75 %", "90 %", "effective groups of 8"]
        parts.append(f"Pool *{name}*, seed {seed}:\n\n{markdown(header, lines)}")
    return "\n\n".join(parts)
