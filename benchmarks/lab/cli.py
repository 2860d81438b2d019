"""The command line of the lab."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]
#: `quick`: fewer seeds, fewer steps, and for no method more than twice the rollouts that uniform takes.
QUICK_METHODS = ("uniform", "dynamic", "oracle")
QUICK = {"steps": 60, "eval_every": 4, "max_rollouts": 2 * 60 * 128}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks.lab", description="Does a GRPO method save rollouts?")
    commands = top.add_subparsers(dest="command", required=True)

    run = commands.add_parser("run", help="run methods over seeds; goes on where an earlier call stopped")
    run.add_argument("--methods", nargs="+", default=["uniform", "dynamic", "oracle"])
    run.add_argument("--pool", default="first", help="first, second or third")
    run.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    run.add_argument("--learning-rates", nargs="+", type=float, default=None, help="default: the lab's own")
    run.add_argument("--steps", type=int, default=100)
    run.add_argument("--eval-every", type=int, default=5, help="steps between evaluations")
    run.add_argument("--max-rollouts", type=int, default=None, help="stop a run here if that comes before --steps")
    _common(run, "runs/lab")

    quick = commands.add_parser("quick", help="a small version: 2 seeds, under 15 minutes on 2 cores")
    _common(quick, "runs/lab-quick")
    quick.set_defaults(workers=2)

    report = commands.add_parser("report", help="tables and report.html once more, from a result table")
    report.add_argument("table", type=Path, help="a results.parquet")

    pools = commands.add_parser("pools", help="show what the trained start can do, and the pools that follow")
    pools.add_argument("--cache", type=Path, default=ROOT / ".cache" / "lab")
    return top


def _common(command: argparse.ArgumentParser, out: str) -> None:
    command.add_argument("--out", type=Path, default=ROOT / out, help="folder of the results")
    command.add_argument("--cache", type=Path, default=ROOT / ".cache" / "lab", help="folder of the trained start")
    command.add_argument("--workers", type=int, default=1, help="processes of one thread each")
    command.add_argument("--fresh", action="store_true", help="run again what is finished")


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    options.shown = "python -m benchmarks.lab " + shlex.join(given)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # before the numerical libraries are imported
        os.environ.setdefault(name, "1")
    {"run": _run, "quick": _quick, "report": _report, "pools": _pools}[options.command](options)


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


def _run(options) -> None:
    from .methods import METHODS
    from .pools import POOLS
    from .pretrain import StartRecipe
    from .runs import interleaved
    from .train import LEARNING_RATE

    for name in options.methods:
        if name not in METHODS:
            raise SystemExit(f"--methods: {name!r} is not one of {', '.join(METHODS)}")
    if options.pool not in POOLS:
        raise SystemExit(f"--pool: {options.pool!r} is not one of {', '.join(POOLS)}")
    specs = interleaved(
        options.methods,
        options.seeds,
        options.learning_rates or [LEARNING_RATE],
        pool=options.pool,
        start=StartRecipe().key,
        steps=options.steps,
        eval_every=options.eval_every,
        max_rollouts=options.max_rollouts,
    )
    _run_specs(specs, options)


def _quick(options) -> None:
    from .pretrain import StartRecipe
    from .runs import interleaved
    from .train import LEARNING_RATE

    specs = interleaved(QUICK_METHODS, [0, 1], [LEARNING_RATE], pool="first", start=StartRecipe().key, **QUICK)
    _run_specs(specs, options)


def _run_specs(specs, options) -> None:
    from .ratios import as_text, curves_by_setting
    from .report import write_report
    from .runs import run_all
    from .store import write_table

    rows = run_all(specs, _start(options.cache), options.out / "runs", options.workers, options.fresh)
    write_table(rows, options.out / "results.parquet", _metadata(options.shown))
    settings = curves_by_setting(rows)
    write_report(settings, options.out / "report.html", options.shown)
    print(f"\n{as_text(settings)}\n\n{options.out / 'results.parquet'}\n{options.out / 'report.html'}")


def _metadata(command: str) -> dict[str, str]:
    from importlib.metadata import version

    names = ("trl-dataeff", "trl", "transformers", "torch", "numpy")
    return {"command": command, **{name: version(name) for name in names}}


def _report(options) -> None:
    import pyarrow.parquet as pq

    from .ratios import as_text, curves_by_setting
    from .report import write_report
    from .store import read_rows

    metadata = pq.read_schema(options.table).metadata or {}
    settings = curves_by_setting(read_rows(options.table))
    write_report(settings, options.table.with_name("report.html"), metadata.get(b"command", b"").decode())
    print(f"{as_text(settings)}\n\n{options.table.with_name('report.html')}")


def _pools(options) -> None:
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
