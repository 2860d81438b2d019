"""Rewards that are most likely a mistake: warned of once, or an error."""

import re

import numpy as np
import pytest

from tests.factories import (
    even_length_reward,
    make_trainer,
    messages,
    plain_dataset,
    run,
)
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer
from trl_dataeff.rollouts.classification import RewardChecks


def test_a_row_that_cannot_be_tokenized_is_named(tmp_path):
    def transform(rows):
        return {"prompt": [p if not p.startswith("05") else 7 for p in rows["prompt"]]}

    dataset = plain_dataset(8).with_transform(transform)
    with pytest.raises((TypeError, ValueError)) as raised:
        make_trainer(tmp_path, "off", trainer={"train_dataset": dataset}, max_steps=8).train()
    assert any(re.search(r"dataset's rows \[.*\b5\b.*\]", note) for note in raised.value.__notes__)


def silent_reward(completions, **kwargs):
    return [None] * len(completions)


def test_rewards_that_score_nothing(tmp_path, caplog_transformers):
    fields = {"rewards": silent_reward, "per_device_train_batch_size": 64, "max_steps": 10}
    run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, tmp_path, **fields)  # TRL's matter when everything is off
    assert len(messages(caplog_transformers, "`silent_reward` returned only None or NaN for the first 64 comp")) == 1
    message = r"No reward function gave a score for any of the first (5|6)\d\d completions: `silent_reward` returned"
    with pytest.raises(ValueError, match=message):
        run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, tmp_path, **fields, selection="greso")


def reward_array(*scored: bool) -> np.ndarray:
    """Rewards of 2 groups of 3 completions, `(2, 3, F)`: of each function all or none."""
    return np.stack([np.full((2, 3), 0.5 if given else np.nan) for given in scored], axis=-1)


@pytest.mark.parametrize("is_main_process", [True, False])
def test_completions_without_any_score_end_the_run_in_all_processes(caplog_transformers, is_main_process):
    checks = RewardChecks(["a", "b"], most_unscored=18, is_main_process=is_main_process)
    checks.check(reward_array(False, False))
    checks.check(reward_array(False, False))
    with pytest.raises(ValueError, match="any of the first 18 completions: `a`, `b` returned only None or NaN"):
        checks.check(reward_array(False, False))
    assert len(messages(caplog_transformers)) == is_main_process


def test_one_score_is_enough(caplog_transformers):
    checks = RewardChecks(["a", "b"], most_unscored=12)
    checks.check(reward_array(True, False))
    for _ in range(10):
        checks.check(reward_array(False, False))
    checks.check(reward_array(False, True))
    (message,) = messages(caplog_transformers, "returned only None or NaN")
    assert message.startswith("`b` returned only None or NaN for the first 6 completions")


def test_a_resumed_run_knows_that_there_were_scores(tmp_path, monkeypatch):
    monkeypatch.setattr("trl_dataeff.collector.collector.MOST_UNSCORED", 32)
    steps = []

    def failing_judge(completion_ids, trainer_state, **kwargs):
        steps.append(trainer_state.global_step)
        return even_length_reward(completion_ids) if trainer_state.global_step < 2 else [None] * len(completion_ids)

    options = {"rewards": failing_judge, "selection": "greso", "save_strategy": "steps", "save_steps": 2}
    run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, tmp_path, **options, max_steps=2)
    resumed = run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, tmp_path, **options, max_steps=10, train=False)
    resumed.train(resume_from_checkpoint=True)
    assert steps == list(range(10))


def test_a_run_without_any_gradient_is_warned_of_once(tmp_path, caplog_transformers):
    def reward(completions, **kwargs):
        return [0.0] * len(completions)

    run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, tmp_path, rewards=reward, max_steps=30)
    assert len(messages(caplog_transformers, "No group of the first 20 generation batches")) == 1


def test_the_warning_counts_from_the_start_of_the_run(caplog_transformers):
    before, after = RewardChecks(["a"]), RewardChecks(["a"])
    for batch in range(19):
        before.check_gradient(effective=False, progress=0.5)
    after.load_state_dict(before.state_dict())
    after.check_gradient(effective=False, progress=0.5)
    assert len(messages(caplog_transformers, "No group of the first 20 generation batches")) == 1
