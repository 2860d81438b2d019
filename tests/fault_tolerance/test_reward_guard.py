"""Reward functions that raise, hang or return something that is not a number (`reward_timeout`)."""

import asyncio
import re
import time

import numpy as np
import pandas as pd
import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from tests.factories import (
    all_finite,
    even_length_reward,
    history,
    last_logged,
    make_trainer,
    messages,
    mixed_reward,
    run,
    tool_tokenizer,
    train_briefly,
)
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer
from trl_dataeff.fault_tolerance.reward_guard import RewardGuard


def test_a_reward_function_that_raises_ends_the_run_after_what_can_be_kept_is(tmp_path):
    calls = []

    def breaking(prompts, completion_ids, **kwargs):
        calls.append(1)
        if len(calls) > 6:
            raise KeyError("answer")
        return even_length_reward(completion_ids)

    with pytest.raises(KeyError, match="answer") as raised:
        train_briefly(tmp_path, "off", rewards=breaking, max_steps=12, save_strategy="steps", save_steps=2)
    assert f"The latest complete checkpoint of this run is {tmp_path / 'checkpoint-6'}" in "".join(
        raised.value.__notes__
    )
    groups = pd.read_parquet(tmp_path / "dataeff" / "groups.parquet")
    assert groups["step"].max() == 5, "rows of the last steps are lost"
    assert make_trainer(tmp_path, "off", rewards=even_length_reward).train(True).global_step == 12


@pytest.mark.parametrize("garbage", ["0.5", [1.0], {}, object(), np.zeros(2), torch.zeros(2), 1j, b"1", 10**400])
def test_what_is_no_number_is_no_score(garbage, caplog_transformers):
    guard = RewardGuard()
    wrapped = guard.wrap(lambda completions: [1.0, garbage, None, garbage], "f")
    assert wrapped(completions="abcd") == [1.0, None, None, None]
    assert guard.faults == 2
    (message,) = messages(caplog_transformers, "which is not a number")
    assert message.startswith("The reward function 'f' returned")


@pytest.mark.parametrize("dynamic", ["off", "dynamic"])
def test_non_numeric_rewards_are_no_scores(tmp_path, caplog_transformers, dynamic):
    def sometimes(completion_ids, **kwargs):
        rewards = even_length_reward(completion_ids)
        rewards[3] = "0.5"
        return rewards

    def unscored(completion_ids, **kwargs):
        return [None if i == 3 else r for i, r in enumerate(even_length_reward(completion_ids))]

    trainer = train_briefly(tmp_path / "garbage", dynamic, rewards=sometimes, reward_timeout=30)
    expected = train_briefly(tmp_path / "none", dynamic, rewards=unscored, reward_timeout=30)
    names = {"rewards/sometimes/mean": "rewards/unscored/mean", "rewards/sometimes/std": "rewards/unscored/std"}
    rows = [
        {names.get(k, k): v for k, v in row.items() if k != "dataeff/reward_faults"}
        for row in history(trainer.state.log_history)
    ]
    # but for the faults themselves, as if the function had said that it does not apply
    assert rows == [
        {k: v for k, v in row.items() if k != "dataeff/reward_faults"} for row in history(expected.state.log_history)
    ]
    assert last_logged(trainer, "reward_faults") >= 3
    assert expected.collector.counters.values["reward_faults"] == 0
    (message,) = messages(caplog_transformers, "which is not a number")
    assert message.startswith("The reward function 'sometimes' returned")


@pytest.mark.parametrize("returned", [None, 0.5, "abc", {"a": 1.0}, np.float32(1)])
def test_what_is_no_list_is_an_error(tmp_path, returned):
    def wrong(completions, **kwargs):
        return returned

    with pytest.raises(TypeError, match=r"'wrong' returned .*; it must return a list of numbers, one per completion"):
        train_briefly(tmp_path, "off", rewards=wrong, reward_timeout=30)


GARBAGE = {
    "nothing": lambda n: None,
    "a number": lambda n: 0.5,
    "too few": lambda n: [1.0],
    "a text": lambda n: ["0.5"] * n,
    "an object": lambda n: [object()] * n,
}


@pytest.mark.parametrize("kind", GARBAGE)
@pytest.mark.parametrize("dynamic", [False, True])
def test_off_the_error_is_trls_own(tmp_path, kind, dynamic):
    def wrong(completions, **kwargs):
        return GARBAGE[kind](len(completions))

    errors = []
    for trainer_class, config_class, fields in (
        (GRPOTrainer, GRPOConfig, {}),
        (DataEfficientGRPOTrainer, DataEfficientGRPOConfig, {"dynamic_sampling": dynamic}),
    ):
        with pytest.raises((TypeError, ValueError)) as raised:
            run(trainer_class, config_class, tmp_path, rewards=wrong, max_steps=1, **fields)
        errors.append((raised.type, str(raised.value)))
    assert errors[0] == errors[1]


async def async_reward(completion_ids, **kwargs):
    return even_length_reward(completion_ids)


def test_off_reward_functions_are_the_users_own_objects(tmp_path):
    functions = [even_length_reward, async_reward]
    trainer = make_trainer(tmp_path, "off", rewards=functions)
    assert all(own is given for own, given in zip(trainer.reward_funcs, functions, strict=True))
    guarded = make_trainer(tmp_path, "off", rewards=functions, reward_timeout=30)
    assert not any(own is given for own, given in zip(guarded.reward_funcs, functions, strict=True))
    assert guarded.reward_func_names == trainer.reward_func_names == ["even_length_reward", "async_reward"]


