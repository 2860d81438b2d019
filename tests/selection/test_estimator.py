"""The estimator: what its experts predict, and which of them it trusts."""

import numpy as np
import pytest

from trl_dataeff.difficulty.logistic import LogisticDifficultyPredictor
from trl_dataeff.difficulty.online import RollingDifficulty
from trl_dataeff.selection.estimate import LEVEL_PRIOR, PromptEstimator, fit_offsets


N, HALF_LIVES = 300, (1.0, 4.0, 16.0)
RNG = np.random.default_rng(3)
E = RNG.normal(size=(N, 10)).astype(np.float32)
TRIALS = np.full(12, 8, dtype=np.float32)


def estimator(embeddings: np.ndarray = E) -> PromptEstimator:
    difficulty = RollingDifficulty(embeddings, LogisticDifficultyPredictor(), half_life=16.0)
    return PromptEstimator(difficulty, N, 4.0, HALF_LIVES)


def train(estimator: PromptEstimator, rate_at, batches: int, seed: int = 0) -> list[float]:
    """Batches of 12 random prompts with success rates `rate_at(batch)` `(N,)`; the mean error before each batch."""
    rng, errors = np.random.default_rng(seed), []
    for batch in range(1, batches + 1):
        p, ids = rate_at(batch), rng.choice(N, 12, replace=False)
        errors.append(float(np.abs(estimator.mean() - p).mean()))
        estimator.observe(ids, (rng.binomial(8, p[ids]) / 8).astype(np.float32), TRIALS, batch)
        estimator.refresh()
    return errors


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def test_offsets_against_a_search_over_a_fine_grid():
    rng = np.random.default_rng(1)
    logits, rates, weight = rng.normal(size=(3, 20)) * 2, rng.random(20), rng.random(20)
    grid = np.linspace(-5, 5, 200_001)[:, None]
    for row, offset in zip(logits, fit_offsets(logits, rates, weight)):
        z = row + grid
        losses = (np.logaddexp(0, z) - rates * z) @ weight + LEVEL_PRIOR / 8 * grid[:, 0] ** 2
        assert offset == pytest.approx(grid[losses.argmin(), 0], abs=1e-4)


def test_a_policy_that_stands_still_is_predicted_from_old_groups_too_and_one_that_turns_around_is_not():
    steady, turning = estimator(), estimator()
    train(steady, lambda batch: sigmoid(2 * E[:, 0]), 30)
    train(turning, lambda batch: sigmoid(3 * E[:, 0] * (-1) ** (batch // 6)), 32)  # two batches after a turn
    assert steady.weights[1:3].sum() > 0.6
    assert turning.weights[1:3].sum() < 0.05


def test_the_level_is_followed_within_four_batches():
    """All success rates rise at once. With a single long half-life predictions need far longer."""
    several = estimator()
    errors = train(several, rising := lambda batch: sigmoid(2 * E[:, 0] + (3.0 if batch > 15 else -2.0)), 20)
    assert errors[15] > 0.5  # right after the change
    assert errors[19] < 0.2
    single = RollingDifficulty(E, LogisticDifficultyPredictor(), half_life=16.0)
    single.ids, single.rates, single.batches = (getattr(several.difficulty, n) for n in ("ids", "rates", "batches"))
    assert np.abs(single.refresh(19) - rising(20)).mean() > 0.3


def test_embeddings_that_say_nothing_leave_predictions_equal():
    """The expert without embeddings takes over, so that selection by these estimates is uniform."""
    shuffled = estimator()
    p = sigmoid(2 * E[:, 0])[np.random.default_rng(9).permutation(N)]
    train(shuffled, lambda batch: p, 30)
    informed = estimator()
    train(informed, lambda batch: sigmoid(2 * E[:, 0]), 30)
    assert shuffled.weights[-1] > 0.4
    assert informed.weights[-1] < 0.05
    unseen = shuffled.history.trials[0] == 0
    assert shuffled.mean()[unseen].std() < 0.3 * informed.mean()[unseen].std()


def test_a_prompts_own_groups_count_against_its_prediction():
    one = estimator()
    one.observe(np.array([5]), np.array([1.0], np.float32), np.array([8.0], np.float32), 1)
    prediction = one.predicted[:, 5]
    np.testing.assert_allclose(one.estimates_of(np.array([5]))[:, 0], (4 * prediction + 8) / 12, rtol=1e-6)
    assert one.mean(np.array([6]))[0] == pytest.approx(0.5)


def test_rates_follow_a_wider_range_of_the_reward():
    """As if the range had been known from the start, but for the clipping of the rates."""
    narrow, wide = estimator(), estimator()
    ids, rates = np.arange(12), np.linspace(0, 1, 12).astype(np.float32)
    narrow.observe(ids, rates, TRIALS, 1)
    narrow.rescale(0.5, 0.5)
    narrow.refresh()
    wide.observe(ids, 0.5 + 0.5 * rates, TRIALS, 1)
    wide.refresh()
    np.testing.assert_allclose(narrow.mean(), wide.mean(), atol=0.02)
