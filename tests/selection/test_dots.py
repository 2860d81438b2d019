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
from trl_dataeff.difficulty.online import RollingDifficulty
from trl_dataeff.difficulty.quality import pearson
from trl_dataeff.rollouts.group import EASY, EFFECTIVE, HARD
from trl_dataeff.selection import Selector, make_selector
from trl_dataeff.selection.base import SelectorContext
from trl_dataeff.selection.dots import gumbel_top_k, log_weight_effective, log_weight_target


getcontext().prec = 60


@given(p=st.floats(1e-12, 1 - 1e-9), group_size=st.integers(2, 64), sharpness=st.floats(0.5, 8))
def test_effective_weight_to_sixty_digits(p, group_size, sharpness):
    exact = 1 - Decimal(p) ** group_size - (1 - Decimal(p)) ** group_size
    expected = sharpness * float(exact.ln())
    assert log_weight_effective(torch.tensor([p], dtype=torch.float64), group_size, sharpness).item() == pytest.approx(
        expected, rel=1e-9, abs=1e-12
    )


def test_effective_weight_is_symmetric_and_largest_in_the_middle():
    p = torch.linspace(0, 1, 101, dtype=torch.float64)
    weight = log_weight_effective(p, 8, 4.0)
    torch.testing.assert_close(weight, weight.flip(0))
    assert weight[[0, 100]].isneginf().all()
    assert weight.argmax() == 50
    assert (weight[1:51].diff() > 0).all()


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


def test_at_the_papers_temperature_the_nearest_come_first():
    """In float32 the softmax of these weights is 0 but for a few, and a draw from it repeats or fails."""
    p = torch.linspace(0, 1, 1001)
    log_weights = log_weight_target(p, 0.5, 1e-3)
    assert (log_weights.float().softmax(0) == 0).sum() > 500
    chosen = p[gumbel_top_k(log_weights, 100, generator())]
    assert (chosen - 0.5).abs().max() < 0.1
    rest = p[gumbel_top_k(log_weights, 900, generator())]
    assert (rest - 0.5).abs().max() < 0.47


def test_ten_million_prompts():
    n = 10_000_000
    ids = gumbel_top_k(torch.zeros(n), 512, generator())
    assert len(ids.unique()) == 512
    assert ids.float().mean() / n == pytest.approx(0.5, abs=4 * math.sqrt(1 / 12 / 512))


@pytest.mark.parametrize("n", [-1, 4])
def test_impossible_draws_are_refused(n):
    with pytest.raises(ValueError, match="3 weights give from 0 to 3"):
        gumbel_top_k(torch.zeros(3), n)
    with pytest.raises(ValueError, match="NaN"):
        gumbel_top_k(torch.tensor([0.0, float("nan")]), 1)


@pytest.mark.parametrize("weights", [[0.0, -3.0, *[-np.inf] * 4], [-500.0, -1e4, *[-np.inf] * 4], [-np.inf] * 6])
def test_prompts_of_weight_zero_come_last_in_random_order(weights):
    log_weights, rng = torch.tensor(weights, dtype=torch.float64), generator()
    drawable = [i for i, w in enumerate(weights) if w > -np.inf]
    first_excluded = np.zeros(6)
    for _ in range(600):
        order = gumbel_top_k(log_weights, 6, rng).tolist()
        assert sorted(order[: len(drawable)]) == drawable
        first_excluded[order[len(drawable)]] += 1
    expected = 600 / (6 - len(drawable))
    assert np.abs(first_excluded[len(drawable) :] - expected).max() < 5 * np.sqrt(expected)


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
        rates = (self.rng.random((n, 8)) < self.p[ids, None]).mean(axis=1)
        kinds = np.where(rates == 0, HARD, np.where(rates == 1, EASY, EFFECTIVE))
        groups = [visit(int(i), int(k), rate=float(r)) for i, k, r in zip(ids, kinds, rates)]
        for group, predicted in zip(groups, selector.predict(ids)):
            group.predicted = float(predicted)
            group.rewards = np.zeros((8, 1))
        self.seen[ids] = True
        selector.observe(groups)
        return ids, kinds


