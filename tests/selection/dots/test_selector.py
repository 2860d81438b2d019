"""DOTS: its weights and its draw against direct calculation, and its selectors on simulated prompts."""

import itertools
import math
from decimal import Decimal, getcontext

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.factories.comparison import groups_since
from tests.factories.configurations import train_briefly
from tests.factories.groups import classified, generator
from trl_dataeff.difficulty.logistic import LogisticDifficultyPredictor
from trl_dataeff.difficulty.online import RollingDifficulty, pearson
from trl_dataeff.rollouts.classification import GroupClassifier
from trl_dataeff.selection import Selector, make_selector
from trl_dataeff.selection.base import SelectorContext
from trl_dataeff.selection.dots.sampling import chance_effective, gumbel_top_k, log_weight
from trl_dataeff.selection.dots.selector import DotsSelector
from trl_dataeff.testing import PROMPTS, embeddings, make_context


getcontext().prec = 60
EVERYTHING = np.arange(400)


# Weights and draws


@given(p=st.floats(1e-12, 1 - 1e-9), group_size=st.integers(2, 64))
def test_chance_of_an_effective_group_to_sixty_digits(p, group_size):
    expected = float(1 - Decimal(p) ** group_size - (1 - Decimal(p)) ** group_size)
    chance = chance_effective(torch.tensor([p], dtype=torch.float64), group_size)
    assert chance.item() == pytest.approx(expected, rel=1e-9, abs=1e-15)


@given(chance=st.floats(1e-9, 1), threshold=st.floats(0.01, 1))
def test_weight_to_sixty_digits(chance, threshold):
    powers = [Decimal(x) ** 4 for x in (chance, threshold)]
    weight = log_weight(torch.tensor([chance], dtype=torch.float64), threshold).item()
    assert weight == pytest.approx(float((powers[0] / sum(powers)).ln()), rel=1e-8, abs=1e-8)


@given(weights=st.lists(st.one_of(st.floats(-2000, 50), st.just(-math.inf)), min_size=1, max_size=30), data=st.data())
def test_a_draw_repeats_nothing_and_takes_what_has_no_weight_last(weights, data):
    n = data.draw(st.integers(0, len(weights)))
    ids = gumbel_top_k(torch.tensor(weights, dtype=torch.float64), n, generator()).tolist()
    assert len(set(ids)) == len(ids) == n
    weightless = [weights[i] == -math.inf for i in ids]
    assert weightless == sorted(weightless)
    if any(weightless):
        assert sum(not w for w in weightless) == sum(w != -math.inf for w in weights)


def test_frequencies_are_those_of_drawing_one_after_the_other():
    """Exact probabilities of every ordered pair, by enumeration: w_i / sum(w) and then w_j / (sum(w) - w_i)."""
    weights = np.array([0.05, 0.5, 0.3, 0.15])
    log_weights, rng, draws = torch.from_numpy(np.log(weights)) - 3, generator(5), 20_000
    counts = dict.fromkeys(itertools.permutations(range(4), 2), 0)
    for _ in range(draws):
        counts[tuple(gumbel_top_k(log_weights, 2, rng).tolist())] += 1
    for (i, j), count in counts.items():
        expected = weights[i] * weights[j] / (1 - weights[i])
        assert abs(count / draws - expected) < 4.5 * math.sqrt(expected * (1 - expected) / draws)


