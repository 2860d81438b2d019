"""`trl-dataeff simulate`: what a run would save, before it is made, and which settings to take."""

from __future__ import annotations

import argparse
import math
import sys
import typing
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_dataeff.cli.errors import UserError, closest, listed


if TYPE_CHECKING:
    from trl_dataeff.analysis.simulate import Outcome, Prompts


EPILOG = """\
The package's own selection, rounds and replay are run on simulated prompts, whose success rates rise as a simulated
policy learns, until each setting has learned what plain GRPO learns in --max_steps steps. What it says of rollouts and
steps is an estimate; docs/simulate.md has it beside what runs of a small language model measured.

A guess at the shares: roll out some prompts once. Groups in which all completions are right are mostly easy, and of the
groups in which all are wrong, most are dead where they outnumber those with one or two right ones. Or let --groups
estimate them, from the log of a run, even a short one, with `selection: uniform`.

examples:
  # 7,473 prompts, 64 groups of 8 a step; 0.2 s a rollout, all devices at work, and 25 s for the rest of a step
  trl-dataeff simulate --prompts 7473 --easy 0.3 --dead 0.2 --num_generations 8 --groups_per_step 64 --max_steps 100 \\
      --seconds_per_rollout 0.2 --seconds_per_step 25

  # shares from the log of a run; a setting of one's own beside the others
  trl-dataeff simulate --groups out/dataeff/groups.parquet --prompts 7473 --max_steps 100 --try replay_fraction=0.75
"""
FEWEST = 32  # prompts in a log
DEAD_BELOW, EASY_FROM = 0.02, 0.95  # success rates; a group of 8 cannot tell 0.01 from 0
SATURATED = 0.97  # success rate of the learnable prompts beyond which the comparison is about their rests
RATES = (0.01, 0.7)
#: Fields that change nothing here: there are no texts, no weights, and rewards are 0 and 1
NOT_SIMULATED = ("dots_embedding", "replay_clip", "replay_ratio_cap", "reward_range")


def run(argv: list[str]) -> int:
    """
    Run the sub-command and return its exit code.

    Args:
        argv (`list[str]`):
            What follows `trl-dataeff simulate`.
    """
    args = _parser().parse_args(argv)
    _check_numbers(args)

    import numpy as np
    from transformers.utils import logging

    from trl_dataeff.analysis.simulate import (
        SETTINGS,
        Costs,
        Learning,
        NothingLearned,
        SimulatedRun,
        compare,
        embed,
        make_config,
    )
    from trl_dataeff.difficulty.base import PredictorError

    logging.set_verbosity_error()
    warnings.simplefilter("ignore", FutureWarning)  # what transformers says of its own fields
    settings = {**SETTINGS, **{text: _changes(text) for text in args.tried}}
    prompts, source = _prompts(args)
    learning = Learning(speed=args.speed)

    def make_run(fields, seed: int) -> SimulatedRun:
        rng = np.random.default_rng(seed)
        log_odds = prompts.log_odds(rng)
        config = make_config(args.num_generations, args.groups_per_step, seed=seed, **fields)
        return SimulatedRun(config, log_odds, lambda: embed(log_odds, prompts.predictability, rng), learning)

    def progress(name: str, seed: int) -> None:
        if sys.stderr.isatty() or prompts.size * args.max_steps > 10**8:
            print(f"  {name}, seed {seed}", file=sys.stderr, flush=True)

    try:
        for text in args.tried:
            make_config(args.num_generations, args.groups_per_step, **settings[text])
    except ValueError as error:
        raise UserError(f"`--try {text}`: {error}") from error
    try:
        outcomes = compare(
            make_run,
            settings,
            steps=args.max_steps,
            costs=Costs(args.seconds_per_rollout or 1.0, args.seconds_per_step),
            seeds=args.seeds,
            progress=progress,
        )
    except (NothingLearned, PredictorError) as error:
        raise UserError(str(error)) from error
    print(report(args, source, outcomes, settings))
    return 0