@pytest.mark.parametrize("name", ["dots", "dots+greso"])
def test_drawn_prompts_have_more_effective_groups_than_uniform_ones(name):
    shares = {}
    for candidate in ("uniform", name):
        population, rng = Population(), generator()
        selector = population.selector(candidate)
        kinds = [population.batch(selector, rng)[1] for _ in range(20)]
        shares[candidate] = np.mean(np.concatenate(kinds[4:]) == EFFECTIVE)
    assert shares[name] > 1.8 * shares["uniform"]
    unseen = ~population.seen
    assert pearson(selector.estimate()[unseen], population.p[unseen]) > 0.8
    assert selector.metrics()["predictor/pearson"] > 0.5


def test_the_gate_skips_prompts_with_repeated_zero_variance_groups():
    population, rng = Population(), generator()
    selector = population.selector("dots+greso", sharpness=0.1, exploration=0.0)  # nearly uniform proposals
    hard = np.arange(0, 400, 2)
    for _ in range(8):
        selector.gate.pool.observe([visit(int(i), HARD) for i in hard])
    chosen = np.concatenate([population.batch(selector, rng)[0] for _ in range(10)])
    assert np.isin(chosen, hard).mean() < 0.1
    assert selector.metrics()["prompts_skipped"] == pytest.approx(80, abs=25), "DOTS alone draws half of them there"
    assert selector.metrics()["p_hard"] == 0.5, "it adapts before a pass's worth of batches"


def test_prompts_of_weight_0_still_come_before_excluded_ones():
    """With estimates of exactly 0 and 1, no prompt is proposed twice while others are left."""
    population, rng = Population(), generator()
    selector = population.selector("dots", exploration=0.5)
    selector._prior = np.where(np.arange(400) % 2, 1.0, 0.0).astype(np.float32)
    for _ in range(5):
        ids = selector.propose(80, rng)
        assert len(set(ids)) == 80
    assert len(selector._proposed) == len(set(selector._proposed)) == 400


def test_no_prompt_twice_in_a_generation_batch_while_there_are_others():
    population, rng = Population(), generator()
    selector = population.selector("dots")
    ids = np.concatenate([selector.propose(100, rng) for _ in range(4)])
    assert len(set(ids)) == 400
    assert len(set(selector.propose(16, rng))) == 16


def test_the_explored_share_is_uniform():
    """Also once estimates are settled: half of what is proposed covers all kinds of prompts alike."""
    population, rng = Population(), generator()
    selector = population.selector("dots", exploration=0.5, objective="target")
    ids = [population.batch(selector, rng)[0][:8] for _ in range(150)]
    unsolvable = population.p < 0.02
    share = np.isin(np.concatenate(ids[10:]), np.flatnonzero(unsolvable)).mean()
    assert share == pytest.approx(unsolvable.mean(), abs=0.05)


def test_a_predictor_that_was_fitted_before_is_there_from_the_start(tmp_path):
    population = Population()
    predictor = LogisticDifficultyPredictor()
    predictor.fit(population.embeddings, torch.from_numpy(population.p))
    rolling = RollingDifficulty(population.embeddings, predictor)
    assert pearson(rolling.refresh(0), population.p) > 0.9


def test_with_other_embeddings_the_groups_are_restored_and_the_predictor_is_fitted_to_them_anew(caplog_transformers):
    """As after a resume on other hardware; with the same embeddings predictions go on to the last bit."""
    population, rng = Population(), generator()
    selector = population.selector("dots")
    for _ in range(6):
        population.batch(selector, rng)
    state = selector.state_dict()
    same = population.selector("dots")
    same.load_state_dict(state)
    np.testing.assert_array_equal(same.difficulty.refresh(6), selector.difficulty.refresh(6))
    assert not caplog_transformers.records

    population.embeddings = population.embeddings[:, ::-1].copy()
    other = population.selector("dots")
    other.load_state_dict(state)
    assert "embeddings differ from those of the run" in caplog_transformers.text
    anew = RollingDifficulty(population.embeddings, LogisticDifficultyPredictor())
    anew.ids, anew.rates, anew.batches = (selector.difficulty.state_dict()[n] for n in ("ids", "rates", "batches"))
    np.testing.assert_array_equal(other.difficulty.refresh(6), anew.refresh(6))
    np.testing.assert_array_equal(other.estimate(), selector.estimate())
    assert other.batch == 6
