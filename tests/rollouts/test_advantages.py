"""Advantages with a tracked baseline: bias by enumeration of all outcomes, and values by another calculation."""

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from trl.trainer.utils import nanstd

from trl_dataeff.rollouts.advantages import Prior, advantages, leave_one_out


def prior(mean, strength, n=1, least=0.0, low=0.0, high=1.0) -> Prior:
    mean = np.broadcast_to(np.asarray(mean, dtype=np.float64), n)
    return Prior(mean, np.broadcast_to(np.float64(strength), n), (mean - low) * (high - mean), least)


def tracked(rewards, mean, strength, scale="none", **options) -> np.ndarray:
    rewards = np.atleast_2d(np.array(rewards, dtype=np.float64))
    return advantages(rewards, leave_one_out(rewards, prior(mean, strength, len(rewards), **options)), scale)


def test_the_baseline_by_hand():
    # (4 x 0.25 + successes of the others) / (4 + 3): 2/7 for a success, 3/7 for a failure
    np.testing.assert_allclose(tracked([1, 0, 0, 1], 0.25, 4), [[5 / 7, -3 / 7, -3 / 7, 5 / 7]])
    np.testing.assert_allclose(tracked([0, 0], 0.5, 1), [[-0.25, -0.25]])
    np.testing.assert_allclose(tracked([1, 1], 0.5, 1), [[0.25, 0.25]])


def test_the_deviation_of_binary_rewards_is_that_of_the_baseline():
    rewards = np.array([[1.0, 0, 0, 1], [0, 0, 0, 0]])
    posterior = leave_one_out(rewards, prior([0.25, 0.7], 4, 2))
    np.testing.assert_allclose(posterior.variance, posterior.mean * (1 - posterior.mean))
    expected = (rewards - posterior.mean) / (np.sqrt(posterior.mean * (1 - posterior.mean)) + 1e-4)
    np.testing.assert_allclose(advantages(rewards, posterior, "group"), expected)


def by_loops(rewards, mean, strength, variance):
    """Baseline and variance of each completion, from lists of weighted observations."""
    out = []
    for i, own in enumerate(rewards):
        others = [r for j, r in enumerate(rewards) if j != i and not np.isnan(r)]
        total = strength + len(others)
        if np.isnan(own) or total == 0:
            out.append((np.nan, np.nan))
            continue
        b = (strength * mean + sum(others)) / total
        second = strength * (variance + mean**2) + sum(r**2 for r in others)
        out.append((b, second / total - b**2))
    return np.array(out).T


@given(st.integers(2, 6), st.floats(0.02, 0.98), st.floats(0.1, 50), st.randoms(use_true_random=False))
def test_graded_rewards_by_another_calculation(g, p, s, random):
    low, high = -2.0, 3.0
    rewards = np.array([random.choice([low, -0.5, 1.0, high, np.nan]) for _ in range(g)])
    mean = low + p * (high - low)
    posterior = leave_one_out(rewards[None], prior(mean, s, low=low, high=high))
    b, variance = by_loops(rewards, mean, s, (mean - low) * (high - mean))
    np.testing.assert_allclose(posterior.mean[0], b)
    np.testing.assert_allclose(posterior.variance[0], variance, atol=1e-9)
    result = advantages(rewards[None], posterior, "none")[0]
    np.testing.assert_array_equal(result, np.where(np.isnan(b), 0.0, rewards - b))


def expected_gradient(g, theta, mean, strength, scale):
    """Of `sum_i A_i d log pi(r_i) / d logit` over all outcomes of g completions of a Bernoulli policy."""
    outcomes = np.array(list(itertools.product([0.0, 1.0], repeat=g)))
    probability = np.prod(np.where(outcomes == 1, theta, 1 - theta), axis=1)
    A = tracked(outcomes, mean, strength, scale, least=1 / g)
    return float(probability @ (A * (outcomes - theta)).sum(axis=1))


@pytest.mark.parametrize("g", [2, 3, 4])
@pytest.mark.parametrize("theta", [0.1, 0.5, 0.8])
@pytest.mark.parametrize(("mean", "strength"), [(0.0, 4.0), (0.3, 0.5), (0.9, 8.0), (np.nan, 4.0)])
def test_the_gradient_is_unbiased_whatever_was_predicted(g, theta, mean, strength):
    truth = g * theta * (1 - theta)  # d E[r] / d logit, once per completion
    assert expected_gradient(g, theta, mean, strength, "none") == pytest.approx(truth)


