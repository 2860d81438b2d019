"""What sequential rollouts do to the expected gradient: the enumeration, against closed forms and a simulation."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.sequential_bias import gradient, row, table


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("p", [0.02, 0.3, 0.5])
@pytest.mark.parametrize("group_size", [2, 5, 8])
def test_whole_groups_of_binary_rewards_have_the_gradient_of_grpo(p, group_size):
    """Unscaled, the sum over the completions that succeed of 1 - mean has the expectation (G - 1) p (1 - p)."""
    expected, completions = gradient((0.0, 1.0), (1 - p, p), group_size, scaled=False, stops=False)
    assert expected[1] == pytest.approx((group_size - 1) * p * (1 - p))
    assert completions == pytest.approx(group_size)


def test_a_stopped_group_costs_half():
    p = 0.1
    _, completions = gradient((0.0, 1.0), (1 - p, p), 8, scaled=True, stops=True)
    assert completions == pytest.approx(8 - 4 * (p**4 + (1 - p) ** 4))


@pytest.mark.parametrize("scaled", [True, False])
def test_graded_rewards_agree_with_a_simulation(scaled):
    """Groups are drawn completion by completion, and stopped ones contribute nothing."""
    rewards, probabilities = np.array([0.0, 0.2, 1.0]), (0.1, 0.8, 0.1)
    drawn = np.random.default_rng(0).choice(3, p=probabilities, size=(200_000, 8))
    values = rewards[drawn]
    advantages = values - values.mean(axis=1, keepdims=True)
    if scaled:
        advantages /= values.std(axis=1, ddof=1, keepdims=True) + 1e-4
    stopped = (drawn[:, :4] == drawn[:, :1]).all(axis=1)
    advantages[stopped] = 0
    simulated = [np.where(drawn == v, advantages, 0).sum(axis=1).mean() for v in range(3)]
    expected, completions = gradient(rewards, probabilities, 8, scaled=scaled, stops=True)
    np.testing.assert_allclose(simulated, expected, atol=0.02)
    assert completions == pytest.approx(8 - 4 * stopped.mean(), abs=0.02)


def test_binary_rewards_keep_the_direction():
    for p in (0.01, 0.2, 0.5):
        completions, length, cosine = row((0.0, 1.0), (1 - p, p), 8, scaled=True)
        assert cosine == pytest.approx(1)
        assert 0.5 < length < completions


def test_the_page_has_the_table():
    committed = (ROOT / "benchmarks" / "results" / "sequential_bias.txt").read_text().splitlines()
    assert committed == table(8)
    page = (ROOT / "docs" / "sequential_rollouts.md").read_text()
    assert "\n".join(committed) in page
