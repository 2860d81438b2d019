"""`trl-dataeff simulate`: estimates savings before training, and which settings to take."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_dataeff.cli.command_parser import CommandParser, out_of_range
from trl_dataeff.cli.errors import UserError, closest, listed
from trl_dataeff.fields import ABOVE_0, AT_LEAST_0, COUNT, Range


if TYPE_CHECKING:
    from trl_dataeff.analysis.simulate import Prompts, SimulatedRun


EPILOG = """\
The package's own selection, rounds and replay are run on simulated prompts, whose success rates rise as a simulated
policy learns, until each setting has learned what plain GRPO learns in --max_steps steps. The numbers of rollouts and
steps are estimates; docs/simulate.md compares them with runs of a small language model.

To estimate the shares by hand, roll out some prompts once. Groups in which all completions are right are mostly easy. If
the groups in which all are wrong outnumber those with one or two right ones, most of their prompts are unsolvable
(--dead). Or let --groups estimate the shares from the log of a run with `selection: uniform`, which may be short.

examples:
  # 7,473 prompts, 64 groups of 8 a step; 0.2 s per rollout and 25 s for the rest of a step
  trl-dataeff simulate --prompts 7473 --easy 0.3 --dead 0.2 --num_generations 8 --groups_per_step 64 --max_steps 100 \\
      --seconds_per_rollout 0.2 --seconds_per_step 25

  # shares from the log of a run, and a further setting to compare
  trl-dataeff simulate --groups out/dataeff/groups.parquet --prompts 7473 --max_steps 100 --try replay_fraction=0.75
"""
LARGE = 10**7  # prompts times steps; beyond it, a simulation takes minutes
RATES = (0.01, 0.7)
RANGES = {
    **dict.fromkeys(("prompts", "max_steps", "groups_per_step", "seeds"), COUNT),
    **dict.fromkeys(("num_generations", "logged_num_generations"), Range(2, integer=True)),
    **dict.fromkeys(("speed", "seconds_per_rollout"), ABOVE_0),
    "seconds_per_step": AT_LEAST_0,
}
#: Options that an audit gives
AUDITED = {
    *("prompts", "easy", "dead", "success_rates", "predictability", "num_generations", "groups_per_step", "max_steps"),
    "speed",
}
#: Fields without an effect in a simulation, or with another one than in a run. A simulation has no texts, no weights and no
#: earlier run; only effective groups count, and rewards are 0 and 1
NOT_SIMULATED = (
    *(
        "dots_embedding",
        "replay_clip",
        "replay_ratio_cap",
        "replay_max_movement",
        "replay_min_ess",
        "replay_min_unclipped",
        "replay_pause_ess",
    ),
    *("history_from", "advantage_baseline", "baseline_strength", "reward_range"),
)


def run(argv: list[str]) -> int:
    """
    Run the sub-command and return its exit code.

    Args:
        argv (`list[str]`):
            What follows `trl-dataeff simulate`.
    """
    args = _parse(argv)
    _check_numbers(args)
    print(_simulate(args))
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    """The options; those that an audit gives stand in for the defaults."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.from_audit is None:
        return args
    if args.groups is not None:
        raise UserError("`--from_audit` and `--groups` both say what the prompts are. Leave one of them out.")
    parser.set_defaults(**options_of_audit(args.from_audit))
    return parser.parse_args(argv)


def options_of_audit(path: str) -> dict[str, Any]:
    """The options that `trl-dataeff audit --json` gives, by name."""
    how = "Write it with `trl-dataeff audit PATH --json > FILE`."
    try:
        found = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"`--from_audit {path}` cannot be read ({error}). {how}") from error
    if not isinstance(found, dict) or "simulation" not in found:
        raise UserError(f"`--from_audit {path}` is not an audit: it has no `simulation`. {how}")
    if found["simulation"] is None:
        raise UserError(
            f"`--from_audit {path}` has no projection to go by: {found.get('no_projection_because') or 'it was left out'}."
        )
    known = {name: value for name, value in found["simulation"].items() if value is not None}
    unknown = set(known) - AUDITED
    if unknown:
        raise UserError(f"`--from_audit {path}` is of another version: {listed(sorted(unknown))} is not known. {how}")
    return known


