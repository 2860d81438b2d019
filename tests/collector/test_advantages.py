"""The scale of fresh groups' advantages beside replayed ones, against TRL's formulas."""

import numpy as np
import pytest
import torch

from trl_dataeff.collector.advantages import scale_of_fresh


REWARDS = np.random.default_rng(0).normal(size=(6, 4, 2)).astype(np.float32)
WEIGHTS, FRESH = np.float32([1.0, 0.5]), np.array([True, True, False, True, False, False])


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_the_deviation_is_that_of_fresh_groups_alone(aggregation):
    values = torch.from_numpy(REWARDS)
    if aggregation == "normalize_then_sum":
        values = (values - values.mean(1, keepdim=True)) / (values.std(1, keepdim=True) + 1e-4)
    totals = values @ torch.from_numpy(WEIGHTS)
    expected = (totals.std() + 1e-4) / (totals[FRESH].std() + 1e-4)
    assert scale_of_fresh(REWARDS, WEIGHTS, FRESH, aggregation) == pytest.approx(expected.item(), rel=1e-5)


def test_without_a_deviation_advantages_stay_as_they_are():
    equal = np.where(FRESH[:, None, None], np.float32(1), REWARDS)
    assert scale_of_fresh(equal, WEIGHTS, FRESH, "sum_then_normalize") == 1
    infinite = REWARDS.copy()
    infinite[2] = np.inf
    assert scale_of_fresh(infinite, WEIGHTS, FRESH, "sum_then_normalize") == 1
