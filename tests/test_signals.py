"""Signals that end a run with a checkpoint (`save_on_signal`)."""

import multiprocessing
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.factories.comparison import checkpoint_names, history, messages
from tests.factories.configurations import make_trainer, train
from tests.factories.tiny import even_length_reward, plain_dataset
from tests.factories.training import before_reward
from trl_dataeff.rollouts.distributed import Processes
from trl_dataeff.signals import StopSignals


EVALUATING = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "per_device_eval_batch_size": 4,
    "save_on_signal": True,
    "trainer": {"train_dataset": plain_dataset(), "eval_dataset": plain_dataset(4)},
}


def train_until_stopped(trainer, step: int | None, number: signal.Signals = signal.SIGTERM) -> None:
    """Train; it ends as a program without handlers would, but after the step and with a checkpoint."""
    before_reward(trainer, step, partial(signal.raise_signal, number))
    if number is signal.SIGINT:
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        return
    with pytest.raises(SystemExit) as raised:
        trainer.train()
    assert raised.value.code == 128 + number == 143


def assert_resumes(tmp_path, **options) -> None:
    """Resumed, the run is the one that never stopped."""
    resumed = train(tmp_path, resume=True, **options)
    assert resumed.stopped_by is None
    whole = train(tmp_path / "whole", **options)
    assert history(resumed.state.log_history) == history(whole.state.log_history)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_with_a_checkpoint(tmp_path, caplog_transformers, number):
    options = {"save_steps": 100, "save_total_limit": 1, "save_on_signal": True}
    trainer = make_trainer(tmp_path, "dynamic", **options)
    former = signal.getsignal(number)
    train_until_stopped(trainer, 4, number)
    assert signal.getsignal(number) is former
    assert trainer.stopped_by is number
    assert checkpoint_names(tmp_path) == {"checkpoint-5"}
    assert len(messages(caplog_transformers, f"Stopped by {number.name} after step 5 of 12")) == 1
    assert_resumes(tmp_path, **options)


def test_a_stopped_run_keeps_its_last_checkpoint_though_another_is_best(tmp_path):
    best = {"metric_for_best_model": "eval_reward", "greater_is_better": False, "load_best_model_at_end": True}
    options = {**EVALUATING, **best, "eval_steps": 1, "save_total_limit": 1, "max_steps": 8}
    trainer = make_trainer(tmp_path, "off", **options)
    trainer.reward_funcs = [lambda completions, **_: [float(trainer.state.global_step)] * len(completions)]
    train_until_stopped(trainer, 5)  # in the evaluation after step 5
    assert trainer.state.global_step == 5
    assert trainer.state.best_global_step == 1
    assert checkpoint_names(tmp_path) == {"checkpoint-1", "checkpoint-5"}


@pytest.mark.parametrize("strategy", ["no", "steps", "best"])
def test_a_signal_during_an_evaluation_takes_effect_without_another_step(tmp_path, strategy):
    best = {"metric_for_best_model": "eval_reward", "greater_is_better": False} if strategy == "best" else {}
    options = {**EVALUATING, "save_strategy": strategy, "save_steps": 100, **best}
    trainer = make_trainer(tmp_path, "dynamic", **options)
    train_until_stopped(trainer, None)
    assert trainer.state.global_step == 2
    assert checkpoint_names(tmp_path) == {"checkpoint-2"}
    assert_resumes(tmp_path, **options)


def test_with_save_strategy_best_a_signal_before_an_evaluation_keeps_a_checkpoint(tmp_path):
    options = {"save_strategy": "best", "metric_for_best_model": "eval_reward", "greater_is_better": True}
    trainer = make_trainer(tmp_path, "dynamic", **EVALUATING, **options)
    trainer.reward_funcs = [lambda completions, **_: [-float(trainer.state.global_step)] * len(completions)]
    train_until_stopped(trainer, 3)  # its evaluation is worse than that of step 2
    assert checkpoint_names(tmp_path) == {"checkpoint-2", "checkpoint-4"}


def test_a_signal_in_the_last_step_is_no_early_end(tmp_path):
    trainer = make_trainer(tmp_path, "dynamic", max_steps=3, save_strategy="no", save_on_signal=True)
    before_reward(trainer, 2, partial(signal.raise_signal, signal.SIGTERM))
    trainer.train()
    assert trainer.stopped_by is None
    assert checkpoint_names(tmp_path) == set()


def test_handlers_of_the_program_are_left_in_place():
    seen = []
    former = signal.signal(signal.SIGTERM, lambda *_: seen.append("own"))
    try:
        with StopSignals() as signals:
            signal.raise_signal(signal.SIGTERM)
        assert seen == ["own"]
        assert signals.received is None
    finally:
        signal.signal(signal.SIGTERM, former)


def test_a_second_signal_is_not_kept_back():
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGINT)
        assert signals.received is signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with StopSignals(Processes(rank=1, world_size=2)):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # the same one, from the launcher
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_process_that_a_reward_forks_ends_by_sigterm():
    parent_end, child_end = multiprocessing.Pipe()

    def report_and_sleep():
        child_end.send("on")
        time.sleep(60)

    with StopSignals() as signals:
        child = multiprocessing.get_context("fork").Process(target=report_and_sleep)
        child.start()
        parent_end.recv()
        child.terminate()
        child.join(20)
        assert (child.exitcode, signals.received) == (-signal.SIGTERM, None)


def test_training_in_another_thread_leaves_signals_alone(tmp_path):
    with ThreadPoolExecutor() as threads:
        trainer = threads.submit(train, tmp_path, max_steps=1, save_on_signal=True).result()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize("dynamic", ["off", "dynamic"])
def test_off_no_handler_is_installed(tmp_path, dynamic):
    seen = []

    def watching(completion_ids, **kwargs):
        seen.append([signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGVTALRM)])
        return even_length_reward(completion_ids)

    before = [signal.default_int_handler, signal.SIG_DFL, signal.SIG_DFL]
    train(tmp_path, dynamic, rewards=watching, max_steps=2, save_strategy="no")
    assert seen.count(before) == len(seen) > 0
    seen.clear()
    train(tmp_path, dynamic, rewards=watching, max_steps=2, save_strategy="no", save_on_signal=True)
    assert not any(set(before[:2]) & set(handlers[:2]) for handlers in seen)
