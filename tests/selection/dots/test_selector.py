"""`DotsSelector` on simulated prompts."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.factories.groups import generator
from tests.selection.dots.population import EVERYTHING, GROUP_SIZE, SIZE, Population, share_effective
from trl_dataeff.difficulty.logistic import LogisticDifficultyPredictor
from trl_dataeff.selection.dots.sampling import log_weight
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
    assert np.isnan(dots.p[ids]).mean() < 0.12
    resumed = dots.another("dots")
    resumed.load_state_dict(dots.selector.state_dict())
    np.testing.assert_array_equal(resumed.chances(), dots.selector.chances())


@pytest.mark.parametrize("coverage", [0.3, 0.7])
def test_no_prompt_is_selected_twice_while_the_others_carry_enough_of_the_weight(coverage):
    population = Population("dots", coverage=coverage)
    done = set()
    passes = 0
    for _ in range(80):
        chance = population.selector.chances().numpy()
        weights = chance**4 / (chance**4 + 0.6**4)
        left = [i for i in range(SIZE) if i not in done]
        if weights[left].sum() < (1 - coverage) * weights.sum():
            done = set()
            passes += 1
        ids = {group.prompt_id for group in population.batch()}
        assert not done & ids
        done |= ids
    assert passes >= 3


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
    weights = log_weight(dots.selector.chances(), dots.selector.threshold).exp().numpy()
    assert weights[unsolved].mean() < 0.5 * weights[~unsolved].mean()
    assert np.abs(dots.selector.predict(EVERYTHING)).max() <= 1.0


def test_a_predictor_that_was_fitted_before_predicts_the_first_batch():
    fitted = LogisticDifficultyPredictor()
    fitted.fit(embeddings(), torch.linspace(0.05, 0.95, PROMPTS))
    selector = DotsSelector(predictor=fitted)
    selector.bind(make_context())
    ids = np.arange(PROMPTS)
    assert np.corrcoef(selector.predict(ids), ids)[0, 1] > 0.9
