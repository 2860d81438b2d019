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
from trl_dataeff.difficulty.loading import LogisticDifficultyPredictor
from trl_dataeff.difficulty.online import RollingDifficulty, pearson
from trl_dataeff.rollouts.classification import GroupClassifier, RewardScale
from trl_dataeff.rollouts.group import EASY, EFFECTIVE, HARD
from trl_dataeff.selection import Selector, make_selector
from trl_dataeff.selection.base import SelectorContext
from trl_dataeff.selection.dots import DotsSelector
from trl_dataeff.selection.draw import (
    gumbel_top_k,
    log_chance_effective,
    log_weight_effective,
    log_weight_target,
    rate_of_difference,
)
from trl_dataeff.testing import PROMPTS, embeddings, make_context


getcontext().prec = 60


@given(p=st.floats(1e-12, 1 - 1e-9), group_size=st.integers(2, 64))
def test_chance_of_an_effective_group_to_sixty_digits(p, group_size):
    expected = float((1 - Decimal(p) ** group_size - (1 - Decimal(p)) ** group_size).ln())
    log_chance = log_chance_effective(torch.tensor([p], dtype=torch.float64), group_size)
    assert log_chance.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(chance=st.floats(1e-9, 1), sharpness=st.floats(0.5, 16), threshold=st.floats(0.01, 1))
def test_weight_with_and_without_a_threshold_to_sixty_digits(chance, sharpness, threshold):
    log_chance = torch.tensor([chance], dtype=torch.float64).log()
    powers = [Decimal(x) ** Decimal(sharpness) for x in (chance, threshold)]
    expected = float((powers[0] / sum(powers)).ln())
    assert log_weight_effective(log_chance, sharpness, threshold).item() == pytest.approx(expected, rel=1e-8, abs=1e-8)
    without = log_weight_effective(log_chance, sharpness, None).item()
    assert without == pytest.approx(float(powers[0].ln()), rel=1e-9, abs=1e-9)


def test_target_weight_by_hand():
    weight = log_weight_target(torch.tensor([0.0, 0.4, 0.5, 1.0]), 0.5, 0.1)
    torch.testing.assert_close(weight, torch.tensor([-5.0, -1.0, 0.0, -5.0], dtype=torch.float64), atol=1e-6, rtol=0)


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
    """A selector with 20 reference prompts every two batches, and a temperature at which it takes the nearest to 0.5."""

    def __init__(self, seed: int = 0, **arguments):
        self.population, self.rng = Population(), generator(seed)
        options = {"objective": "target", "temperature": 1e-9, "exploration": 0.0, "history_prior": 1e9}
        options |= {"reference": "paper", "reference_size": 20, "refresh_batches": 2, **arguments}
        self.selector = self.population.selector("dots", **options)
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
        order = np.argsort(np.abs(self.selector.success.mean().astype(float) - 0.5), kind="stable")
        return order[~np.isin(order, self.references)]


def test_probabilities_of_a_draw_that_is_split_over_two_batches():
    """Of all pairs, one prompt each, by enumeration: both orders of a draw of two are equally likely."""
    weights = np.array([0.05, 0.5, 0.3, 0.15])
    log_weights, draws, selector = torch.from_numpy(np.log(weights)), 20_000, Paper().selector
    counts, rng = dict.fromkeys(itertools.permutations(range(4), 2), 0), generator(3)
    for _ in range(draws):
        selector._order, selector._taken = np.empty(0, np.int64), 0
        counts[tuple(int(selector._next_drawn(log_weights, 1, rng)[0]) for _ in range(2))] += 1
    for (i, j), count in counts.items():
        one, other = (weights[a] * weights[b] / (1 - weights[a]) for a, b in ((i, j), (j, i)))
        expected = (one + other) / 2
        assert abs(count / draws - expected) < 4.5 * math.sqrt(expected * (1 - expected) / draws)


def test_further_rounds_continue_the_draw():
    """Two batches of 16 were drawn; three rounds in the first batch take more than that, and the next batch what follows."""
    paper = Paper()
    paper.begin()
    rounds = [paper.propose() for _ in range(3)]
    assert set(np.concatenate(rounds[:2])) == set(paper.nearest()[:32])
    assert set(rounds[2]) == set(paper.nearest()[32:48])
    paper.selector.observe([visit(int(i), EFFECTIVE) for i in np.concatenate(rounds)])
    given = np.concatenate(rounds)
    assert not set(paper.batch(8)) & set(given)
    everything = Paper()
    for _ in range(2):  # more than there are: the second batch has prompts of the first again, each once
        ids = everything.batch(300)
        assert len(set(ids)) == 300


def test_a_draw_that_is_half_used_survives_a_checkpoint():
    paper, copy = Paper(exploration=0.2), Paper(exploration=0.2)
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


