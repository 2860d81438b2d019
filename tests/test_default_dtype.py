"""`torch.set_default_dtype` changes neither the precision of the update nor what selection predicts."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from trl import GRPOTrainer

from tests.factories.comparison import history
from tests.factories.groups import difficulty_problem
from tests.factories.tiny import run, tiny_model
from tests.factories.training import mixed_reward, partly_learnable_reward
from trl_dataeff import DataEfficientGRPOTrainer
from trl_dataeff.difficulty.attention import AttentionDifficultyPredictor
from trl_dataeff.difficulty.logistic import LogisticDifficultyPredictor


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    former = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(former)


DTYPES = [torch.bfloat16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "make",
    [LogisticDifficultyPredictor, lambda: AttentionDifficultyPredictor(40, width=16)],
    ids=["logistic", "attention"],
)
def test_predictions_are_the_same(make, dtype):
    E, p = difficulty_problem(60)

    def predicted() -> np.ndarray:
        predictor = make()
        predictor.fit(E, p)
        return predictor.predict(E).numpy()

    expected = predicted()
    with default_dtype(dtype):
        np.testing.assert_array_equal(predicted(), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo"])
def test_an_update_without_zero_rows_is_trls(tmp_path, loss_type, dtype):
    """A factor on the gradient that is rounded to bfloat16 changes it by up to 0.4 %."""
    fields = {"per_device_train_batch_size": 21, "num_generations": 3, "max_steps": 1, "max_grad_norm": 0.0}
    fields |= {"optim": "sgd", "learning_rate": 0.5, "loss_type": loss_type, "rewards": partly_learnable_reward}
    changes = []
    for trainer_class, own in ((GRPOTrainer, {}), (DataEfficientGRPOTrainer, {"compact_update": True})):
        model = tiny_model()
        before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
        with default_dtype(dtype):
            run(tmp_path, trainer_class, **fields, **own, trainer={"model": model})
        changes.append(torch.cat([p.detach().flatten() for p in model.parameters()]) - before)
    plain, ours = changes
    assert torch.linalg.vector_norm(plain) > 1e-3
    assert torch.linalg.vector_norm(ours - plain) < 2e-4 * torch.linalg.vector_norm(plain)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("predictor", ["logistic", "attention"])
def test_training_with_selection_and_replay_ends_and_resumes(tmp_path, predictor, dtype):
    options = {
        "selection": "dots",
        "selector_args": {"predictor": predictor},
        "replay": "fill",
        "compact_update": True,
    }
    options |= {"rewards": mixed_reward, "save_strategy": "steps", "save_steps": 3}
    ends = []
    for resume in (None, tmp_path / "checkpoint-3"):
        model = tiny_model()
        with default_dtype(dtype):
            trainer = run(tmp_path, **options, max_steps=6, resume=resume, trainer={"model": model})
        ends.append(history(trainer.state.log_history)[-1])
    assert ends[0] == ends[1]
