"""`DotsSelector` on simulated prompts."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.factories.groups import generator
from tests.selection.dots.population import BATCH, EVERYTHING, GROUP_SIZE, SIZE, Population, share_effective
from trl_dataeff.difficulty.logistic import LogisticDifficultyPredictor
from trl_dataeff.selection.dots.sampling import PromptPass, gumbel_keys, log_weights_of, top_of_kinds
from trl_dataeff.selection.dots.selector import DotsSelector
from trl_dataeff.testing import PROMPTS, embeddings, make_context


def test_drawn_prompts_have_more_effective_groups_than_uniform_ones():
    dots = Population("dots")
    uniform = Population("uniform")
    assert share_effective(dots, 20, 4) > 1.8 * share_effective(uniform, 20, 4)


@pytest.mark.parametrize(("penalty", "factor"), [(0.0, 2.2), (0.25, 2.3)])
def test_without_a_word_from_the_embeddings_prompts_are_known_by_their_own_groups(penalty, factor):
    """Also after a single reward between the others, since which groups count as effective or not."""
    dots = Population("dots")
    uniform = Population("uniform")
    shuffled = dots.rng.permutation(dots.p)
    dots.p = shuffled
    uniform.p = shuffled
    assert share_effective(dots, 60, 30, penalty) > factor * share_effective(uniform, 60, 30)


@pytest.mark.parametrize("penalty", [0.0, 0.25], ids=["right or wrong", "graded"])
def test_prompts_that_no_reward_function_scores_are_soon_left_alone(penalty):
    dots = Population("dots")
    dots.p = np.where(EVERYTHING % 5 == 0, np.nan, dots.p)
    share_effective(dots, 40, 10, penalty)
    ids = [group.prompt_id for _ in range(10) for group in dots.batch()]
    assert np.isnan(dots.p[ids]).mean() < (0.18 if penalty else 0.06)
    resumed = dots.another("dots")
    resumed.load_state_dict(dots.selector.state_dict())
    np.testing.assert_array_equal(resumed.chances(), dots.selector.chances())


def weights_of(chances: np.ndarray, sharpness=8.0) -> np.ndarray:
    threshold = chances.mean() ** (2 / 3)
    return chances**sharpness / (chances**sharpness + threshold**sharpness)


def test_no_prompt_is_selected_twice_while_the_others_carry_enough_of_the_weight():
    population = Population("dots")
    done = set()
    passes = 0
    for _ in range(80):
        weights = weights_of(population.selector.chances().numpy())
        left = [i for i in range(SIZE) if i not in done]
        if weights[left].sum() < 0.3 * weights.sum():
            done = set()
            passes += 1
        ids = {group.prompt_id for group in population.batch()}
        assert not done & ids
        done |= ids
    assert passes >= 3


def test_a_history_that_tells_all_leaves_hardly_a_group_without_a_gradient():
    """Prompts that are solved always, never, or half of the time: their first groups tell."""
    dots = Population("dots")
    dots.p = dots.rng.permutation(np.repeat([0.0, 1.0, 0.5, 0.5], SIZE // 4))
    assert share_effective(dots, 60, 40) > 0.93


def test_where_every_prompt_is_alike_draws_are_uniform():
    """Noise is not taken for a difference: of two passes, each prompt gets about its share."""
    dots = Population("dots")
    dots.p = np.full(SIZE, 0.1)
    drawn = np.zeros(SIZE)
    for _ in range(2 * SIZE // BATCH):
        np.add.at(drawn, [group.prompt_id for group in dots.batch()], 1)
    assert (drawn > 0).mean() > 0.8
    assert drawn.max() <= 5


def test_without_sharpness_draws_are_uniform():
    dots = Population("dots", sharpness=0.0)
    share = share_effective(dots, 25, 0)
    assert share == pytest.approx((1 - dots.p**8 - (1 - dots.p) ** 8).mean(), abs=0.06)


def test_kinds_keep_their_shares_however_few_of_their_groups_have_a_gradient():
    kinds = np.arange(SIZE) % 4
    hard = kinds == 0
    drawn = {}
    for name, column in (("dots", None), ("stratified", kinds)):
        population = Population("dots", kinds=column)
        population.p = np.where(hard, 0.02, 0.5)
        ids = [group.prompt_id for _ in range(50) for group in population.batch()]
        drawn[name] = hard[ids].mean()
    assert drawn["stratified"] == pytest.approx(0.25, abs=1 / len(ids))
    assert drawn["dots"] < 0.2


def test_a_column_of_success_rates_selects_in_the_first_batches():
    column = Population("dots")
    column.p = column.rng.permutation(column.p)  # which the embeddings do not know
    column.known_rates = column.p.astype(np.float32)
    column.selector = column.another("dots")
    assert share_effective(column, 4, 0) > 0.7


def test_a_column_is_still_believed_when_the_first_batch_shows_that_rewards_are_graded():
    column = Population("dots")
    column.p = column.rng.permutation(column.p)
    column.known_rates = column.p.astype(np.float32)
    column.selector = column.another("dots")
    column.batch(penalty=0.25)
    assert column.selector.graded
    unseen = ~column.seen
    solvable = (column.p > 0.1) & (column.p < 0.9)
    chances = column.selector.chances().numpy()
    assert chances[unseen & solvable].mean() > 2 * chances[unseen & ~solvable].mean()


@pytest.mark.parametrize("missing", [0.0, 0.5])
def test_a_run_with_columns_resumes_exactly(missing):
    rng = np.random.default_rng(1)
    rates = np.where(rng.random(SIZE) < missing, np.nan, rng.random(SIZE)).astype(np.float32)
    run = Population("dots", known_rates=rates, kinds=rng.integers(0, 3, SIZE))
    for _ in range(5):
        run.batch()
    resumed = run.another("dots")
    resumed.load_state_dict(run.selector.state_dict())
    for _ in range(5):
        draws = run.draws.get_state()
        ids = run.selector.propose(BATCH, run.draws)
        run.draws.set_state(draws)
        np.testing.assert_array_equal(resumed.propose(BATCH, run.draws), ids)
        resumed.observe(run.observe(ids))
    assert resumed.metrics() == run.selector.metrics()


def test_columns_that_have_changed_are_said_and_the_run_goes_on(caplog_transformers):
    run = Population("dots", kinds=np.arange(SIZE) % 3)
    run.batch()
    state = run.selector.state_dict()
    run.kinds = np.arange(SIZE) % 5
    resumed = run.another("dots")
    resumed.load_state_dict(state)
    assert "`stratify_by`" in caplog_transformers.text
    assert len(resumed.propose(BATCH, run.draws)) == BATCH


@pytest.mark.parametrize("column", ["difficulties", "success rates", "noise"])
def test_a_column_of_difficulties_is_said(column, caplog_transformers):
    run = Population("dots")
    run.p = run.rng.random(SIZE)
    columns = {"difficulties": 1 - run.p, "success rates": run.p, "noise": run.rng.random(SIZE)}
    run.known_rates = columns[column].astype(np.float32)
    run.selector = run.another("dots")
    for _ in range(30):
        run.batch()
    assert caplog_transformers.text.count("does the column hold difficulties") == (column == "difficulties")


@pytest.mark.parametrize("solvable", [0.2, 0.5])
@pytest.mark.parametrize("knows", [True, False])
def test_the_share_that_uniform_draws_would_find_is_logged(solvable, knows):
    """Though the draws find far more, and though the text says nothing."""
    dots = Population("dots")
    if not knows:
        dots.p = np.where(dots.rng.random(SIZE) < solvable, 0.5, 0.0)
    for batches in (30, 60):
        share_effective(dots, batches, 0)
        expected = (1 - dots.p**GROUP_SIZE - (1 - dots.p) ** GROUP_SIZE).mean()
        assert dots.selector.metrics()["uniform_effective_ratio"] == pytest.approx(expected, abs=0.08)


def test_prompts_come_back_after_rewards_that_were_away_for_a_while():
    away = Population("dots")
    for batch in range(3):
        ids = np.arange(batch * BATCH, (batch + 1) * BATCH)
        known = [*ids[:4], *range(100 + batch, 104 + batch)]  # in each batch some are scored
        away.p = np.where(np.isin(EVERYTHING, known), 0.5, np.nan)
        away.observe(np.unique([*ids, *known]))
    away.p = np.full(SIZE, 0.5)
    drawn = np.zeros(SIZE)
    for _ in range(150):
        np.add.at(drawn, [group.prompt_id for group in away.batch()], 1)
    without = np.setdiff1d(np.arange(3 * BATCH), [*range(4), *range(16, 20), *range(32, 36)])
    assert (drawn[without] == 0).mean() < 0.6
    assert drawn[without].mean() > 0.2 * drawn.mean()


def test_a_batch_in_which_nothing_is_scored_says_nothing_of_its_prompts():
    dots = Population("dots")
    before = dots.selector.chances()
    dots.p = np.full(SIZE, np.nan)
    dots.observe(np.arange(BATCH))
    np.testing.assert_allclose(dots.selector.chances(), before)


def test_prompts_without_a_rate_are_not_preferred_to_hard_ones():
    rates = np.where(EVERYTHING % 4 == 0, np.nan, 0.1).astype(np.float32)
    chances = Population("dots", known_rates=rates).selector.chances().numpy()
    assert np.ptp(chances) < 0.02


@pytest.mark.parametrize("sharpness", [1e3, 1e6])
def test_however_sharp_the_best_prompts_are_drawn(sharpness):
    """All weights may be too small for a float: those far below the mean of a few good ones."""
    chances = torch.tensor([0.05, 0.2, *[0.1] * 8], dtype=torch.float64)
    kinds = torch.zeros(10, dtype=torch.int64)
    prompts = PromptPass(kinds)
    drawn = []
    for seed in range(40):
        none = torch.zeros(10, dtype=torch.bool)
        weights = prompts.restrict(log_weights_of(chances, kinds, sharpness), none, torch.tensor([1]))
        (best,) = top_of_kinds(gumbel_keys(weights, generator(seed)), kinds, torch.tensor([1])).tolist()
        prompts.drawn[best] = True
        drawn.append(best)
    assert drawn.count(1) > 35


@given(batch=st.integers(1, 12), more=st.integers(0, 20), requests=st.lists(st.integers(1, 12), max_size=12))
def test_no_prompt_comes_twice_in_a_batch_as_long_as_there_are_others(batch, more, requests):
    size = batch + more
    selector = DotsSelector()
    selector.bind(make_context(size, batch))
    rng = generator()
    proposed = set()
    for request in requests:  # rounds of one generation batch
        n = min(request, batch)
        num_others = size - len(proposed)
        ids = selector.propose(n, rng).tolist()
        assert len(set(ids)) == n
        assert set(ids) <= set(range(size))
        if num_others < n:  # too few: all may come again, and do from now on
            break
        assert not proposed & set(ids)
        proposed |= set(ids)


class GradedPopulation(Population):
    """Rewards of 1 for the right answer and 0.5 for the format, which is nearly always right where no answer is."""

    weights = np.array([1.0, 0.5])

    def rewards(self, ids):
        is_right = super().rewards(ids)[:, :, 0] > 0  # (n, 8)
        format_rate = np.where(self.p[ids] < 0.05, 0.995, 0.9)
        has_format = self.rng.random((len(ids), GROUP_SIZE)) < format_rate[:, None]
        return np.stack([is_right, is_right | has_format], axis=2).astype(np.float32)


@pytest.mark.parametrize("penalty", [0.0, -5.0])
def test_graded_rewards_do_not_draw_prompts_whose_completions_all_get_the_same_middle_reward(penalty):
    """Also after a single completion of -5, in whose range all other means are nearly equal."""
    dots = GradedPopulation("dots")
    uniform = GradedPopulation("uniform")
    assert share_effective(dots, 24, 8, penalty) > 1.4 * share_effective(uniform, 24, 8, penalty)
    unsolved = dots.p < 0.05
    weights = weights_of(dots.selector.chances().numpy())
    assert weights[unsolved].mean() < 0.5 * weights[~unsolved].mean()
    assert np.abs(dots.selector.predict(EVERYTHING)).max() <= 1.0


def test_a_predictor_that_was_fitted_before_predicts_the_first_batch():
    fitted = LogisticDifficultyPredictor()
    fitted.fit(embeddings(), torch.linspace(0.05, 0.95, PROMPTS))
    selector = DotsSelector(predictor=fitted)
    selector.bind(make_context())
    ids = np.arange(PROMPTS)
    assert np.corrcoef(selector.predict(ids), ids)[0, 1] > 0.9
