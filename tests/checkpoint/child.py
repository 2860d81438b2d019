"""A training process that is meant to be killed. See `test_kill.py`."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

from tests.factories import history, make_trainer
from trl_dataeff import DataEfficientGRPOTrainer
from trl_dataeff import trainer as trainer_module
from trl_dataeff.checkpoint import resume
from trl_dataeff.collector import state
from trl_dataeff.utils import write_atomically


NAME = "greso, dynamic"
OPTIONS = {"steps_per_generation": 2, "rollout_margin": 2.0, "save_total_limit": 2}
_STATIONS = ("_save_optimizer_and_scheduler", "_save_rng_state", "save_model")

_FUNCTIONS = (
    (state, "save_state"),
    (state, "save_generation_batch"),
    (resume, "write_manifest"),
    (trainer_module, "remove_older"),
)


def train(folder: str, seconds: float) -> None:
    """
    Resume the run in `folder`, or begin it, as the same command would each time; at the end write `history.json`. Before and after
    each part of a save it waits for up to `seconds`, as it would for the gigabytes of a real model.
    """
    rng = random.Random(os.getpid())
    for name in _STATIONS:
        slow_down(DataEfficientGRPOTrainer, name, rng, seconds)
    for owner, name in _FUNCTIONS:
        slow_down(owner, name, rng, seconds)
    trainer = make_trainer(folder, NAME, **OPTIONS)
    trainer.train(resume_from_checkpoint=True)
    text = json.dumps(history(trainer.state.log_history))
    write_atomically(Path(folder) / "history.json", lambda path: path.write_text(text))


def slow_down(owner, name: str, rng: random.Random, seconds: float) -> None:
    plain = getattr(owner, name)

    def slow(*args, **kwargs):
        time.sleep(rng.random() * seconds)
        result = plain(*args, **kwargs)
        time.sleep(rng.random() * seconds)
        return result

    setattr(owner, name, slow)


def train_until(folder: str, step: int, numbers: list[int]) -> None:
    """Train, and in the reward function of `step` send the signals `numbers` to this process, which ends it."""
    trainer = make_trainer(folder, NAME, **OPTIONS, save_on_signal=True)
    plain, pending = trainer.reward_funcs[0], list(numbers)

    def reward(*args, **kwargs):
        if trainer.state.global_step == step:
            while pending:
                signal.raise_signal(pending.pop(0))
        return plain(*args, **kwargs)

    trainer.reward_funcs[0] = reward
    try:
        trainer.train()
    finally:
        stopped = trainer.stopped_by.name if trainer.stopped_by else None
        (Path(folder) / "ended.json").write_text(
            json.dumps({"step": trainer.state.global_step, "stopped_by": stopped})
        )
