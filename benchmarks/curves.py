"""What is read from a curve: the rollouts that it takes to reach an accuracy, means and bands over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np


Values: TypeAlias = Sequence[float] | np.ndarray


#: Two-sided 95 % quantiles of Student's t, by degrees of freedom
T_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
#: Accuracies that differ by less are equal: so runs end that differ by rounding alone
EQUAL = 1e-4


def t_95(degrees: int) -> float:
    """Two-sided 95 % quantile of Student's t; within 1 % beyond the table."""
    return T_95.get(degrees, 1.96 + 2.5 / degrees)


def isotonic(values: Values) -> np.ndarray:
    """The non-decreasing sequence nearest to `values` in least squares (pool adjacent violators)."""
    if not len(values):
        return np.zeros(0)
    means: list[float] = []  # of blocks of values, increasing
    sizes: list[int] = []
    for value in values:
        means.append(float(value))
        sizes.append(1)
        while len(means) > 1 and means[-2] >= means[-1]:
            mean = means.pop()
            size = sizes.pop()
            means[-1] = (means[-1] * sizes[-1] + mean * size) / (sizes[-1] + size)
            sizes[-1] += size
    return np.repeat(means, sizes)


def reach(x: Values, accuracy: Values, target: float) -> float:
    """Where the isotonic fit of a curve first reaches a target.

    Args:
        x (`(N,)` values): Rollouts, steps or seconds, increasing.
        accuracy (`(N,)` values): The curve.
        target (`float`): The accuracy to reach.

    Returns:
        The x, linear between the points; `x[0]` if it is there at once; infinite if it is never reached.
    """
    fit = isotonic(accuracy)
    there = np.flatnonzero(fit >= target - EQUAL)
    if not len(there):
        return math.inf
    i = int(there[0])
    if i == 0:
        return float(x[0])
    share = (target - fit[i - 1]) / (fit[i] - fit[i - 1])
    # The fit may end below the target, by less than `EQUAL`
    share = min(share, 1.0)
    return float(x[i - 1] + share * (x[i] - x[i - 1]))


def final(accuracy: Values) -> float:
    """The last value of the isotonic fit. It depends less on noise than the last point of the curve."""
    return float(isotonic(accuracy)[-1])


def band(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean over seeds, and the half-width of its 95 % confidence interval.

    Args:
        values (`np.ndarray`): One row per seed, `(seeds, points)`.

    Returns:
        Two arrays `(points,)`. The half-width is NaN for a single seed.
    """
    n = len(values)
    mean = values.mean(0)
    if n < 2:
        return mean, np.full_like(mean, np.nan)
    half_width = t_95(n - 1) * values.std(0, ddof=1) / math.sqrt(n)
    return mean, half_width


def geometric_mean(values: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean of positive values, and the ends of its 95 % confidence interval (Student's t on the logarithms).

    Returns:
        The mean and the two ends. The ends are NaN for a single value. All three are NaN with a value that is NaN.
        With an infinite value the mean is infinite.

    Raises:
        ValueError: If a value is not above 0.
    """
    if any(math.isinf(value) for value in values):
        return math.inf, math.nan, math.nan
    if any(value <= 0 for value in values):
        raise ValueError(f"A geometric mean takes values above 0, not {list(values)}.")
    logarithms = np.log(np.asarray(values, dtype=float))
    (mean,), (half_width,) = band(logarithms[:, None])
    return float(np.exp(mean)), float(np.exp(mean - half_width)), float(np.exp(mean + half_width))


def on_grid(curves: Sequence[tuple[Values, Values]], points: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Curves of several seeds on one grid, up to where the shortest ends.

    Args:
        curves (sequence of `(x, y)`): The curves.
        points (`int`, *optional*, defaults to `60`): Number of points of the grid.

    Returns:
        The grid `(points,)`, and the values of the curves on it `(seeds, points)`.
    """
    start = max(x[0] for x, _ in curves)
    end = min(x[-1] for x, _ in curves)
    grid = np.linspace(start, end, points)
    return grid, np.stack([np.interp(grid, x, y) for x, y in curves])
