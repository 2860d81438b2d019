"""Which groups have zero variance, and the success rate of each."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_dataeff.rollouts.classification import (
    GroupClassifier,
    RewardScale,
    is_masked_out,
    is_zero_variance,
    kinds_of,
    total_rewards,
)
from trl_dataeff.rollouts.group import EASY, EFFECTIVE, HARD


NAN = math.nan


def kind_of(rewards, weights=(1.0,), reward_range=(0, 1), aggregation="sum_then_normalize") -> int:
    """The kind of one group, `rewards` being (G, F) or (G,)."""
    rewards = np.array(rewards, dtype=np.float32).reshape(1, len(rewards), -1)
    scale = RewardScale.of(reward_range)
    totals = total_rewards(rewards, np.array(weights))
    scale.observe(totals)
    kind = int(kinds_of(is_zero_variance(rewards, np.array(weights), aggregation), scale.success_rate(totals))[0])
    classifier = GroupClassifier(np.array(weights), reward_range=reward_range, aggregation=aggregation)
    rates, kinds = classifier.classify(rewards, np.zeros(rewards.shape[:2], dtype=bool))
    assert kinds.tolist() == [kind]
    np.testing.assert_array_equal(rates, scale.success_rate(totals))
    return kind


@pytest.mark.parametrize(
    ("rewards", "options", "kind"),
    [
        ([1, 1, 1, 1], {}, EASY),
        ([0, 0, 0, 0], {}, HARD),
        ([0, 0, 1, 0], {}, EFFECTIVE),
        ([0.5, 0.5, 0.5], {}, HARD),  # zero variance in the middle counts as hard
        ([1e-9, 2e-9, 1e-9], {}, EFFECTIVE),  # TRL's isclose test calls this zero
        ([1e6, 1e6 + 1, 1e6], {"reward_range": (0, 2e6)}, EFFECTIVE),
        ([NAN, 1, 1], {}, EASY),  # what is unscorable is left out
        ([NAN, 1, 0], {}, EFFECTIVE),
        ([NAN, NAN, 1], {}, EASY),  # one completion has nothing to differ from
        ([NAN, NAN, NAN], {}, HARD),
        ([[1, NAN], [1, NAN], [1, NAN]], {"weights": (1, 1)}, EASY),
        ([[0.1, 0.2], [0.3, 0.0], [0.3, NAN]], {"weights": (1, 1)}, HARD),  # equal but for rounding
        ([[1, 0], [0, 1]], {"weights": (0.5, 0.5)}, HARD),  # equal totals from different parts
        ([[1, 0], [0, 1]], {"weights": (0.5, 0.6)}, EFFECTIVE),
        ([[1, 0], [0, 1]], {"weights": (0.5, 0.5), "aggregation": "normalize_then_sum"}, EFFECTIVE),
        ([[1, 0], [1, 1]], {"weights": (1, 0)}, EASY),  # a function without weight does not count
        ([[1, 0], [1, 1]], {"weights": (1, 0), "aggregation": "normalize_then_sum"}, EASY),
        ([-2, -2], {"reward_range": (-2, 3)}, HARD),
        ([3, 3], {"reward_range": (-2, 3)}, EASY),
        ([0.9, 0.9], {}, HARD),
        ([0.9, 0.9], {"reward_range": (0, 0.9)}, EASY),  # 0.9 is not the same number in float32
        ([[0.7, 0.2, 0.1], [0.1, 0.7, 0.2]], {"weights": (1, 1, 1)}, EASY),
        ([[0.7, 0.8, 0.1], [0.7, 0.9, 0.0]], {"weights": (1, 1, 1), "reward_range": (0, 2)}, HARD),
        ([[0.7, 0.8, 0.1], [0.7, 0.9, 0.001]], {"weights": (1, 1, 1), "reward_range": (0, 2)}, EFFECTIVE),
        ([math.inf, 0.0], {}, HARD),  # TRL sets the advantages of such a group to 0
    ],
)
def test_kinds(rewards, options, kind):
    assert kind_of(rewards, **options) == kind


@given(st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=2, max_size=2))
def test_totals_of_tenths_compare_as_their_exact_sums(rows):
    rewards = np.array(rows, dtype=np.float32)[None] / np.float32(10)
    assert is_zero_variance(rewards, np.ones(3))[0] == (sum(rows[0]) == sum(rows[1]))


def test_a_group_whose_differing_completions_were_all_cut_off_has_no_gradient():
    rewards = np.array([[[1], [0], [0.5]]] * 4, dtype=np.float32)
    truncated = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]], dtype=bool)  # the third is at the mean
    assert is_masked_out(rewards, np.ones(1), truncated).tolist() == [True, False, True, False]
    for masks, kinds in ((True, [HARD, EFFECTIVE, HARD, EFFECTIVE]), (False, [EFFECTIVE] * 4)):
        assert GroupClassifier(np.ones(1), masks_truncated=masks).classify(rewards, truncated)[1].tolist() == kinds


def test_a_group_whose_functions_differ_but_whose_totals_do_not_is_masked_out_where_totals_count():
    rewards = np.array([[[2, -1], [0, 0], [0, 0]]] * 2, dtype=np.float32)  # totals with weights 0.5 and 1 are all 0
    truncated = np.array([[0, 1, 1], [1, 1, 1]], dtype=bool)
    weights = np.float32([0.5, 1])
    assert is_masked_out(rewards, weights, truncated).tolist() == [True, True]
    assert is_masked_out(rewards, weights, truncated, "normalize_then_sum").tolist() == [False, True]
    classifier = GroupClassifier(weights, aggregation="normalize_then_sum", masks_truncated=True)
    assert classifier.classify(rewards, truncated)[1].tolist() == [EFFECTIVE, HARD]


def test_a_classifier_widens_its_scale_round_by_round():
    """A round is classified by a scale that has seen it; a given range stays as it is."""
    classifier, given_range = GroupClassifier(np.ones(1)), GroupClassifier(np.ones(1), reward_range=(0, 4))
    assert classifier.weights.dtype == np.float32
    for rewards, rates, kinds, in_range in (
        ([[1, 1]], [1], [EASY], [0.25]),  # one value alone: positive is success
        ([[1, 3], [3, 3]], [0.5, 1], [EFFECTIVE, EASY], [0.5, 0.75]),
        ([[1, 1]], [0], [HARD], [0.25]),
        ([[NAN, NAN], [NAN, 2]], [NAN, 0.5], [HARD, HARD], [NAN, 0.5]),
    ):
        groups = np.array(rewards, dtype=np.float32)[..., None]
        whole = np.zeros(groups.shape[:2], dtype=bool)
        success_rates, codes = classifier.classify(groups, whole)
        np.testing.assert_allclose(success_rates, rates)
        assert codes.tolist() == kinds
        assert codes.dtype == np.int8
        np.testing.assert_allclose(given_range.classify(groups, whole)[0], in_range)
    assert (classifier.scale.low, classifier.scale.high) == (1, 3)
    assert (given_range.scale.low, given_range.scale.high) == (0, 4)


def test_totals_are_trls():
    """As in TRL: nansum of the weighted columns, NaN where no function gave a score."""
    rewards = torch.tensor([[1.0, NAN], [0.25, 2.0], [NAN, NAN], [NAN, 3.0]])
    weights = torch.tensor([0.3, 1.7])
    expected = (rewards * weights).nansum(dim=1)
    expected[2] = NAN
    np.testing.assert_array_equal(total_rewards(rewards.numpy(), weights.numpy()), expected.numpy())


@given(st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=8), st.floats(-5, 5), st.floats(0.5, 5))
def test_success_rate_is_the_mean_place_in_the_range(rewards, low, width):
    scale = RewardScale.of((low, low + width))
    expected = sum(min(max((r - low) / width, 0), 1) for r in rewards) / len(rewards)
    assert scale.success_rate(np.array([rewards]))[0] == pytest.approx(expected, abs=1e-6)


def test_sums_that_differ_by_rounding_alone_do_not_differ():
    """0.1 + 0.2 and 0.3 + 0 in float32; in a single function any difference counts."""
    rewards = np.array([[[0.1, 0.2], [0.3, 0.0], [0.15, 0.15]]], dtype=np.float32)
    assert is_zero_variance(rewards, np.array([1.0, 1.0]))[0]
    assert not is_zero_variance(np.array([[[0.3], [0.30000003]]], np.float32), np.array([1.0]))[0]


def test_rewards_are_graded_from_the_third_value_on():
    classifier, uncut = GroupClassifier(np.array([1.0])), np.zeros((1, 2), dtype=bool)
    for totals, graded in (([0, 0], False), ([0, 1], False), ([NAN, 1], False), ([0.5, 0.5], True), ([0, 1], True)):
        classifier.classify(np.array(totals, np.float32).reshape(1, 2, 1), uncut)
        assert classifier.graded == graded


@given(st.lists(st.floats(-5, 5, width=16), min_size=1, max_size=6), st.lists(st.floats(-9, 9, width=16), min_size=1))
def test_rates_of_a_narrower_range_are_mapped_to_those_of_the_wider_one(first, later):
    scale, totals = RewardScale(), np.array([first], dtype=np.float32)
    scale.observe(totals)
    earlier, before = RewardScale(scale.low, scale.high), scale.success_rate(totals)
    scale.observe(np.array(later))
    mapping = scale.mapping_from(earlier)
    if mapping is None:
        assert (scale.low, scale.high) == (earlier.low, earlier.high)
    else:
        np.testing.assert_allclose(mapping[0] * before + mapping[1], scale.success_rate(totals), atol=1e-5)
    assert RewardScale(0, 1).mapping_from(RewardScale()) is None