def report(
    args: argparse.Namespace, source: str, outcomes: dict[str, Outcome], settings: dict[str, dict[str, Any]]
) -> str:
    """
    Return the table and the advice, in Markdown.

    Args:
        args (`argparse.Namespace`):
            Options of the command.
        source (`str`):
            The prompts, in words.
        outcomes (`dict[str, Outcome]`):
            By setting.
        settings (`dict[str, dict]`):
            Fields of the configuration, by setting.
    """
    import yaml

    from trl_dataeff.analysis.simulate import BASELINE, PATIENCE, best

    base = outcomes[BASELINE]
    timed = args.seconds_per_rollout is not None
    body = [("setting", "steps", "rollouts", "rollouts/uniform", "effective", *(("time", "time/uniform") * timed))]
    for name, o in sorted(outcomes.items(), key=lambda item: item[1].seconds):
        there = math.isfinite(o.rollouts)
        body.append(
            (
                name,
                f"{o.steps:,.0f}" if there else "never",
                f"{o.rollouts:,.0f}" if there else "never",
                f"{o.ratio:.2f}" if there else "-",
                f"{o.effective:.0%}",
                *((_duration(o.seconds), f"{o.seconds / base.seconds:.2f}") if there else ("-", "-")) * timed,
            )
        )
    widths = [max(len(line[i]) for line in body) for i in range(len(body[0]))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in body]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    chosen = best(outcomes)
    head = [
        f"{source}; {args.groups_per_step} groups of {args.num_generations} a step.",
        f"Until each setting has learned what uniform sampling learns in {args.max_steps:,} steps: the others' success is "
        f"then {base.success:.0%} ({args.seeds} simulated runs each; never: not in {PATIENCE:g} times uniform's time).",
        "",
    ]
    advice = [""]
    if base.success > SATURATED:
        advice += [
            f"By then nearly everything is learned: the savings are those of the last few per cent. Fewer --max_steps than "
            f"{args.max_steps:,} would do, and say more.",
            "",
        ]
    if chosen == BASELINE:
        advice.append("Little is to be saved here: nothing is faster than uniform sampling by more than 5 %.")
    else:
        o = outcomes[chosen]
        advice.append(
            f"Take {chosen!r}: about {o.ratio:.0%} of the rollouts"
            + (f" and {o.seconds / base.seconds:.0%} of the time." if timed else ".")
        )
        fields = settings[chosen]
        advice.append("That is what the package does by default." if not fields else "In the recipe:")
        if fields:
            advice += ["", *(f"    {line}" for line in yaml.safe_dump(fields, sort_keys=False).splitlines())]
    return "\n".join([*head, *lines, *advice])


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def _changes(text: str) -> dict[str, Any]:
    """`"replay_fraction=0.25,exploration=0"` as fields of the configuration, of their types."""
    import yaml

    from trl_dataeff.cli.help import own_fields
    from trl_dataeff.cli.values import WrongType, fit, got
    from trl_dataeff.config import DataEfficientGRPOConfig

    hints = typing.get_type_hints(DataEfficientGRPOConfig)
    known = own_fields() + own_fields("replay_", "dots_", "greso_", "history_", "exploration")
    known = tuple(name for name in known if name not in NOT_SIMULATED)
    fields = {}
    for change in text.split(","):
        name, equals, value = (part.strip() for part in change.partition("="))
        if not equals or name not in known:
            raise UserError(
                f"`--try {text}`: {change!r} is not FIELD=VALUE with a field that decides which prompts are rolled out or "
                f"replayed.{closest(name, known)} They are {listed(known)}."
            )
        parsed = yaml.safe_load(value)
        try:
            fields[name] = fit(parsed, hints[name])
        except WrongType as error:
            raise UserError(f"`--try {text}`: `{name}` is {got(parsed)}; it takes {error}.") from error
    return fields