class Population:
    """400 prompts whose success rate is a function of their embedding, 70 % of them unsolvable; groups of 8."""

    weights = np.ones(1)

    def __init__(self, name: str, known_range=(), **arguments):
        self.rng, self.draws = np.random.default_rng(0), generator()
        self.embeddings = self.rng.normal(size=(400, 12)).astype(np.float16)
        score = 3.0 * self.embeddings[:, 0].astype(float)
        self.p = 1 / (1 + np.exp(-(score - np.quantile(score, 0.7)) * 3))
        self.classifier = GroupClassifier(self.weights)
        self.classifier.scale.observe(np.array(known_range))
        self.seen = np.zeros(400, dtype=bool)
        self.selector = self.another(name, **arguments)

    def another(self, name: str, **arguments) -> Selector:
        selector, scale = make_selector(name, arguments), self.classifier.scale
        selector.bind(SelectorContext(400, 16, group_size=8, seed=42, embed=lambda: self.embeddings, scale=scale))
        return selector

    def rewards(self, ids) -> np.ndarray:
        right = self.rng.random((len(ids), 8, 1)) < self.p[ids, None, None]
        return np.where(np.isnan(self.p[ids, None, None]), np.nan, right).astype(np.float32)

    def observe(self, ids, penalty=0.0, origin="fresh"):
        """Generate and observe groups of `ids`; `penalty` is added to a single reward."""
        rewards = self.rewards(ids)
        rewards[0, 0, 0] += penalty
        groups = classified(ids, rewards, self.classifier)
        for group in groups:
            group.origin = origin
        self.seen[ids] = True
        self.selector.observe(groups)
        return groups

    def batch(self, n=16, penalty=0.0):
        return self.observe(self.selector.propose(n, self.draws), penalty)


def share_effective(population, batches: int, since: int, penalty=0.0) -> float:
    """Of the groups from batch `since` on; `penalty` is added to one reward of the batch before."""
    groups = [population.batch(penalty=penalty * (i == since - 1)) for i in range(batches)]
    return np.mean([group.effective for batch in groups[since:] for group in batch])


# DOTS as this package has it


def test_drawn_prompts_have_more_effective_groups_than_uniform_ones():
    dots, uniform = Population("dots"), Population("uniform")
    assert share_effective(dots, 20, 4) > 1.8 * share_effective(uniform, 20, 4)


@pytest.mark.parametrize(("penalty", "factor"), [(0.0, 2.2), (0.25, 2.3)])
def test_without_a_word_from_the_embeddings_prompts_are_known_by_their_own_groups(penalty, factor):
    """Also after a single reward between the others, since which groups count as effective or not."""
    dots, uniform = Population("dots"), Population("uniform")
    dots.p = uniform.p = dots.rng.permutation(dots.p)
    assert share_effective(dots, 60, 30, penalty) > factor * share_effective(uniform, 60, 30)


@pytest.mark.parametrize("penalty", [0.0, 0.25], ids=["right or wrong", "graded"])
def test_prompts_that_no_reward_function_scores_are_soon_left_alone(penalty):
    dots = Population("dots")
    dots.p = np.where(np.arange(400) % 5 == 0, np.nan, dots.p)
    share_effective(dots, 40, 10, penalty)
    ids = [group.prompt_id for _ in range(10) for group in dots.batch()]
    assert np.isnan(dots.p[ids]).mean() < 0.12
    resumed = dots.another("dots")
    resumed.load_state_dict(dots.selector.state_dict())
    np.testing.assert_array_equal(resumed.chances(), dots.selector.chances())


@pytest.mark.parametrize("coverage", [0.3, 0.7])
def test_no_prompt_is_selected_twice_while_the_others_carry_enough_of_the_weight(coverage):
    population, done, passes = Population("dots", coverage=coverage), set(), 0
    for _ in range(80):
        chance = population.selector.chances().numpy()
        weights = chance**4 / (chance**4 + 0.6**4)
        left = [i for i in range(400) if i not in done]
        if weights[left].sum() < (1 - coverage) * weights.sum():
            done, passes = set(), passes + 1
        ids = {group.prompt_id for group in population.batch()}
        assert not done & ids
        done |= ids
    assert passes >= 3


@given(batch=st.integers(1, 12), more=st.integers(0, 20), requests=st.lists(st.integers(1, 12), max_size=12))
def test_no_prompt_comes_twice_in_a_batch_as_long_as_there_are_others(batch, more, requests):
    size = batch + more
    selector = DotsSelector()
    selector.bind(make_context(size, batch))
    rng, proposed = generator(), set()
    for n in [min(request, batch) for request in requests]:  # rounds of one generation batch
        had, ids = len(proposed), selector.propose(n, rng).tolist()
        assert len(set(ids)) == n
        assert set(ids) <= set(range(size))
        if size - had < n:  # too few others: all may come again, and do from now on
            break
        assert not proposed & set(ids)
        proposed |= set(ids)


