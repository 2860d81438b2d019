"""What `benchmarks.cold_start` computes of a run's evaluations."""

import math

import pytest

from benchmarks.cold_start import _of


def evaluation(rollouts, accuracy, groups, effective):
    return {"rollouts": rollouts, "accuracy_sampled": accuracy, "groups": groups, "effective_groups": effective}


def test_early_share_and_rollouts_to_the_targets_by_hand():
    """`groups` counts those since the last evaluation; between evaluations all is linear."""
    rows = [evaluation(0, 0.2, 0, 0), evaluation(400, 0.3, 50, 10), evaluation(800, 0.45, 50, 20)]
    share, first, second = _of(rows)
    assert share == pytest.approx((10 + 10) / (50 + 25))  # half-way from 400 to 800 rollouts
    assert first == pytest.approx(400 + 400 * 0.1 / 0.15)
    assert math.isinf(second)