def _simulate(args: argparse.Namespace) -> str:
    """Everything that is printed."""
    from trl_dataeff.analysis.simulate import (
        BASELINE,
        PREDICTABILITY_RANGE,
        SETTINGS,
        Costs,
        compare,
        make_config,
    )
    from trl_dataeff.cli.simulate_report import report
    from trl_dataeff.validation import check_selection

    settings = {**SETTINGS, **{text: _changes(text) for text in args.tried}}
    prompts, source = _prompts(args)
    try:
        for text in args.tried:
            config = make_config(args.num_generations, args.groups_per_step, **settings[text])
            check_selection(config, None)
    except ValueError as error:
        raise UserError(f"`--try {text}`: {error}") from error
    # What does not predict is the same for every predictability
    predicting = {name: f for name, f in settings.items() if f.get("selection", "auto") not in ("uniform", "greso")}
    plans = [(prompts, settings)]
    if args.predictability is None:
        plans += [(replace(prompts, predictability=value), predicting) for value in PREDICTABILITY_RANGE]
    costs = Costs(args.seconds_per_rollout or 1.0, args.seconds_per_step)
    runs = sum(len({BASELINE, *chosen}) for _, chosen in plans) * args.seeds
    outcomes = []
    with ProgressBar(runs, args.max_steps, lines=prompts.size * args.max_steps >= LARGE) as bar:
        for population, chosen in plans:
            make_run = _runs_on(population, args)
            outcomes.append(
                compare(make_run, chosen, steps=args.max_steps, costs=costs, seeds=args.seeds, progress=bar.update)
            )
    return report(args, source, outcomes[0], settings, dict(zip(PREDICTABILITY_RANGE, outcomes[1:], strict=False)))


def _runs_on(prompts: Prompts, args: argparse.Namespace) -> Callable[[Mapping[str, Any], int], SimulatedRun]:
    import numpy as np

    from trl_dataeff.analysis.simulate import Learning, SimulatedRun, embed, make_config

    def make_run(fields: Mapping[str, Any], seed: int) -> SimulatedRun:
        rng = np.random.default_rng(seed)
        log_odds = prompts.log_odds(rng)
        config = make_config(args.num_generations, args.groups_per_step, seed=seed, **fields)
        learning = Learning(speed=args.speed)
        return SimulatedRun(config, log_odds, lambda: embed(log_odds, prompts.predictability, rng), learning)

    return make_run


class ProgressBar:
    """
    A bar on stderr, on a terminal alone. Elsewhere, if `lines` is set, a line for each run.

    Args:
        runs (`int`): simulated runs.
        steps (`int`): that each takes, about.
        lines (`bool`): whether the runs take so long that a log should show where they are.
    """

    def __init__(self, runs: int, steps: int, lines: bool):
        from tqdm.auto import tqdm

        self._steps, self._begun, self._runs = steps, 0, runs
        hidden = not sys.stderr.isatty()
        self._lines = lines and hidden
        self._bar = tqdm(total=runs * steps, unit="step", disable=hidden, leave=False, file=sys.stderr)

    def update(self, name: str, seed: int, step: int) -> None:
        """Show that the run of setting `name` has made `step` steps. A run that takes more than planned stands still."""
        if step == 0:
            self._begun += 1
            self._bar.set_description(f"{name}, seed {seed}")
            if self._lines:
                print(f"  run {self._begun} of {self._runs}: {name}, seed {seed}", file=sys.stderr, flush=True)
        reached = (self._begun - 1) * self._steps + min(step, self._steps)
        self._bar.update(reached - self._bar.n)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()


def _changes(text: str) -> dict[str, Any]:
    """`"replay_fraction=0.25,exploration=0"` as fields of the configuration, of their types."""
    import yaml

    from trl_dataeff.cli.field_parser import FieldParser, WrongValue
    from trl_dataeff.cli.help import own_fields
    from trl_dataeff.fields import in_words
    from trl_dataeff.options import DataEfficientOptions

    parser = FieldParser(DataEfficientOptions)
    known = own_fields() + own_fields("replay_", "dots_", "greso_", "history_", "exploration")
    known = tuple(name for name in known if name not in NOT_SIMULATED)
    fields = {}
    for change in re.split(r",(?![^\[{]*[\]}])", text):  # not at commas within a list or a mapping
        name, equals, value = (part.strip() for part in change.partition("="))
        if name in known and not value:
            raise UserError(
                f"`--try {text}`: `{name}` has no value; write `{name}=VALUE`. It takes {in_words(parser.hints[name])}, and "
                f"is {parser.defaults[name]!r} by default."
            )
        if not equals or name not in known:
            raise UserError(
                f"`--try {text}`: {change!r} is not FIELD=VALUE with a field that decides which prompts are rolled out or "
                f"replayed.{closest(name, known)} They are {listed(known)}."
            )
        try:
            parsed = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UserError(f"`--try {text}`: the value of `{name}`, {value!r}, cannot be read as YAML.") from error
        try:
            fields[name] = parser.convert(name, parsed)
        except WrongValue as error:
            raise UserError(f"`--try {text}`: {error}") from error
    return fields


def _check_numbers(args: argparse.Namespace) -> None:
    """The numbers that nothing later looks at before the simulation begins."""
    wrong = out_of_range(args, RANGES)
    if args.seconds_per_step and args.seconds_per_rollout is None:
        wrong.append("`--seconds_per_step` needs `--seconds_per_rollout`: one without the other says nothing.")
    if not wrong and args.prompts is not None and args.prompts < args.groups_per_step:
        wrong.append(
            f"A step takes {args.groups_per_step} prompts (`--groups_per_step`), and there are {args.prompts} "
            "(`--prompts`)."
        )
    if wrong:
        raise UserError(*wrong)


