"""What is read from a curve: the rollouts that it takes to reach an accuracy, means and bands over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np


Values: TypeAlias = Sequence[float] | np.ndarray


#: Two-sided 95 % quantiles of Student's t, by degrees of freedom.
T_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}


def t_95(degrees: int) -> float:
    """Two-sided 95 % quantile of Student's t; within 1 % beyond the table."""
    return T_95.get(degrees, 1.96 + 2.5 / degrees)


def isotonic(values: Values) -> np.ndarray:
    """The non-decreasing sequence nearest to `values` in least squares (pool adjacent violators)."""
    blocks: list[list[float]] = []  # [mean, size], means increasing
    for value in values:
        blocks.append([float(value), 1])
        while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
            mean, size = blocks.pop()
            blocks[-1][0] = (blocks[-1][0] * blocks[-1][1] + mean * size) / (blocks[-1][1] + size)
            blocks[-1][1] += size
    return np.concatenate([np.full(int(size), mean) for mean, size in blocks]) if blocks else np.zeros(0)


EQUAL = 1e-4  # accuracies that differ by less: runs that are equal but for rounding end so


def reach(x: Values, accuracy: Values, target: float) -> float:
    """The x (rollouts, steps, seconds) at which the isotonic fit of `accuracy` first reaches `target`.

    Linear between the points; `x[0]` if it is there at once; infinite if it is never reached.
    """
    fit = isotonic(accuracy)
    there = np.flatnonzero(fit >= target - EQUAL)
    if not len(there):
        return math.inf
    i = int(there[0])
    if i == 0:
        return float(x[0])
    share = min((target - fit[i - 1]) / (fit[i] - fit[i - 1]), 1.0)
    return float(x[i - 1] + share * (x[i] - x[i - 1]))


def final(accuracy: Values) -> float:
    """The last value of the isotonic fit. It depends less on noise than the last point of the curve."""
    return float(isotonic(accuracy)[-1])


def band(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean over seeds and half-width of its 95 % confidence interval, from `values` (seeds, points).

    The half-width is NaN for a single seed.
    """
    n = len(values)
    mean = values.mean(0)
    if n < 2:
        return mean, np.full_like(mean, np.nan)
    return mean, t_95(n - 1) * values.std(0, ddof=1) / math.sqrt(n)


def geometric_mean(values: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean of positive values and its 95 % confidence interval (Student's t on the logarithms).

    The interval is NaN for a single value; so is all of it with a value that is NaN, and the mean is infinite with an
    infinite one.
    """
    if any(math.isinf(value) for value in values):
        return math.inf, math.nan, math.nan
    if any(value <= 0 for value in values):
        raise ValueError(f"A geometric mean takes values above 0, not {list(values)}.")
    mean, half = band(np.log(np.asarray(values, dtype=float)[:, None]))
    middle, low, high = (float(np.exp(x[0])) for x in (mean, mean - half, mean + half))
    return middle, low, high


def on_grid(curves: Sequence[tuple[Values, Values]], points: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Curves `(x, y)` of several seeds on one grid, up to where the shortest ends: `x` (points,), `y` (seeds, points)."""
    end = min(x[-1] for x, _ in curves)
    start = max(x[0] for x, _ in curves)
    grid = np.linspace(start, end, points)
    return grid, np.stack([np.interp(grid, x, y) for x, y in curves])
