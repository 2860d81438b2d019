"""What docs/script.md says of epochs and steps: their number is TRL's, the prompts in them are the selector's."""

import pandas as pd
import pytest
from trl import GRPOConfig, GRPOTrainer

from tests.factories import DYNAMIC, FILL, mixed_reward, run
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer


N = 24  # prompts of the dataset that the factories make, two for each step
EPOCHS = {"num_train_epochs": 2, "max_steps": -1, "rewards": mixed_reward}


@pytest.fixture(scope="module")
def of_trl(tmp_path_factory):
    return run(GRPOTrainer, GRPOConfig, tmp_path_factory.mktemp("trl"), **EPOCHS).state


def rolled_out(tmp_path, **fields):
    """The state of a run, and the prompts that it generated for, in order."""
    trainer = run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, tmp_path, **EPOCHS, **fields)
    return trainer.state, pd.read_parquet(tmp_path / "dataeff" / "groups.parquet")["prompt_id"].tolist()


@pytest.mark.parametrize(
    ("fields", "passes"),
    [
        ({"selection": "auto", **FILL}, False),
        ({"selection": "greso"}, False),
        (DYNAMIC, False),
        ({}, True),
        (FILL, True),
    ],
    ids=["defaults", "greso", "dynamic sampling", "off", "uniform, filled batches"],
)
def test_epochs_decide_the_number_of_steps_as_in_trl_and_uniform_selection_alone_takes_a_pass_in_each(
    tmp_path, of_trl, fields, passes
):
    state, prompts = rolled_out(tmp_path, **fields)
    assert (state.global_step, state.epoch) == (of_trl.global_step, of_trl.epoch) == (N, 2.0)
    assert (sorted(prompts[:N]) == sorted(prompts[N:]) == [*range(N)]) == passes


def test_with_half_of_a_batch_replayed_a_pass_takes_two_epochs(tmp_path):
    _, prompts = rolled_out(tmp_path, replay="share")
    assert N <= len(prompts) < 1.5 * N
    assert sorted(prompts[:N]) == [*range(N)]
