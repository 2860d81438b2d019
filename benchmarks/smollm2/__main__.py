"""The command line: `python -m benchmarks.smollm2 --help`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "benchmarks" / "results" / "smollm2" / "runs"
#: Runs whose learning rate falls to 0, as with TRL's default: planned for their rollouts, on seeds that chose the rate and on
#: others, and for the steps of uniform sampling
LINEAR_TUNING, LINEAR, STEPS = (RUNS.with_name(name) for name in ("linear_tuning", "linear", "steps"))
WEIGHTS = ROOT / "quickstart"  # shared with the quickstart

METHODS = ("uniform", "dynamic", "dots", "replay50", "default", "dots_paper")
FORMER = "independent_draws"  # the defaults before passes and a threshold
#: Pool, learning rate, methods and seeds of the tables. Settings were chosen on other seeds: 0 to 2, 10 to 12, and from 100 on
STUDY: tuple[tuple[str, float, tuple[str, ...], tuple[int, ...]], ...] = (
    ("unsolvable", 1e-3, ("uniform", "default", FORMER, "sharp_selection"), (18, 19, 20)),
    ("mixed", 1e-3, ("uniform", "default", FORMER), tuple(range(13, 18))),
    ("mixed", 1e-3, ("uniform", FORMER), (18, 19)),
    ("learnable", 1e-3, ("uniform", "default", FORMER), (18, 19, 20)),
    ("mixed", 5e-4, ("uniform", "default", FORMER, f"{FORMER},sequential_rollouts=true"), (23, 24, 25)),
    ("mixed", 5e-4, ("sharp_selection", "uniform,per_device_train_batch_size=32"), (23, 24, 25)),
    ("mixed", 1e-3, ("sharp_selection",), (13,)),
    ("learnable", 1e-3, ("sharp_selection",), (18, 19)),
    ("mixed", 1e-3, (f"{FORMER},replay_fraction=0", "replay50", "dynamic", "dots_paper"), (13, 14, 15)),
)
#: The rate that was best for a method of those that were run, and where both are compared with that
OWN_RATES = {"uniform": 1e-3, "default": 5e-4, FORMER: 5e-4}
OWN_RATE_SEEDS = (("mixed", (23, 24, 25)), ("learnable", (18, 19, 20)))
TUNING = ("uniform", (0, 1, 2), (5e-4, 1e-3, 2e-3))


def study_runs() -> list[tuple[str, float, str, int]]:
    """Pool, learning rate, method and seed of each run of the study, each once."""
    runs = [(pool, rate, method, seed) for pool, rate, methods, seeds in STUDY for method in methods for seed in seeds]
    return list(dict.fromkeys(runs))


def own_rate_runs() -> list[tuple[str, float, str, int]]:
    """The same for the comparison in which each method has the rate that is best for it."""
    return [
        (pool, rate, method, s) for pool, seeds in OWN_RATE_SEEDS for s in seeds for method, rate in OWN_RATES.items()
    ]


def tuning_runs() -> list[tuple[str, float, str, int]]:
    """The same for the choice of the learning rate."""
    method, seeds, rates = TUNING
    return [("mixed", rate, method, seed) for rate in rates for seed in seeds]


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m benchmarks.smollm2", description="Does the package save rollouts on a pretrained model?"
    )
    commands = top.add_subparsers(dest="command", required=True)
    study = commands.add_parser("study", help="the runs of the tables that are not finished yet")
    tune = commands.add_parser("tune", help="uniform sampling at several learning rates, on other seeds")
    run = commands.add_parser("run", help="runs of your own choice")
    for command in (study, run):
        command.add_argument(
            "--methods", nargs="+", help="these alone; `default,replay_fraction=0.25` changes a field"
        )
        command.add_argument("--pools", nargs="+", help="these alone: mixed, unsolvable, learnable")
        command.add_argument("--seeds", nargs="+", type=int, help="these alone")
        command.add_argument("--learning-rate", type=float, help="this one alone")
    run.add_argument(
        "--schedule",
        choices=("constant", "linear"),
        default="constant",
        help="of the learning rate; linear: to 0 at the end of the run, TRL's default (default: constant)",
    )
    end = run.add_mutually_exclusive_group()
    end.add_argument("--rollouts", type=int, help="end with the step that reaches them (default: 1,024)")
    end.add_argument("--steps", type=int, help="end with this step, whatever was generated")
    for command in (study, tune, run):
        command.add_argument("--workers", type=int, default=2, help="runs at a time, of one thread each (default: 2)")
        command.add_argument(
            "--scale", type=int, default=1, help="times as many groups a step, for a GPU (default: 1)"
        )
        command.add_argument("--runs", type=Path, default=RUNS, help="folder of the runs")
    tables = commands.add_parser("tables", help="the tables of the finished runs, as Markdown")
    tables.add_argument("--runs", type=Path, default=RUNS, help="folder of the runs")
    tables.add_argument("--tuning", action="store_true", help="those of `tune`")
    commands.add_parser("pools", help="initial success rates of the pools, by exact probability of the answers")
    return top


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = parser().parse_args(arguments)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # before the numerical libraries are imported
        os.environ.setdefault(name, "1")
    from examples.quickstart.__main__ import ENVIRONMENT

    for name, value in ENVIRONMENT.items():  # for the processes that are made
        os.environ.setdefault(name, value)
    {"study": _study, "run": _study, "tune": _tune, "tables": _tables, "pools": _pools}[chosen.command](chosen)


def _study(chosen: argparse.Namespace) -> None:
    from benchmarks.smollm2.train import LEARNING_RATE, Spec

    own_rates = tuple((pool, rate, (method,), (seed,)) for pool, rate, method, seed in own_rate_runs())
    entries = STUDY + own_rates
    if chosen.command == "run":
        rate = chosen.learning_rate or LEARNING_RATE
        entries = tuple(
            (pool, rate, tuple(chosen.methods or METHODS), tuple(chosen.seeds or (100,)))
            for pool in chosen.pools or ["mixed"]
        )

    def ended(spec: Spec) -> Spec:
        """As `run` is told to end it."""
        if chosen.command == "study":
            return spec
        if chosen.steps is not None:
            return spec.planned(chosen.steps, chosen.schedule)
        return spec.until(chosen.rollouts).scheduled(chosen.schedule)

    specs = [
        ended(Spec(method, seed, pool, learning_rate=rate)).scaled(chosen.scale)
        for pool, rate, methods, seeds in entries
        for seed in seeds
        for method in methods
        if method in (chosen.methods or methods)
        and pool in (chosen.pools or [pool])
        and seed in (chosen.seeds or seeds)
        and rate == (chosen.learning_rate or rate)
    ]
    _run(list(dict.fromkeys(specs)), chosen)


def _tune(chosen: argparse.Namespace) -> None:
    from benchmarks.smollm2.train import Spec

    method, seeds, rates = TUNING
    _run([Spec(method, s, "mixed", learning_rate=r).scaled(chosen.scale) for s in seeds for r in rates], chosen)


def _run(specs: list, chosen: argparse.Namespace) -> None:
    from benchmarks.lab.runs import run_all
    from benchmarks.smollm2.report import finished_runs, tables
    from benchmarks.smollm2.train import load, run

    # A field that the package's config has got since then, switched off, changes a run's name and nothing else
    names = {key: path.stem for key, path in finished_runs(chosen.runs).items()} if chosen.command != "run" else {}
    kept = [spec for spec in specs if names.get(spec.key, spec.name) != spec.name and chosen.scale == 1]
    for spec in kept:
        print(f"{names[spec.key]}: finished with former fields of the config; remove the file to run it again")
    load(WEIGHTS)  # converts them, once
    made = run_all([s for s in specs if s not in kept], WEIGHTS, chosen.runs, chosen.workers, train=run)
    print(tables(made))


def _tables(chosen: argparse.Namespace) -> None:
    from benchmarks.smollm2.report import recorded, tables

    print(tables(recorded(chosen.runs, tuning_runs() if chosen.tuning else study_runs())))


def _pools(chosen: argparse.Namespace) -> None:
    from benchmarks.smollm2.report import describe_pools

    print(describe_pools(WEIGHTS))


if __name__ == "__main__":
    main()
