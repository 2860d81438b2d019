"""Rollouts to reach an accuracy, on made-up curves."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.curves import band, final, isotonic, on_grid, reach


X = [0, 100, 200, 300]


def test_between_points_it_is_linear():
    assert reach(X, [0.1, 0.2, 0.4, 0.5], 0.3) == pytest.approx(150)
    assert reach(X, [0.1, 0.2, 0.4, 0.5], 0.2) == pytest.approx(100)


def test_never_reached():
    assert reach(X, [0.1, 0.2, 0.3, 0.3], 0.31) == math.inf


def test_reached_at_once():
    assert reach(X, [0.5, 0.6, 0.7, 0.8], 0.4) == 0
    assert reach([50, 100], [0.5, 0.6], 0.5) == 50


def test_a_lucky_point_does_not_count():
    # The peak of 0.5 at 100 is pooled with the fall after it: (0.5 + 0.1) / 2 = 0.3
    assert isotonic([0.0, 0.5, 0.1, 0.6]) == pytest.approx([0.0, 0.3, 0.3, 0.6])
    assert reach(X, [0.0, 0.5, 0.1, 0.6], 0.45) == pytest.approx(250)


def test_noise_moves_it_little():
    rng = np.random.default_rng(0)
    x = np.linspace(0, 1000, 201)
    noisy = x / 1000 + rng.normal(0, 0.05, len(x))
    assert reach(x, noisy, 0.5) == pytest.approx(500, abs=40)


def test_a_flat_curve_that_touches_the_target():
    assert reach(X, [0.2, 0.2, 0.2, 0.2], 0.2) == 0


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
