"""
What only a GPU can show, in commands of a few minutes each: the time and memory of the update, and whole runs.

    python -m benchmarks.gpu --minutes 8            # goes on where an earlier call stopped
    python -m benchmarks.gpu --tiny --minutes 1     # tries the script out, also on a CPU; nothing is kept

It needs torch, transformers, accelerate and peft as they come, TRL, datasets and reasoning-gym, and the converted
weights of the quickstart (`python -m examples.quickstart --prepare-only`). First it measures the rows of
`benchmarks.update` for the GPU's models, then it makes runs of `benchmarks.smollm2` in bfloat16, seed by seed. It
begins nothing that would take longer than what is left of the minutes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import transformers

from benchmarks import update
from benchmarks.lab.runs import run_all, silence_transformers
from benchmarks.lab.store import read_runs
from benchmarks.lengths import read as read_lengths
from benchmarks.smollm2.__main__ import WEIGHTS
from benchmarks.smollm2.train import Spec, run


RUNS = Path(__file__).resolve().parent / "results" / "gpu.jsonl"
METHODS = ("uniform", "compact", "selection", "fill")
SEEDS = (41, 42, 43)
POOL = "several"
REPETITIONS = 5  # of an update

Job = Callable[[], object]


def update_jobs(path: Path, tiny: bool) -> Iterator[tuple[str, Job]]:
    """The rows of the update that are not in the file, each with its name."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = update.cuda_sizes()
    rows = [row for row in update.ROWS if row.name in update.CUDA_ROWS]
    groups = read_lengths()[1]
    if tiny:
        sizes = [update.smollm2(2, hidden_size=72, intermediate_size=192)]
        rows, groups = update.smaller(rows, groups)
    measured = set()
    if path.exists():
        measured = {(result["model"], result["name"]) for result in update.read_results(path)}
    for size in sizes:
        for row in rows:
            if (size.name, row.name) not in measured:
                job = partial(update.measure_and_record, row, size, groups, device, REPETITIONS, path)
                yield f"{size.name}, {row.name}", job


def run_jobs(path: Path, tiny: bool) -> Iterator[tuple[str, Job]]:
    """The runs that are not in the file, each with its name."""
    finished = read_runs(path)
    for spec in specs():
        if tiny:
            spec = replace(spec, steps=1)
        if spec.name not in finished:
            yield spec.name, partial(run_all, [spec], WEIGHTS, path, workers=0, train=run)


def specs() -> list[Spec]:
    """The runs, seed by seed."""
    return [Spec(method, seed, POOL) for seed in SEEDS for method in METHODS]


def work(jobs: Iterator[tuple[str, Job]], deadline: float) -> bool:
    """Do jobs while there is time for one that takes as long as the longest so far.

    Args:
        jobs (`Iterator`): Names and jobs.
        deadline (`float`): By `time.monotonic()`.

    Returns:
        Whether all jobs were done.
    """
    longest = 0.0
    for name, job in jobs:
        started = time.monotonic()
        if started + longest > deadline:
            print(f"No time is left for {name}. Call it again to go on.", flush=True)
            return False
        print(f"== {name}", flush=True)
        job()
        longest = max(longest, time.monotonic() - started)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="begin nothing that takes longer (default: 8)")
    parser.add_argument("--part", choices=("update", "runs"), help="this one alone")
    parser.add_argument(
        "--tiny", action="store_true", help="updates of a tiny model, runs of one step; nothing is kept"
    )
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        parser.error("there is no CUDA GPU; --tiny tries the script out without one")
    deadline = time.monotonic() + 60 * options.minutes
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # on `rollout_func`
    transformers.logging.set_verbosity_error()
    silence_transformers()
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) if options.tiny else update.RESULTS
        updates = kept / "cuda.jsonl"
        runs = kept / "gpu.jsonl" if options.tiny else RUNS
        all_done = True
        if options.part != "runs":
            all_done = work(update_jobs(updates, options.tiny), deadline)
        if options.part != "update" and all_done:
            work(run_jobs(runs, options.tiny), deadline)
        if updates.exists():
            update.print_tables(update.read_results(updates))
        ends = [rows[-1] for rows in read_runs(runs).values()]
        for end in ends:
            print(f"{end['run']}: {end['accuracy_sampled']:.3f} after {end['wall_s']:.0f} s")


if __name__ == "__main__":
    main()
