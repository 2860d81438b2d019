"""Training processes that are killed with SIGKILL, again and again, and end as the one that was never killed."""

import itertools
import json
import multiprocessing
import os
import random
import time
from pathlib import Path

import pandas as pd
import pytest

from tests.factories.comparison import groups_since, history
from tests.factories.configurations import train
from trl_dataeff import DataEfficientGRPOTrainer
from trl_dataeff import trainer as trainer_module
from trl_dataeff.checkpoint import resume, state
from trl_dataeff.checkpoint.manifest import is_complete
from trl_dataeff.checkpoint.resume import checkpoints
from trl_dataeff.utils import write_atomically


#: Seconds at most, at each of some twenty stations of a save
SAVING = 0.02
#: Seconds; a process that takes longer hangs
LONGEST = 300.0
OPTIONS = {"steps_per_generation": 2, "rollout_margin": 2.0, "save_total_limit": 2}
PARTS = (
    (DataEfficientGRPOTrainer, "_save_optimizer_and_scheduler"),
    (DataEfficientGRPOTrainer, "_save_rng_state"),
    (DataEfficientGRPOTrainer, "save_model"),
    (state, "save_state"),
    (resume, "write_manifest"),
    (trainer_module, "remove_older"),
)


def train_slowly(folder: str, name: str) -> None:
    """
    Resume the run in `folder`, or begin it, as the same command would each time; at the end write `history.json`.
    Before and after each part of a save it waits a little, as it would for the gigabytes of a real model.
    """
    rng = random.Random(os.getpid())
    for owner, part in PARTS:
        slow_down(owner, part, rng)
    trainer = train(folder, name, resume=True, **OPTIONS)
    text = json.dumps(history(trainer.state.log_history))
    write_atomically(Path(folder) / "history.json", lambda path: path.write_text(text))


def slow_down(owner, name: str, rng: random.Random) -> None:
    plain = getattr(owner, name)

    def slow(*args, **kwargs):
        time.sleep(rng.random() * SAVING)
        result = plain(*args, **kwargs)
        time.sleep(rng.random() * SAVING)
        return result

    setattr(owner, name, slow)


@pytest.fixture(scope="module")
def processes():
    """Processes that are forked from one which has imported everything: each starts in milliseconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.checkpoint.test_kill"])
    context.Process(target=time.sleep, args=(0,)).start()  # returns once all is imported
    return context


def in_a_save(folder: Path) -> bool:
    return any(not is_complete(path) for path in checkpoints(folder))


def ends(processes, folder: Path, name: str, rng: random.Random, seconds: float) -> bool:
    """Have a process go on with the run for up to `seconds`, then kill it, half of the time in its next save."""
    process = processes.Process(target=train_slowly, args=(str(folder), name))
    process.start()
    process.join(seconds)
    if rng.random() < 0.5:
        while process.is_alive() and not in_a_save(folder):
            time.sleep(0.002)
        time.sleep(rng.random() * 0.15)
    process.kill()
    process.join(LONGEST)
    assert process.exitcode in (0, -9), "the process failed by itself"
    return process.exitcode == 0


def seconds_to_live(rng: random.Random, longest: float, more: bool) -> float:
    """Part of the `longest` seconds that a run takes, if `more` kills are wanted; else all the time it needs."""
    return rng.random() * longest if more else LONGEST


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("greso, dynamic", 5),
        pytest.param("greso, dynamic", 30, marks=pytest.mark.slow),
        pytest.param("all three", 30, marks=pytest.mark.slow),
        pytest.param("fill, batches of 2 steps", 30, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_ends_as_if_it_had_never_been_killed(processes, tmp_path, name, wanted):
    rng = random.Random(0)
    whole = tmp_path / "whole"
    started = time.monotonic()
    assert ends(processes, whole, name, rng, LONGEST), "it hangs"
    longest = time.monotonic() - started
    expected = json.loads((whole / "history.json").read_text())
    assert len(expected) == 12
    kills = 0
    kills_in_a_save = 0
    for i in itertools.count():
        folder = tmp_path / str(i)
        kills_before = kills
        while not ends(processes, folder, name, rng, seconds_to_live(rng, longest, more=kills < wanted)):
            kills += 1
            kills_in_a_save += in_a_save(folder)
        assert json.loads((folder / "history.json").read_text()) == expected
        pd.testing.assert_frame_equal(groups_since(folder, 0), groups_since(whole, 0))
        # What was left incomplete has been replaced. Each kill between a save and the deletion of an older one leaves
        # one more, and after the last save there is nothing more to do
        last, *older = checkpoints(folder)
        assert last.name == "checkpoint-12"
        assert is_complete(last)
        assert len(older) <= 1 + kills - kills_before
        if kills >= wanted:
            break
    assert kills_in_a_save >= wanted // 5
