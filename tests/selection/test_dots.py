"""DOTS: its weights and its draw against direct calculation, and its selector on simulated prompts."""

import itertools
import math
from decimal import Decimal, getcontext

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.factories import generator, visit
from trl_dataeff.difficulty.logistic import LogisticDifficultyPredictor
from trl_dataeff.difficulty.online import RollingDifficulty, pearson
from trl_dataeff.rollouts.classification import GroupClassifier, RewardScale
from trl_dataeff.rollouts.group import EASY, EFFECTIVE, HARD
from trl_dataeff.selection import Selector, make_selector
from trl_dataeff.selection.base import SelectorContext
from trl_dataeff.selection.dots import DotsSelector
from trl_dataeff.selection.draw import chance_effective, gumbel_top_k, log_weight
from trl_dataeff.selection.estimate import HALF_LIVES
from trl_dataeff.testing import PROMPTS, embeddings, make_context


getcontext().prec = 60


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
    """400 prompts whose success rate is a function of their embedding, 70 % of them unsolvable."""

    def __init__(self, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.embeddings = rng.normal(size=(400, 12)).astype(np.float16)
        score = 3.0 * self.embeddings[:, 0].astype(float)
        self.p = 1 / (1 + np.exp(-(score - np.quantile(score, 0.7)) * 3))
        self.rng = rng

    def selector(self, name: str, **arguments) -> Selector:
        selector = make_selector(name, arguments)
        selector.bind(SelectorContext(400, 16, group_size=8, seed=42, embed=lambda: self.embeddings))
        self.seen = np.zeros(400, dtype=bool)
        return selector

    def batch(self, selector, rng, n=16):
        """A generation batch: its prompts, and the kinds of their groups."""
        ids = selector.propose(n, rng)
        return ids, self.roll_out(selector, ids)

    def roll_out(self, selector, ids):
        """What the selector observes of proposed prompts: the kinds of their groups."""
        rates = (self.rng.random((len(ids), 8)) < self.p[ids, None]).mean(axis=1)
        kinds = np.where(rates == 0, HARD, np.where(rates == 1, EASY, EFFECTIVE))
        groups = [visit(int(i), int(k), rate=float(r)) for i, k, r in zip(ids, kinds, rates)]
        for group, predicted in zip(groups, selector.predict(ids)):
            group.predicted = float(predicted)
            group.rewards = np.zeros((8, 1))
        self.seen[ids] = True
        selector.observe(groups)
        return kinds


class Paper:
    """DOTS as published with 20 reference prompts, and a temperature at which it takes the nearest to 0.5."""

    def __init__(self, seed: int = 0):
        self.population, self.rng = Population(), generator(seed)
        options = {"temperature": 1e-9, "reference_size": 20, "predictor": "logistic"}
        self.selector = self.population.selector("dots_paper", **options)
        self.references = np.empty(0, np.int64)

    def begin(self):
        def roll_out(ids):
            self.references = ids
            return [visit(int(i), EFFECTIVE, rate=float(self.population.p[i])) for i in ids]

        self.selector.roll_out_references(roll_out, self.rng)

    def propose(self, n=16):
        return self.selector.propose(n, self.rng)

    def batch(self, n=16):
        self.begin()
        ids = self.propose(n)
        self.selector.observe([visit(int(i), EFFECTIVE) for i in ids])
        return ids

    def nearest(self) -> np.ndarray:
        """All prompts but the references, by their predicted distance from 0.5, which is all that the draw knows."""
        order = np.argsort(np.abs(self.selector.predict(np.arange(400)).astype(float) - 0.5), kind="stable")
        return order[~np.isin(order, self.references)]


def test_predictions_of_the_paper_rest_on_the_references_alone():
    """Those of a logistic regression on the references; what other groups give changes nothing until the next references."""
    paper, everything = Paper(), np.arange(400)
    paper.batch()
    ids = paper.references
    alone = RollingDifficulty(paper.population.embeddings, LogisticDifficultyPredictor())
    rates = paper.population.p[ids].astype(np.float32)
    np.testing.assert_array_equal(paper.selector.predict(everything), alone.predict_with_references(ids, rates, 0))
    before = paper.selector.predict(everything)
    paper.batch()
    np.testing.assert_array_equal(paper.selector.predict(everything), before)
    paper.batch()
    assert not np.array_equal(paper.selector.predict(everything), before)


def test_further_rounds_of_the_paper_continue_the_draw():
    """Two batches of 16 were drawn; three rounds in the first batch take more than that, and the next batch what follows."""
    paper = Paper()
    paper.begin()
    rounds = [paper.propose() for _ in range(3)]
    assert set(np.concatenate(rounds[:2])) == set(paper.nearest()[:32])
    assert set(rounds[2]) == set(paper.nearest()[32:48])
    given = np.concatenate(rounds)
    paper.selector.observe([visit(int(i), EFFECTIVE) for i in given])
    assert not set(paper.batch(8)) & set(given)
    everything = Paper()
    for _ in range(2):  # more than there are: the second batch has prompts of the first again, each once
        ids = everything.batch(300)
        assert len(set(ids)) == 300


def test_the_two_batches_of_a_draw_are_alike():
    """The nearer half of the prompts goes to either of them."""
    paper = Paper()
    first = paper.batch()
    assert set(first) < set(paper.nearest()[:32])
    assert set(first) != set(paper.nearest()[:16])


@pytest.mark.parametrize("after", [1, 2])
def test_a_draw_of_the_paper_survives_a_checkpoint(after):
    paper, copy = Paper(), Paper()
    for _ in range(after):
        paper.batch()
    copy.selector.load_state_dict(paper.selector.state_dict())
    copy.rng.set_state(paper.rng.get_state())
    for n in (16, 16, 24, 8):
        np.testing.assert_array_equal(paper.batch(n), copy.batch(n))


def test_drawn_prompts_have_more_effective_groups_than_uniform_ones():
    shares = {}
    for name in ("uniform", "dots"):
        population, rng = Population(), generator()
        selector = population.selector(name)
        kinds = [population.batch(selector, rng)[1] for _ in range(20)]
        shares[name] = np.mean(np.concatenate(kinds[4:]) == EFFECTIVE)
    assert shares["dots"] > 1.8 * shares["uniform"]
    unseen = ~population.seen
    assert pearson(selector.success.mean()[unseen], population.p[unseen]) > 0.8


@pytest.mark.parametrize("coverage", [0.3, 0.7])
def test_no_prompt_is_selected_twice_while_the_others_carry_enough_of_the_weight(coverage):
    population, rng = Population(), generator()
    selector = population.selector("dots", coverage=coverage)
    done, passes = set(), 0
    for _ in range(80):
        chance = selector.chances().numpy()
        weights = chance**4 / (chance**4 + 0.6**4)
        left = [i for i in range(400) if i not in done]
        if weights[left].sum() < (1 - coverage) * weights.sum():
            done, passes = set(), passes + 1
        ids, _ = population.batch(selector, rng)
        assert not done & set(ids.tolist())
        done |= set(ids.tolist())
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


def test_with_other_embeddings_the_groups_are_restored_and_the_predictor_is_fitted_to_them_anew(caplog_transformers):
    """As after a resume on other hardware; with the same embeddings predictions go on to the last bit."""
    population, rng = Population(), generator()
    selector = population.selector("dots")
    for _ in range(6):
        population.batch(selector, rng)
    state = selector.state_dict()
    same = population.selector("dots")
    same.load_state_dict(state)
    np.testing.assert_array_equal(same.success.difficulty.refresh(6), selector.success.difficulty.refresh(6))
    assert not caplog_transformers.records

    population.embeddings = population.embeddings[:, ::-1].copy()
    other = population.selector("dots")
    other.load_state_dict(state)
    assert "embeddings differ from those of the run" in caplog_transformers.text
    anew = RollingDifficulty(population.embeddings, LogisticDifficultyPredictor(), half_life=HALF_LIVES[-1])
    anew.ids, anew.rates, anew.batches = (
        selector.success.difficulty.state_dict()[n] for n in ("ids", "rates", "batches")
    )
    np.testing.assert_array_equal(other.success.difficulty.refresh(6), anew.refresh(6))
    np.testing.assert_array_equal(other.success.mean(), selector.success.mean())
    assert other.batch == 6


class GradedPopulation(Population):
    """Two rewards: 1 for the right answer, and 0.5 for the format, which is nearly always right where the answer never is."""

    def __init__(self, seed: int = 0):
        super().__init__(seed)
        self.classifier = GroupClassifier(np.array([1.0, 0.5]))

    def batch(self, selector, rng, n=16, penalty=0.0):
        ids = selector.propose(n, rng)
        answers = self.rng.random((n, 8)) < self.p[ids, None]
        form = self.rng.random((n, 8)) < np.where(self.p[ids] < 0.05, 0.995, 0.9)[:, None]
        rewards = np.stack([answers, answers | form], axis=2).astype(np.float32)
        rewards[0, 0, 0] += penalty
        before = RewardScale(self.classifier.scale.low, self.classifier.scale.high)
        rates, kinds = self.classifier.classify(rewards, np.zeros((n, 8), dtype=bool))
        mapping = self.classifier.scale.mapping_from(before)
        if mapping is not None:
            selector.rescale(*mapping)
        groups = [visit(int(i), int(k), rate=float(r)) for i, k, r in zip(ids, kinds, rates)]
        for group, own, rewards_of_group in zip(groups, selector.predict(ids), rewards):
            group.predicted, group.rewards, group.graded = float(own), rewards_of_group, self.classifier.graded
        selector.observe(groups)
        return ids, kinds


@pytest.mark.parametrize("penalty", [0.0, -5.0])
def test_graded_rewards_do_not_draw_prompts_whose_completions_all_get_the_same_middle_reward(penalty):
    """Also after a single completion of -5, in whose range all other means are nearly equal."""
    shares = {}
    for name in ("uniform", "dots"):
        population, rng = GradedPopulation(), generator()
        selector = population.selector(name)
        kinds = [population.batch(selector, rng, penalty=penalty * (i == 6))[1] for i in range(24)]
        shares[name] = np.mean(np.concatenate(kinds[8:]) == EFFECTIVE)
    assert shares["dots"] > 1.4 * shares["uniform"]
    unsolved = population.p < 0.05
    weights = log_weight(selector.chances(), selector.threshold).exp().numpy()
    assert weights[unsolved].mean() < 0.5 * weights[~unsolved].mean()
    assert np.abs(selector.success.mean()).max() <= 1.0


def test_a_predictor_that_was_fitted_before_predicts_the_first_batch():
    pool, ids = embeddings(), np.arange(PROMPTS)
    fitted = LogisticDifficultyPredictor()
    fitted.fit(pool, torch.linspace(0.05, 0.95, PROMPTS))
    first = {}
    for name, predictor in (("fitted", fitted), ("new", LogisticDifficultyPredictor())):
        selector = DotsSelector(predictor=predictor)
        selector.bind(make_context())
        first[name] = selector.predict(ids)
    assert np.corrcoef(first["fitted"], ids)[0, 1] > 0.9
    assert np.isnan(first["new"]).all()
