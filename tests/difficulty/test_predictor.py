"""What every predictor does: fit, predict, save, load, and reject wrong input."""

import json

import numpy as np
import pytest
import torch

from tests.factories.groups import difficulty_problem
from trl_dataeff.difficulty import load_predictor, make_predictor, save_predictor
from trl_dataeff.difficulty.attention import AttentionDifficultyPredictor
from trl_dataeff.difficulty.logistic import LogisticDifficultyPredictor
from trl_dataeff.difficulty.predictor import PredictorError


def make(cls, width: int = 40):
    if cls is LogisticDifficultyPredictor:
        return LogisticDifficultyPredictor()
    return AttentionDifficultyPredictor(width, width=32)


def fitted(cls, E, p):
    predictor = make(cls, E.shape[1])
    predictor.fit(E, p)
    return predictor


BOTH = pytest.mark.parametrize("cls", [LogisticDifficultyPredictor, AttentionDifficultyPredictor])


@BOTH
def test_predicts_prompts_that_it_has_not_seen(cls):
    E, p = difficulty_problem(400)
    with pytest.raises(PredictorError, match="`fit`"):
        make(cls).predict(E)
    predicted = fitted(cls, E[:200], p[:200]).predict(E[200:])
    assert predicted.dtype == torch.float32
    assert predicted.shape == (200,)
    assert np.corrcoef(predicted, p[200:])[0, 1] > 0.75


@BOTH
def test_arrays_memory_maps_and_half_precision_give_the_same(cls, tmp_path):
    E, p = difficulty_problem(9000 if cls is LogisticDifficultyPredictor else 4200, h=12)
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
    E, p = difficulty_problem(50)
    predictor = fitted(cls, E, p)
    save_predictor(predictor, tmp_path / "new" / "folder", "some/model")
    loaded = load_predictor(tmp_path / "new" / "folder")
    assert type(loaded) is cls
    assert json.loads((tmp_path / "new" / "folder" / "config.json").read_text())["embedding"] == "some/model"
    assert torch.equal(loaded.predict(E), predictor.predict(E))
    loaded.fit(E, 1 - p)
    predictor.fit(E, 1 - p)
    assert torch.equal(loaded.predict(E), predictor.predict(E))


@BOTH
def test_nan_labels_and_zero_weights_are_left_out(cls):
    E, p = difficulty_problem(60)
    known = fitted(cls, E[:40], p[:40])
    weight = torch.ones(60)
    weight[50:] = 0
    marked = p.clone()
    marked[40:50] = float("nan")
    other = make(cls)
    if cls is LogisticDifficultyPredictor:
        known.fit_basis(E)
        known.fit(E[:40], p[:40])
    other.fit(E, marked, weight)
    torch.testing.assert_close(other.predict(E), known.predict(E), atol=1e-5, rtol=0)


@BOTH
@pytest.mark.parametrize(
    "change",
    [
        lambda E, p: (E, p * 2 + 0.5),
        lambda E, p: (E, p[:-1]),
        lambda E, p: (E.flatten(), p),
        lambda E, p: (torch.cat([E, E], dim=1), p),
        lambda E, p: (E, p, -torch.ones(50)),
    ],
    ids=["rates", "lengths", "shape", "width", "weights"],
)
def test_wrong_groups_are_rejected(cls, change):
    E, p = difficulty_problem(50)
    predictor = fitted(cls, E, p)
    with pytest.raises(PredictorError):
        predictor.fit(*change(E, p))


@BOTH
def test_corrupt_folders_are_rejected(cls, tmp_path):
    E, p = difficulty_problem(50)
    save_predictor(fitted(cls, E, p), tmp_path)
    config = tmp_path / "config.json"
    tensors = tmp_path / "predictor.safetensors"
    text = config.read_text()
    whole = tensors.read_bytes()
    broken_texts = [text[:20]]
    for change in ({"predictor": "oracle"}, {"format": 99}, {"settings": {"wrong": 1}}):
        broken_texts.append(json.dumps(json.loads(text) | change))
    for broken in broken_texts:
        config.write_text(broken)
        with pytest.raises(PredictorError, match="loaded"):
            load_predictor(tmp_path)
    config.write_text(text)
    tensors.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(PredictorError, match="loaded"):
        load_predictor(tmp_path)


def test_predictors_are_made_by_name_and_by_path(tmp_path):
    logistic, new = make_predictor("logistic", 40, 3, {"components": 5})
    assert (type(logistic), logistic.components, new) == (LogisticDifficultyPredictor, 5, True)
    attention, new = make_predictor("attention", 40, 3, {"width": 8})
    E, p = difficulty_problem(50)
    assert torch.equal(attention.project(E), AttentionDifficultyPredictor(40, width=8, seed=3).project(E))
    saved = fitted(LogisticDifficultyPredictor, E, p)
    save_predictor(saved, tmp_path / "saved")
    loaded, new = make_predictor(str(tmp_path / "saved"), 40)
    assert torch.equal(loaded.predict(E), saved.predict(E))
    assert not new
    with pytest.raises(PredictorError, match="l2"):
        make_predictor(str(tmp_path / "saved"), arguments={"l2": 1.0})


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("some/folder", None, "'some/folder'"),
        ("logistic", {"ridge": 2.0}, "`ridge`"),
        ("attention", {"embedding_width": 30}, "`embedding_width`"),
        (LogisticDifficultyPredictor(), {"l2": 1.0}, "no arguments; got l2"),
    ],
)
def test_wrong_names_and_arguments(name, arguments, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PredictorError, match=says):
        make_predictor(name, arguments=arguments)
