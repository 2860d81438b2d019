"""Rollouts to reach an accuracy, on made-up curves."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.curves import band, final, isotonic, on_grid, reach


X = [0, 100, 200, 300]


@pytest.mark.parametrize(
    ("x", "values", "target", "expected"),
    [
        (X, [0.1, 0.2, 0.4, 0.5], 0.3, 150),  # linear between points
        (X, [0.1, 0.2, 0.4, 0.5], 0.2, 100),
        (X, [0.1, 0.2, 0.3, 0.3], 0.31, math.inf),
        (X, [0.5, 0.6, 0.7, 0.8], 0.4, 0),
        (X, [0.2, 0.2, 0.2, 0.2], 0.2, 0),
        ([50, 100], [0.5, 0.6], 0.5, 50),
        # The peak of 0.5 at 100 is pooled with the fall after it: (0.5 + 0.1) / 2 = 0.3
        (X, [0.0, 0.5, 0.1, 0.6], 0.45, 250),
    ],
)
def test_reach_by_hand(x, values, target, expected):
    assert reach(x, values, target) == pytest.approx(expected)


def test_the_end_is_that_of_the_fit():
    assert final([0.1, 0.5, 0.3]) == pytest.approx(0.4)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_isotonic_is_increasing_and_keeps_the_mean(values):
    fit = isotonic(values)
    assert len(fit) == len(values)
    assert np.all(np.diff(fit) >= -1e-12)
    assert fit.mean() == pytest.approx(np.mean(values), abs=1e-9)
    assert isotonic(fit) == pytest.approx(fit)


def test_the_band_of_three_seeds():
    mean, half = band(np.array([[1.0], [2.0], [3.0]]))
    assert mean == pytest.approx([2.0])
    assert half == pytest.approx([4.30 / math.sqrt(3)])
    assert np.isnan(band(np.ones((1, 4)))[1]).all()


def test_a_grid_ends_with_the_shortest_curve():
    grid, values = on_grid([([0, 10], [0.0, 1.0]), ([0, 20], [0.0, 1.0])], points=3)
    assert grid.tolist() == [0, 5, 10]
    assert values.tolist() == [[0, 0.5, 1.0], [0, 0.25, 0.5]]
