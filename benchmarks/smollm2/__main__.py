"""The command line: `python -m benchmarks.smollm2 --help`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "benchmarks" / "results" / "smollm2" / "runs"
WEIGHTS = ROOT / "quickstart"  # shared with the quickstart

FIVE, THREE, TRIAL = tuple(range(31, 36)), tuple(range(31, 34)), (20,)
BOTH = ("uniform", "default")
DOTS = "dots_paper,reference_size=4,replay_capacity=8"  # half a batch of references, a buffer of one batch
#: Half and twice the batch of the others
BATCHES = tuple(f"uniform,per_device_train_batch_size={size}" for size in (32, 128))
OTHERS = ("skip", "fill", "dynamic", "greso", DOTS, *BATCHES)
#: Pool, groups a step, learning rate, planned rollouts, methods and seeds of the tables; and the trials by which rates were chosen
STUDY: tuple[tuple[str, int, float, int, tuple[str, ...], tuple[int, ...]], ...] = (
    ("mixed", 8, 2e-3, 1024, (*BOTH, "selection"), FIVE),
    ("mixed", 8, 2e-3, 1024, ("fill", DOTS, *BATCHES), FIVE),
    ("mixed", 8, 2e-3, 2112, ("dynamic",), FIVE),  # rounds are smaller than planned: ends after about 1,024
    *(("gym", 8, rate, 1024, BOTH, FIVE) for rate in (2e-3, 4e-3)),
    ("gym", 8, 4e-3, 1024, ("selection", "fill", DOTS, *BATCHES), FIVE),
    ("gym", 8, 4e-3, 2112, ("dynamic",), FIVE),  # for the same reason
    *(("gym", 8, rate, 1024, ("uniform",), THREE) for rate in (1e-3, 8e-3)),
    ("mixed", 8, 2.5e-4, 9600, BOTH, FIVE),
    ("mixed", 8, 2.5e-4, 9600, (DOTS,), THREE),
    *(("mixed", 8, 2.5e-4, plan, ("default",), FIVE) for plan in (6720, 4800, 3360)),
    *(("mixed", 8, rate, 1024, BOTH, THREE) for rate in (1e-3, 4e-3)),
    *(("unsolvable", 8, rate, 2400, (*BOTH, "selection", *OTHERS), FIVE) for rate in (1e-3, 5e-4)),
    ("unsolvable", 8, 2e-3, 2400, ("uniform",), THREE[:2]),
    *(("unsolvable", 8, rate, plan, ("default",), THREE) for rate in (1e-3, 5e-4) for plan in (1664, 1024)),
    ("gym", 8, 2e-3, 2400, BOTH, FIVE),
    ("gym", 8, 1e-3, 2400, ("uniform",), THREE),
    ("mixed", 32, 2e-3, 2400, (*BOTH, "selection"), THREE),
    ("mixed", 32, 4e-3, 2400, BOTH, THREE[:2]),
    ("mixed", 8, 1e-3, 9600, BOTH, THREE),
    ("mixed", 8, 5e-4, 9600, BOTH, THREE[:1]),
    ("mixed", 8, 1.25e-4, 9600, ("uniform",), THREE[:1]),
    *(("unsolvable", 8, rate, 2400, BOTH, TRIAL) for rate in (2.5e-4, 5e-4, 1e-3)),
    ("unsolvable", 8, 2e-3, 2400, ("default",), TRIAL),
    *(("learnable", 8, rate, 2400, ("uniform",), TRIAL) for rate in (2.5e-4, 5e-4, 1e-3, 2e-3)),
    *(("gym", 8, rate, 2400, ("uniform",), TRIAL) for rate in (5e-4, 1e-3, 2e-3, 4e-3)),
    *(("gym", 8, rate, 2400, ("default",), TRIAL) for rate in (1e-3, 2e-3, 4e-3)),
    *(("mixed", 32, rate, 2400, ("uniform",), TRIAL) for rate in (1e-3, 2e-3, 4e-3, 8e-3)),
    ("learnable", 8, 1e-3, 2400, BOTH, FIVE),
    ("learnable", 8, 2e-3, 2400, ("uniform",), FIVE),
    ("learnable", 8, 5e-4, 2400, ("uniform",), THREE),
    ("learnable", 8, 1e-3, 2400, ("selection", "fill", DOTS, *BATCHES), FIVE),
    ("learnable", 8, 1e-3, 6400, ("dynamic",), FIVE),  # ends after about 2,400, for the same reason
    *(("learnable", 8, rate, 2400, ("default",), TRIAL) for rate in (5e-4, 1e-3, 2e-3)),
)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m benchmarks.smollm2", description="Does the package save rollouts on a pretrained model?"
    )
    commands = top.add_subparsers(dest="command", required=True)
    study = commands.add_parser("study", help="the runs of the tables that are not finished yet")
    run = commands.add_parser("run", help="runs of your own choice")
    run.add_argument("--methods", nargs="+", default=["uniform", "default"], help="`default,replay=off` sets a field")
    run.add_argument("--pools", nargs="+", default=["mixed"], help="mixed, unsolvable, learnable, gym")
    run.add_argument("--seeds", nargs="+", type=int, default=[100])
    run.add_argument("--learning-rate", type=float, default=2e-3)
    run.add_argument("--rollouts", type=int, default=1024, help="end with the step that reaches them (default: 1024)")
    run.add_argument("--prompts", type=int, default=8, help="groups a step (default: 8)")
    study.add_argument("--methods", nargs="+", help="these alone")
    study.add_argument("--pools", nargs="+", help="these alone")
    study.add_argument("--seeds", nargs="+", type=int, help="these alone")
    study.add_argument("--learning-rate", type=float, help="this one alone")
    study.add_argument("--rollouts", type=int, help="runs that are planned for so many alone")
    for command in (study, run):
        command.add_argument("--workers", type=int, default=2, help="runs at a time, of one thread each (default: 2)")
    study.add_argument(
        "--runs", type=Path, default=RUNS, help="folder of the runs; by default that of the committed ones"
    )
    run.add_argument("--runs", type=Path, default=ROOT / "runs" / "smollm2", help="folder of the runs")
    commands.add_parser("pools", help="initial success rates of the pools, by exact probability of the answers")
    return top


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = parser().parse_args(arguments)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # before the numerical libraries are imported
        os.environ.setdefault(name, "1")
    from examples.quickstart.__main__ import ENVIRONMENT

    for name, value in ENVIRONMENT.items():  # for the processes that are made
        os.environ.setdefault(name, value)
    if chosen.command == "pools":
        print(describe_pools())
    else:
        specs = study_specs(chosen) if chosen.command == "study" else chosen_specs(chosen)
        _run(specs, chosen)


def study_specs(chosen: argparse.Namespace | None = None) -> list:
    """The runs of the study, seed by seed; of these, those that are `chosen`."""
    from benchmarks.smollm2.train import planned

    specs = [
        planned(method, seed, pool, rate, rollouts, prompts)
        for pool, prompts, rate, rollouts, methods, seeds in STUDY
        for seed in seeds
        for method in methods
    ]
    if chosen is None:
        return specs
    return [
        spec
        for spec in specs
        if spec.method in (chosen.methods or [spec.method])
        and spec.pool in (chosen.pools or [spec.pool])
        and spec.seed in (chosen.seeds or [spec.seed])
        and spec.learning_rate == (chosen.learning_rate or spec.learning_rate)
        and spec.max_rollouts == (chosen.rollouts or spec.max_rollouts)
    ]


def chosen_specs(chosen: argparse.Namespace) -> list:
    from benchmarks.smollm2.train import planned

    return [
        planned(method, seed, pool, chosen.learning_rate, chosen.rollouts, chosen.prompts)
        for pool in chosen.pools
        for seed in chosen.seeds
        for method in chosen.methods
    ]


def _run(specs: list, chosen: argparse.Namespace) -> None:
    from benchmarks.lab.ratios import curves_of
    from benchmarks.lab.runs import run_all
    from benchmarks.smollm2.tables import FIRST_SEED, full_table, settings_of
    from benchmarks.smollm2.train import load, run

    load(WEIGHTS)  # converts them, once
    curves = curves_of(run_all(specs, WEIGHTS, chosen.runs, chosen.workers, train=run))
    for trials in (True, False):  # which are not seeds of the tables
        if own := [curve for curve in curves if (curve.seed < FIRST_SEED) == trials]:
            print(f"\n{full_table(settings_of(own))}")


def describe_pools(seed: int = 0) -> str:
    """
    Before training: by kind and in all, the exact chance of a right completion on the questions of `mixed`, `unsolvable` and
    `learnable`, and the score on the held-out questions of `gym`.
    """
    import numpy as np

    from benchmarks.lab.evaluate import success
    from benchmarks.lab.tasks import Task
    from benchmarks.smollm2.pools import POOLS, Pool, training_questions
    from benchmarks.smollm2.questions import KINDS
    from benchmarks.smollm2.train import load
    from benchmarks.tables import markdown

    model, tokenizer = load(WEIGHTS)
    rows = []
    for name, pool in POOLS.items():
        if not isinstance(pool, Pool):
            continue
        asked = training_questions(pool, seed)
        tasks = [Task(q.kind, 0, q.prompt, q.answer) for q in asked]
        rates = success(model.eval(), tokenizer, tasks).sampled.numpy()
        for kind in (*KINDS, "all"):
            p = rates[[kind in (q.kind, "all") for q in asked]]
            if len(p):
                quantiles = [f"{q:.3f}" for q in np.quantile(p, [0.1, 0.5, 0.9])]
                effective = f"{(1 - p**8 - (1 - p) ** 8).mean():.2f}"
                rows.append([name, kind, str(len(p)), f"{p.mean():.3f}", *quantiles, effective])
    header = ["pool", "kind", "questions", "mean", "10 %", "50 %", "90 %", "effective groups of 8"]
    gym = POOLS["gym"].quality(model, tokenizer)
    scores = [[kind, f"{value:.3f}"] for kind, value in gym["accuracy_by_kind"].items()]
    scores += [["all", f"{gym['accuracy_sampled']:.3f}"], ["all, greedy", f"{gym['accuracy_greedy']:.3f}"]]
    return f"{markdown(header, rows)}\n\n{markdown(['gym', 'score'], scores)}"


if __name__ == "__main__":
    main()
