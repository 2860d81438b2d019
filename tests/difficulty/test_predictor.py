"""Predictors against calculations of their own: torch's optimiser and SVD, and the published architecture, literally."""

from __future__ import annotations

import json
import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trl_dataeff.difficulty.loading import (
    AttentionDifficultyPredictor,
    LogisticDifficultyPredictor,
    PredictorError,
    load_predictor,
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def problem(n: int, h: int = 40, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings of low rank with a mean of their own, `(n, h)`, and success rates of 8 completions, `(n,)`."""
    rng = generator(seed)
    latent = torch.randn(n, 6, generator=rng) * torch.linspace(2, 0.5, 6)
    E = latent @ torch.randn(6, h, generator=generator(1)) + 5 * torch.randn(h, generator=generator(2))
    E = E + 0.05 * torch.randn(n, h, generator=rng)
    chance = torch.sigmoid(1.5 * latent[:, 0] - latent[:, 1])
    return E, torch.binomial(torch.full((n,), 8.0), chance, generator=rng) / 8


def fitted(cls, E, p):
    predictor = cls() if cls is LogisticDifficultyPredictor else cls(E.shape[1], width=32)
    predictor.fit(E, p)
    return predictor


BOTH = pytest.mark.parametrize("cls", [LogisticDifficultyPredictor, AttentionDifficultyPredictor])


# ---------------------------------------------------------------- both


@BOTH
def test_predicts_prompts_that_it_has_not_seen(cls):
    E, p = problem(400)
    predicted = fitted(cls, E[:200], p[:200]).predict(E[200:])
    assert predicted.dtype == torch.float32
    assert predicted.shape == (200,)
    assert np.corrcoef(predicted, p[200:])[0, 1] > 0.75


@BOTH
def test_predict_is_project_and_the_rest(cls):
    E, p = problem(60)
    predictor = fitted(cls, E, p)
    assert torch.equal(predictor.predict(E), predictor.predict_projected(predictor.project(E)))


@BOTH
def test_arrays_memory_maps_and_half_precision_give_the_same(cls, tmp_path):
    E, p = problem(9000 if cls is LogisticDifficultyPredictor else 4200, h=12)
    E = E.half()
    predictor = fitted(cls, E[:100], p[:100])
    expected = predictor.predict(E)
    array = np.memmap(tmp_path / "e", np.float16, "w+", shape=tuple(E.shape))
    array[:] = E.numpy()
    array.flush()
    mapped = np.memmap(tmp_path / "e", np.float16, "r", shape=tuple(E.shape))
    for same in (mapped, E.numpy(), E.float(), E.double().numpy()):
        assert torch.equal(predictor.predict(same), expected)
    assert (predictor.predict(E.bfloat16()) - expected).abs().max() < 0.3


@BOTH
def test_saved_and_loaded_it_predicts_the_same_bits(cls, tmp_path):
    E, p = problem(50)
    predictor = fitted(cls, E, p)
    predictor.embedding = "some/model"
    predictor.save(tmp_path / "new" / "folder")
    loaded = cls.load(tmp_path / "new" / "folder")
    assert type(loaded) is cls
    assert loaded.embedding == "some/model"
    assert torch.equal(loaded.predict(E), predictor.predict(E))
    loaded.fit(E, 1 - p)
    predictor.fit(E, 1 - p)
    assert torch.equal(loaded.predict(E), predictor.predict(E))
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == [
        "config.json",
        "predictor.safetensors",
    ]


@BOTH
def test_nan_labels_and_zero_weights_are_left_out(cls):
    E, p = problem(60)
    known = fitted(cls, E[:40], p[:40])
    weight = torch.ones(60)
    weight[50:] = 0
    marked = p.clone()
    marked[40:50] = float("nan")
    other = LogisticDifficultyPredictor() if cls is LogisticDifficultyPredictor else cls(E.shape[1], width=32)
    if cls is LogisticDifficultyPredictor:
        known.fit_basis(E)
        known.fit(E[:40], p[:40])
    other.fit(E, marked, weight)
    torch.testing.assert_close(other.predict(E), known.predict(E), atol=1e-5, rtol=0)


@BOTH
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda E, p: (E, p * 2 + 0.5), "Success rates lie in"),
        (lambda E, p: (E, p[:-1]), "each embedding takes one of each"),
        (lambda E, p: (E.flatten(), p), "one row per prompt"),
        (lambda E, p: (torch.cat([E, E], dim=1), p), "width 40, and these have width 80"),
        (lambda E, p: (E * torch.tensor(float("nan")), p), "not finite"),
    ],
)
def test_wrong_groups_are_refused(cls, change, says):
    E, p = problem(50)
    predictor = fitted(cls, E, p)
    with pytest.raises(PredictorError, match=says):
        predictor.fit(*change(E, p))


@BOTH
def test_negative_weights_are_refused(cls):
    E, p = problem(50)
    with pytest.raises(PredictorError, match="not negative"):
        fitted(cls, E, p).fit(E, p, torch.full((50,), -1.0))


@BOTH
def test_damaged_folders_are_refused(cls, tmp_path):
    E, p = problem(50)
    fitted(cls, E, p).save(tmp_path)
    config, tensors = tmp_path / "config.json", tmp_path / "predictor.safetensors"
    whole, text = tensors.read_bytes(), config.read_text()
    tensors.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(PredictorError, match="is damaged"):
        load_predictor(tmp_path)
    tensors.write_bytes(whole)
    for broken, says in [
        (text[:20], "is damaged"),
        (json.dumps(json.loads(text) | {"class": "Oracle"}), "holds a Oracle of format 1"),
        (json.dumps(json.loads(text) | {"format": 2}), "of format 2"),
        (json.dumps(json.loads(text) | {"settings": {"wrong": 1}}), "is damaged"),
    ]:
        config.write_text(broken)
        with pytest.raises(PredictorError, match=says):
            load_predictor(tmp_path)
    config.write_text(text)
    other = {LogisticDifficultyPredictor, AttentionDifficultyPredictor} - {cls}
    with pytest.raises(PredictorError, match=f"holds a {cls.__name__}"):
        other.pop().load(tmp_path)


def test_no_predictor_there(tmp_path):
    with pytest.raises(PredictorError, match="There is no predictor at"):
        load_predictor(tmp_path / "nothing")


@BOTH
def test_one_that_was_not_fitted_says_so(cls):
    E, _ = problem(5)
    predictor = LogisticDifficultyPredictor() if cls is LogisticDifficultyPredictor else cls(40, width=8)
    assert not predictor.fitted
    with pytest.raises(PredictorError, match="call `fit`"):
        predictor.predict(E)


# ---------------------------------------------------------------- logistic


@pytest.mark.parametrize("n", [300, 7])
def test_basis_is_that_of_the_singular_value_decomposition(n):
    E = torch.randn(n, 12, generator=generator(), dtype=torch.float64) * torch.linspace(3, 1, 12) + 100
    predictor = LogisticDifficultyPredictor(components=5)
    predictor.fit_basis(E.float())
    centred = E - E.mean(dim=0)
    U, S, _ = torch.linalg.svd(centred, full_matrices=False)
    expected = (U * S / (S[0] / math.sqrt(n)))[:, :5]
    got = predictor.project(E.float()).double()
    sign = torch.sign((got * expected).sum(dim=0))
    torch.testing.assert_close(got, expected * sign, atol=2e-4, rtol=0)
    assert got.var(dim=0, correction=0)[0] == pytest.approx(1, abs=1e-4)


def test_signs_of_the_basis_are_settled():
    E = torch.randn(9000, 12, generator=generator()) * torch.linspace(3, 1, 12)
    one, two = LogisticDifficultyPredictor(9), LogisticDifficultyPredictor(9)
    one.fit_basis(E)
    two.fit_basis(E.flip(0))
    torch.testing.assert_close(one.basis, two.basis, atol=1e-5, rtol=0)
    assert torch.equal(one.basis.max(dim=0).values, one.basis.abs().max(dim=0).values)


def test_large_pools_are_sampled_evenly():
    E = torch.randn(50_000, 4, generator=generator()) * torch.tensor([3.0, 2.0, 1.0, 0.5])
    E[25_000:] += 10  # a sample of the first rows alone would miss this
    predictor = LogisticDifficultyPredictor(2)
    predictor.fit_basis(E)
    assert predictor.mean.mean() == pytest.approx(5, abs=0.1)


def minimum(X: torch.Tensor, p: torch.Tensor, weight: torch.Tensor, l2: float) -> torch.Tensor:
    """Predictions at the minimum of the loss, found by L-BFGS from zero."""
    X, p, weight = X.double(), p.double(), weight.double()
    theta = torch.zeros(X.shape[1] + 1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([theta], max_iter=2000, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        scores = X @ theta[:-1] + theta[-1]
        loss = nn.functional.binary_cross_entropy_with_logits(scores, p, weight, reduction="sum")
        loss = loss + l2 / 2 * (theta[:-1] ** 2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return torch.sigmoid(X @ theta[:-1] + theta[-1]).detach().float()


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
    torch.testing.assert_close(predictor.predict_projected(X), minimum(X, p, weight, l2), atol=2e-5, rtol=0)


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


def test_an_anchored_fit_starts_from_what_it_knew():
    E, p = problem(400)
    predictor = fitted(LogisticDifficultyPredictor, E[:300], p[:300])
    before = predictor.predict(E[300:])
    cold = LogisticDifficultyPredictor()
    cold.fit_basis(E[:300])
    cold.fit(E[300:304], p[300:304])
    predictor.anchor()
    predictor.fit(E[300:304], p[300:304])
    after = predictor.predict(E[300:])
    assert np.corrcoef(before, after)[0, 1] > 0.9
    assert np.corrcoef(cold.predict(E[304:]), p[304:])[0, 1] < np.corrcoef(after[4:], p[304:])[0, 1]


def test_fitting_takes_milliseconds():
    X = torch.randn(2048, 32, generator=generator()) * torch.linspace(1, 0.01, 32)
    p = torch.binomial(torch.full((2048,), 8.0), torch.sigmoid(4 * X[:, 0]), generator=generator()) / 8
    predictor, seconds = LogisticDifficultyPredictor(), []
    for _ in range(5):
        began = time.perf_counter()
        predictor.fit_projected(X, p)
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.1


@pytest.mark.parametrize("given", [{"components": 0}, {"l2": 0.0}])
def test_settings_that_make_no_sense(given):
    with pytest.raises(PredictorError, match="are needed"):
        LogisticDifficultyPredictor(**given)
