"""Faults of a third party's selector are named with its class, before training where that is possible."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.factories import run
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer, DotsSelector, Selector


class Mine(Selector):
    """Uniform draws; `faults` replaces methods."""

    def __init__(self, **faults):
        self.__dict__.update(faults)

    def propose(self, n, rng):
        return torch.randperm(self.context.num_prompts, generator=rng)[:n].numpy()


def fail():
    raise RuntimeError("Can't call numpy()")


def train(tmp_path, selector, **fields):
    fields = {"selection": "auto", "max_steps": 2, "trainer": {"selector": selector}, **fields}
    return run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, tmp_path, **fields)


@pytest.mark.parametrize(
    ("state_dict", "message"),
    [
        (fail, r"Mine.state_dict\(\) failed \(RuntimeError: Can't call numpy"),
        (lambda: {"n": 5}, r"Mine.state_dict\(\) returned \{'n': 5\}; it must return numeric NumPy arrays by name"),
        (lambda: {"n": np.array(["a"])}, r"Mine.state_dict\(\) returned"),
        (lambda: None, r"Mine.state_dict\(\) returned None"),
    ],
)
def test_a_state_that_cannot_be_saved_is_found_before_training(tmp_path, state_dict, message):
    steps = []
    with pytest.raises(TypeError, match=message):
        train(tmp_path, Mine(state_dict=state_dict), rewards=lambda completions, **kwargs: steps.append(1))
    assert not steps


@pytest.mark.parametrize("predicted", [None, np.zeros(24), ["a", "b"], np.full((2, 1), 0.5)], ids=str)
def test_predictions_of_another_shape_are_an_error(tmp_path, predicted):
    with pytest.raises(
        ValueError, match=r"Mine.predict\(\) of 2 prompts returned shape .*one success rate per prompt"
    ):
        train(tmp_path, Mine(predict=lambda ids: predicted))


@pytest.mark.parametrize("value", [None, "a", np.zeros(3)], ids=str)
def test_metrics_that_are_not_numbers_are_an_error(tmp_path, value):
    with pytest.raises(TypeError, match=r"Mine.metrics\(\)\['a'\] is .*; it must be a number"):
        train(tmp_path, Mine(metrics=lambda: {"a": value}))


@pytest.mark.parametrize("error", [KeyError("n"), RuntimeError("size mismatch")], ids=repr)
def test_a_state_that_does_not_fit_is_said_in_a_sentence(tmp_path, error):
    def load(state):
        raise error

    train(tmp_path, Mine(), save_strategy="steps", save_steps=1)
    trainer = train(tmp_path, Mine(load_state_dict=load), train=False)
    with pytest.raises(ValueError, match="selection state does not fit the Mine of this run"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_a_predictor_of_another_type():
    with pytest.raises(ValueError, match="`predictor` is a tuple; it takes 'logistic', 'attention', a path, or"):
        DotsSelector(predictor=(1, 2))
