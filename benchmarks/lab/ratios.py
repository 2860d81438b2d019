"""The ratio table: what each method needs, against uniform, to reach what uniform has come to."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from benchmarks.curves import final, geometric_mean, reach


BASELINE = "uniform"
Setting = tuple[str, float]  # pool, learning rate


@dataclass(frozen=True)
class Curve:
    """One run, by evaluation. Arrays of shape (evaluations,)."""

    method: str
    seed: int
    rows: list[dict]

    def column(self, name: str) -> np.ndarray:
        return np.array([row[name] for row in self.rows], dtype=float)

    def until(self, step: int | None) -> Curve:
        """The run as it was at optimizer step `step`; whole for `None`."""
        rows = [row for row in self.rows if step is None or row["step"] <= step]
        return Curve(self.method, self.seed, rows)

    def effective_share(self) -> float:
        """Effective share of all groups generated; NaN without groups."""
        groups = self.column("groups").sum()
        return float(self.column("effective_groups").sum() / groups) if groups else math.nan

    def worst_kind(self) -> tuple[str, float]:
        """The kind of held-out prompts with the lowest accuracy at the last evaluation, and that accuracy.

        `""` and NaN where a run has no accuracy by kind. Not of an isotonic fit, which would hide that a kind was lost.
        """
        by_kind = self.rows[-1].get("accuracy_by_kind") or {}
        known = {kind: p for kind, p in by_kind.items() if p is not None}  # a table has the kinds of all its runs
        return min(known.items(), key=lambda item: item[1], default=("", math.nan))


def curves_by_setting(rows: Iterable[dict]) -> dict[Setting, list[Curve]]:
    """The runs in `rows`, apart by pool and learning rate, in the order in which they stand."""
    runs: dict[str, list[dict]] = {}
    for row in rows:
        runs.setdefault(row["run"], []).append(row)
    settings: dict[Setting, list[Curve]] = {}
    for points in runs.values():
        first = points[0]
        curve = Curve(first["method"], first["seed"], points)
        settings.setdefault((first["pool"], first["learning_rate"]), []).append(curve)
    return settings


def methods_of(curves: Iterable[Curve]) -> list[str]:
    return list(dict.fromkeys(curve.method for curve in curves))


def ratios(curves: list[Curve], baseline: str = BASELINE, at_step: int | None = None) -> list[dict]:
    """A row per method: its end, and what it needs of rollouts, steps and time against the baseline.

    The target is the accuracy that the baseline has come to with the same seed, at its end or at step `at_step`. A ratio is
    the geometric mean over seeds of `x(method) / x(baseline)`, infinite if a seed never got there; NaN without a
    baseline run of that seed. `.._low` and `.._high` are its 95 % confidence interval.
    """
    base = {curve.seed: curve.until(at_step) for curve in curves if curve.method == baseline}
    table = []
    for method in methods_of(curves):
        own = [curve for curve in curves if curve.method == method]
        row = {
            "method": method,
            "seeds": len(own),
            "start": np.mean([c.column("accuracy_sampled")[0] for c in own]),
            "end": np.mean([final(c.column("accuracy_sampled")) for c in own]),
            **_worst_kind(own),
            "end_greedy": np.mean([c.column("accuracy_greedy")[-1] for c in own]),
            "rollouts": np.mean([c.column("rollouts")[-1] for c in own]),
            "effective": np.mean([c.effective_share() for c in own]),
        }
        for x in ("rollouts", "step", "wall_s", "cpu_s"):
            # The baseline, too, is what it was then: what it came to afterwards moves the fit of its curve
            each = [_ratio(base.get(c.seed, c) if method == baseline else c, base.get(c.seed), x) for c in own]
            row[f"{x}_ratios"] = each
            row[f"{x}_ratio"], row[f"{x}_low"], row[f"{x}_high"] = geometric_mean(each)
        then = [base.get(c.seed, c) if method == baseline else c for c in own]
        row["reach"] = float(
            np.mean([_reach(c, base[c.seed], "rollouts") for c in then if c.seed in base] or [math.nan])
        )
        table.append(row)
    return table


def _worst_kind(curves: list[Curve]) -> dict:
    """`worst`: mean over seeds of the accuracy on each run's own worst kind. `worst_kinds`: these kinds, the commonest first."""
    found = [curve.worst_kind() for curve in curves]
    kinds = [kind for kind, _ in Counter(kind for kind, _ in found if kind).most_common()]
    return {"worst": float(np.mean([p for _, p in found])), "worst_kinds": kinds}


def _reach(curve: Curve, base: Curve, x: str) -> float:
    return reach(curve.column(x), curve.column("accuracy_sampled"), final(base.column("accuracy_sampled")))


def _ratio(curve: Curve, base: Curve | None, x: str) -> float:
    if base is None:
        return math.nan
    own, other = _reach(curve, base, x), _reach(base, base, x)
    return own / other if other > 0 else math.nan


def show(value: float, digits: int = 2) -> str:
    """A number for the table: `never` for an infinite one, `-` for one that does not exist."""
    if math.isnan(value):
        return "-"
    return "never" if math.isinf(value) else f"{value:.{digits}f}"


HEADER = (
    "method", "seeds", "accuracy", "worst kind", "greedy", "rollouts", "effective", "to reach", "ratio", "95 %", "per seed", "steps", "wall", "cpu",
)  # fmt: skip


def cells(row: dict) -> list[str]:
    """One row of `ratios` as text, in the order of `HEADER`."""
    return [
        row["method"],
        str(row["seeds"]),
        f"{row['start']:.3f} -> {row['end']:.3f}",
        "-" if math.isnan(row["worst"]) else f"{row['worst']:.3f} {', '.join(row['worst_kinds'])}",
        f"{row['end_greedy']:.3f}",
        f"{row['rollouts']:.0f}",
        f"{row['effective']:.2f}",
        show(row["reach"], 0),
        show(row["rollouts_ratio"]),
        "-" if math.isnan(row["rollouts_low"]) else f"{row['rollouts_low']:.2f}-{row['rollouts_high']:.2f}",
        " ".join(show(value) for value in row["rollouts_ratios"]),
        show(row["step_ratio"]),
        show(row["wall_s_ratio"]),
        show(row["cpu_s_ratio"]),
    ]


def as_text(settings: dict[Setting, list[Curve]], at_step: int | None = None) -> str:
    """The ratio tables as Markdown, one per pool and learning rate."""
    parts = []
    for (pool, rate), curves in settings.items():
        body = [HEADER, *(cells(row) for row in ratios(curves, at_step=at_step))]
        widths = [max(len(line[i]) for line in body) for i in range(len(HEADER))]
        lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in body]
        lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
        parts.append(f"pool {pool}, learning rate {rate:g}:\n\n" + "\n".join(lines))
    return "\n\n".join(parts)
