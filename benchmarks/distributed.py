"""
What this package's own communication costs per generation batch, with 1, 2 and 3 processes (gloo, on the CPU).

    python -m benchmarks.distributed

Times the four exchanges that are not TRL's, on made-up rollouts of 66 groups of 8 completions of 256 tokens: prompt ids from the
main process, lengths and flags of every completion, groups that move to another process (a quarter of them), and, once per
checkpoint, the rollouts of 66 replayable groups. Prints medians of 20 repetitions in milliseconds.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from accelerate import Accelerator

from trl_dataeff.generation.recorder import RoundRecorder
from trl_dataeff.rollouts.distributed import Processes, broadcast_from_main, pack_distributed, redistribute
from trl_dataeff.rollouts.group import EFFECTIVE, RolloutGroup, Rollouts


GROUPS, SIZE, TOKENS, REPEATS = 66, 8, 256, 20  # 66: for 1, 2 and 3 processes
COLUMNS = ("processes", "prompt ids", "lengths and flags", "moved groups", "replay buffer, at a save")


def make_groups(processes: Processes) -> list[RolloutGroup]:
    """Groups of which each process holds an equal part."""
    rng = np.random.default_rng(0)
    groups = []
    for i in range(GROUPS):
        tokens = [rng.integers(0, 50_000, TOKENS).astype(np.int32) for _ in range(SIZE)]
        logps = [np.zeros(TOKENS, np.float32) for _ in range(SIZE)]
        rollouts = Rollouts(tokens[0][:64], tokens, ["four" * TOKENS] * SIZE, behavior_logps=logps)
        owner = i * processes.world_size // GROUPS
        totals = np.zeros(SIZE, np.float32)
        fields = (totals[:, None], totals, 0.5, EFFECTIVE, np.full(SIZE, TOKENS), np.zeros(SIZE, bool))
        own = rollouts if owner == processes.rank else None
        groups.append(RolloutGroup(i, 0, 0, *fields, owner=owner, rollouts=own))
    return groups


def milliseconds(exchange: Callable[[int], object], processes: Processes) -> float:
    """Median of the time of `exchange(repetition)`, all processes starting together."""
    times = []
    for i in range(REPEATS):
        processes.wait()
        began = time.perf_counter()
        exchange(i)
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def measure() -> list[float]:
    """The columns of this many processes, without the first."""
    torch.set_num_threads(1)
    processes = Processes.of(Accelerator(cpu=True))
    groups, own = make_groups(processes), GROUPS * SIZE // processes.world_size
    recording = RoundRecorder(set(), lengths=[TOKENS] * own, truncated=[False] * own)
    recording.rewards = torch.zeros(GROUPS * SIZE, 1)
    home = np.array([group.owner for group in groups])
    away = np.where(np.arange(GROUPS) % 4 == 0, (home + 1) % processes.world_size, home)
    several = processes.world_size > 1
    return [
        milliseconds(lambda i: broadcast_from_main(np.arange(GROUPS)), processes) if several else 0.0,
        milliseconds(lambda i: recording.complete(processes), processes),
        milliseconds(lambda i: redistribute(groups, home if i % 2 else away, processes.rank), processes),
        milliseconds(lambda i: pack_distributed(groups, processes.rank, processes.world_size), processes),
    ]


def main() -> None:
    if "RANK" in os.environ:
        row = measure()
        if os.environ["RANK"] == "0":
            print("|", os.environ["WORLD_SIZE"], "|", " | ".join(f"{value:.2f}" for value in row), "|", flush=True)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        return
    print("|", " | ".join(COLUMNS), "|\n|" + "---|" * len(COLUMNS), flush=True)
    for processes in (1, 2, 3):
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        subprocess.run([*launch, "-m", "benchmarks.distributed"], check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