def _check_numbers(args: argparse.Namespace) -> None:
    """The numbers that nothing later looks at before the simulation begins."""
    at_least = {"prompts": 1, "max_steps": 1, "groups_per_step": 1, "num_generations": 2, "seeds": 1}
    at_least["logged_num_generations"] = 2
    wrong = [
        f"`--{name}` is {getattr(args, name)}; it takes an integer >= {low}."
        for name, low in at_least.items()
        if getattr(args, name) is not None and getattr(args, name) < low
    ]
    if args.seconds_per_step and args.seconds_per_rollout is None:
        wrong.append("`--seconds_per_step` needs `--seconds_per_rollout`: one without the other says nothing.")
    for name in ("speed", "seconds_per_rollout"):
        if getattr(args, name) is not None and not 0 < getattr(args, name) < math.inf:
            wrong.append(f"`--{name}` is {getattr(args, name)}; it takes a number > 0.")
    if not 0 <= args.seconds_per_step < math.inf:
        wrong.append(f"`--seconds_per_step` is {args.seconds_per_step}; it takes a number >= 0.")
    if not wrong and args.prompts is not None and args.prompts < args.groups_per_step:
        wrong.append(
            f"A step takes {args.groups_per_step} prompts (`--groups_per_step`), and there are {args.prompts} "
            "(`--prompts`)."
        )
    if wrong:
        raise UserError(*wrong)


def _prompts(args: argparse.Namespace) -> tuple[Prompts, str]:
    """The prompts to simulate, and what they are in words."""
    from trl_dataeff.analysis.simulate import Prompts

    if args.groups is None:
        missing = [f"`--{name}`" for name in ("prompts", "easy", "dead") if getattr(args, name) is None]
        if missing:
            raise UserError(f"{', '.join(missing)} is missing. Give guesses, or the log of a run: --groups FILE.")
        low, high = args.success_rates or RATES
        source = f"{args.prompts:,} prompts, {args.easy:.0%} of them easy and {args.dead:.0%} dead"
        rates: Any = (low, high)
        easy, dead = args.easy, args.dead
    else:
        if args.easy is not None or args.dead is not None or args.success_rates is not None:
            raise UserError(
                "`--easy`, `--dead` and `--success_rates` are estimated from `--groups`. Leave one or the other out."
            )
        easy, dead, rates, logged = _from_log(args.groups, args.logged_num_generations or args.num_generations)
        if args.prompts is None:
            raise UserError("`--prompts` is missing: how many prompts the dataset has, seen or not.")
        source = (
            f"{args.prompts:,} prompts like the {logged:,} in {args.groups}: {easy:.0%} of them easy, {dead:.0%} dead, "
            f"the others with success rates of {rates[0]:.2f} to {rates[1]:.2f}"
        )
    try:
        return Prompts(args.prompts, easy, dead, rates, args.predictability), source
    except ValueError as error:
        raise UserError(str(error)) from error


