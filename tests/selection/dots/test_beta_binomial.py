"""The beta-binomial distribution against its definition, by Gamma functions, and against known rates."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_dataeff.selection.dots.beta_binomial import chance_at, chance_effective, log_likelihood


PARAMETERS = st.floats(1e-3, 1e3)


def log_beta(a, b):
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def probability(k, n, a, b):
    return math.comb(n, k) * math.exp(log_beta(a + k, b + n - k) - log_beta(a, b))


def one(value):
    return torch.tensor([value], dtype=torch.float64)


@given(a=PARAMETERS, b=PARAMETERS, n=st.integers(2, 32))
def test_chance_of_a_gradient_is_that_of_some_successes_and_some_failures(a, b, n):
    expected = sum(probability(k, n, a, b) for k in range(1, n))
    assert chance_effective(one(a), one(b), n).item() == pytest.approx(expected, abs=1e-8)


@given(a=PARAMETERS, b=PARAMETERS, n=st.integers(1, 32), data=st.data())
def test_likelihood(a, b, n, data):
    k = data.draw(st.integers(0, n))
    found = log_likelihood(one(a), one(b), one(k), one(n)).item()
    assert math.comb(n, k) * math.exp(found) == pytest.approx(probability(k, n, a, b), rel=1e-6)


@given(p=st.floats(0.001, 0.999), n=st.integers(2, 32))
def test_a_rate_that_is_certain_has_the_chance_of_a_binomial(p, n):
    certain = chance_effective(one(p * 1e9), one((1 - p) * 1e9), n)
    assert certain.item() == pytest.approx(chance_at(one(p), n).item(), abs=1e-6)
    assert chance_effective(one(p), one(1 - p), n).item() < certain.item()  # one that is not has less
