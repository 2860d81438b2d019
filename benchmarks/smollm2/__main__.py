"""The command line: `python -m benchmarks.smollm2 --help`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.smollm2 import RUNS


if TYPE_CHECKING:  # the commands import the numerical libraries when they run
    from benchmarks.smollm2.train import Spec


ROOT = Path(__file__).resolve().parents[2]
WEIGHTS = ROOT / "quickstart"  # shared with the quickstart

#: Of the trials, by which each method's learning rate is chosen
TRIAL = (20,)
#: The keys of `POOLS`, which imports the numerical libraries
POOL_NAMES = ("mixed", "several", "unsolvable", "learnable", "gym", "worked", "several_worked")


class Part(NamedTuple):
    """Runs of each method with each seed. `methods`: by name, their learning rates."""

    pool: str
    methods: Mapping[str, float]
    seeds: Iterable[int]
    steps: int
    prompts: int = 8  # groups a step
    eval_every: int = 10  # steps


#: Plain GRPO with the faster update stands for TRL's trainer: its weights are the same but for rounding
COMPARED = ("compact", "selection", "fill", "share", "greso_fill")
COMPARED_WORKED = ("compact", "fill", "fill,stratify_by=kind")
#: That of the trials at which plain GRPO keeps half of its first share of effective groups to the middle of the run
RATE = 1.5e-4
SEEDS = range(30, 35)

#: That of the trials at which plain GRPO ends highest
HIGHER_RATE = 3e-4

STUDY = (
    *(Part("several", {"compact": rate}, TRIAL, steps=100) for rate in (RATE, HIGHER_RATE)),
    Part("several", {"selection": HIGHER_RATE, "share": HIGHER_RATE}, TRIAL, steps=100),
    # Six passes
    Part("several", dict.fromkeys(COMPARED, RATE), SEEDS, steps=100),
    # About as many effective groups a step as plain GRPO has
    Part("several", {"selection": RATE}, SEEDS, steps=100, prompts=5),
    # Whether selection pays where plain GRPO ends higher, too
    Part("several", {"compact": HIGHER_RATE, "selection": HIGHER_RATE}, range(30, 33), steps=100),
    # Four passes, in half as many steps at twice the rate. An evaluation takes as long as several steps
    Part("several_worked", dict.fromkeys(COMPARED_WORKED, 2 * RATE), range(30, 33), steps=48, eval_every=24),
)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m benchmarks.smollm2", description="Does the package save rollouts on a pretrained model?"
    )
    commands = top.add_subparsers(dest="command", required=True)

    study = commands.add_parser("study", help="the runs of the tables that are not finished yet")
    study.add_argument("--methods", nargs="+", help="these alone")
    pools = sorted({part.pool for part in STUDY})
    study.add_argument("--pools", nargs="+", choices=pools, help="these alone")
    study.add_argument("--seeds", nargs="+", type=int, help="these alone")
    study.add_argument("--learning-rate", type=float, help="this one alone")
    _add_common_arguments(study, RUNS)

    run = commands.add_parser("run", help="runs of your own choice")
    run.add_argument("--methods", nargs="+", default=["uniform", "fill"], help="`fill,replay=off` sets a field")
    run.add_argument(
        "--pools", nargs="+", choices=POOL_NAMES, default=["mixed"], help="the questions (default: mixed)"
    )
    run.add_argument("--seeds", nargs="+", type=int, default=[100])
    run.add_argument("--learning-rate", type=float, default=3e-4, help="at the start (default: 3e-4)")
    run.add_argument("--steps", type=int, default=100, help="(default: 100)")
    run.add_argument("--prompts", type=int, default=8, help="groups a step (default: 8)")
    run.add_argument("--eval-every", type=int, default=10, help="steps (default: 10)")
    _add_common_arguments(run, ROOT / "runs" / "smollm2.jsonl")

    commands.add_parser("pools", help="initial success rates of the pools")
    return top


def _add_common_arguments(command: argparse.ArgumentParser, runs: Path) -> None:
    command.add_argument("--workers", type=int, default=2, help="runs at a time, of one thread each (default: 2)")
    command.add_argument("--runs", type=Path, default=runs, help=f"file of the runs (default: {runs.name})")


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    # Before the numerical libraries are imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MKL_NUM_THREADS", "1")
    from examples.quickstart.__main__ import ENVIRONMENT

    # The processes that are made read it
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if options.command == "study":
        _run_specs(study_specs(options), options)
    elif options.command == "run":
        _run_specs(chosen_specs(options), options)
    else:
        print(describe_pools())


def study_specs(options: argparse.Namespace | None = None) -> list[Spec]:
    """The runs of the study, seed by seed; of these, those that the options of `study` leave."""
    from benchmarks.smollm2.train import Spec

    specs = []
    for part in STUDY:
        for seed in part.seeds:
            for method, rate in part.methods.items():
                spec = Spec(method, seed, part.pool, rate, part.steps, part.prompts, eval_every=part.eval_every)
                specs.append(spec)
    specs.sort(key=lambda spec: (spec.pool, spec.seed))
    if options is None:
        return specs
    return [spec for spec in specs if _is_chosen(spec, options)]


def _is_chosen(spec: Spec, options: argparse.Namespace) -> bool:
    """Whether the options of `study` leave a run. An option that is not given leaves all."""
    if options.methods and spec.method not in options.methods:
        return False
    if options.pools and spec.pool not in options.pools:
        return False
    if options.seeds and spec.seed not in options.seeds:
        return False
    return not options.learning_rate or spec.learning_rate == options.learning_rate


def chosen_specs(options: argparse.Namespace) -> list[Spec]:
    """The runs that the options of `run` describe."""
    from benchmarks.smollm2.train import Spec

    fields = {
        "learning_rate": options.learning_rate,
        "steps": options.steps,
        "prompts": options.prompts,
        "eval_every": options.eval_every,
    }
    every = product(options.pools, options.seeds, options.methods)
    return [Spec(method, seed, pool, **fields) for pool, seed, method in every]


def _run_specs(specs: list[Spec], options: argparse.Namespace) -> None:
    from benchmarks.lab.ratios import curves_of, ratio_table
    from benchmarks.lab.runs import rows_of, run_all
    from benchmarks.smollm2.train import load, run

    load(WEIGHTS)  # converts them, once
    run_all(specs, WEIGHTS, options.runs, options.workers, train=run)
    curves = curves_of(rows_of(specs, options.runs))
    if curves:
        shortest = min(curve.rows[-1]["rollouts"] for curve in curves)
        print(f"\n{ratio_table(curves, budget=shortest)}")


def describe_pools(seed: int = 0) -> str:
    """Tables of what the model can do before training.

    Args:
        seed (`int`, *optional*, defaults to `0`): That of the questions.

    Returns:
        By kind and in all, the exact chance of a right completion on the questions of `mixed`, `unsolvable` and
        `learnable`; and the score on the held-out questions of `gym` and `worked`.
    """
    from benchmarks.smollm2.pools import POOLS, Pool
    from benchmarks.smollm2.train import load
    from benchmarks.tables import markdown

    rows = []
    scores = []
    for name, pool in POOLS.items():
        model, tokenizer = load(WEIGHTS, pool.end)
        model.eval()
        if isinstance(pool, Pool):
            rows += _rows_of_pool(name, pool, seed, model, tokenizer)
        else:
            scores += _scores_of_pool(name, pool, model, tokenizer)
    header = ["pool", "kind", "questions", "mean", "10 %", "50 %", "90 %", "effective groups of 8"]
    return f"{markdown(header, rows)}\n\n{markdown(['pool', 'kind', 'score'], scores)}"


def _scores_of_pool(name: str, pool, model, tokenizer) -> list[list[str]]:
    measured = pool.quality(model, tokenizer)
    rows = [[name, kind, f"{score:.3f}"] for kind, score in measured["accuracy_by_kind"].items()]
    rows.append([name, "all", f"{measured['accuracy_sampled']:.3f}"])
    if measured["accuracy_greedy"] is not None:
        rows.append([name, "all, greedy", f"{measured['accuracy_greedy']:.3f}"])
    return rows


def _rows_of_pool(name: str, pool, seed: int, model, tokenizer) -> list[list[str]]:
    import numpy as np

    from benchmarks.lab.evaluate import success
    from benchmarks.lab.tasks import Task
    from benchmarks.smollm2.pools import training_questions
    from benchmarks.smollm2.questions import KINDS

    asked = training_questions(pool, seed)
    tasks = [Task(question.kind, 0, question.prompt, question.answer) for question in asked]
    rates = success(model, tokenizer, tasks).sampled.numpy()
    rows = []
    for kind in (*KINDS, "all"):
        p = rates[[kind in (question.kind, "all") for question in asked]]
        if len(p) == 0:
            continue
        quantiles = [f"{quantile:.3f}" for quantile in np.quantile(p, [0.1, 0.5, 0.9])]
        effective = (1 - p**8 - (1 - p) ** 8).mean()
        rows.append([name, kind, str(len(p)), f"{p.mean():.3f}", *quantiles, f"{effective:.2f}"])
    return rows


if __name__ == "__main__":
    main()