def _prompts(args: argparse.Namespace) -> tuple[Prompts, str]:
    """The prompts to simulate, and what they are in words."""
    from trl_dataeff.analysis.simulate import PREDICTABILITY, Prompts
    from trl_dataeff.cli.simulate_log import shares_of_log

    if args.groups is None:
        missing = [f"`--{name}`" for name in ("prompts", "easy", "dead") if getattr(args, name) is None]
        if missing:
            raise UserError(
                f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing. Give guesses, or the log of a run: --groups FILE."
            )
        low, high = args.success_rates or RATES
        source = f"{args.prompts:,} prompts, {args.easy:.0%} of them easy and {args.dead:.0%} dead"
        rates: Any = (low, high)
        easy, dead = args.easy, args.dead
    else:
        if args.easy is not None or args.dead is not None or args.success_rates is not None:
            raise UserError(
                "`--easy`, `--dead` and `--success_rates` are estimated from `--groups`. Leave one or the other out."
            )
        if args.prompts is None:
            raise UserError("`--prompts` is missing: how many prompts the dataset has, seen or not.")
        log = shares_of_log(args.groups, args.logged_num_generations or args.num_generations)
        easy, dead, rates = log.easy, log.dead, log.rates or RATES
        others = f", the others with success rates of {rates[0]:.2f} to {rates[1]:.2f}" if log.rates else ""
        source = f"{args.prompts:,} prompts like the {log.prompts:,} in {args.groups}: {easy:.0%} of them easy, {dead:.0%} dead{others}"
    predictability = PREDICTABILITY if args.predictability is None else args.predictability
    try:
        return Prompts(args.prompts, easy, dead, rates, predictability), source
    except ValueError as error:
        raise UserError(str(error)) from error


def _parser() -> CommandParser:
    from trl_dataeff.analysis.simulate import PREDICTABILITY, PREDICTABILITY_RANGE, SPEED

    parser = CommandParser(
        "trl-dataeff simulate",
        description="Estimate what a run would save, and with which settings, without training anything.",
        epilog=EPILOG,
    )
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument("--prompts", type=int, metavar="N", help="number of prompts in the dataset")
    prompts.add_argument(
        "--easy", type=float, metavar="SHARE", help="share of prompts that are always solved from the start"
    )
    prompts.add_argument(
        "--dead", type=float, metavar="SHARE", help="share of unsolvable prompts: no completion of the run is right"
    )
    prompts.add_argument(
        "--success_rates",
        type=float,
        nargs=2,
        metavar=("LOW", "HIGH"),
        help=f"range of the other prompts' success rates at the start (default: {RATES[0]} {RATES[1]})",
    )
    prompts.add_argument(
        "--groups",
        metavar="FILE",
        help="dataeff/groups.parquet of a run, from which the shares and rates above are estimated",
    )
    prompts.add_argument(
        "--from_audit",
        metavar="FILE",
        help="output of `trl-dataeff audit --json`, which sets these options and those of the run unless they are given",
    )
    prompts.add_argument(
        "--logged_num_generations",
        type=int,
        metavar="G",
        help="completions per prompt in that run (default: as --num_generations)",
    )
    prompts.add_argument(
        "--predictability",
        type=float,
        metavar="R",
        help="correlation between a prompt's difficulty and the best prediction from its text (default: "
        f"{PREDICTABILITY:g}, and for comparison {PREDICTABILITY_RANGE[0]:g} and {PREDICTABILITY_RANGE[1]:g})",
    )
    training = parser.add_argument_group("run")
    training.add_argument(
        "--num_generations", type=int, default=8, metavar="G", help="completions per prompt (default: 8)"
    )
    training.add_argument(
        "--groups_per_step", type=int, default=16, metavar="B", help="prompts per step (default: 16)"
    )
    training.add_argument(
        "--max_steps",
        type=int,
        default=200,
        metavar="N",
        help="steps that the run would take with plain GRPO (default: 200)",
    )
    training.add_argument(
        "--speed",
        type=float,
        default=SPEED,
        help=f"rise of the log-odds of success per step if all groups are effective (default: {SPEED:g})",
    )
    costs = parser.add_argument_group("costs")
    costs.add_argument(
        "--seconds_per_rollout",
        type=float,
        metavar="S",
        help="seconds to generate and score a batch, divided by its completions; without it, time is measured in "
        "rollouts",
    )
    costs.add_argument(
        "--seconds_per_step",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds of the rest of a step, mostly training (default: 0)",
    )
    parser.add_argument(
        "--try",
        dest="tried",
        action="append",
        default=[],
        metavar="FIELD=VALUE[,...]",
        help="a further setting to compare, as changes to the package's defaults; may be repeated",
    )
    parser.add_argument(
        "--seeds", type=int, default=3, metavar="N", help="number of simulated runs per setting (default: 3)"
    )
    return parser
