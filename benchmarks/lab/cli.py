"""The command line of the lab."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shlex
import sys
import time
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]
#: `quick`: fewer seeds, fewer steps, and for no method more than twice the rollouts that uniform takes.
QUICK_METHODS = ("uniform", "default")
QUICK = {"steps": 60, "eval_every": 4, "max_rollouts": 2 * 60 * 128}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks.lab", description="Does a GRPO method save rollouts?")
    commands = top.add_subparsers(dest="command", required=True)

    run = commands.add_parser("run", help="run methods over seeds; goes on where an earlier call stopped")
    run.add_argument(
        "--methods",
        nargs="+",
        default=["uniform", "dynamic", "oracle"],
        help="names, each with changes of its config if you like: default,replay_fraction=0.25,exploration=0",
    )
    run.add_argument("--pool", default="first", help="one of those in benchmarks/lab/pools.py")
    run.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    run.add_argument("--learning-rates", nargs="+", type=float, default=None, help="default: the lab's own")
    run.add_argument("--steps", type=int, default=100)
    run.add_argument("--eval-every", type=int, default=5, help="steps between evaluations")
    run.add_argument("--max-rollouts", type=int, default=None, help="stop a run here if that comes before --steps")
    _common(run, "runs/lab")

    study = commands.add_parser("study", help="run one of the studies whose tables are committed")
    study.add_argument("name", help="one of those in benchmarks/lab/studies.py")
    study.add_argument(
        "--methods", nargs="+", default=None, help="run these alone; the table has all that are finished"
    )
    study.add_argument("--seeds", nargs="+", type=int, default=None, help="run these alone")
    study.add_argument("--pools", nargs="+", default=None, help="run these alone")
    study.add_argument(
        "--tables",
        type=Path,
        default=ROOT / "benchmarks" / "results" / "lab",
        help="folder of the committed tables: what is in them is not run again, and they grow by what is finished",
    )
    _common(study, "runs/studies")

    quick = commands.add_parser("quick", help="plain GRPO and the defaults: 2 seeds, under 15 minutes on 2 cores")
    _common(quick, "runs/lab-quick")
    quick.set_defaults(workers=2)

    report = commands.add_parser("report", help="tables and report.html once more, from a result table")
    report.add_argument("table", type=Path, help="a results.parquet")
    report.add_argument(
        "--at-step", type=int, help="the target is what uniform has come to at this step; default: its end"
    )

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
    commands = {"run": _run, "study": _study, "quick": _quick, "report": _report, "pools": _pools}
    commands[options.command](options)


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
    from .methods import find
    from .pools import POOLS
    from .pretrain import StartRecipe
    from .runs import interleaved
    from .train import LEARNING_RATE

    try:
        for name in options.methods:
            find(name)
    except ValueError as error:
        raise SystemExit(f"--methods: {error}") from None
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


def _study(options) -> None:
    from .methods import find
    from .pretrain import StartRecipe
    from .runs import merged
    from .store import read_rows
    from .studies import STUDIES

    if options.name not in STUDIES:
        raise SystemExit(f"{options.name!r} is not one of {', '.join(STUDIES)}")
    specs = STUDIES[options.name].specs(StartRecipe().key)
    for given, of in ((options.methods, "method"), (options.seeds, "seed"), (options.pools, "pool")):
        unknown = set(given or ()) - {getattr(spec, of) for spec in specs}
        if unknown:
            raise SystemExit(f"--{of}s: {', '.join(map(str, sorted(unknown)))}: not in the study {options.name!r}")
    chosen = [
        spec
        for spec in specs
        if spec.method in (options.methods or [spec.method])
        and spec.seed in (options.seeds or [spec.seed])
        and spec.pool in (options.pools or [spec.pool])
    ]
    left_out = {spec.method for spec in chosen if importlib.util.find_spec(find(spec.method).package) is None}
    for method in sorted(left_out):
        print(f"{method}: {find(method).package} is not installed here, so that it is not run")
    chosen = [spec for spec in chosen if spec.method not in left_out]
    options.out = options.out / options.name
    table = options.tables / options.name / "results.parquet"
    before = read_rows(table) if table.exists() else []
    _run_specs(chosen, options, table, {row["run"] for row in before}, lambda folder: merged(specs, before, folder))


def _quick(options) -> None:
    from .pretrain import StartRecipe
    from .runs import interleaved
    from .train import LEARNING_RATE

    specs = interleaved(QUICK_METHODS, [0, 1], [LEARNING_RATE], pool="first", start=StartRecipe().key, **QUICK)
    _run_specs(specs, options)


def _run_specs(specs, options, table=None, recorded=(), all_rows=None) -> None:
    """
    Run `specs` but those `recorded`, and report on them, or on the rows that `all_rows` gives for the folder of runs; write
    `table`, or one beside the report.
    """
    from .ratios import as_text, curves_by_setting
    from .report import write_report
    from .runs import run_all
    from .store import write_table

    folder = options.out / "runs"
    rows = run_all(specs, _start(options.cache), folder, options.workers, options.fresh, recorded=recorded)
    rows = all_rows(folder) if all_rows else rows
    table = table or options.out / "results.parquet"
    for place in (table, options.out / "report.html"):
        place.parent.mkdir(parents=True, exist_ok=True)
    write_table(rows, table, metadata(options.shown))
    settings = curves_by_setting(rows)
    write_report(settings, options.out / "report.html", options.shown)
    print(f"\n{as_text(settings)}\n\n{table}\n{options.out / 'report.html'}")


def metadata(command: str) -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"command": command}
    for name in ("trl-dataeff", "trl", "transformers", "torch", "numpy"):
        with contextlib.suppress(PackageNotFoundError):  # another package's environment
            found[name] = version(name)
    return found


def _report(options) -> None:
    import pyarrow.parquet as pq

    from .ratios import as_text, curves_by_setting
    from .report import write_report
    from .store import read_rows

    metadata = pq.read_schema(options.table).metadata or {}
    settings = curves_by_setting(read_rows(options.table))
    write_report(settings, options.table.with_name("report.html"), metadata.get(b"command", b"").decode())
    print(f"{as_text(settings, options.at_step)}\n\n{options.table.with_name('report.html')}")


def _pools(options) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .pools import LEARNABLE, POOLS, cached_cell_success, classify

    start = _start(options.cache)
    cells = cached_cell_success(
        start, AutoModelForCausalLM.from_pretrained(start), AutoTokenizer.from_pretrained(start)
    )
    kind_of = {cell: kind for kind, members in classify(cells).items() for cell in members}
    turns = POOLS["continuum"].kinds(cells)[LEARNABLE]
    for (family, length), p in cells.items():
        share = turns.count((family, length)) / len(turns)
        kind = kind_of.get((family, length), "not used")
        print(f"{family:>10} {length:>2}  {p:.4f}  {kind:<9}  {share:.1%} of the continuum")
    for name, pool in POOLS.items():
        print(name, pool.counts(), f"reward {pool.reward.__name__}")