@pytest.mark.parametrize("g", [2, 3, 4])
@pytest.mark.parametrize(("theta", "mean"), [(0.1, 0.2), (0.5, 0.9), (0.8, 0.05)])
def test_scaled_by_the_posterior_it_is_unbiased_up_to_a_common_scale(g, theta, mean):
    """The scale of a completion is that of the others: the expected gradient is the true one times its mean inverse."""
    s = 3.0
    others = np.array(list(itertools.product([0.0, 1.0], repeat=g - 1)))
    probability = np.prod(np.where(others == 1, theta, 1 - theta), axis=1)
    b = (s * mean + others.sum(axis=1)) / (s + g - 1)
    inverse = probability @ (1 / (np.sqrt(np.maximum(b * (1 - b), 1 / g)) + 1e-4))
    truth = g * theta * (1 - theta)
    assert expected_gradient(g, theta, mean, s, "group") == pytest.approx(truth * inverse)


def test_graded_rewards_have_the_true_gradients_direction():
    """A softmax policy over three outcomes with rewards 0, 0.4 and 1, in groups of three."""
    values, theta, g = np.array([0.0, 0.4, 1.0]), np.array([0.5, 0.2, 0.3]), 3
    outcomes = np.array(list(itertools.product(range(3), repeat=g)))
    probability = theta[outcomes].prod(axis=1)
    A = tracked(values[outcomes], 0.7, 2.0)
    scores = np.eye(3)[outcomes] - theta  # d log pi / d logits
    truth = g * theta * (values - theta @ values)
    np.testing.assert_allclose(np.einsum("o,og,ogk->k", probability, A, scores), truth, atol=1e-12)


def test_between_leave_one_out_and_the_prediction():
    rewards = [1.0, 0, 0, 1]
    np.testing.assert_allclose(tracked(rewards, 0.2, 0), [[2 / 3, -2 / 3, -2 / 3, 2 / 3]])
    np.testing.assert_allclose(tracked(rewards, 0.2, 1e12), [[0.8, -0.2, -0.2, 0.8]], rtol=1e-9)


def trl_advantages(rewards) -> np.ndarray:
    tensor = torch.tensor(rewards, dtype=torch.float64)
    mean = tensor.nanmean(dim=1, keepdim=True)
    return ((tensor - mean) / (nanstd(tensor, dim=1, keepdim=True) + 1e-4)).nan_to_num(0.0).numpy()


@pytest.mark.parametrize("g", [2, 3, 8])
def test_without_a_prediction_it_is_leave_one_out_with_trls_deviation(g):
    rewards = np.random.default_rng(g).normal(size=(5, g))
    np.testing.assert_allclose(tracked(rewards, np.nan, 4, "group"), trl_advantages(rewards) * g / (g - 1), rtol=1e-6)
    assert (tracked([[1.0] * g], np.nan, 4, "group") == 0).all()


def test_unscored_completions_and_infinite_rewards():
    A = tracked([[1.0, np.nan, 0.0], [np.nan, np.nan, 1.0], [1.0, np.inf, 0.0]], 0.5, 1, "group")
    assert A[0, 1] == 0
    assert A[0, 0] > 0 > A[0, 2]
    assert A[1].tolist() == [0, 0, pytest.approx(0.5 / 0.5001)]  # against the prediction alone
    assert A[2].tolist() == [0, 0, 0]
    assert tracked([[np.nan, np.nan, 1.0]], np.nan, 1, "group").tolist() == [[0, 0, 0]]  # with nothing to compare


@given(st.integers(2, 16), st.integers(0, 16), st.floats(0, 1), st.floats(0, 100))
def test_advantages_are_at_most_the_root_of_g(g, successes, p, s):
    rewards = (np.arange(g) < successes).astype(float)
    A = tracked(rewards, p, s, "group", least=1 / g)
    assert np.abs(A).max() <= np.sqrt(g)


@given(st.integers(2, 8), st.floats(0.01, 0.99), st.floats(0.1, 100))
def test_zero_variance_groups_push_away_from_what_was_predicted(g, p, s):
    assert (tracked([0.0] * g, p, s, "group", least=1 / g) < 0).all()
    assert (tracked([1.0] * g, p, s, "group", least=1 / g) > 0).all()
    assert (tracked([0.0] * g, 0.0, s, "group", least=1 / g) == 0).all()


def test_batch_divides_all_groups_by_one_deviation():
    rewards = np.array([[1.0, 0, 0, 1], [0, 0, 0, np.nan], [1, 1, 1, 1]])
    posterior = leave_one_out(rewards, prior([0.25, 0.1, 0.6], 4, 3))
    b, v = posterior.mean[~np.isnan(posterior.mean)], posterior.variance[~np.isnan(posterior.mean)]
    deviation = np.sqrt(np.mean(v + b**2) - np.mean(b) ** 2)
    plain, scaled = (advantages(rewards, posterior, scale) for scale in ("none", "batch"))
    np.testing.assert_allclose(scaled, plain / (deviation + 1e-4))
