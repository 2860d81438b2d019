"""
The command `trl-dataeff`: hands `grpo` and `recipes` to their modules, runs the others, and prints user errors without
a traceback.

What reads the command line imports no torch, so that help, recipes and mistakes in a command are printed at once.
"""

from __future__ import annotations

import importlib
import io
import logging
import os
import signal
import sys
import textwrap
import warnings
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path

from trl_dataeff.utils import UserError, __version__, closest, listed, terminal_width


DESCRIPTION = "GRPO for Hugging Face TRL with a faster, exact update, prompt selection and rollout replay."
COMMANDS = ("grpo", "recipes", "env", "audit", "report")
RECIPES_COMMANDS = ("list", "show", "copy", "validate")
GRPO_USAGE = "trl-dataeff grpo --config RECIPE [--field VALUE ...] [accelerate launch options]"
START = """\
to get started:
  trl-dataeff recipes list
  trl-dataeff recipes copy Qwen2.5-0.5B-Instruct/gsm8k/uniform recipe.yaml
  trl-dataeff grpo --config recipe.yaml --max_steps 20
"""
AUDIT = "Show how much of a finished GRPO run carried no gradient. Needs no GPU and no model."
AUDIT_EXAMPLES = """\
PATH is the output_dir of a run, or JSON or Parquet files of another trainer, with one completion a row.

examples:
  trl-dataeff audit out
  trl-dataeff audit rollouts.jsonl --prompt_column question \\
      --reward_column score --step_column iteration
"""
REPORT = "Show what one or several runs did: a table, and with --figure a figure."
REPORT_EXAMPLES = """\
Runs of plain TRL are read from the `trainer_state.json` of their latest checkpoint. With `scale_rewards="batch"`
their share of effective groups counts batches. A single checkpoint can be given, too.

examples:
  trl-dataeff report out
  trl-dataeff report out/dots out/uniform --rollouts_per_step 64 \\
      --figure comparison.png
"""


class ParagraphHelpFormatter(RawDescriptionHelpFormatter):
    """Wraps the paragraphs of a description, and keeps those with indented lines, such as examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = []
        for paragraph in text.split("\n\n"):
            is_listing = "\n  " in paragraph
            wrapped = textwrap.fill(paragraph, width, break_long_words=False, break_on_hyphens=False)
            paragraphs.append(paragraph if is_listing else wrapped)
        return "\n\n".join(paragraphs)


def main(argv: list[str] | None = None) -> int:
    """
    Run the command.

    Args:
        argv (`list[str]`, *optional*):
            Words after the command's name. If unset, those of the process.

    Returns:
        `int`: Exit code: 0, 2 for a mistake in what was given, 1 for a recipe that is not valid, 130 after Ctrl-C.

    Raises:
        SystemExit: With 0 after help, with 2 for options that argparse rejects, and with 143 if SIGTERM stops a run.
    """
    is_process = argv is None
    if argv is None:
        argv = sys.argv[1:]
    arguments = argv or ["--help"]
    command = arguments[0]
    only_prints = command != "grpo" or "--help" in arguments
    if is_process and only_prints and hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # no traceback if the output's reader, such as `head`, ends
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # some consoles cannot encode every character
    if not sys.warnoptions:  # of `python -W` and PYTHONWARNINGS
        warnings.simplefilter("ignore", FutureWarning)  # of libraries, on which a user of the command cannot act
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    try:
        return _run(command, arguments)
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":  # of several processes, the first one speaks
            for message in error.messages:
                print(f"trl-dataeff: error: {_printable(message)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130  # as a shell reports SIGINT


def _printable(text: str) -> str:
    """
    Return a text in which what a terminal would obey or hide is written as an escape sequence.

    Names of files and columns, and other words of files, are printed, and may hold such characters.
    """
    characters = []
    for character in text:
        is_shown = character.isprintable() or character == "\n"
        characters.append(character if is_shown else ascii(character)[1:-1])
    return "".join(characters)


def _run(command: str, arguments: list[str]) -> int:
    if command not in COMMANDS and not command.startswith("-"):
        raise UserError(_unknown_command(command))
    if arguments == ["grpo"]:
        raise UserError(
            f"There is nothing to train: give a recipe or fields, as in {GRPO_USAGE}. `trl-dataeff recipes list` "
            "names recipes, and `trl-dataeff grpo --help` lists the fields."
        )
    if command in ("grpo", "recipes"):
        module = importlib.import_module(f"trl_dataeff.cli.{command}")  # `grpo` imports torch
        exit_code: int = module.run(arguments[1:])
        return exit_code
    args = _parser().parse_args(arguments)
    args.run(args)
    return 0


def _unknown_command(name: str) -> str:
    """Return the message for an unknown command, with the one that comes closest."""
    hint = f" Did you mean `recipes {name}`?" if name in RECIPES_COMMANDS else closest(name, COMMANDS)
    return f"`{name}` is an unknown command.{hint} Known are {listed(COMMANDS)}."


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        "trl-dataeff", description=DESCRIPTION, epilog=START, formatter_class=ParagraphHelpFormatter
    )
    parser.add_argument("-V", "--version", action="version", version=f"trl-dataeff {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    commands.add_parser("grpo", help="train a model with GRPO from a recipe")
    commands.add_parser("recipes", help="list, show, copy and validate recipes")

    env = commands.add_parser("env", help="print versions for a bug report")
    env.set_defaults(run=print_versions)

    audit = commands.add_parser(
        "audit",
        help="show how much of a run carried no gradient",
        description=AUDIT,
        epilog=AUDIT_EXAMPLES,
        formatter_class=ParagraphHelpFormatter,
    )
    audit.set_defaults(run=print_audit)
    audit.add_argument("path", nargs="+", metavar="PATH", help="folder or files of one run")
    audit.add_argument(
        "--prompt_column", metavar="NAME", default="prompt", help="column of the prompt (default: prompt)"
    )
    audit.add_argument(
        "--reward_column", metavar="NAME", help="column of the total reward (default: reward; for TRL all rewards)"
    )
    audit.add_argument(
        "--step_column",
        metavar="NAME",
        help="column of the step (default: step; without one, how groups were found is said)",
    )

    report = commands.add_parser(
        "report",
        help="show what runs did",
        description=REPORT,
        epilog=REPORT_EXAMPLES,
        formatter_class=ParagraphHelpFormatter,
    )
    report.set_defaults(run=print_report)
    report.add_argument("runs", nargs="+", metavar="RUN", help="`output_dir` of a run, or a checkpoint")
    report.add_argument("--figure", metavar="FILE", type=Path, help=".png, .svg or .pdf to draw; needs matplotlib")
    report.add_argument("--rollouts_per_step", type=int, metavar="N", help="completions a step, for runs of plain TRL")
    return parser


def print_versions(args: Namespace) -> None:
    """`trl-dataeff env`: TRL's report, with our versions at its end."""
    from trl.scripts.env import print_env

    print_env()
    print(f"- trl-dataeff version: {__version__}\n")


