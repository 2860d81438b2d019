"""Runs many specs: interleaved, in worker processes of one thread each, going on where an earlier call stopped."""

from __future__ import annotations

import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TypeAlias

from benchmarks.provenance import provenance

from .store import append_run, read_runs
from .train import RunSpec, run


Sink: TypeAlias = Callable[[dict], None]
Train: TypeAlias = Callable[[RunSpec, Path, Sink], None]
Job: TypeAlias = tuple[RunSpec, Path, Train]
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def run_all(
    specs: Sequence[RunSpec],
    start: Path,
    path: Path,
    workers: int,
    fresh: bool = False,
    train: Train = run,
) -> None:
    """Run what is not finished yet, and append each run to a file when it has finished.

    Args:
        specs (`Sequence[RunSpec]`): The runs, in the order in which they start.
        start (`Path`): The folder of the model that every run starts from.
        path (`Path`): The file of the runs (see `store.py`). Runs that it has are finished.
        workers (`int`): Number of processes; with 0, everything runs in this one.
        fresh (`bool`, *optional*, defaults to `False`): Run again what is finished.
        train (`Callable`, *optional*): Trains a spec from `start` and hands a row to its third argument at each
            evaluation.
    """
    finished = read_runs(path)
    missing = [spec for spec in specs if fresh or spec.name not in finished]
    print(f"{len(specs)} runs, {len(specs) - len(missing)} of them finished before", flush=True)
    jobs = [(spec, start, train) for spec in missing]
    for n, rows in enumerate(_results(jobs, workers), start=1):
        append_run(path, rows)
        print(f"[{n}/{len(jobs)}] done: {rows[0]['run']}", flush=True)


def rows_of(specs: Iterable[RunSpec], path: Path) -> list[dict]:
    """The rows of those of `specs` that are in the file, in their order.

    Runs that were made with other settings are left out.
    """
    finished = read_runs(path)
    rows: list[dict] = []
    for spec in specs:
        rows += finished.get(spec.name, [])
    return rows


def _results(jobs: Sequence[Job], workers: int) -> Iterator[list[dict]]:
    """The rows of each job, as they finish."""
    if not jobs:
        return
    if workers == 0:
        yield from map(_run_one, jobs)
        return
    # The numerical libraries of the processes made below read them
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
    spawn = multiprocessing.get_context("spawn")
    # If a process is killed, for want of memory for instance, this raises an error. A `Pool` would wait for ever
    processes = ProcessPoolExecutor(min(workers, len(jobs)), mp_context=spawn)
    try:
        for finished in as_completed([processes.submit(_run_one, job) for job in jobs]):
            yield finished.result()
    finally:
        processes.shutdown(cancel_futures=True)


def _run_one(job: Job) -> list[dict]:
    """The rows of a run, each with the code that produced it."""
    silence_transformers()
    spec, start, train = job
    origin = provenance()
    started = time.monotonic()
    rows: list[dict] = []

    def sink(row: dict) -> None:
        rows.append({**row, **origin})
        _print_progress(spec, row, started)

    train(spec, start, sink)
    return rows


def _print_progress(spec: RunSpec, row: dict, started: float) -> None:
    share = row["step"] / spec.steps
    remaining = ""
    if share > 0:
        seconds = (time.monotonic() - started) * (1 / share - 1)
        remaining = f", {seconds:.0f} s left"
    print(
        f"  {spec.pool}/{spec.method} lr {spec.learning_rate:g} seed {spec.seed}: step {row['step']}/{spec.steps}, "
        f"{row['rollouts']} rollouts, accuracy {row['accuracy_sampled']:.3f}{remaining}",
        flush=True,
    )


def silence_transformers() -> None:
    """No bar for the loading of a tiny model, nothing on how transformers renames its own arguments."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")
