"""A predictor that is fitted to the groups of a run."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.factories.groups import difficulty_problem
from trl_dataeff.difficulty.attention import AttentionDifficultyPredictor
from trl_dataeff.difficulty.logistic import LogisticDifficultyPredictor
from trl_dataeff.difficulty.online import PredictionRecord, RollingDifficulty, pearson
from trl_dataeff.difficulty.predictor import PredictorError


N = 160
E, P = difficulty_problem(N)
RATES = P.numpy()


def rolling(kind: str, **options) -> RollingDifficulty:
    if kind == "logistic":
        predictor = LogisticDifficultyPredictor(8)
    else:
        predictor = AttentionDifficultyPredictor(40, width=16)
    return RollingDifficulty(E.numpy(), predictor, **{"half_life": 4.0, "fit_every": 3, **options})


KINDS = pytest.mark.parametrize("kind", ["logistic", "attention"])


def run(difficulty: RollingDifficulty, batches: range) -> list[np.ndarray]:
    predictions = []
    for batch in batches:
        rng = np.random.default_rng(batch)
        ids = rng.choice(N, 16, replace=False)
        rates = RATES[ids].copy()
        rates[0] = math.nan
        difficulty.observe(ids, rates, batch)
        predictions.append(difficulty.refresh(batch))
    return predictions


@KINDS
def test_without_a_group_nothing_is_known(kind):
    difficulty = rolling(kind)
    difficulty.observe(np.array([3]), np.array([math.nan]), 0)
    difficulty.observe(np.array([], dtype=np.int64), np.array([]), 1)
    for predicted in (difficulty.refresh(0), difficulty.predict_with_references(np.array([], int), np.array([]), 0)):
        np.testing.assert_array_equal(predicted, np.full(N, 0.5, dtype=np.float32))
        assert predicted.dtype == np.float32


def by_hand(entries, capacity):
    """What is kept of (prompt, rate, batch), oldest first: a loop in place of the arrays."""
    kept: list[tuple[int, float, int]] = []
    for prompt, rate, batch in entries:
        if not math.isnan(rate):
            kept = [entry for entry in kept if entry[0] != prompt]
            kept.append((prompt, rate, batch))
    return kept[-capacity:]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 12), st.sampled_from([0.0, 0.5, 1.0, math.nan])), max_size=8), max_size=6
    ),
    st.integers(1, 20),
)
def test_keeps_the_newest_group_of_each_prompt(batches, capacity):
    difficulty = RollingDifficulty(torch.rand(13, 4), LogisticDifficultyPredictor(), capacity=capacity)
    for batch, groups in enumerate(batches):
        ids = np.array([prompt for prompt, _ in groups], dtype=np.int64)
        rates = np.array([rate for _, rate in groups])
        difficulty.observe(ids, rates, batch)
    expected = by_hand([(*group, batch) for batch, groups in enumerate(batches) for group in groups], capacity)
    got = list(zip(difficulty.ids.tolist(), difficulty.rates.tolist(), difficulty.batches.tolist()))
    assert got == expected


@KINDS
def test_groups_count_by_their_age_and_with_attention_no_prompt_sees_itself(kind):
    difficulty = rolling(kind, half_life=2.0, fit_every=0)
    difficulty.observe(np.arange(20), RATES[:20], 3)
    difficulty.observe(np.arange(30, 50), RATES[30:50], 7)
    ids = [*range(20), *range(30, 50)]
    weight = torch.cat([torch.full((20,), 0.125), torch.full((20,), 0.5)])
    if kind == "logistic":
        model = LogisticDifficultyPredictor(8)
        model.fit_basis(E)
        model.fit(E[ids], P[ids], weight)
        expected = model.predict(E)
    else:
        model = AttentionDifficultyPredictor(40, width=16)
        model.set_references(E[ids], P[ids], weight)
        exclude = torch.tensor([ids.index(i) if i in ids else -1 for i in range(N)])
        expected = model.attend(model.project(E), model.references, exclude).detach()
    np.testing.assert_allclose(difficulty.refresh(9), expected.numpy(), atol=1e-5)


@KINDS
def test_the_papers_way_sees_the_references_alone(kind):
    difficulty = rolling(kind, fit_every=0)
    other = rolling(kind, fit_every=0)
    run(difficulty, range(3))
    ids = np.arange(50, 90)
    got = difficulty.predict_with_references(ids, RATES[ids], 5)
    other.observe(ids, RATES[ids], 5)
    np.testing.assert_array_equal(got, other.refresh(5))
    twice = difficulty.predict_with_references(
        np.concatenate([ids[:9], ids]), np.concatenate([1 - RATES[:9], RATES[ids]]), 5
    )
    np.testing.assert_array_equal(twice, got)


def test_towers_are_fitted_when_their_time_has_come_and_prompts_are_projected_only_then(monkeypatch):
    difficulty = rolling("attention", fit_every=3)
    calls = []
    fit = difficulty.predictor.fit
    project = difficulty.predictor.project

    def noted_fit(*args, **kwargs):
        calls.append(("fit", batch))
        fit(*args, **kwargs)

    def noted_project(E):
        calls.append(("project", batch))
        return project(E)

    monkeypatch.setattr(difficulty.predictor, "fit", noted_fit)
    monkeypatch.setattr(difficulty.predictor, "project", noted_project)
    for batch in range(8):
        ids = np.arange(16 * batch, 16 * batch + 16)
        difficulty.observe(ids, RATES[ids], batch)
        if batch % 2:
            difficulty.refresh(batch)
        else:
            difficulty.predict_with_references(ids, RATES[ids], batch)
    fits = [batch for name, batch in calls if name == "fit"]
    projections = [batch for name, batch in calls if name == "project"]
    assert fits == [1, 4, 7]  # 32 groups first, then every 3 batches
    assert projections == [0, 1, 4, 7]  # once for the first prediction, and after each fit


@KINDS
def test_a_restored_run_predicts_the_same_bits(kind):
    difficulty = rolling(kind, capacity=200, fit_every=4)
    restored = rolling(kind, capacity=200, fit_every=4)
    run(difficulty, range(5))
    run(restored, range(20, 22))  # what it knew before is gone
    restored.load_state_dict(difficulty.state_dict())
    np.testing.assert_array_equal(run(restored, range(5, 9)), run(difficulty, range(5, 9)))


def test_a_logistic_predictor_of_other_runs_is_where_it_begins():
    predictor = LogisticDifficultyPredictor(8)
    predictor.fit(E, P)
    expected = predictor.predict(E).numpy()
    difficulty = RollingDifficulty(E, predictor)
    restored = rolling("logistic", half_life=20.0)
    np.testing.assert_array_equal(difficulty.refresh(0), expected)
    difficulty.observe(np.arange(4), RATES[:4], 1)
    cold = rolling("logistic")
    cold.observe(np.arange(4), RATES[:4], 1)
    assert np.corrcoef(difficulty.refresh(1), expected)[0, 1] > 0.9
    assert np.corrcoef(cold.refresh(1), expected)[0, 1] < 0.9
    assert np.corrcoef(difficulty.refresh(2), expected)[0, 1] > 0.9  # and stays where it began
    restored.load_state_dict(difficulty.state_dict())
    np.testing.assert_array_equal(run(restored, range(2, 4)), run(difficulty, range(2, 4)))


def test_embeddings_of_another_width_are_rejected():
    with pytest.raises(PredictorError, match="width 41, and these have width 40"):
        RollingDifficulty(E, AttentionDifficultyPredictor(41, width=8))


def test_attention_starts_without_the_references_of_another_run():
    predictor = AttentionDifficultyPredictor(40, width=16)
    predictor.fit(E, P, epochs=1)
    difficulty = RollingDifficulty(E, predictor)
    np.testing.assert_array_equal(difficulty.refresh(0), np.full(N, 0.5, np.float32))
    difficulty.observe(np.arange(20), RATES[:20], 1)
    assert (difficulty.refresh(1) != 0.5).any()
    difficulty.observe(np.array([3]), RATES[3:4], 1)
    np.testing.assert_array_equal(difficulty.refresh(10**5), np.full(N, 0.5, np.float32))


@given(st.lists(st.tuples(st.floats(0, 1, width=32), st.floats(0, 1, width=32)), min_size=2, max_size=60))
def test_pearson_agrees_with_numpy(pairs):
    x, y = np.array(pairs).T
    if x.std() > 1e-6 and y.std() > 1e-6:
        assert pearson(x, y) == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-6)
        unknown = np.append(x, math.nan)
        assert pearson(unknown, np.append(y, 0.5)) == pearson(x, y)
    assert math.isnan(pearson(np.full(len(x), 0.5), y))


def test_the_record_keeps_the_newest():
    record = PredictionRecord(capacity=9)
    rng = np.random.default_rng(0)
    predicted = rng.random(30).astype(np.float32)
    observed = rng.random(30).astype(np.float32)
    predicted[25] = np.nan
    for start in range(0, 30, 6):
        record.add(predicted[start : start + 6], observed[start : start + 6])
    newest = [i for i in range(30) if i != 25][-9:]
    assert record.metrics() == {"predictor/pearson": pytest.approx(pearson(predicted[newest], observed[newest]))}
    assert PredictionRecord().metrics() == {}