def _from_log(path: str, group_size: int) -> tuple[float, float, tuple[float, float], int]:
    """Shares of easy and of dead prompts, the range of the others' success rates, and how many prompts were seen."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from trl_dataeff.analysis.simulate import success_rate_distribution

    try:
        table = pq.read_table(Path(path).expanduser(), columns=["prompt_id", "success_rate", "predicted"])
    except (OSError, pa.ArrowException, KeyError) as error:
        raise UserError(f"`--groups {path}` is not the groups.parquet of a run ({error}).") from error
    ids, rates = table["prompt_id"].to_numpy(), table["success_rate"].to_numpy().astype(np.float64)
    known = ~np.isnan(rates) & (ids >= 0)
    ids, rates = ids[known], rates[known]
    _, first = np.unique(ids, return_index=True)  # the policy as it was at the start, as far as may be
    if len(first) < FEWEST:
        raise UserError(f"`--groups {path}` has groups of {len(first)} prompts; at least {FEWEST} are needed.")
    if len(table) - table["predicted"].null_count:
        raise UserError(
            f"`--groups {path}` is of a run that chose its prompts (DOTS): they are not like the dataset. Take the log of a "
            "run with `selection: uniform`, even a short one."
        )
    successes = np.round(rates[first] * group_size)
    if np.abs(successes - rates[first] * group_size).max() > 0.02 * group_size:
        raise UserError(
            f"`--groups {path}`: success rates are not shares of {group_size} completions. Say how many there were with "
            "`--logged_num_generations`; a run with graded rewards cannot be used, so give `--easy` and `--dead`."
        )
    grid, weights = success_rate_distribution(successes, np.full(len(first), float(group_size)))
    between = (grid >= DEAD_BELOW) & (grid < EASY_FROM)
    easy, dead = float(weights[grid >= EASY_FROM].sum()), float(weights[grid < DEAD_BELOW].sum())
    if weights[between].sum() < 0.5 / len(first):  # less than half a prompt: nothing to tell a range from
        return easy, dead, RATES, len(first)
    cumulative = np.cumsum(weights[between]) / weights[between].sum()
    low, high = (float(grid[between][np.searchsorted(cumulative, q)]) for q in (0.05, 0.95))
    return easy, dead, (low, high), len(first)


def _parser() -> argparse.ArgumentParser:
    from trl_dataeff.analysis.simulate import SPEED

    parser = argparse.ArgumentParser(
        prog="trl-dataeff simulate",
        description="What would a run save, and with which settings? Nothing is trained.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument("--prompts", type=int, metavar="N", help="prompts in the dataset")
    prompts.add_argument("--easy", type=float, metavar="SHARE", help="share that is always solved already")
    prompts.add_argument(
        "--dead", type=float, metavar="SHARE", help="share that the policy will not solve in this run"
    )
    prompts.add_argument(
        "--success_rates",
        type=float,
        nargs=2,
        metavar=("LOW", "HIGH"),
        help=f"of the others, at the start (default: {RATES[0]} {RATES[1]})",
    )
    prompts.add_argument("--groups", metavar="FILE", help="dataeff/groups.parquet of a run, to estimate these from")
    prompts.add_argument(
        "--logged_num_generations", type=int, metavar="G", help="completions of a prompt in that run (as in this one)"
    )
    prompts.add_argument(
        "--predictability",
        type=float,
        default=0.9,
        metavar="R",
        help="how well a prompt's text tells how hard it is, as a correlation (default: 0.9; 0.5 for prompts that look alike)",
    )
    training = parser.add_argument_group("run")
    training.add_argument("--num_generations", type=int, default=8, metavar="G", help="completions of a prompt (8)")
    training.add_argument("--groups_per_step", type=int, default=16, metavar="B", help="prompts of a step (16)")
    training.add_argument(
        "--max_steps", type=int, default=200, metavar="N", help="steps planned with plain GRPO (200)"
    )
    training.add_argument(
        "--speed",
        type=float,
        default=SPEED,
        help=f"log-odds of success that a step adds if all groups are effective (default: {SPEED:g})",
    )
    costs = parser.add_argument_group("costs")
    costs.add_argument(
        "--seconds_per_rollout",
        type=float,
        metavar="S",
        help="to generate and score a completion with all devices at work: those of a batch over its completions; without "
        "it, time is taken to be rollouts",
    )
    costs.add_argument(
        "--seconds_per_step", type=float, default=0.0, metavar="S", help="the rest of a step, mostly training (0)"
    )
    parser.add_argument(
        "--try",
        dest="tried",
        action="append",
        default=[],
        metavar="FIELD=VALUE[,...]",
        help="a setting beside the others, as changes of the package's defaults; may be repeated",
    )
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="simulated runs of each setting (3)")
    return parser
