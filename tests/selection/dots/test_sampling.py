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
from trl_dataeff.selection.dots.sampling import chance_effective, gumbel_top_k, log_weight


getcontext().prec = 60


@given(p=st.floats(1e-12, 1 - 1e-9), group_size=st.integers(2, 64))
def test_chance_of_an_effective_group_to_sixty_digits(p, group_size):
    expected = 1 - Decimal(p) ** group_size - (1 - Decimal(p)) ** group_size
    chance = chance_effective(torch.tensor([p], dtype=torch.float64), group_size)
    assert chance.item() == pytest.approx(float(expected), rel=1e-9, abs=1e-15)


@given(chance=st.floats(1e-9, 1), threshold=st.floats(0.01, 1))
def test_weight_to_sixty_digits(chance, threshold):
    powers = [Decimal(x) ** 4 for x in (chance, threshold)]
    expected = (powers[0] / sum(powers)).ln()
    weight = log_weight(torch.tensor([chance], dtype=torch.float64), threshold)
    assert weight.item() == pytest.approx(float(expected), rel=1e-8, abs=1e-8)


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