def test_other_embeddings_of_a_resumed_run(caplog_transformers):
    """As on other hardware: this is said, and the groups of the run are fitted with the new ones."""
    population = Population("dots")
    for _ in range(6):
        population.batch()
    population.embeddings = population.embeddings[:, ::-1].copy()
    resumed = population.another("dots")
    resumed.load_state_dict(population.selector.state_dict())
    np.testing.assert_array_equal(resumed.predict(EVERYTHING), population.selector.predict(EVERYTHING))
    assert "embeddings differ from those of the run" in caplog_transformers.text
    groups = population.batch()
    resumed.observe(groups)
    after = resumed.predict(EVERYTHING)
    assert not np.array_equal(after, population.selector.predict(EVERYTHING))
    unseen = ~population.seen
    assert pearson(after[unseen], population.p[unseen]) > 0.8


class GradedPopulation(Population):
    """Two rewards: 1 for the right answer, and 0.5 for the format, which is nearly always right where the answer never is."""

    weights = np.array([1.0, 0.5])

    def rewards(self, ids):
        answers = super().rewards(ids)[:, :, 0] > 0
        form = self.rng.random(answers.shape) < np.where(self.p[ids] < 0.05, 0.995, 0.9)[:, None]
        return np.stack([answers, answers | form], axis=2).astype(np.float32)


@pytest.mark.parametrize("penalty", [0.0, -5.0])
def test_graded_rewards_do_not_draw_prompts_whose_completions_all_get_the_same_middle_reward(penalty):
    """Also after a single completion of -5, in whose range all other means are nearly equal."""
    dots, uniform = GradedPopulation("dots"), GradedPopulation("uniform")
    assert share_effective(dots, 24, 8, penalty) > 1.4 * share_effective(uniform, 24, 8, penalty)
    unsolved = dots.p < 0.05
    weights = log_weight(dots.selector.chances(), dots.selector.threshold).exp().numpy()
    assert weights[unsolved].mean() < 0.5 * weights[~unsolved].mean()
    assert np.abs(dots.selector.predict(EVERYTHING)).max() <= 1.0


def test_a_predictor_that_was_fitted_before_predicts_the_first_batch():
    fitted, ids = LogisticDifficultyPredictor(), np.arange(PROMPTS)
    fitted.fit(embeddings(), torch.linspace(0.05, 0.95, PROMPTS))
    selector = DotsSelector(predictor=fitted)
    selector.bind(make_context())
    assert np.corrcoef(selector.predict(ids), ids)[0, 1] > 0.9


# A range of rewards that widens


OF_PAPER = {"reference_size": 20, "predictor": "logistic"}


def widening(name: str, batches: int, **arguments) -> list[Population]:
    """
    Two runs over the same groups. In the fourth batch a reward of -3 widens the range from [0, 1], which the second run had
    known from the start.
    """
    runs = [Population(name, known, **arguments) for known in ((), (-3.0, 1.0))]
    for i in range(batches):
        for one in runs:
            references = one.selector.references(one.draws)
            if len(references):
                one.observe(references, origin="reference")
        ids, _ = (one.selector.propose(16, one.draws) for one in runs)
        for one in runs:
            one.observe(ids, penalty=-4.0 * (i == 3))
            one.draws.manual_seed(i)
    return runs


def test_every_expert_of_dots_predicts_in_a_wider_range_as_if_it_had_known_it():
    """From the evidence of each prompt and the groups of the run; the trust in each expert follows within a few batches."""
    narrow, wide = (one.selector for one in widening("dots", 12))
    a, b = narrow.state_dict(), wide.state_dict()
    for part, name in (("difficulty", "rates"), ("history", "successes"), ("history", "trials")):
        np.testing.assert_allclose(a["success"][part][name], b["success"][part][name], atol=1e-5, err_msg=name)
    np.testing.assert_allclose(a["success"]["predicted"], b["success"]["predicted"], atol=1e-5)
    np.testing.assert_allclose(a["record"]["rows"][:, 1], b["record"]["rows"][:, 1], atol=1e-6)
    np.testing.assert_allclose(narrow.predict(EVERYTHING), wide.predict(EVERYTHING), atol=0.03)


