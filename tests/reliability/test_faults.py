"""What goes wrong around a run: survived with a metric and one warning, or one clear error after what can be kept is."""

import asyncio
import re
import time

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset

from tests.reliability.configurations import make
from tests.reliability.history import history
from tests.test_dynamic_sampling import mixed_reward
from tests.tiny import chat_dataset, even_length_reward, plain_dataset
from trl_dataeff.fault_tolerance.reconnect import PatientClient
from trl_dataeff.fault_tolerance.reward_guard import RewardGuard


def train(folder, name="dynamic", **options):
    trainer = make(folder, name, **{"max_steps": 3, "save_strategy": "no", **options})
    trainer.train()
    return trainer


def last(trainer, metric: str) -> float:
    return [log[f"dataeff/{metric}"] for log in trainer.state.log_history if f"dataeff/{metric}" in log][-1]


def said(caplog, text: str) -> list[str]:
    return [record.message for record in caplog.records if text in record.message]


def finite(trainer) -> bool:
    return all(p.isfinite().all() for p in trainer.model.parameters())


# Reward functions


def test_a_reward_function_that_raises_ends_the_run_after_what_can_be_kept_is(tmp_path):
    calls = []

    def breaking(prompts, completion_ids, **kwargs):
        calls.append(1)
        if len(calls) > 6:
            raise KeyError("answer")
        return even_length_reward(completion_ids)

    with pytest.raises(KeyError, match="answer") as raised:
        train(tmp_path, "off", rewards=breaking, max_steps=12, save_strategy="steps", save_steps=2)
    assert f"The newest checkpoint of this run is {tmp_path / 'checkpoint-6'}" in "".join(raised.value.__notes__)
    groups = pd.read_parquet(tmp_path / "dataeff" / "groups.parquet")
    assert groups["step"].max() == 5, "rows of the last steps are lost"
    assert make(tmp_path, "off", rewards=even_length_reward).train(True).global_step == 12


@pytest.mark.parametrize("garbage", ["0.5", [1.0], {}, object(), np.zeros(2), torch.zeros(2), 1j, b"1", 10**400])
def test_what_is_no_number_is_no_score(garbage, caplog_transformers):
    guard = RewardGuard()
    wrapped = guard.wrap(lambda completions: [1.0, garbage, None, garbage], "f")
    assert wrapped(completions="abcd") == [1.0, None, None, None]
    assert guard.faults == 2
    (message,) = said(caplog_transformers, "which is no number")
    assert message.startswith("The reward function 'f' returned")


@pytest.mark.parametrize("dynamic", ["off", "dynamic"])
def test_rewards_that_are_no_numbers_are_no_scores(tmp_path, caplog_transformers, dynamic):
    def sometimes(completion_ids, **kwargs):
        rewards = even_length_reward(completion_ids)
        rewards[3] = "0.5"
        return rewards

    def unscored(completion_ids, **kwargs):
        return [None if i == 3 else r for i, r in enumerate(even_length_reward(completion_ids))]

    trainer = train(tmp_path / "garbage", dynamic, rewards=sometimes)
    expected = train(tmp_path / "none", dynamic, rewards=unscored)
    names = {"rewards/sometimes/mean": "rewards/unscored/mean", "rewards/sometimes/std": "rewards/unscored/std"}
    rows = [
        {names.get(k, k): v for k, v in row.items() if k != "dataeff/reward_faults"}
        for row in history(trainer.state.log_history)
    ]
    # but for the faults themselves, as if the function had said that it does not apply
    assert rows == [
        {k: v for k, v in row.items() if k != "dataeff/reward_faults"} for row in history(expected.state.log_history)
    ]
    assert last(trainer, "reward_faults") >= 3
    assert last(expected, "reward_faults") == 0
    (message,) = said(caplog_transformers, "which is no number")
    assert message.startswith("The reward function 'sometimes' returned")


