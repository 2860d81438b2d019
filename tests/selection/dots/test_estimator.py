"""Estimates of success rates: own groups against a loop over them, the experts, and which of them are trusted."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_dataeff.difficulty.logistic import LogisticDifficultyPredictor
from trl_dataeff.difficulty.online import RollingDifficulty
from trl_dataeff.selection.dots.estimator import LEVEL_PRIOR, PromptEstimator, SuccessHistory, fit_offsets
from trl_dataeff.selection.dots.selector import PRIORS


N = 300
HALF_LIVES = (1.0, 4.0, 16.0)
E = np.random.default_rng(3).normal(size=(N, 10)).astype(np.float32)
TRIALS = np.full(12, 8, dtype=np.float32)
VISITS = st.lists(
    st.lists(st.tuples(st.integers(0, 4), st.one_of(st.floats(0, 1), st.just(math.nan))), max_size=6), max_size=8
)


@given(
    batches=VISITS,
    prior=st.floats(0.5, 10),
    half_lives=st.lists(st.floats(0.5, 30), min_size=1, max_size=3),
    later=st.integers(0, 5),
)
def test_posterior_against_a_loop_over_visits(batches, prior, half_lives, later):
    priors = [prior / (1 + k) for k in range(len(half_lives))]
    history = SuccessHistory(5, priors, half_lives)
    predicted = np.linspace(0.1, 0.9, 5 * len(half_lives), dtype=np.float32).reshape(-1, 5)
    visits: list[tuple[int, int, float, int]] = []
    for batch, groups in enumerate(batches):
        ids = np.array([prompt for prompt, _ in groups], int)
        rates = np.array([rate for _, rate in groups], np.float32)
        trials = np.array([2 + i % 3 for i in range(len(groups))], np.float32)
        history.observe(ids, rates, trials, batch)
        for visit in zip(ids, rates, trials, strict=True):
            if not math.isnan(visit[1]):
                visits.append((batch, *visit))
    now = len(batches) + later
    estimate = history.estimate(predicted, now)
    for (k, half_life), prompt in itertools.product(enumerate(half_lives), range(5)):
        successes = priors[k] * predicted[k, prompt]
        completions = priors[k]
        for batch, visited, rate, trials in visits:
            if visited == prompt:
                fade = 0.5 ** ((now - batch) / half_life)
                successes += fade * rate * trials
                completions += fade * trials
        assert estimate[k, prompt] == pytest.approx(successes / completions, abs=1e-5)
    assert estimate.dtype == np.float32
    np.testing.assert_array_equal(history.estimate(predicted[:, [3, 1]], now, np.array([3, 1])), estimate[:, [3, 1]])


def test_offsets_against_a_search_over_a_fine_grid():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(3, 20)) * 2
    rates = rng.random(20)
    weight = rng.random(20)
    grid = np.linspace(-5, 5, 200_001)[:, None]
    for row, offset in zip(logits, fit_offsets(logits, rates, weight)):
        z = row + grid
        bce = np.logaddexp(0, z) - rates * z
        losses = bce @ weight + LEVEL_PRIOR / 8 * grid[:, 0] ** 2
        assert offset == pytest.approx(grid[losses.argmin(), 0], abs=1e-4)


def rolling() -> RollingDifficulty:
    return RollingDifficulty(E, LogisticDifficultyPredictor(), half_life=16.0)


def estimator() -> PromptEstimator:
    return PromptEstimator(rolling(), PRIORS, HALF_LIVES)


def train(rate_at, batches: int) -> tuple[PromptEstimator, list[float]]:
    """Batches of 12 random prompts with success rates `rate_at(batch)` `(N,)`; the mean error before each batch."""
    trained = estimator()
    rng = np.random.default_rng(0)
    errors = []
    for batch in range(1, batches + 1):
        p = rate_at(batch)
        ids = rng.choice(N, 12, replace=False)
        errors.append(float(np.abs(trained.mean() - p).mean()))
        rates = rng.binomial(8, p[ids]) / 8
        trained.observe(ids, rates.astype(np.float32), TRIALS, batch)
        trained.refresh()
    return trained, errors


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def steady(batch):
    return sigmoid(2 * E[:, 0])


def test_a_policy_that_stands_still_is_predicted_from_old_groups_too_and_one_that_turns_around_is_not():
    def turning_around(batch):
        direction = -1 if batch >= 30 else 1
        return sigmoid(3 * E[:, 0] * direction)

    still, _ = train(steady, 30)
    turning, _ = train(turning_around, 32)  # two batches after the turn
    assert still.weights[1:3].sum() > 0.6
    assert turning.weights[1:3].sum() < 0.05


def test_the_level_is_followed_within_four_batches():
    """All success rates rise at once. With a single long half-life predictions need far longer."""

    def rising(batch):
        level = 3.0 if batch > 15 else -2.0
        return sigmoid(2 * E[:, 0] + level)

    several, errors = train(rising, 20)
    assert errors[15] > 0.5  # right after the change
    assert errors[19] < 0.2
    single = rolling()
    single.load_state_dict(several.difficulty.state_dict())
    assert np.abs(single.refresh(19) - rising(20)).mean() > 0.3


def test_embeddings_that_say_nothing_leave_predictions_equal():
    """The expert without embeddings takes over: prompts without a group have nearly equal estimates."""
    p = steady(0)[np.random.default_rng(9).permutation(N)]
    shuffled, _ = train(lambda batch: p, 30)
    informed, _ = train(steady, 30)
    assert shuffled.weights[-1] > 0.8
    assert informed.weights[-1] < 0.05
    unseen = shuffled.history.trials[0] == 0
    assert shuffled.mean()[unseen].std() < 0.3 * informed.mean()[unseen].std()


def test_a_prompts_own_groups_count_against_its_prediction():
    one = estimator()
    one.observe(np.array([5]), np.array([1.0], np.float32), np.array([8.0], np.float32), 1)
    strength = np.array([4, 4, 4, 0.25])  # in completions, against 8 that succeeded
    expected = (strength * one.predicted[:, 5] + 8) / (strength + 8)
    np.testing.assert_allclose(one.estimates(np.array([5]))[:, 0], expected, rtol=1e-6)
    assert one.mean(np.array([6]))[0] == pytest.approx(0.5)
