"""The logistic predictor against torch's optimizer and singular value decomposition."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.factories.groups import generator
from trl_dataeff.difficulty.logistic import LogisticDifficultyPredictor


@pytest.mark.parametrize("n", [300, 7])
def test_basis_is_that_of_the_singular_value_decomposition(n):
    rotation = torch.linalg.qr(torch.randn(12, 12, generator=generator(1), dtype=torch.float64)).Q
    independent = torch.randn(n, 12, generator=generator(), dtype=torch.float64) * 0.7 ** torch.arange(12)
    E = independent @ rotation * 9 + 10
    predictor = LogisticDifficultyPredictor(components=5)
    predictor.fit_basis(E.float())
    standardised = (E - E.mean(dim=0)) / E.std(dim=0, correction=0)
    U, S, _ = torch.linalg.svd(standardised, full_matrices=False)
    expected = (math.sqrt(n) * U * (S / S[0]).sqrt())[:, :5]
    got = predictor.project(E.float()).double()
    sign = torch.sign((got * expected).sum(dim=0))
    torch.testing.assert_close(got, expected * sign, atol=2e-3, rtol=0)  # noise of float16 is allowed for
    assert got.var(dim=0, correction=0)[0] == pytest.approx(1, abs=1e-3)
    assert torch.equal(predictor.basis.amax(dim=0), predictor.basis.abs().amax(dim=0))  # signs are settled


def test_a_large_dimension_does_not_hide_the_others():
    """As in hidden states of language models: one is a thousand times as large, and says nothing of the kind."""
    kind = torch.arange(400) % 2
    E = torch.randn(400, 12, generator=generator())
    E[:, 1:7] += 3 * kind[:, None]
    E[:, 0] *= 1000
    E[:, 11] = 500 + 0.01 * E[:, 11]  # lost in the precision of float16
    predictor = LogisticDifficultyPredictor(2)
    predictor.fit_basis(E)
    projected = predictor.project(E)
    assert abs(np.corrcoef(projected[:, 0], kind)[0, 1]) > 0.9
    assert predictor.basis[11].abs().max() * E[:, 11].std() < 0.1


def test_large_pools_are_sampled_evenly():
    E = torch.randn(50_000, 4, generator=generator()) * torch.tensor([3.0, 2.0, 1.0, 0.5])
    E[25_000:] += 10  # a sample of the first rows alone would miss this
    predictor = LogisticDifficultyPredictor(2)
    predictor.fit_basis(E)
    assert predictor.mean.mean() == pytest.approx(5, abs=0.1)


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 80), st.floats(0.01, 10), st.integers(0, 1000), st.sampled_from([1.0, 0.5, 0.02]))
def test_fit_is_the_minimum_of_its_loss(n, l2, seed, share):
    rng = generator(seed)
    X = torch.randn(n, 10, generator=rng) * torch.linspace(1, 0.1, 10)
    p = torch.binomial(torch.full((n,), 8.0), torch.full((n,), share), generator=rng) / 8
    p[0] = 0.5  # labels that are all 0 or all 1 have no minimum
    weight = torch.rand(n, generator=rng) + 0.01
    predictor = LogisticDifficultyPredictor(l2=l2)
    predictor.fit_projected(X, p, weight)
    c = predictor.coefficients.double().requires_grad_()
    b = predictor.intercept.double().requires_grad_()
    scores = X.double() @ c + b
    bce = nn.functional.binary_cross_entropy_with_logits(scores, p.double(), weight.double(), reduction="sum")
    loss = bce + l2 / 2 * (c**2).sum()
    loss.backward()  # convex: its gradient is zero at the minimum alone
    tolerance = 2e-6 * (weight.sum() + l2) * (1 + c.abs().max())
    assert c.grad.abs().max() < tolerance
    assert b.grad.abs().max() < tolerance
    torch.testing.assert_close(predictor.predict_projected(X), torch.sigmoid(scores).detach().float())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.125, 0.5, 1.0, math.nan]), max_size=40), st.integers(0, 100))
def test_any_labels_give_probabilities(labels, seed):
    X = 3 * torch.randn(len(labels), 6, generator=generator(seed))
    predictor = LogisticDifficultyPredictor()
    predictor.fit_projected(X, torch.tensor(labels))
    predicted = predictor.predict_projected(torch.randn(50, 6))
    assert bool(predicted.isfinite().all() and (predicted >= 0).all() and (predicted <= 1).all())


@pytest.mark.parametrize(("label", "expected"), [(0.0, 1e-4), (1.0, 1 - 1e-4), (0.25, 0.25), (math.nan, 0.5)])
@pytest.mark.parametrize("n", [1, 20])
def test_equal_labels_are_predicted_everywhere(label, expected, n):
    predictor = LogisticDifficultyPredictor()
    predictor.fit_projected(torch.randn(n, 32, generator=generator()), torch.full((n,), label))
    predicted = predictor.predict_projected(torch.randn(9, 32, generator=generator(1)))
    torch.testing.assert_close(predicted, torch.full((9,), expected), atol=1e-6, rtol=1e-4)


def test_embeddings_that_are_all_equal_predict_the_mean():
    predictor = LogisticDifficultyPredictor()
    predictor.fit(torch.ones(4, 8), torch.tensor([0.0, 0.5, 1.0, 1.0]))
    torch.testing.assert_close(predictor.predict(torch.ones(3, 8)), torch.full((3,), 0.625))


@pytest.mark.parametrize("given", [{"components": 0}, {"l2": 0.0}])
def test_settings_that_make_no_sense(given):
    with pytest.raises(ValueError, match=f"`{next(iter(given))}` is 0"):
        LogisticDifficultyPredictor(**given)


@pytest.mark.parametrize("seed", range(4))
def test_one_failed_group_says_little_of_the_others_of_its_kind_and_eight_say_much(seed):
    """Ten kinds of twelve prompts, of which a fifth of the completions succeed; nothing was seen of the first kind."""
    rng = generator(seed)
    kinds = torch.arange(10).repeat_interleave(12)
    E = 3 * torch.randn(10, 32, generator=rng)[kinds] + torch.randn(120, 32, generator=rng)
    predictor = LogisticDifficultyPredictor()
    predictor.fit_basis(E)
    Z = predictor.project(E)
    seen = 12 + torch.randperm(108, generator=rng)[:40]
    rates = torch.binomial(torch.full((40,), 8.0), torch.full((40,), 0.2), generator=rng) / 8

    def predicted_after(failed: int) -> float:
        """For the last four prompts of the first kind, after groups of so many others have failed."""
        ids = torch.cat([seen, torch.arange(failed)])
        predictor.fit_projected(Z[ids], torch.cat([rates, torch.zeros(failed)]))
        return float(predictor.predict_projected(Z[8:12]).mean())

    before = predicted_after(0)
    assert predicted_after(1) > 0.6 * before
    assert predicted_after(8) < 0.5 * before