@pytest.mark.parametrize("returned", [None, 0.5, "abc", {"a": 1.0}, np.float32(1)])
def test_what_is_no_list_is_an_error(tmp_path, returned):
    def wrong(completions, **kwargs):
        return returned

    with pytest.raises(TypeError, match=r"'wrong' returned .*; it must return a list of 8 numbers"):
        train(tmp_path, "off", rewards=wrong)


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
def test_nan_and_infinite_rewards(tmp_path, caplog_transformers, value, dynamic):
    def sometimes(completion_ids, **kwargs):
        return [value if i == 1 else r for i, r in enumerate(even_length_reward(completion_ids))]

    trainer = train(tmp_path, dynamic, rewards=sometimes, max_steps=6)
    assert trainer.state.global_step == 6
    assert finite(trainer)
    assert last(trainer, "steps_skipped") == 0
    if np.isnan(value):
        assert last(trainer, "unscorable_ratio") > 0
    else:
        assert last(trainer, "reward_faults") >= 6
        assert len(said(caplog_transformers, "returned an infinite reward")) == 1


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
    trainer = train(tmp_path, "off", rewards=Hanging({2, 3}, how), reward_timeout=0.2, max_steps=5)
    assert time.monotonic() - started < 30
    assert trainer.state.global_step == 5
    assert last(trainer, "reward_faults") == 16
    ratios = [log["dataeff/unscorable_ratio"] for log in trainer.state.log_history if "dataeff/rounds" in log]
    assert ratios == [0, 1, 1, 0, 0]
    (message,) = said(caplog_transformers, "reward_timeout")
    assert "'hanging' did not return within `reward_timeout` (0.2 s): its 8 completions have no score" in message


def test_an_async_reward_function_that_hangs(tmp_path):
    calls = []

    async def judge(prompts, completion_ids, **kwargs):
        calls.append(1)
        await asyncio.sleep(60 if len(calls) == 2 else 0)
        return mixed_reward(prompts, completion_ids)

    trainer = train(tmp_path, "off", rewards=judge, reward_timeout=0.2)
    assert last(trainer, "reward_faults") == 8

    async def own_timeout(**kwargs):
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        train(tmp_path, "off", rewards=own_timeout, reward_timeout=5)


def test_one_that_hangs_from_the_beginning_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="No reward function gave a score for any of the first 8 completions"):
        train(tmp_path, "off", rewards=Hanging(range(100), busy), reward_timeout=0.1)


def test_a_time_limit_that_is_not_reached_changes_nothing(tmp_path):
    runs = [train(tmp_path / str(t), reward_timeout=t) for t in (None, 30)]
    assert history(runs[0].state.log_history) == history(runs[1].state.log_history)


# Gradients


def spoil(trainer, steps, value=float("nan")):
    """Make the log-probabilities of the micro-batches of `steps` not finite."""
    plain = trainer._get_per_token_logps_and_entropies

    def spoiled(*args, **kwargs):
        logps, *rest = plain(*args, **kwargs)
        return (logps * value if trainer.state.global_step in steps else logps, *rest)

    trainer._get_per_token_logps_and_entropies = spoiled


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_log_probabilities_that_are_not_finite_cost_a_step_not_the_model(tmp_path, caplog_transformers, value):
    trainer = make(tmp_path, "off", max_steps=6, save_strategy="no")
    spoil(trainer, {2, 3}, value)
    trainer.train()
    assert finite(trainer)
    skipped = [log["dataeff/steps_skipped"] for log in trainer.state.log_history if "dataeff/rounds" in log]
    assert skipped[-1] == 2
    (message,) = said(caplog_transformers, "is not finite")
    assert message.startswith("The gradient of step 3 is not finite")


def test_without_end_it_is_an_error(tmp_path):
    trainer = make(tmp_path, "off", max_steps=100, save_steps=2)
    spoil(trainer, range(3, 100))
    with pytest.raises(FloatingPointError, match="not finite in 10 steps in a row"):
        trainer.train()
    assert finite(trainer)


# Prompts


@pytest.mark.parametrize("dynamic", ["off", "dynamic"])
@pytest.mark.parametrize(
    "rows",
    [
        [*plain_dataset(8)["prompt"], None],
        [*chat_dataset(8)["prompt"], []],
        [*chat_dataset(8)["prompt"], None],
    ],
)
def test_rows_without_a_prompt_are_named_before_training(tmp_path, rows, dynamic):
    dataset = Dataset.from_dict({"prompt": rows})
    with pytest.raises(ValueError, match=r"has 1 rows without a prompt .*: 8\. Remove them"):
        make(tmp_path, dynamic, trainer={"train_dataset": dataset})
    make(tmp_path, dynamic, trainer={"train_dataset": dataset.select(range(8))})


