"""Rewards that are most likely a mistake: warned of once, or an error."""

import re

import numpy as np
import pytest

from tests.factories.comparison import messages
from tests.factories.tiny import even_length_reward, run
from trl_dataeff.rollouts.classification import RewardChecks


def silent_reward(completions, **kwargs):
    return [None] * len(completions)


def test_rewards_that_score_nothing(tmp_path, caplog_transformers):
    fields = {"rewards": silent_reward, "per_device_train_batch_size": 64, "max_steps": 20}
    run(tmp_path, **fields)  # TRL's matter when everything is off
    assert len(messages(caplog_transformers, "`silent_reward`")) == 1
    assert len(messages(caplog_transformers, "gradient")) == 1
    with pytest.raises(ValueError, match=r"\b(5|6)\d\d completions: `silent_reward`"):
        run(tmp_path, **fields, selection="greso")


def reward_array(*scored: bool) -> np.ndarray:
    """Rewards of 2 groups of 3 completions, `(2, 3, F)`: of each function all or none."""
    return np.stack([np.full((2, 3), 0.5 if given else np.nan) for given in scored], axis=-1)


@pytest.mark.parametrize("is_main_process", [True, False])
def test_completions_without_any_score_end_the_run_in_all_processes(caplog_transformers, is_main_process):
    checks = RewardChecks(["a", "b"], most_unscored=18, is_main_process=is_main_process)
    checks.check(reward_array(False, False))
    checks.check(reward_array(False, False))
    with pytest.raises(ValueError, match=r"\b18\b.*`a`, `b`"):
        checks.check(reward_array(False, False))
    assert len(messages(caplog_transformers)) == is_main_process


def test_one_score_is_enough(caplog_transformers):
    checks = RewardChecks(["a", "b"], most_unscored=12)
    checks.check(reward_array(True, False))
    for _ in range(10):
        checks.check(reward_array(False, False))
    checks.check(reward_array(False, True))
    (message,) = messages(caplog_transformers)
    assert re.match(r"`b`.*\b6\b", message)


def test_infinite_rewards_are_warned_of_once(caplog_transformers):
    checks = RewardChecks(["a", "b"])
    for _ in range(2):
        checks.check(np.array([[[1, 0], [np.inf, 0]]]))
    assert [message[:3] for message in messages(caplog_transformers)] == ["`a`"]


def test_a_resumed_run_knows_that_there_were_scores(tmp_path, monkeypatch):
    monkeypatch.setattr("trl_dataeff.collector.collector.MOST_UNSCORED", 32)
    steps = []

    def failing_judge(completion_ids, trainer_state, **kwargs):
        steps.append(trainer_state.global_step)
        return even_length_reward(completion_ids) if trainer_state.global_step < 2 else [None] * len(completion_ids)

    options = {"rewards": failing_judge, "selection": "greso", "save_strategy": "steps", "save_steps": 2}
    run(tmp_path, **options, max_steps=2)
    run(tmp_path, **options, max_steps=10, resume=True)
    assert steps == list(range(10))


def test_the_warning_counts_from_the_start_of_the_run(caplog_transformers):
    before, after = RewardChecks(["a"]), RewardChecks(["a"])
    for batch in range(19):
        before.check_gradient(effective=False, progress=0.5)
    after.load_state_dict(before.state_dict())
    after.check_gradient(effective=False, progress=0.5)
    assert len(messages(caplog_transformers, "gradient")) == 1
