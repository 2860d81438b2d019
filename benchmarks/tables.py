"""The one writer of tables, and how their cells show numbers. What is undefined is shown as `-`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from benchmarks.curves import band, geometric_mean


#: What methods are called in tables; others go by their names
TITLES = {
    "uniform": "plain GRPO",
    "compact": "plain GRPO, faster update",
    "selection": "selection alone",
    "fill": "selection and replay",
    "fill,stratify_by=kind": "selection and replay, strata",
    "replay": "replay alone",
    "shuffled": "selection and replay, embeddings shuffled",
    "share": "selection, half of the batch replayed",
    "dynamic": "dynamic sampling",
    "greso": "GRESO",
    "greso_fill": "GRESO and replay",
    "dots_paper": "DOTS as published",
    "oracle": "plain GRPO, learnable prompts",
}
FEWEST_FOR_AN_INTERVAL = 3  # values


def title(method: str) -> str:
    return TITLES.get(method, f"`{method}`")


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    lines = [_line(header, widths), rule]
    lines += [_line(row, widths) for row in rows]
    return "\n".join(lines)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
    return "| " + " | ".join(padded) + " |"


def mean(values: Sequence[float], digits: int = 3) -> str:
    """The mean; undefined if a value is NaN."""
    if not len(values):
        return "-"
    average = float(np.mean(values))
    if math.isnan(average):
        return "-"
    return f"{average:,.{digits}f}"


def difference(paired: Sequence[float]) -> str:
    """Mean and 95 % interval of differences that are paired by seed; the mean alone of one or two."""
    if not len(paired):
        return "-"
    (average,), (half_width,) = band(np.array(paired, dtype=float)[:, None])
    if len(paired) < FEWEST_FOR_AN_INTERVAL:
        return f"{average:+.3f}"
    return f"{average:+.3f} ± {half_width:.3f}"


def ratio(paired: Sequence[float]) -> str:
    """Geometric mean and 95 % interval of ratios that are paired by seed; or how many of the runs did not arrive."""
    if not len(paired):
        return "-"
    late = sum(math.isinf(value) for value in paired)
    if late:
        return f"not in {late} of {len(paired)}"
    middle, low, high = geometric_mean(paired)
    if len(paired) < FEWEST_FOR_AN_INTERVAL:
        return f"{middle:.2f}"
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"