def test_kinds_of_equal_mean_success_differ_by_how_often_their_groups_are_effective():
    """Prompts of one kind are all solved now and then; of the other, one in five always and the others never."""
    rng, numbers = generator(3), np.random.default_rng(3)
    kind = np.arange(200) % 2
    embeddings = numbers.normal(size=(200, 8)).astype(np.float32) * 0.1
    embeddings[:, 0] += kind
    success = np.where(kind == 0, 0.2, numbers.random(200) < 0.2)
    selector = make_selector("dots", {"exploration": 0.0, "sharpness": 2.0, "threshold": None})
    selector.bind(SelectorContext(200, 16, group_size=8, embed=lambda: embeddings))
    seen = set()
    for _ in range(10):
        ids = torch.randperm(200, generator=rng)[:16].numpy()
        seen.update(ids.tolist())
        wins = numbers.binomial(8, success[ids])
        selector.observe(
            [visit(i, EFFECTIVE if 0 < k < 8 else EASY if k else HARD, 0, k / 8) for i, k in zip(ids, wins)]
        )
    unseen = np.setdiff1d(np.arange(200), list(seen))
    weights = selector.log_weights()[unseen].exp().numpy()
    of_kind = [weights[kind[unseen] == k].mean() for k in (0, 1)]
    assert of_kind[0] > 2 * of_kind[1]


@pytest.mark.parametrize("coverage", [0.3, 0.7])
def test_no_prompt_is_selected_twice_while_the_others_carry_enough_of_the_weight(coverage):
    population, rng = Population(), generator()
    selector = population.selector("dots", coverage=coverage, exploration=0.0)
    done, passes = set(), 0
    for _ in range(80):
        weights = selector.log_weights().exp().numpy()
        left = [i for i in range(400) if i not in done]
        if weights[left].sum() < (1 - coverage) * weights.sum():
            done, passes = set(), passes + 1
        ids, _ = population.batch(selector, rng)
        assert not done & set(ids.tolist())
        done |= set(ids.tolist())
    assert passes >= 3


def test_exploring_alone_takes_the_prompts_of_plain_grpo_in_its_order():
    """Over two and a half passes, with a checkpoint in between; that of `uniform` is compared with TRL's elsewhere."""
    population = Population()
    uniform, plain_rng = population.selector("uniform"), generator(42)  # the context's seed
    selector, rng = population.selector("dots", exploration=1.0), generator(7)
    for batch in range(62):
        ids = selector.propose(16, rng)
        np.testing.assert_array_equal(ids, uniform.propose(16, plain_rng))
        selector.observe([visit(int(i), EFFECTIVE) for i in ids])
        if batch == 30:
            state, selector = selector.state_dict(), population.selector("dots", exploration=1.0)
            selector.load_state_dict(state)


@given(
    batch=st.integers(1, 12),
    more=st.integers(0, 20),
    requests=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    shuffle=st.booleans(),
    exploration=st.sampled_from([0.3, 1.0]),
)
def test_exploration_reaches_prompts_that_passes_leave_out(batch, more, requests, shuffle, exploration):
    """A pass in the dataset's order never offers the last prompts, which may be the only ones that a batch has not had."""
    size = batch + more
    selector = DotsSelector(shuffle=shuffle, exploration=exploration)
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
    anew = RollingDifficulty(population.embeddings, LogisticDifficultyPredictor(), half_life=selector.half_lives[-1])
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
        predicted, spreads = selector.predict(ids), self.classifier.spreads(rewards)
        for group, own, rewards_of_group, d in zip(groups, predicted, rewards, spreads):
            group.predicted, group.rewards = float(own), rewards_of_group
            group.spread, group.graded = float(d), self.classifier.graded
        selector.observe(groups)
        return ids, kinds


@pytest.mark.parametrize(
    ("options", "gain", "weight"),
    [
        ({}, 1.25, 0.5),
        ({"sharpness": 1.0, "threshold": None, "coverage": 0.0}, 1.0, 0.7),  # gains less than it has to: gives way
        ({"sharpness": 4.0, "threshold": None, "coverage": 0.7}, 1.5, 0.25),
    ],
)
@pytest.mark.parametrize("penalty", [0.0, -5.0])
def test_graded_rewards_do_not_draw_prompts_whose_completions_all_get_the_same_middle_reward(
    penalty, options, gain, weight
):
    """Also after a single completion of -5, in whose range all other means are nearly equal."""
    shares = {}
    for name in ("uniform", "dots"):
        population, rng = GradedPopulation(), generator()
        selector = population.selector(name, **(options if name == "dots" else {}))
        kinds = [population.batch(selector, rng, penalty=penalty * (i == 6))[1] for i in range(24)]
        shares[name] = np.mean(np.concatenate(kinds[8:]) == EFFECTIVE)
    assert shares["dots"] > gain * shares["uniform"]
    unsolved = population.p < 0.05
    weights = selector.log_weights().exp().numpy()
    assert weights[unsolved].mean() < weight * weights[~unsolved].mean()
    assert np.abs(selector.success.mean()).max() <= 1.0


def test_rate_of_difference_inverts_the_binary_case():
    p = torch.linspace(0, 0.5, 21, dtype=torch.float64)
    torch.testing.assert_close(rate_of_difference(4 * p * (1 - p)), p, atol=1e-7, rtol=0)


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
