"""Runs many specs: interleaved, in worker processes of one thread each, going on where an earlier call stopped."""

from __future__ import annotations

import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from .store import RunFile
from .train import RunSpec, run


Sink = Callable[[dict], None]
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def _progress(spec: RunSpec, row: dict, started: float) -> None:
    share = row["step"] / spec.steps
    left = f", {(time.monotonic() - started) * (1 / share - 1):.0f} s left" if share else ""
    print(
        f"  {spec.pool}/{spec.method} lr {spec.learning_rate:g} seed {spec.seed}: step {row['step']}/{spec.steps}, "
        f"{row['rollouts']} rollouts, accuracy {row['accuracy_sampled']:.3f}{left}",
        flush=True,
    )


def _quiet() -> None:
    """No bar for the loading of a tiny model, nothing on how transformers renames its own arguments."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")


def _run_one(spec: RunSpec, start: Path, folder: Path, train: Callable[[RunSpec, Path, Sink], None]) -> str:
    _quiet()
    file, started = RunFile(folder, spec.name), time.monotonic()
    file.begin()

    def sink(row: dict) -> None:
        file.append(row)
        _progress(spec, row, started)

    train(spec, start, sink)
    file.end()
    return spec.name


def _job(arguments) -> str:
    return _run_one(*arguments)


def run_all(
    specs: Sequence[RunSpec],
    start: Path,
    folder: Path,
    workers: int,
    fresh: bool = False,
    train: Callable[[RunSpec, Path, Sink], None] | None = None,
    recorded: Collection[str] = (),
) -> list[dict]:
    """
    Run what is not finished yet and return the rows of all `specs`, in their order; with `run`, or with `train`, in so many
    processes, or with 0 `workers` in this one. Of a spec whose name is in `recorded` the rows are kept elsewhere: it is finished,
    and has none here.
    """
    missing = [
        spec for spec in specs if fresh or (spec.name not in recorded and not RunFile(folder, spec.name).finished())
    ]
    print(f"{len(specs)} runs, {len(specs) - len(missing)} of them finished before", flush=True)
    jobs = [(spec, start, folder, train or run) for spec in missing]
    if workers == 0:
        for n, job in enumerate(jobs, 1):
            print(f"[{n}/{len(jobs)}] done: {_job(job)}", flush=True)
    elif jobs:
        os.environ.update(dict.fromkeys(ONE_THREAD, "1"))  # read by the libraries of the processes made below
        with multiprocessing.get_context("spawn").Pool(min(workers, len(jobs))) as pool:
            for n, name in enumerate(pool.imap_unordered(_job, jobs), 1):
                print(f"[{n}/{len(jobs)}] done: {name}", flush=True)
    return [row for spec in specs for row in RunFile(folder, spec.name).rows()]


def merged(specs: Iterable[RunSpec], table: Iterable[dict], folder: Path) -> list[dict]:
    """The rows of the finished runs of `specs`, from the files in `folder` or else from a `table` made before, in their order."""
    before: dict[str, list[dict]] = {}
    for row in table:
        before.setdefault(row["run"], []).append(row)
    rows = []
    for spec in specs:
        file = RunFile(folder, spec.name)
        rows += file.rows() if file.finished() else before.get(spec.name, [])
    return rows
