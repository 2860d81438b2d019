"""The one writer of tables, and how their cells show numbers. What is undefined is shown as `-`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from benchmarks.curves import band, geometric_mean


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in [header, *rows]]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def mean(values: Sequence[float], digits: int = 3) -> str:
    """The mean, over runs that all have a value."""
    middle = float(np.mean(values)) if len(values) else math.nan
    return "-" if math.isnan(middle) else f"{middle:,.{digits}f}"


def difference(paired: Sequence[float]) -> str:
    """Mean and 95 % interval of differences that are paired by seed."""
    if not len(paired):
        return "-"
    (middle,), (half,) = band(np.array(paired, dtype=float)[:, None])
    return f"{middle:+.3f}" + ("" if math.isnan(half) else f" ± {half:.3f}")


def ratio(paired: Sequence[float]) -> str:
    """Geometric mean and 95 % interval of ratios that are paired by seed; or how many of the runs never arrived."""
    if not len(paired):
        return "-"
    late = sum(map(math.isinf, paired))
    if late:
        return f"never, in {late} of {len(paired)}"
    middle, low, high = geometric_mean(paired)
    return f"{middle:.2f}" + ("" if math.isnan(low) else f" ({low:.2f}-{high:.2f})")
