"""`trl-dataeff audit`: what a run spent on groups without a gradient, from the files that it has left."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from trl_dataeff.analysis.audit import Audit, Shares

EXAMPLES = """\
PATH is the output_dir of a run, or JSON lines or Parquet files of another trainer, with one completion a row.

examples:
  trl-dataeff audit out
  trl-dataeff audit rollouts.jsonl --prompt_column question --reward_column score --step_column iteration
"""


def run(argv: list[str]) -> int:
    """Run the sub-command with what follows its name, and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="trl-dataeff audit",
        description="Show how much of a finished GRPO run carried no gradient. Needs no GPU and no model.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", nargs="+", metavar="PATH", help="folder or files of one run")
    parser.add_argument(
        "--prompt_column", default="prompt", metavar="NAME", help="column of the prompt (default: prompt)"
    )
    parser.add_argument(
        "--reward_column", metavar="NAME", help="column of the total reward (default: reward; for TRL all rewards)"
    )
    parser.add_argument(
        "--step_column",
        metavar="NAME",
        help="column of the step (default: a group's rows follow each other; for TRL step)",
    )
    args = parser.parse_args(argv)
    from trl_dataeff.analysis.audit import audit

    print(report(audit(args.path, args.prompt_column, args.reward_column, args.step_column)))
    return 0


def report(found: Audit) -> str:
    """The audit for a terminal."""
    overall = found.overall
    lines = [f"Read: {found.source}"]
    lines += [f"{1 - overall.effective:.0%} of the groups carried no gradient: all of their rewards were equal."]
    lines += ["", f"{'steps':>13}{'groups':>9}{'effective':>11}{'easy':>7}{'hard':>7}"]
    lines += [_row(shares) for shares in found.periods]
    if not math.isnan(found.again):
        lines += [
            "",
            f"After a group without a gradient, the next one of its prompt had none in {found.again:.0%} of the cases.",
        ]
    if not math.isnan(found.after_effective):
        lines += [f"After an effective group, the next one of its prompt had none in {found.after_effective:.0%}."]
    if not math.isnan(overall.hard):
        lines += ["", "easy: every completion had the highest reward. hard: all rewards were equal and lower."]
    return "\n".join([*lines, *(["", found.note] if found.note else [])])


def _row(shares: Shares) -> str:
    kinds = [shares.effective, shares.easy, shares.hard]
    effective, easy, hard = ("" if math.isnan(share) else f"{share:.0%}" for share in kinds)
    groups = f"{shares.groups:,}" if shares.groups else ""
    return f"{f'{shares.first}-{shares.last}':>13}{groups:>9}{effective:>11}{easy:>7}{hard:>7}"
