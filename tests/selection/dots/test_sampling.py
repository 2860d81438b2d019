"""Weights and draws of prompts against direct calculation."""

import itertools
import math
from decimal import Decimal, getcontext

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.factories.groups import generator
from trl_dataeff.selection.dots.sampling import KindShares, PromptPass, gumbel_top_k, log_weights_of, top_of_kinds


getcontext().prec = 60


@given(chances=st.lists(st.floats(1e-6, 1), min_size=1, max_size=12), sharpness=st.floats(0, 30), data=st.data())
def test_weights_to_sixty_digits(chances, sharpness, data):
    kinds = data.draw(st.lists(st.integers(0, 2), min_size=len(chances), max_size=len(chances)))
    kinds = np.unique(kinds, return_inverse=True)[1].tolist()
    weights = log_weights_of(torch.tensor(chances, dtype=torch.float64), torch.tensor(kinds), sharpness)
    for chance, kind, weight in zip(chances, kinds, weights.tolist(), strict=True):
        own = [Decimal(other) for other, its in zip(chances, kinds, strict=True) if its == kind]
        threshold = (sum(own) / len(own)) ** (Decimal(2) / 3)
        power = Decimal(chance) ** Decimal(sharpness)
        expected = (power / (power + threshold ** Decimal(sharpness))).ln()
        assert weight == pytest.approx(float(expected), rel=1e-8, abs=1e-8)


@given(weights=st.lists(st.one_of(st.floats(-2000, 50), st.just(-math.inf)), min_size=1, max_size=30), data=st.data())
def test_a_draw_repeats_nothing_and_takes_what_has_no_weight_last(weights, data):
    n = data.draw(st.integers(0, len(weights)))
    ids = gumbel_top_k(torch.tensor(weights, dtype=torch.float64), n, generator()).tolist()
    assert len(ids) == n
    assert len(set(ids)) == n
    is_weightless = [weights[i] == -math.inf for i in ids]
    assert is_weightless == sorted(is_weightless)
    if any(is_weightless):  # then every prompt with a weight was drawn
        assert is_weightless.count(False) == sum(weight != -math.inf for weight in weights)


def test_frequencies_are_those_of_drawing_one_after_the_other():
    """Exact probabilities of every ordered pair, by enumeration: w_i / sum(w) and then w_j / (sum(w) - w_i)."""
    weights = np.array([0.05, 0.5, 0.3, 0.15])
    log_weights = torch.from_numpy(np.log(weights)) - 3  # not normalised
    rng = generator(5)
    draws = 20_000
    counts = dict.fromkeys(itertools.permutations(range(4), 2), 0)
    for _ in range(draws):
        pair = gumbel_top_k(log_weights, 2, rng).tolist()
        counts[tuple(pair)] += 1
    for (i, j), count in counts.items():
        expected = weights[i] * weights[j] / (1 - weights[i])
        standard_error = math.sqrt(expected * (1 - expected) / draws)
        assert abs(count / draws - expected) < 4.5 * standard_error


KINDS = st.lists(st.integers(0, 4), min_size=1, max_size=40).map(
    lambda kinds: np.unique(kinds, return_inverse=True)[1]
)


@given(kinds=KINDS, data=st.data())
def test_the_largest_keys_of_each_kind_by_sorting_each(kinds, data):
    keys = np.random.default_rng(0).permutation(len(kinds)) / 7.0
    counts = [data.draw(st.integers(0, size)) for size in np.bincount(kinds).tolist()]
    found = top_of_kinds(torch.from_numpy(keys), torch.from_numpy(kinds), torch.tensor(counts)).tolist()
    expected = []
    for kind, count in enumerate(counts):
        of_kind = sorted(np.flatnonzero(kinds == kind).tolist(), key=lambda i: -keys[i])
        expected += of_kind[:count]
    assert found == sorted(expected, key=lambda i: -keys[i])


@given(kinds=KINDS, requests=st.lists(st.integers(1, 12), min_size=1, max_size=30))
def test_kinds_get_their_shares_and_are_never_a_prompt_behind(kinds, requests):
    shares = KindShares(torch.from_numpy(kinds))
    sizes = np.bincount(kinds)
    drawn = np.zeros(len(sizes))
    for n in requests:
        counts = shares.take(n, torch.full((len(sizes),), 100)).numpy()
        assert counts.sum() == n
        assert counts.min() >= 0
        drawn += counts
        assert np.abs(drawn - drawn.sum() * sizes / sizes.sum()).max() < len(sizes)
    assert shares.due.sum().item() == pytest.approx(0, abs=1e-6)


def test_a_kind_without_enough_prompts_is_made_up_for_later():
    shares = KindShares(torch.tensor([0] * 6 + [1] * 2))
    assert shares.take(4, torch.tensor([1, 8])).tolist() == [1, 3]
    assert shares.take(4, torch.tensor([8, 8])).tolist() == [4, 0]
    assert shares.take(4, torch.tensor([8, 8])).tolist() == [4, 0]
    assert shares.take(4, torch.tensor([8, 8])).tolist() == [3, 1]


def test_a_pass_over_one_kind_ends_without_the_others():
    kinds = torch.tensor([0] * 10 + [1] * 10)
    prompts = PromptPass(kinds)
    weights = torch.zeros(20, dtype=torch.float64)
    none = torch.zeros(20, dtype=torch.bool)
    counts = torch.tensor([1, 1])
    prompts.drawn[:7] = True  # of the first kind 30 % are left, no less
    prompts.drawn[10:17] = True
    assert prompts.restrict(weights, none, counts).isneginf().sum() == 14
    prompts.drawn[17] = True
    left = ~prompts.restrict(weights, none, counts).isneginf()
    assert left.tolist() == [False] * 7 + [True] * 13
    assert not prompts.drawn[10:].any()
    few = prompts.restrict(weights, none, torch.tensor([4, 1]))  # more than the three that are left
    assert not few.isneginf().any()
