"""A run that is resumed goes on as if it had never stopped: to the last bit, after whatever step it was stopped."""

import json
from unittest.mock import Mock

import pandas as pd
import pytest

from tests.factories.comparison import assert_same_end, groups_since, history
from tests.factories.configurations import CONFIGURATIONS, STEPS, make_trainer, train
from tests.factories.training import before_reward


# The default run resumes each configuration after one step: in a generation batch, between two, in the second epoch
QUICK_STEPS = [5, 7, 9, 5, 3, 9, 3, 6, 6, 5, 7, 5, 6, 5, 6, 7, 5, 7, 5, 5, 7, 5, 7, 5, 5, 5]
QUICK = dict(zip(CONFIGURATIONS, QUICK_STEPS, strict=True))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """By configuration, a run that was never stopped, and its folder."""
    runs = {}

    def get(name):
        if name not in runs:
            folder = tmp_path_factory.mktemp("whole")
            runs[name] = (train(folder, name), folder)
        return runs[name]

    return get


@pytest.mark.parametrize(
    ("name", "step"),
    [
        pytest.param(name, step, marks=() if step == QUICK[name] else pytest.mark.slow)
        for name in CONFIGURATIONS
        for step in range(1, STEPS)
    ],
)
def test_resume_is_exact(name, step, whole, tmp_path):
    trainer, folder = whole(name)
    checkpoint = str(folder / f"checkpoint-{step}")
    resumed = train(tmp_path, name, save_strategy="no", resume=checkpoint, log_completions=True)
    assert resumed.state.global_step == STEPS
    assert all(len(pd.read_parquet(path)) for path in (tmp_path / "completions").iterdir())
    assert history(resumed.state.log_history) == history(trainer.state.log_history)
    half_used = json.loads((folder / f"checkpoint-{step}" / "dataeff" / "state.json").read_text())["half_used"]
    if (tmp_path / "dataeff" / "groups.parquet").exists():
        pd.testing.assert_frame_equal(groups_since(tmp_path, step), groups_since(folder, step))
    else:
        assert half_used, "no group was rolled out"
    assert_same_end(resumed, trainer)


def test_resume_in_the_trainer_that_failed_is_exact(tmp_path, caplog):
    """As in a notebook. The policy in memory is not the one that embedded the prompts."""
    options = {"save_strategy": "steps", "save_steps": 5}
    whole = train(tmp_path / "whole", "dots", **options)
    failed = make_trainer(tmp_path / "failed", "dots", **options)
    before_reward(failed, 7, Mock(side_effect=RuntimeError("the grader is away")))
    with pytest.raises(RuntimeError, match="the grader is away"):
        failed.train()
    failed.train(resume_from_checkpoint=True)
    assert "embeddings differ" not in caplog.text
    assert history(failed.state.log_history) == history(whole.state.log_history)
    assert_same_end(failed, whole)


def test_the_save_points_are_what_they_are_said_to_be(whole):
    """Some are within a generation batch, some have leftover groups, some are in a later epoch or between two logs."""
    states = {}
    epochs = []
    for name, step in QUICK.items():
        _, folder = whole(name)
        checkpoint = folder / f"checkpoint-{step}"
        states[name] = json.loads((checkpoint / "dataeff" / "state.json").read_text())
        epochs.append(json.loads((checkpoint / "trainer_state.json").read_text())["epoch"])
    num_half_used = sum(state["half_used"] for state in states.values())
    assert 3 <= num_half_used <= len(states) - 3
    assert states["dynamic, leftover groups"]["holds_rollouts"]
    assert sum(epoch > 1 for epoch in epochs) >= 2
    assert states["several steps to a log"]["loop"]["metrics"]


def test_a_longer_run_and_other_logging_are_no_mismatch(whole, tmp_path):
    _, folder = whole("dynamic")
    options = {"save_strategy": "no", "max_steps": STEPS + 3, "logging_steps": 4, "max_rollout_rounds": 7}
    longer = train(tmp_path, resume=str(folder / f"checkpoint-{STEPS}"), **options)
    assert longer.state.global_step == STEPS + 3
