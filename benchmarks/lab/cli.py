"""The command line of the synthetic benchmark."""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[2]
TABLES = ROOT / "benchmarks" / "results" / "lab"
QUICK_METHODS = ("uniform", "default")
QUICK = {"steps": 60, "max_rollouts": 60 * 128}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks.lab", description="Does a GRPO method save rollouts?")
    commands = top.add_subparsers(dest="command", required=True)

    run = commands.add_parser("run", help="run methods over seeds; goes on where an earlier call stopped")
    run.add_argument(
        "--methods",
        nargs="+",
        default=["uniform", "default", "oracle"],
        help="names, each with changes of its config if you like: default,replay=off,threshold=0.5",
    )
    run.add_argument("--pool", default="first", help="one of those in benchmarks/lab/pools.py")
    run.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    run.add_argument("--learning-rates", nargs="+", type=float, default=None, help="default: 1e-4")
    run.add_argument("--steps", type=int, default=100)
    run.add_argument("--eval-every", type=int, default=5, help="steps between evaluations")
    run.add_argument("--max-rollouts", type=int, default=None, help="stop a run here if that comes before --steps")
    _common(run, "runs/lab")

    study = commands.add_parser("study", help="run one of the studies whose tables are committed")
    study.add_argument("name", help="one of those in benchmarks/lab/studies.py")
    study.add_argument("--methods", nargs="+", help="run these alone; the table has all that are finished")
    study.add_argument("--seeds", nargs="+", type=int, help="run these alone")
    study.add_argument("--pools", nargs="+", help="run these alone")
    study.add_argument("--tables", type=Path, default=TABLES, help="folder of the committed tables")
    _common(study, "runs/studies")

    quick = commands.add_parser("quick", help="plain GRPO and the defaults: 2 seeds, under 15 minutes on 2 cores")
    _common(quick, "runs/lab-quick")
    quick.set_defaults(workers=2)

    pools = commands.add_parser("pools", help="show what the trained start can do, and the pools that follow")
    pools.add_argument("--cache", type=Path, default=ROOT / ".cache" / "lab")
    return top


def _common(command: argparse.ArgumentParser, out: str) -> None:
    command.add_argument("--out", type=Path, default=ROOT / out, help="folder of the results")
    command.add_argument("--cache", type=Path, default=ROOT / ".cache" / "lab", help="folder of the trained start")
    command.add_argument("--workers", type=int, default=1, help="processes of one thread each; 0: none but this one")
    command.add_argument("--fresh", action="store_true", help="run again what is finished")


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    options.shown = "python -m benchmarks.lab " + shlex.join(sys.argv[1:] if arguments is None else arguments)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # before the numerical libraries are imported
        os.environ.setdefault(name, "1")
    {"run": _run, "study": _study, "quick": _quick, "pools": _pools}[options.command](options)


def _start(cache: Path) -> Path:
    import torch

    from .pretrain import StartRecipe, start_folder

    torch.set_num_threads(1)
    recipe, started = StartRecipe(), time.monotonic()

    def progress(step: int, loss: float) -> None:
        if step % 100 == 0 or step == recipe.steps - 1:
            took = time.monotonic() - started
            print(f"  trained start: step {step}/{recipe.steps}, loss {loss:.3f}, {took:.0f} s", flush=True)

    return start_folder(recipe, cache, progress)


def _specs(methods: Iterable[str], seeds: Iterable[int], rates: Iterable[float], **shared: Any) -> list:
    """
    All methods of the first seed, then of the second, ...: a machine that is busier at some hours than at others so touches all
    methods alike.
    """
    from .pretrain import StartRecipe
    from .train import RunSpec

    return [
        RunSpec(method, seed, learning_rate=rate, start=StartRecipe().key, **shared)
        for seed, rate, method in itertools.product(seeds, rates, methods)
    ]


def _run(options: argparse.Namespace) -> None:
    from .methods import find
    from .pools import POOLS
    from .train import LEARNING_RATE

    try:
        for name in options.methods:
            find(name)
    except ValueError as error:
        raise SystemExit(f"--methods: {error}") from None
    if options.pool not in POOLS:
        raise SystemExit(f"--pool: {options.pool!r} is not one of {', '.join(POOLS)}")
    shared = {name: getattr(options, name) for name in ("pool", "steps", "eval_every", "max_rollouts")}
    specs = _specs(options.methods, options.seeds, options.learning_rates or [LEARNING_RATE], **shared)
    _report(_made(specs, options), options.out / "results.parquet", options)


def _quick(options: argparse.Namespace) -> None:
    from .train import LEARNING_RATE

    specs = _specs(QUICK_METHODS, [0, 1], [LEARNING_RATE], pool="first", **QUICK)
    _report(_made(specs, options), options.out / "results.parquet", options)


def _study(options: argparse.Namespace) -> None:
    from .pretrain import StartRecipe
    from .runs import merged
    from .store import read_rows
    from .studies import STUDIES, specs_of

    if options.name not in STUDIES:
        raise SystemExit(f"{options.name!r} is not one of {', '.join(STUDIES)}")
    specs = chosen = specs_of(options.name, StartRecipe().key)
    for given, of in ((options.methods, "method"), (options.seeds, "seed"), (options.pools, "pool")):
        unknown = set(given or ()) - {getattr(spec, of) for spec in specs}
        if unknown:
            raise SystemExit(f"--{of}s: {', '.join(map(str, sorted(unknown)))}: not in the study {options.name!r}")
        chosen = [spec for spec in chosen if getattr(spec, of) in (given or [getattr(spec, of)])]
    options.out = options.out / options.name
    table = options.tables / options.name / "results.parquet"
    before = read_rows(table) if table.exists() else []
    _made(chosen, options, {row["run"] for row in before})
    _report(merged(specs, before, options.out / "runs"), table, options)


def _made(specs: list, options: argparse.Namespace, recorded: Iterable[str] = ()) -> list[dict]:
    """The rows of `specs`, run now unless they are finished or `recorded`."""
    from .runs import run_all

    start = _start(options.cache)
    return run_all(specs, start, options.out / "runs", options.workers, options.fresh, recorded=set(recorded))


def _report(rows: list[dict], table: Path, options: argparse.Namespace) -> None:
    from .ratios import curves_of, ratio_table
    from .store import write_table

    write_table(rows, table, options.shown)
    print(f"\n{ratio_table(curves_of(rows))}\n\n{table}")


def _pools(options: argparse.Namespace) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .pools import POOLS, cached_cell_success, classify

    start = _start(options.cache)
    cells = cached_cell_success(
        start, AutoModelForCausalLM.from_pretrained(start), AutoTokenizer.from_pretrained(start)
    )
    kind_of = {cell: kind for kind, members in classify(cells).items() for cell in members}
    for (family, length), p in cells.items():
        print(f"{family:>10} {length:>2}  {p:.4f}  {kind_of.get((family, length), 'not used')}")
    for name, pool in POOLS.items():
        print(name, pool.counts(), f"reward {pool.reward.__name__}")
