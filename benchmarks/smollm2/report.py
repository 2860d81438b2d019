"""The tables, as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.lab.evaluate import success
from benchmarks.lab.ratios import BASELINE, Curve, curves_by_setting, methods_of, ratios, show
from benchmarks.lab.store import RunFile
from benchmarks.lab.tasks import Task
from benchmarks.smollm2.pools import POOLS, training_questions
from benchmarks.smollm2.questions import KINDS
from benchmarks.smollm2.train import load
from trl_dataeff.analysis.curves import band, geometric_mean


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
            parts.append(
                [
                    pool,
                    f"{own[0].rows[0]['learning_rate']:g}",
                    f"`{row['method']}`",
                    str(row["seeds"]),
                    *(show(value, 3) for value in at),
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
        "to half-way",
        "to the end, by seed",
        "to the end",
        "CPU time",
    ]
    return _markdown(header, parts)


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
    return _markdown(["learning rate", "seeds", "after 512", "after 1,024", "by seed"], parts)


def by_budget(folder: Path) -> str:
    """Success at the end of runs whose learning rate falls to 0 at that end, by pool, method and rollouts."""
    header = ["pool", "method", "rollouts", "seeds", "success", "by seed", "steps", "greedy", "entropy", "CPU seconds"]
    lines = []
    for (pool, method, budget), ends in _budgets(folder):
        by_seed = ", ".join(f"{end['accuracy_sampled']:.3f}" for end in ends)
        success = [_mean_of(ends, "accuracy_sampled", 3), by_seed]
        measured = [("step", 1), ("accuracy_greedy", 3), ("entropy_held_out", 2), ("cpu_s", 0)]
        begin = [pool, f"`{method}`", f"{budget:,}", str(len(ends)), *success]
        lines.append([*begin, *(_mean_of(ends, *column) for column in measured)])
    return _markdown(header, lines)


def by_budget_in_short(folder: Path) -> str:
    """The same of uniform sampling and the defaults alone, with what a newcomer looks at."""
    lines = [
        [
            pool,
            f"`{method}`",
            f"{budget:,}",
            str(len(ends)),
            _mean_of(ends, "accuracy_sampled", 3),
            _mean_of(ends, "cpu_s", 0),
        ]
        for (pool, method, budget), ends in _budgets(folder)
        if method in (BASELINE, "default")
    ]
    return _markdown(["pool", "method", "rollouts", "seeds", "success", "CPU seconds"], lines)


def between_budgets(folder: Path) -> str:
    """
    Rollouts, steps and CPU time with which the defaults end where uniform sampling's longest run of the same seed ended, as a
    share of its own: interpolated between their runs of fewer and more rollouts. At least those of their shortest run.
    """
    ends = _ends(folder)
    lines = []
    for pool in (pool for pool in POOLS if any(end["pool"] == pool for end in ends)):
        of_pool = [end for end in ends if end["pool"] == pool]
        targets = {
            end["seed"]: end for end in sorted(of_pool, key=lambda end: end["rollouts"]) if end["method"] == BASELINE
        }
        own = {s: [end for end in of_pool if (end["method"], end["seed"]) == ("default", s)] for s in targets}
        cells = []
        for name in ("rollouts", "step", "cpu_s"):
            each = [
                _interpolated(own[seed], end["accuracy_sampled"], name) / end[name] for seed, end in targets.items()
            ]
            mean, low, high = geometric_mean(each)
            interval = "" if math.isnan(low) else f" ({low:.2f}-{high:.2f})"
            cells += [show(mean) + interval, ", ".join(map(show, each))]
        lines.append([pool, str(len(targets)), *cells[:3], cells[4]])
    return _markdown(["pool", "seeds", "rollouts", "per seed", "steps", "CPU time"], lines)


def _interpolated(ends: Iterable[dict], success: float, name: str) -> float:
    """`name` at this success between the ends of runs of one seed; infinite if none has it."""
    ordered = sorted(ends, key=lambda end: end["accuracy_sampled"])
    xs = [end["accuracy_sampled"] for end in ordered]
    return float(np.interp(success, xs, [end[name] for end in ordered], right=math.inf))


def by_budget_and_kind(folder: Path) -> str:
    """Success at those ends by kind of question, as the mean over seeds."""
    runs = _budgets(folder)
    kinds = list(runs[0][1][0]["accuracy_by_kind"])
    lines = [
        [
            pool,
            f"`{method}`",
            f"{budget:,}",
            *(f"{np.mean([end['accuracy_by_kind'][kind] for end in ends]):.2f}" for kind in kinds),
        ]
        for (pool, method, budget), ends in runs
    ]
    return _markdown(["pool", "method", "rollouts", *kinds], lines)


def _budgets(folder: Path) -> list[tuple[tuple[str, str, int], list[dict]]]:
    """The ends of the runs of each pool, method and number of rollouts."""
    runs: dict[tuple[str, str, int], list[dict]] = {}
    for end in _ends(folder):
        budget = 128 * (end["rollouts"] // 128)  # a run ends with the step that reaches it
        runs.setdefault((end["pool"], end["method"], budget), []).append(end)
    return sorted(runs.items(), key=lambda run: (list(POOLS).index(run[0][0]), run[0][1] != BASELINE, *run[0][1:]))


def by_steps(folder: Path, baseline: Path) -> str:
    """
    The same for runs that were planned for as many steps as those of uniform sampling in the folder `baseline`, of the same
    pools and seeds. The difference is paired by seed, with its 95 % interval.
    """
    plain = {(end["pool"], end["seed"], end["step"]): end for end in _ends(baseline) if end["method"] == BASELINE}
    pairs: dict[tuple[str, str], list[tuple[dict, dict]]] = {}
    for end in _ends(folder):
        base = plain[end["pool"], end["seed"], end["step"]]
        pairs.setdefault((end["pool"], end["method"]), []).append((base, end))
    lines = []
    for pool, method in sorted(pairs, key=lambda key: list(POOLS).index(key[0])):
        gains = np.array([end["accuracy_sampled"] - base["accuracy_sampled"] for base, end in pairs[pool, method]])
        (gain,), (half,) = band(gains[:, None])
        for name, ends in zip((BASELINE, method), zip(*pairs[pool, method], strict=True), strict=True):
            cells = [
                _mean_of(ends, "step", 0),
                f"{np.mean([end['rollouts'] for end in ends]):,.0f}",
                _mean_of(ends, "accuracy_sampled", 3),
            ]
            difference = "" if name == BASELINE else f"{gain:+.3f} ± {half:.3f}"
            lines.append([pool, f"`{name}`", str(len(ends)), *cells, difference, _mean_of(ends, "cpu_s", 0)])
    return _markdown(["pool", "method", "seeds", "steps", "rollouts", "success", "difference", "CPU seconds"], lines)


def _ends(folder: Path) -> list[dict]:
    """The last row of each finished run, by seed."""
    files = [RunFile(folder, path.stem) for path in sorted(folder.glob("*.jsonl"))]
    return sorted((file.rows()[-1] for file in files if file.finished()), key=lambda row: row["seed"])


def _mean_of(ends: Iterable[dict], name: str, digits: int) -> str:
    return f"{np.mean([end[name] for end in ends]):.{digits}f}"


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
        own = [c for c in curves if c.method == row["method"] and c.seed in base]
        worst = [worst_kind(c, base[c.seed]) for c in own]
        interval = "-" if math.isnan(row["rollouts_low"]) else f"{row['rollouts_low']:.2f}-{row['rollouts_high']:.2f}"
        lines.append(
            [
                f"`{row['method']}`",
                str(row["seeds"]),
                f"{row['start']:.3f} -> {row['end']:.3f}",
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
    return _markdown(header, lines)


def _by_kind(curves: list[Curve]) -> str:
    kinds = list(curves[0].rows[0]["accuracy_by_kind"])
    lines = []
    for method in methods_of(curves):
        ends = [c.rows[-1]["accuracy_by_kind"] for c in curves if c.method == method]
        lines.append([f"`{method}`", *(f"{np.mean([end[kind] for end in ends]):.2f}" for kind in kinds)])
    return _markdown(["method", *kinds], lines)


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
    return _markdown(["method", "effective", *MEASURED], lines)


def _mean(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else math.nan


def _markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
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
        parts.append(f"Pool *{name}*, seed {seed}:\n\n{_markdown(header, lines)}")
    return "\n\n".join(parts)
