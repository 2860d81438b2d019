"""A training process that is meant to be killed. See `test_kill.py`."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

from tests.factories import history, make_trainer
from trl_dataeff import DataEfficientGRPOTrainer
from trl_dataeff import trainer as trainer_module
from trl_dataeff.checkpoint import resume, state
from trl_dataeff.utils import write_atomically


NAME = "greso, dynamic"
OPTIONS = {"steps_per_generation": 2, "rollout_margin": 2.0, "save_total_limit": 2}
PARTS = (
    (DataEfficientGRPOTrainer, "_save_optimizer_and_scheduler"),
    (DataEfficientGRPOTrainer, "_save_rng_state"),
    (DataEfficientGRPOTrainer, "save_model"),
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
    for owner, name in PARTS:
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