def print_audit(args: Namespace) -> None:
    """`trl-dataeff audit`: what a run spent on groups without a gradient, from the files that it has left."""
    from trl_dataeff.analysis.audit import audit

    found = audit(args.path, args.prompt_column, args.reward_column, args.step_column)
    print(f"Read: {_printable(found.source)}")
    for note in found.notes:
        print(_printable(note))
    effective = found.shares["effective"].iloc[-1]
    print(f"{1 - effective:.0%} of the groups carried no gradient.")
    known = found.shares.dropna(axis="columns")
    formatters = {
        "groups": "{:,.0f}".format,
        "effective": "{:.0%}".format,
        "easy": "{:.0%}".format,
        "hard": "{:.0%}".format,
    }
    print()
    print(known.to_string(index=False, formatters=formatters))
    print()
    for before, followed in [
        ("a group without a gradient", found.again),
        ("an effective group", found.after_effective),
    ]:
        if followed.groups:
            share = f"{followed.zero_variance:.0%} of {followed.groups:,}"
            print(f"Same prompt again, after {before}: {share} had no gradient")
    if "hard" in known:
        print("easy: every completion had the highest reward")
        print("hard: no gradient and lower rewards: equal ones, or masked completions")
    else:
        print("Train with `log_completions=True` and `logging_steps=1` to see which groups were easy or hard.")


def print_report(args: Namespace) -> None:
    """`trl-dataeff report`: what runs did, as a table in the terminal and, with `--figure`, as a figure."""
    from trl_dataeff.analysis.figures import check_figure, save_figure
    from trl_dataeff.analysis.recorded import read_runs, summary

    if args.figure is not None:
        check_figure(args.figure)
    runs = read_runs(args.runs, args.rollouts_per_step)
    print(_printable(summary(runs, terminal_width())))
    without_rollouts = [run.name for run in runs if "rollouts" not in run.logs]
    if without_rollouts:
        print(
            f"Rollouts of {_printable(', '.join(without_rollouts))} are not known: plain TRL does not log them. Give "
            "--rollouts_per_step N, the completions of an optimizer step over all processes."
        )
    if args.figure is not None:
        save_figure(runs, args.figure)
        print(f"Figure: {args.figure}")


def find_recipe(name: str) -> Path:
    """
    Return the path of a recipe.

    Args:
        name (`str`):
            Path of a file, or a name that `trl-dataeff recipes list` prints.

    Returns:
        `Path`: The file.

    Raises:
        UserError: If there is neither a file nor a recipe of this name.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    shipped = shipped_recipes()
    shipped_name = name.removesuffix(".yaml")
    if shipped_name in shipped:
        return shipped[shipped_name]
    siblings = [str(sibling) for sibling in path.parent.glob("*.yaml")]
    of_method = [full_name for full_name in shipped if full_name.endswith(f"/{shipped_name}")]
    advice = closest(name, [*siblings, *shipped])
    if of_method:
        advice = f" Give the full name: {listed(of_method)}."
    raise UserError(
        f"The recipe {name!r} does not exist: there is no such file, and no recipe of that name comes with the "
        f"package (`trl-dataeff recipes list`).{advice}"
    )


def shipped_recipes() -> dict[str, Path]:
    """Return the recipes of the package by their names, `<model>/<task>/<method>`, in alphabetical order."""
    package = Path(__file__).resolve().parents[1]
    in_wheel = package / "recipes"
    in_checkout = package.parent / "recipes"
    folder = in_wheel if in_wheel.is_dir() else in_checkout
    recipes = {}
    for path in sorted(folder.glob("*/*/*.yaml")):
        name = path.relative_to(folder).with_suffix("").as_posix()
        recipes[name] = path
    return recipes


if __name__ == "__main__":
    raise SystemExit(main())
