"""`trl-dataeff audit`: what a run spent on groups without a gradient, from the files it left behind."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from trl_dataeff.cli.command_parser import CommandParser, out_of_range
from trl_dataeff.cli.errors import UserError, closest, listed
from trl_dataeff.fields import ABOVE_0, COUNT, SHARE, Range


if TYPE_CHECKING:
    from trl_dataeff.analysis.audit import Audit
    from trl_dataeff.analysis.audit_projection import Projection
    from trl_dataeff.tracking.completions import RecordedGroups

RANGES = {
    "seconds_per_step": ABOVE_0,
    "prompts": COUNT,
    "num_generations": Range(2, integer=True),
    "predictability": SHARE,
}
EPILOG = """\
PATH is a run's folder, or its files: TRL's completions/*.parquet (`log_completions=True`, `logging_steps=1`), JSON lines of
verl, prime-rl, OpenRLHF or your own (.jsonl, .jsonl.gz), or this package's dataeff/groups.parquet.

examples:
  trl-dataeff audit out                                     # a TRL run's output_dir
  trl-dataeff audit rollouts --seconds_per_step 40          # verl's trainer.rollout_data_dir; hours as well
  trl-dataeff audit log.jsonl --map prompt=question,reward=accuracy+0.5*format,step=iteration
  trl-dataeff audit out --json > audit.json && trl-dataeff simulate --from_audit audit.json --max_steps 500
"""


def run(argv: list[str]) -> int:
    """
    Run the sub-command and return its exit code.

    Args:
        argv (`list[str]`):
            What follows `trl-dataeff audit`.
    """
    from trl_dataeff.analysis.audit import audit
    from trl_dataeff.cli.audit_report import report
    from trl_dataeff.tracking.completions import read_groups

    args = _parser().parse_args(argv)
    _check_numbers(args)
    groups = read_groups(
        args.path, _columns(args.map), reward_range=args.reward_range, group_size=args.num_generations
    )
    found = audit(groups, args.seconds_per_step)
    if args.prompts is not None and args.prompts < found.prompts:
        raise UserError(
            f"`--prompts` is {args.prompts}; it takes an integer >= {found.prompts}: the run has groups of {found.prompts} prompts."
        )
    projection, missing = (None, "") if args.no_projection else _projection(groups, args)
    if args.json:
        print(json.dumps(_plain(as_dict(groups, found, projection, missing)), indent=2))
    else:
        print(report(" ".join(args.path), groups, found, projection, missing))
    return 0


def _projection(groups: RecordedGroups, args: argparse.Namespace) -> tuple[Projection | None, str]:
    """What would have been saved; or why that cannot be said."""
    if groups.methods:
        used = " and ".join(filter(None, (", ".join(groups.methods[:-1]), groups.methods[-1])))
        return None, f"this run used {used}, so that its groups are not those of plain GRPO"
    from trl_dataeff.analysis.audit_projection import TooLittle, project

    try:
        return project(groups, prompts=args.prompts, predictability=args.predictability, progress=_show), ""
    except TooLittle as error:
        return None, str(error)
    finally:
        _show(None)


def _show(share: float | None) -> None:
    """A line on stderr, on a terminal alone."""
    if sys.stderr.isatty():
        print("\r\033[K" if share is None else f"\rsimulating {share:.0%}", end="", file=sys.stderr, flush=True)


def as_dict(groups: RecordedGroups, found: Audit, projection: Projection | None, missing: str) -> dict[str, Any]:
    """What `--json` prints. `simulation` has the options of `trl-dataeff simulate` that follow from the run."""
    simulation = None
    if projection is not None:
        simulation = {
            "prompts": projection.prompts,
            "easy": math.floor(projection.easy * 1e4) / 1e4,  # not above 1 together
            "dead": math.floor(projection.dead * 1e4) / 1e4,
            "success_rates": list(projection.rates) if projection.rates else None,
            "predictability": projection.predictability,
            "num_generations": groups.group_size or None,
            "groups_per_step": found.groups_per_step,
            "max_steps": found.steps * found.every,
            "speed": projection.speed,
        }
    return {
        "source": {
            "format": groups.format,
            "files": groups.files,
            "group_size": groups.group_size,
            "notes": groups.notes,
        },
        "audit": asdict(found),
        "projection": asdict(projection) if projection else None,
        "no_projection_because": missing or None,
        "simulation": simulation,
    }


def _plain(value: Any) -> Any:
    """JSON has neither NaN nor infinity."""
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _columns(text: str | None) -> dict[str, str]:
    """`"prompt=question,reward=score"` as columns by role."""
    from trl_dataeff.tracking.completion_columns import ROLES

    columns = {}
    for pair in (text or "").split(",") if text else ():
        role, equals, name = (part.strip() for part in pair.partition("="))
        if not equals or not name or role not in ROLES:
            hint = closest(role, ROLES) if role not in ROLES else ""
            raise UserError(f"`--map {text}`: {pair!r} is not ROLE=COLUMN, with a role of {listed(ROLES)}.{hint}")
        columns[role] = name
    return columns


def _check_numbers(args: argparse.Namespace) -> None:
    wrong = out_of_range(args, RANGES)
    if args.reward_range is not None and not args.reward_range[0] < args.reward_range[1]:
        wrong.append(f"`--reward_range` is {args.reward_range}; it takes two numbers, LOW < HIGH.")
    if wrong:
        raise UserError(*wrong)


def _parser() -> CommandParser:
    parser = CommandParser(
        "trl-dataeff audit",
        description="Tell which part of a finished GRPO run carried no gradient, and what would have saved it; needs no GPU and no model.",
        epilog=EPILOG,
    )
    parser.add_argument("path", nargs="+", metavar="PATH", help="folder or files of one run")
    parser.add_argument(
        "--map",
        metavar="ROLE=COLUMN[,...]",
        help="columns with unusual names: prompt, completion, reward (can be a sum: accuracy+0.5*format), step, tokens",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON, for `simulate --from_audit`")
    parser.add_argument("--seconds_per_step", type=float, metavar="S", help="duration of an optimizer step")
    parser.add_argument(
        "--reward_range",
        type=float,
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="lowest and highest total reward (default: those that occur); all completions at HIGH make a group easy",
    )
    parser.add_argument(
        "--num_generations",
        type=int,
        metavar="G",
        help="completions of a group (default: the most frequent number)",
    )
    parser.add_argument("--prompts", type=int, metavar="N", help="prompts in the dataset (default: those that occur)")
    parser.add_argument(
        "--predictability",
        type=float,
        metavar="R",
        help="how well a prompt's text predicts its difficulty, as a correlation (see `trl-dataeff simulate --help`)",
    )
    parser.add_argument("--no_projection", action="store_true", help="describe the run without a projection")
    return parser