def test_the_paper_predicts_in_the_wider_range_from_the_next_references_on():
    narrow, wide = widening("dots_paper", 5, **OF_PAPER)
    np.testing.assert_allclose(narrow.selector.predict(EVERYTHING), wide.selector.predict(EVERYTHING), atol=1e-6)
    for _ in range(3):
        ids, others = (one.selector.propose(16, one.draws) for one in (narrow, wide))
        np.testing.assert_array_equal(ids, others)


@pytest.mark.parametrize(("name", "arguments"), [("dots", {}), ("dots_paper", OF_PAPER)])
def test_a_resumed_run_may_give_a_narrower_range(name, arguments):
    one, _ = widening(name, 5, **arguments)
    scale = one.selector.context.scale
    scale.low, scale.high, scale.fixed = 0.4, 0.6, True
    one.observe(one.selector.propose(16, one.draws))
    predicted = one.selector.predict(EVERYTHING)
    assert 0 <= predicted.min() < predicted.max() <= 1


# DOTS as published


class Paper(Population):
    """20 reference prompts, whose success rates are seen as they are, and a temperature at which the nearest to 0.5 are taken."""

    def __init__(self):
        super().__init__("dots_paper", (0.0, 1.0), temperature=1e-9, **OF_PAPER)
        self.references = np.empty(0, dtype=np.int64)

    def rewards(self, ids):
        return np.repeat(self.p[ids], 8).reshape(-1, 8, 1).astype(np.float32)

    def begin(self):
        ids = self.selector.references(self.draws)
        if len(ids):
            self.references = ids
            self.observe(ids, origin="reference")

    def propose(self, n=16):
        return self.selector.propose(n, self.draws)

    def batch(self, n=16):
        self.begin()
        ids = self.propose(n)
        self.observe(ids)
        return ids

    def nearest(self) -> np.ndarray:
        """All prompts but the references, by their predicted distance from 0.5, which is all that the draw knows."""
        order = np.argsort(np.abs(self.selector.predict(EVERYTHING).astype(float) - 0.5), kind="stable")
        return order[~np.isin(order, self.references)]


def test_predictions_of_the_paper_rest_on_the_references_alone():
    """Those of a logistic regression on the references; what other groups give changes nothing until the next references."""
    paper = Paper()
    paper.batch()
    alone = RollingDifficulty(paper.embeddings, LogisticDifficultyPredictor())
    expected = alone.predict_with_references(paper.references, paper.p[paper.references].astype(np.float32), 0)
    for _ in range(2):
        np.testing.assert_allclose(paper.selector.predict(EVERYTHING), expected, atol=1e-5)
        paper.batch()
    assert np.abs(paper.selector.predict(EVERYTHING) - expected).max() > 0.01


def test_further_rounds_of_the_paper_continue_the_draw():
    """Two batches of 16, alike, were drawn; three rounds in the first take more than that, and the next batch what follows."""
    paper = Paper()
    paper.begin()
    rounds = [paper.propose() for _ in range(3)]
    assert set(np.concatenate(rounds[:2])) == set(paper.nearest()[:32])
    assert set(rounds[0]) != set(paper.nearest()[:16])  # the nearer half goes to either of them
    assert set(rounds[2]) == set(paper.nearest()[32:48])
    given = np.concatenate(rounds)
    paper.observe(given)
    assert not set(paper.batch(8)) & set(given)
    everything = Paper()
    for _ in range(2):  # more than there are: the second batch has prompts of the first again, each once
        assert len(set(everything.batch(300))) == 300


# In training


def test_the_papers_references_are_rolled_out_for_every_second_batch(tmp_path):
    arguments = {"reference_size": 6, "predictor": "logistic"}
    train_briefly(tmp_path, selection="dots_paper", selector_args=arguments, max_steps=8)
    table = groups_since(tmp_path, 0)
    assert table["predicted"].notna().all()
    references = table[table["origin"] == "reference"]
    assert references.groupby("step").size().to_dict() == {0: 6, 2: 6, 4: 6, 6: 6}
    assert (table.groupby("step")["prompt_id"].nunique() == table.groupby("step").size()).all()