class Environment:
    def reset(self, **kwargs):
        return "Say something."

    def get_reward(self) -> float:
        return 0.25


@pytest.mark.parametrize("timeout", [None, 30])
def test_a_reward_function_may_be_called_with_environments_alone(tmp_path, timeout):
    """As TRL calls its own, which asks each environment."""
    arguments = {"train_dataset": None, "environment_factory": Environment, "processing_class": tool_tokenizer()}
    trainer = make_trainer(tmp_path, "off", rewards=None, trainer=arguments, reward_timeout=timeout)
    assert trainer.reward_funcs[0](environments=[Environment(), Environment()]) == [0.25, 0.25]


def test_a_late_call_with_environments_alone_has_a_score_for_none():
    guard = RewardGuard(0.1)
    assert guard.wrap(lambda environments: busy(), "f")(environments=[1, 2, 3]) == [None] * 3
    assert guard.faults == guard.take_faults() == 3
    assert guard.faults == 0


def test_numbers_of_every_kind_go_through():
    guard = RewardGuard()
    rewards = [1, True, 0.25, np.float32(0.1), np.int64(3), torch.tensor(0.5), torch.tensor([2.0]), None]
    wrapped = guard.wrap(lambda completions: rewards, "f")
    assert wrapped(completions=["x"] * 8) == [1.0, 1.0, 0.25, float(np.float32(0.1)), 3.0, 0.5, 2.0, None]
    assert guard.wrap(lambda completions: torch.tensor([1.0, 2.0]), "f")(completions="ab") == [1.0, 2.0]
    assert guard.wrap(lambda completions: (r for r in (1, 0)), "f")(completions="ab") == [1.0, 0.0]
    assert guard.faults == 0
    model = torch.nn.Linear(1, 1)
    assert guard.wrap(model, "f") is model


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dynamic", ["off", "dynamic"])
@pytest.mark.parametrize("timeout", [None, 30])
def test_nan_and_infinite_rewards(tmp_path, caplog_transformers, value, dynamic, timeout):
    def sometimes(completion_ids, **kwargs):
        return [value if i == 1 else r for i, r in enumerate(even_length_reward(completion_ids))]

    trainer = train_briefly(tmp_path, dynamic, rewards=sometimes, max_steps=6, reward_timeout=timeout)
    assert trainer.state.global_step == 6
    assert all_finite(trainer)
    assert trainer.collector.counters.values["steps_skipped"] == 0
    if np.isnan(value):
        assert last_logged(trainer, "unscorable_ratio") > 0
    else:
        faults = trainer.collector.counters.values["reward_faults"]
        assert faults >= 6 if timeout else faults == 0
        assert len(messages(caplog_transformers, "returned an infinite reward")) == 1


class Hanging:
    """Hangs in the calls that are named; elsewhere like `mixed_reward`."""

    def __init__(self, hangs, how):
        self.__name__, self.calls, self.hangs, self.how = "hanging", 0, hangs, how

    def __call__(self, prompts, completion_ids, **kwargs):
        self.calls += 1
        if self.calls in self.hangs:
            self.how()
        return mixed_reward(prompts, completion_ids)


def sleep_through_errors():
    for _ in range(100):
        try:
            time.sleep(60)
        except Exception:  # as a function that tries again and again would
            continue


def busy():
    end = time.monotonic() + 60
    while time.monotonic() < end:
        pass


def hopeless_expression():
    re.match(r"(a+)+$", "a" * 40 + "b")


@pytest.mark.parametrize("how", [sleep_through_errors, busy, hopeless_expression])
def test_a_reward_function_that_hangs(tmp_path, caplog_transformers, how):
    started = time.monotonic()
    trainer = train_briefly(tmp_path, "off", rewards=Hanging({2, 3}, how), reward_timeout=0.2, max_steps=5)
    assert time.monotonic() - started < 30
    assert trainer.state.global_step == 5
    assert last_logged(trainer, "reward_faults") == 16
    ratios = [log["dataeff/unscorable_ratio"] for log in trainer.state.log_history if "dataeff/rounds" in log]
    assert ratios == [0, 1, 1, 0, 0]
    (message,) = messages(caplog_transformers, "reward_timeout")
    assert "'hanging' did not return within `reward_timeout` (0.2 s): its 8 completions have no score" in message


def test_an_async_reward_function_that_hangs(tmp_path):
    calls = []

    async def judge(prompts, completion_ids, **kwargs):
        calls.append(1)
        await asyncio.sleep(60 if len(calls) == 2 else 0)
        return mixed_reward(prompts, completion_ids)

    trainer = train_briefly(tmp_path, "off", rewards=judge, reward_timeout=0.2)
    assert last_logged(trainer, "reward_faults") == 8

    async def own_timeout(**kwargs):
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        train_briefly(tmp_path, "off", rewards=own_timeout, reward_timeout=5)


def test_one_that_hangs_from_the_beginning_is_an_error(tmp_path):
    options = {"per_device_train_batch_size": 64, "max_steps": 20, "reward_timeout": 0.1}
    with pytest.raises(ValueError, match=r"No reward function gave a score for any of the first [56]\d\d completions"):
        train_briefly(tmp_path, "dynamic", rewards=Hanging(range(100), busy), **options)


def test_a_time_limit_that_is_not_reached_changes_nothing(tmp_path):
    runs = [train_briefly(tmp_path / str(t), reward_timeout=t) for t in (None, 30)]
    assert history(runs[0].state.log_history) == history(runs[1].state.log_history)
