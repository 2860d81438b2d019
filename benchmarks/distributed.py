"""
What this package's own communication costs per generation batch, with 1, 2 and 3 processes (gloo, on the CPU).

    python -m benchmarks.distributed

Times the four exchanges that are not TRL's, on made-up rollouts of 66 groups of 8 completions of 256 tokens: prompt
ids from the main process, lengths and flags of every completion, groups that move to another process (a quarter of
them), and, once per checkpoint, the rollouts of 66 replayable groups. Prints medians of 20 repetitions in
milliseconds.
"""

from __future__ import annotations

import argparse
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


GROUPS = 66  # divides among 1, 2 and 3 processes
GROUP_SIZE = 8
TOKENS = 256  # of a completion
PROMPT_TOKENS = 64
VOCABULARY = 50_000
REPETITIONS = 20
COLUMNS = ("processes", "prompt ids", "lengths and flags", "moved groups", "replay buffer, at a save")


def make_groups(processes: Processes) -> list[RolloutGroup]:
    """Groups of which each process holds an equal part."""
    rng = np.random.default_rng(0)
    groups = []
    for i in range(GROUPS):
        tokens = [rng.integers(0, VOCABULARY, TOKENS).astype(np.int32) for _ in range(GROUP_SIZE)]
        logps = [np.zeros(TOKENS, np.float32) for _ in range(GROUP_SIZE)]
        texts = ["four" * TOKENS] * GROUP_SIZE
        rollouts = Rollouts(tokens[0][:PROMPT_TOKENS], tokens, texts, behavior_logps=logps)
        owner = i * processes.world_size // GROUPS
        totals = np.zeros(GROUP_SIZE, np.float32)
        group = RolloutGroup(
            i,
            0,
            0,
            totals[:, None],
            totals,
            0.5,
            EFFECTIVE,
            np.full(GROUP_SIZE, TOKENS),
            np.zeros(GROUP_SIZE, bool),
            owner=owner,
            rollouts=rollouts if owner == processes.rank else None,
        )
        groups.append(group)
    return groups


def milliseconds(exchange: Callable[[int], object], processes: Processes) -> float:
    """Median of the time of `exchange(repetition)`, all processes starting together."""
    times = []
    for repetition in range(REPETITIONS):
        processes.wait()
        start = time.perf_counter()
        exchange(repetition)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def measure() -> list[float]:
    """The columns of this many processes, without the first."""
    torch.set_num_threads(1)
    processes = Processes.of(Accelerator(cpu=True))
    groups = make_groups(processes)
    completions_here = GROUPS * GROUP_SIZE // processes.world_size
    recorder = RoundRecorder(end_tokens=set())
    recorder.lengths = [TOKENS] * completions_here
    recorder.truncated = [False] * completions_here
    recorder.rewards = torch.zeros(GROUPS * GROUP_SIZE, 1)
    # A quarter of the groups goes to the next process
    home = np.array([group.owner for group in groups])
    moves = np.arange(GROUPS) % 4 == 0
    away = np.where(moves, (home + 1) % processes.world_size, home)

    def send_prompt_ids(repetition: int) -> object:
        return broadcast_from_main(np.arange(GROUPS))

    def complete_recording(repetition: int) -> object:
        return recorder.complete(processes)

    def move_groups(repetition: int) -> object:
        return redistribute(groups, away, processes.rank)

    def pack_groups(repetition: int) -> object:
        return pack_distributed(groups, processes.rank, processes.world_size)

    return [
        milliseconds(send_prompt_ids, processes) if processes.world_size > 1 else 0.0,
        milliseconds(complete_recording, processes),
        milliseconds(move_groups, processes),
        milliseconds(pack_groups, processes),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    if "RANK" in os.environ:
        run_process()
        return
    print("|", " | ".join(COLUMNS), "|\n|" + "---|" * len(COLUMNS), flush=True)
    for processes in (1, 2, 3):
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        subprocess.run([*launch, "-m", "benchmarks.distributed"], check=True, stderr=subprocess.DEVNULL)


def run_process() -> None:
    """Measure as one of several processes; the first one prints the row."""
    row = measure()
    if os.environ["RANK"] == "0":
        cells = " | ".join(f"{value:.2f}" for value in row)
        print("|", os.environ["WORLD_SIZE"], "|", cells, "|", flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
