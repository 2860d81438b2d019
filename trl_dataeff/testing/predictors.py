"""
Checks of the contract of [`~trl_dataeff.difficulty.base.DifficultyPredictor`]. Each raises an `AssertionError` that says what
is wrong.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load, save

from trl_dataeff.difficulty.base import DifficultyPredictor, PredictorError
from trl_dataeff.difficulty.loading import is_predictor, load_predictor
from trl_dataeff.difficulty.online import RollingDifficulty
from trl_dataeff.difficulty.quality import pearson
from trl_dataeff.testing.data import PROMPTS, Check, Make, embeddings, random_states


def _labels(size: int = PROMPTS) -> torch.Tensor:
    """Success rates that rise with the first column of [`embeddings`], float32 `(size,)`."""
    return torch.sigmoid(2 * torch.from_numpy(embeddings(size)[:, 0].astype(np.float32)))


def _fitted(make: Make, p: torch.Tensor | None = None, weight: torch.Tensor | None = None) -> DifficultyPredictor:
    predictor: DifficultyPredictor = make()
    predictor.fit(embeddings(), _labels() if p is None else p, weight)
    return predictor


def _assert_rates(p: torch.Tensor, size: int) -> None:
    assert p.shape == (size,), f"predictions of {size} prompts have shape {tuple(p.shape)}"
    assert p.dtype == torch.float32, f"predictions are {p.dtype}; they must be float32"
    assert bool(((p >= 0) & (p <= 1)).all()), f"predictions must lie in [0, 1]; they reach from {p.min()} to {p.max()}"


def check_predictions_follow_success_rates(make: Make) -> None:
    """Predictions are success rates, rise with an easily seen difficulty, and come in two parts."""
    predictor = _fitted(make)
    assert predictor.fitted
    p = predictor.predict(embeddings())
    _assert_rates(p, PROMPTS)
    correlation = pearson(p.numpy(), _labels().numpy())
    assert correlation > 0.5, f"predictions of the prompts it was fitted to correlate by {correlation:.2f}, not by 0.5"
    parts = predictor.predict_projected(predictor.project(embeddings()))
    assert torch.equal(p, parts), "predict(E) must equal predict_projected(project(E))"


def check_fits_repeat(make: Make) -> None:
    """Two predictors with the same data predict the same, and no global random state changes."""
    before = random_states()
    first, second = _fitted(make).predict(embeddings()), _fitted(make).predict(embeddings())
    assert torch.equal(first, second), "two fits to the same data predict differently"
    assert random_states() == before, "a global random state was changed"


def check_unknown_and_weightless_groups_do_not_count(make: Make) -> None:
    """Groups with a NaN success rate, or with weight 0, change nothing."""
    p, weight = _labels(), torch.ones(PROMPTS)
    p[::5], weight[::5] = float("nan"), 1.0
    unknown = _fitted(make, p, weight).predict(embeddings())
    p[::5], weight[::5] = 1.0, 0.0
    weightless = _fitted(make, p, weight).predict(embeddings())
    assert torch.allclose(unknown, weightless, atol=1e-5), "NaN success rates and weights of 0 must be left out alike"


def check_wrong_input_is_an_error(make: Make) -> None:
    """Another width, another number of labels, and rates out of range raise `PredictorError`."""
    E, p = embeddings(), _labels()
    for arguments in ((E, p[:-1]), (E, p + 1.0), (E, p, -torch.ones(PROMPTS))):
        _assert_error("fit", make().fit, *arguments)
    predictor = _fitted(make)
    if predictor.embedding_width:
        _assert_error("predict", predictor.predict, E[:, :-1])


def _assert_error(name: str, method: Callable[..., Any], *arguments: Any) -> None:
    try:
        method(*arguments)
    except PredictorError:
        return
    raise AssertionError(f"{name}() must raise PredictorError for shapes that disagree and values out of range")


def check_settings_and_tensors_restore_it(make: Make) -> None:
    """`type(p)(**p.settings())` with `p.tensors()` predicts the same; so does the folder of a registered predictor."""
    predictor = _fitted(make)
    expected = predictor.predict(embeddings())
    copies = [type(predictor)(**predictor.settings())]
    copies[0].load_tensors({name: value.clone() for name, value in predictor.tensors().items()})
    if is_predictor(predictor.name):
        with tempfile.TemporaryDirectory() as folder:
            predictor.save(Path(folder))
            copies.append(load_predictor(folder))
    for restored in copies:
        assert torch.equal(restored.predict(embeddings()), expected), "a restored predictor predicts differently"


def check_it_runs_online(make: Make) -> None:
    """In a run: predictions of all prompts from recent groups, and the same ones after the state was restored."""
    E, rng = embeddings(), np.random.default_rng(0)
    first = RollingDifficulty(E, make(), capacity=48, fit_every=2)
    p = _labels().numpy()
    for batch in range(1, 7):
        ids = rng.choice(PROMPTS, 16, replace=False)
        first.observe(ids, p[ids], batch)
        predicted = first.refresh(batch)
        _assert_rates(torch.from_numpy(predicted), PROMPTS)
        if batch == 3:
            state = load(save({k: np.ascontiguousarray(v) for k, v in first.state_dict().items()}))
            second = RollingDifficulty(E, make(), capacity=48, fit_every=2)
            second.load_state_dict(state)
        elif batch > 3:
            second.observe(ids, p[ids], batch)
            np.testing.assert_array_equal(
                second.refresh(batch), predicted, "predictions differ after the state is restored"
            )


PREDICTOR_CHECKS: list[Check] = [
    check_predictions_follow_success_rates,
    check_fits_repeat,
    check_unknown_and_weightless_groups_do_not_count,
    check_wrong_input_is_an_error,
    check_settings_and_tensors_restore_it,
    check_it_runs_online,
]