def test_a_row_that_cannot_be_tokenized_is_named(tmp_path):
    def transform(rows):
        return {"prompt": [p if not p.startswith("05") else 7 for p in rows["prompt"]]}

    dataset = plain_dataset(8).with_transform(transform)
    with pytest.raises((TypeError, ValueError)) as raised:
        make(tmp_path, "off", trainer={"train_dataset": dataset}, max_steps=8).train()
    assert any(re.search(r"dataset's rows \[.*\b5\b.*\]", note) for note in raised.value.__notes__)


def test_a_prompt_that_fills_the_context(tmp_path, caplog_transformers):
    prompts = [f"{i:02d}:1+1=" for i in range(7)] + ["07:" + "1+" * 508 + "1="]
    dataset = Dataset.from_dict({"prompt": prompts})
    trainer = train(tmp_path, "off", trainer={"train_dataset": dataset}, max_steps=10)
    assert trainer.state.global_step == 10
    assert finite(trainer)
    assert last(trainer, "overlong_prompts") in (4, 8, 12)  # once an epoch, four completions each
    (message,) = said(caplog_transformers, "leaves no room")
    assert (
        "A prompt of 1021 tokens leaves no room for `max_completion_length` (8) in the model's context of 1024"
        in message
    )


# The vLLM server


class Server:
    """A vLLM server as its client sees it: gone at the requests that are numbered; restarts lose the weights."""

    base_url = "http://gone:8000"

    def __init__(self, gone=()):
        self.gone, self.requests, self.log = set(gone), 0, []
        self.weights = self.joined = None

    def request(self, name):
        self.requests += 1
        if self.requests in self.gone:
            self.weights, self.joined = "original", False  # it is started again
            raise ConnectionError(f"{name}: connection refused")
        self.log.append(name)

    def check_server(self, total_timeout):
        self.log.append(f"wait {total_timeout}")

    def close_communicator(self):
        self.log.append("close")

    def init_communicator(self, device):
        self.request("join")
        self.joined = True

    def update_named_params(self, metadata, named_params):
        self.request("weights")
        assert self.joined
        self.weights = list(named_params)

    def reset_prefix_cache(self):
        self.request("reset")

    def generate(self, prompts):
        self.request("generate")
        return [self.weights, prompts]


def client_of(server, version=None, **options):
    returns = []
    options = {"named_params": lambda: iter(version or ["present"]), **options}
    client = PatientClient(server, device="cpu", timeout=7.0, on_return=lambda: returns.append(1), **options)
    return client, returns


@pytest.mark.parametrize("gone", [{4}, {3}, {2}, {4, 5}, {4, 6}, {4, 8}, {2, 3, 4}])
def test_a_server_that_comes_back_gets_the_present_weights(gone, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    server = Server(gone)
    server.joined = True
    client, returns = client_of(server)
    client.init_communicator(device="cpu")
    client.update_named_params(["metadata"], iter(["present"]))
    client.reset_prefix_cache()
    for _ in range(3):
        assert client.generate(["a"]) == [["present"], ["a"]]
    assert len(returns) >= 1
    assert "wait 7.0" in server.log
    assert client.base_url == server.base_url


def test_a_server_that_does_not_come_back(monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    client, returns = client_of(Server(range(1, 100)))
    with pytest.raises(
        ConnectionError, match=r"came back 3 times without taking the present weights .* resume the run"
    ):
        client.generate(["a"])
    server = Server({1})
    monkeypatch.setattr(server, "check_server", lambda timeout: (_ for _ in ()).throw(ConnectionError("after 7 s")))
    with pytest.raises(ConnectionError, match="after 7 s"):
        client_of(server)[0].generate(["a"])
    assert returns == []


def test_sharded_weights_cannot_be_sent_in_the_middle_of_a_step():
    client, _ = client_of(Server({1}), named_params=None)
    with pytest.raises(ConnectionError, match=r"sharded over processes .* resume the run from its last checkpoint"):
        client.generate(["a"])


def test_a_mistake_in_a_request_is_not_repeated():
    class Strict(Server):
        def generate(self, prompts):
            self.requests += 1
            raise Exception("Request failed: 400, prompt too long")  # TRL's own type

    server = Strict()
    with pytest.raises(Exception, match="Request failed: 400"):
        client_of(server)[0].generate(["a"])
    assert server.requests == 1
