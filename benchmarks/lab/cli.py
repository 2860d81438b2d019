"""The command line of the synthetic benchmark."""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:  # the commands import the numerical libraries when they run
    from .train import RunSpec


ROOT = Path(__file__).resolve().parents[2]
QUICK_METHODS = ("uniform", "fill")
QUICK_STEPS = 60
QUICK_ROLLOUTS = QUICK_STEPS * 128


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks.lab", description="Does a GRPO method save rollouts?")
    commands = top.add_subparsers(dest="command", required=True)

    run = commands.add_parser("run", help="run methods over seeds; goes on where an earlier call stopped")
    run.add_argument(
        "--methods",
        nargs="+",
        default=["uniform", "fill", "oracle"],
        help="names, each with changes of its config if you like: fill,replay_max_age=10,sharpness=4",
    )
    run.add_argument("--pool", default="first", help="one of those in benchmarks/lab/pools.py")
    run.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    run.add_argument("--learning-rates", nargs="+", type=float, default=None, help="default: 1e-4")
    run.add_argument("--steps", type=int, default=100)
    run.add_argument("--eval-every", type=int, default=5, help="steps between evaluations")
    run.add_argument("--max-rollouts", type=int, default=None, help="stop a run here if that comes before --steps")
    _add_common_arguments(run, ROOT / "runs" / "lab")

    study = commands.add_parser("study", help="run one of the studies whose runs are committed")
    study.add_argument("name", help="one of those in benchmarks/lab/studies.py")
    study.add_argument("--methods", nargs="+", help="run these alone; the table has all that are finished")
    study.add_argument("--seeds", nargs="+", type=int, help="run these alone")
    study.add_argument("--pools", nargs="+", help="run these alone")
    _add_common_arguments(study, ROOT / "benchmarks" / "results" / "lab")

    quick = commands.add_parser(
        "quick", help="plain GRPO, and selection and replay: 2 seeds, under 15 minutes on 2 cores"
    )
    _add_common_arguments(quick, ROOT / "runs" / "lab-quick")
    quick.set_defaults(workers=2)

    pools = commands.add_parser("pools", help="show what the trained start can do, and the pools that follow")
    _add_cache_argument(pools)
    return top


def _add_common_arguments(command: argparse.ArgumentParser, out: Path) -> None:
    command.add_argument("--out", type=Path, default=out, help="folder of the results")
    command.add_argument("--workers", type=int, default=1, help="processes of one thread each; 0: none but this one")
    command.add_argument("--fresh", action="store_true", help="run again what is finished")
    _add_cache_argument(command)


def _add_cache_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument("--cache", type=Path, default=ROOT / ".cache" / "lab", help="folder of the trained start")


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    # Before the numerical libraries are imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MKL_NUM_THREADS", "1")
    commands = {"run": _run, "study": _study, "quick": _quick, "pools": _pools}
    commands[options.command](options)


def _start(cache: Path) -> Path:
    """The folder of the trained start, trained now if the cache lacks it."""
    import torch

    from .pretrain import StartRecipe, start_folder

    torch.set_num_threads(1)
    recipe = StartRecipe()
    started = time.monotonic()

    def print_progress(step: int, loss: float) -> None:
        if step % 100 == 0 or step == recipe.steps - 1:
            seconds = time.monotonic() - started
            print(f"  trained start: step {step}/{recipe.steps}, loss {loss:.3f}, {seconds:.0f} s", flush=True)

    return start_folder(recipe, cache, print_progress)


def _specs(methods: Iterable[str], seeds: Iterable[int], rates: Iterable[float], **shared: Any) -> list[RunSpec]:
    """The runs of all methods with the first seed, then with the second, and so on.

    In this order, a machine that is busier at some hours than at others affects all methods alike.
    """
    from .pretrain import StartRecipe
    from .train import RunSpec

    start = StartRecipe().key
    specs = []
    for seed, rate, method in itertools.product(seeds, rates, methods):
        specs.append(RunSpec(method, seed, learning_rate=rate, start=start, **shared))
    return specs


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
    specs = _specs(
        options.methods,
        options.seeds,
        options.learning_rates or [LEARNING_RATE],
        pool=options.pool,
        steps=options.steps,
        eval_every=options.eval_every,
        max_rollouts=options.max_rollouts,
    )
    path = options.out / "results.jsonl"
    _run_specs(specs, path, options)
    _print_table(specs, path)


def _quick(options: argparse.Namespace) -> None:
    from .train import LEARNING_RATE

    specs = _specs(
        QUICK_METHODS,
        seeds=[0, 1],
        rates=[LEARNING_RATE],
        pool="first",
        steps=QUICK_STEPS,
        max_rollouts=QUICK_ROLLOUTS,
    )
    path = options.out / "results.jsonl"
    _run_specs(specs, path, options)
    _print_table(specs, path)


def _study(options: argparse.Namespace) -> None:
    from .pretrain import StartRecipe
    from .studies import STUDIES, file_of, specs_of

    if options.name not in STUDIES:
        raise SystemExit(f"{options.name!r} is not one of {', '.join(STUDIES)}")
    specs = specs_of(options.name, StartRecipe().key)
    chosen = specs
    filters = {"method": options.methods, "seed": options.seeds, "pool": options.pools}
    for field, values in filters.items():
        if values:
            unknown = set(values) - {getattr(spec, field) for spec in specs}
            if unknown:
                names = ", ".join(str(value) for value in sorted(unknown))
                raise SystemExit(f"--{field}s: {names}: not in the study {options.name!r}")
            chosen = [spec for spec in chosen if getattr(spec, field) in values]
    path = file_of(options.name, options.out)
    _run_specs(chosen, path, options)
    _print_table(specs, path)


def _run_specs(specs: Sequence[RunSpec], path: Path, options: argparse.Namespace) -> None:
    from .runs import run_all

    start = _start(options.cache)
    run_all(specs, start, path, options.workers, options.fresh)


def _print_table(specs: Iterable[RunSpec], path: Path) -> None:
    """The table of those of `specs` that are finished."""
    from .ratios import curves_of, ratio_table
    from .runs import rows_of

    curves = curves_of(rows_of(specs, path))
    print(f"\n{ratio_table(curves)}\n\n{path}")


def _pools(options: argparse.Namespace) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .pools import POOLS, cached_cell_success, classify

    start = _start(options.cache)
    model = AutoModelForCausalLM.from_pretrained(start)
    tokenizer = AutoTokenizer.from_pretrained(start)
    success_by_cell = cached_cell_success(start, model, tokenizer)
    kind_of = {}
    for kind, cells in classify(success_by_cell).items():
        kind_of.update(dict.fromkeys(cells, kind))
    for (family, length), success in success_by_cell.items():
        kind = kind_of.get((family, length), "not used")
        print(f"{family:>10} {length:>2}  {success:.4f}  {kind}")
    for name, pool in POOLS.items():
        print(name, pool.counts(), f"reward {pool.reward.__name__}")
