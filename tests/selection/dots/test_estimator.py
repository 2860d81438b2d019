"""Estimates of success rates: own groups against a loop over them, the sources, and which of them are trusted."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_dataeff.difficulty.logistic import LogisticDifficultyPredictor
from trl_dataeff.difficulty.online import RollingDifficulty, pearson
from trl_dataeff.selection.dots.estimator import LEVEL_PRIOR, PromptEstimator, column_difficulty, fit_offsets
from trl_dataeff.selection.dots.history import SuccessHistory


N = 300
E = np.random.default_rng(3).normal(size=(N, 10)).astype(np.float32)
TRIALS = np.full(12, 8, dtype=np.float32)
EVERYTHING = np.arange(N)
VISITS = st.lists(
    st.lists(st.tuples(st.integers(0, 4), st.one_of(st.floats(0, 1), st.just(math.nan))), max_size=6), max_size=8
)


@given(batches=VISITS, half_lives=st.lists(st.floats(0.1, 30), min_size=1, max_size=3), later=st.floats(0, 5))
def test_own_groups_against_a_loop_over_visits(batches, half_lives, later):
    history = SuccessHistory(5, half_lives)
    visits: list[tuple[float, int, float, float]] = []
    for batch, groups in enumerate(batches):
        ids = np.array([prompt for prompt, _ in groups], int)
        rates = np.array([rate for _, rate in groups], np.float32)
        trials = np.array([2 + i % 3 for i in range(len(groups))], np.float32)
        history.observe(ids, rates, trials, batch / 2)
        for visit in zip(ids, rates, trials, strict=True):
            if not math.isnan(visit[1]):
                visits.append((batch / 2, *visit))
    now = len(batches) / 2 + later
    successes, trials = history.faded(now)
    for (k, half_life), prompt in itertools.product(enumerate(half_lives), range(5)):
        expected = np.zeros(2)
        for passes, visited, rate, completions in visits:
            if visited == prompt:
                expected += 0.5 ** ((now - passes) / half_life) * completions * np.array([rate, 1])
        assert successes[k, prompt] == pytest.approx(expected[0], abs=1e-4)
        assert trials[k, prompt] == pytest.approx(expected[1], abs=1e-4)
    some = history.faded(now, np.array([3, 1]))
    np.testing.assert_array_equal(some[0], successes[:, [3, 1]])
    np.testing.assert_array_equal(some[1], trials[:, [3, 1]])


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


def train(rate_at, batches: int, column=None) -> tuple[PromptEstimator, list[float]]:
    """Batches of 12 random prompts with success rates `rate_at(batch)` `(N,)`; the mean error before each batch."""
    trained = PromptEstimator(rolling(), None if column is None else column_difficulty(column))
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


def shuffled_logits():
    """Which the embeddings do not know."""
    return E[np.random.default_rng(9).permutation(N), 0]


def steady(batch):
    return sigmoid(2 * E[:, 0])


def shuffled(batch):
    return steady(batch)[np.random.default_rng(9).permutation(N)]


def test_posteriors_join_the_prediction_with_a_prompts_own_groups():
    one = PromptEstimator(rolling())
    one.observe(np.array([5]), np.array([0.75], np.float32), np.array([8.0], np.float32), 1)
    a, b = (parameters.numpy() for parameters in one.posteriors(np.array([5, 6])))
    strengths = np.repeat([0.5, 2, 8, 32], 4)  # each with four half-lives
    prior = one.prior[5]
    np.testing.assert_allclose(a[:, 0], strengths * prior + 6, rtol=1e-6)
    np.testing.assert_allclose(b[:, 0], strengths * (1 - prior) + 2, rtol=1e-6)
    np.testing.assert_allclose(a[:, 1] + b[:, 1], strengths, rtol=1e-6)


def test_a_policy_that_stands_still_is_predicted_better_and_better_and_one_that_turns_around_is_learned_anew():
    def turning_around(batch):
        direction = -1 if batch >= 30 else 1
        return sigmoid(3 * E[:, 0] * direction)

    _, still = train(steady, 30)
    _, turning = train(turning_around, 40)
    assert still[29] < 0.06
    assert turning[29] > 0.6
    assert turning[36] < 0.25


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
    """The mean of recent groups takes over: prompts without a group have nearly equal estimates."""
    trained, _ = train(shuffled, 30)
    informed, _ = train(steady, 30)
    unseen = trained.history.trials[0] == 0
    assert trained.mean()[unseen].std() < 0.33 * informed.mean()[unseen].std()


def test_with_one_group_a_prompt_is_told_from_its_group_where_nothing_else_is_known():
    trained, _ = train(shuffled, 40)
    seen = trained.history.trials[0] > 0
    assert pearson(trained.mean()[seen], shuffled(0)[seen]) > 0.85
    informed, _ = train(steady, 40)
    unseen = informed.history.trials[0] == 0
    assert pearson(informed.mean()[unseen], steady(0)[unseen]) > 0.9


def test_slow_half_lives_remember_a_prompt_over_a_pass_and_a_policy_that_changes_does_not():
    """Another half of all prompts can be solved in each pass, or always the same one."""

    def turning(batch):
        return np.where((EVERYTHING + batch // 25) % 2, 0.95, 0.05)

    def standing(batch):
        return np.where(EVERYTHING % 2, 0.95, 0.05)

    _, of_standing = train(standing, 75)
    assert of_standing[74] < 0.1
    _, of_turning = train(turning, 78)
    assert of_turning[76] < 0.6  # of 0.9, if the last pass were believed


COLUMN = steady(0).astype(np.float32)


def test_a_column_is_believed_at_first():
    before = PromptEstimator(rolling(), column_difficulty(COLUMN))
    assert pearson(before.mean(), COLUMN) > 0.999
    assert np.abs(before.mean() - COLUMN).mean() < 0.05


def test_order_first_level_later_of_a_stronger_models_column():
    """The column is that of a model which solves far more: its order holds from the first batch, its level soon."""
    stronger = sigmoid(2 * shuffled_logits() + 2).astype(np.float32)
    _, errors = train(lambda batch: sigmoid(2 * shuffled_logits() - 2), 8, stronger)
    assert errors[0] > 0.3
    assert errors[1] < 0.3
    assert errors[7] < 0.12


@pytest.mark.parametrize("wrong", ["reversed", "unrelated"])
def test_a_misleading_column_is_unlearned_within_a_pass(wrong):
    p = sigmoid(2 * shuffled_logits())
    column = 1 - p if wrong == "reversed" else np.random.default_rng(2).random(N)
    _, errors = train(lambda batch: p, 25, column.astype(np.float32))
    _, errors_without = train(lambda batch: p, 25)
    assert errors[24] < errors_without[24] + 0.03


def test_missing_rates_have_a_level_of_their_own():
    """The rates of the hardest prompts are missing, as a table of solve rates leaves out what was never solved."""
    p = np.where(EVERYTHING % 3 == 0, 0.02, sigmoid(shuffled_logits() + 1))
    column = np.where(EVERYTHING % 3 == 0, np.nan, p).astype(np.float32)
    trained, _ = train(lambda batch: p, 12, column)
    unseen = trained.history.trials[0] == 0
    missing = np.isnan(column)
    assert trained.mean()[unseen & missing].mean() < 0.2
    assert trained.mean()[unseen & ~missing].mean() > 0.5


def test_chances_are_calibrated_where_nothing_is_known_but_the_groups():
    """The mean chance is that of uniform draws, which no mean of success rates would tell: half of the prompts are
    never solved, and half always."""
    p = np.where(np.random.default_rng(5).random(N) < 0.5, 0.001, 0.999)
    trained, _ = train(lambda batch: p, 20)
    unseen = torch.from_numpy(trained.history.trials[0] == 0)
    assert trained.chances(8)[unseen].mean() < 0.45
    spread = np.random.default_rng(5).random(N)
    trained, _ = train(lambda batch: spread, 20)
    unseen = torch.from_numpy(trained.history.trials[0] == 0)
    assert trained.chances(8)[unseen].mean() > 0.6
