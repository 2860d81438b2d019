"""SIGTERM and Ctrl-C to a command that trains through `accelerate launch`: which code it ends with, and no orphans."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from trl_dataeff.checkpoint.manifest import check_checkpoint
from trl_dataeff.cli import grpo as launching


ROOT = Path(__file__).resolve().parents[2]
LONGEST = 180.0  # seconds
REWARD = """\
import os, pathlib, time

def slow(completions, **kwargs):
    pathlib.Path(f"pid-{os.getpid()}").touch()
    time.sleep(0.1)
    return [float(len(text) % 2) for text in completions]
"""
ENDLESS = ["--reward_funcs", "my_rewards.slow", "--reward_weights", "1", "--max_steps", "1000", "--save_on_signal"]
ONE = ["--num_machines", "1"]
TWO = ["--multi_gpu", "--num_processes", "2"]


@pytest.fixture
def started(recipe, write, tmp_path):
    """Starts the command with options of `accelerate launch`; returns it and its processes once they train."""
    write("my_rewards.py", REWARD)
    found: list[psutil.Process] = []

    def start(options: list[str], count: int) -> tuple[subprocess.Popen, list[psutil.Process]]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "120"  # a busy machine takes longer than the default of 30 s
        command = [sys.executable, "-m", "trl_dataeff.cli.main", "grpo", "--config", recipe, *ENDLESS, *options]
        command += ["--per_device_train_batch_size", "4", "--save_strategy", "no"]
        with open(tmp_path / "log.txt", "w") as log:
            process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log, process_group=0)
        found.append(psutil.Process(process.pid))
        end = time.monotonic() + LONGEST
        while len(list(tmp_path.glob("pid-*"))) < count:
            text = (tmp_path / "log.txt").read_text()[-3000:]
            assert process.poll() is None, text
            assert time.monotonic() < end, text
            time.sleep(0.1)
        for path in tmp_path.glob("pid-*"):
            found.append(psutil.Process(int(path.name.removeprefix("pid-"))))
        return process, found[1:]

    yield start
    for process in found:
        if process.is_running():
            process.kill()


@pytest.mark.parametrize(
    ("number", "options", "count"),
    [
        (signal.SIGTERM, ONE, 1),
        pytest.param(signal.SIGINT, ONE, 1, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, TWO, 2, marks=pytest.mark.slow),
        (signal.SIGINT, TWO, 2),
    ],
)
def test_a_signal_to_a_launched_command_ends_training_with_a_checkpoint(started, tmp_path, number, options, count):
    command, training = started(options, count)
    command.send_signal(number)
    assert command.wait(LONGEST) == 128 + number, (tmp_path / "log.txt").read_text()[-3000:]
    assert not any(process.is_running() for process in training), "orphans"
    (checkpoint,) = (tmp_path / "out").glob("checkpoint-*")
    check_checkpoint(checkpoint)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [([143, -15], 143), ([130, -15], 130), ([-15, 143], 143), ([-9, -15], 137), ([1, -15], 1), ([3], 1)],
)
def test_code_of_several_processes(codes, expected, monkeypatch):
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    failures = {rank: ProcessFailure(rank, 0, code, "") for rank, code in enumerate(codes)}
    for rank, failure in failures.items():
        failure.timestamp = rank

    def fail(args):
        raise ChildFailedError("training", failures)

    monkeypatch.setattr("accelerate.commands.launch.launch_command", fail)
    assert launching.launch(TWO, []) == expected
