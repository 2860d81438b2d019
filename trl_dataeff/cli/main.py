"""The command `trl-dataeff`: hands what follows a sub-command to its module, and shows a user's mistakes as such."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from importlib.metadata import PackageNotFoundError, version

from trl_dataeff.cli.errors import INTERRUPTED, UserError, closest, show
from trl_dataeff.version import __version__


HELP = """\
usage: trl-dataeff COMMAND [options]

Data-efficient GRPO for Hugging Face TRL: generate only rollouts that produce a gradient.

commands:
  grpo       train a model with GRPO from a recipe           trl-dataeff grpo --config recipe.yaml
  recipes    list, show, copy and validate recipes           trl-dataeff recipes list
  env        print the versions of everything that matters, for a report
  fit-predictor
             fit a predictor of success rates to the groups of finished runs
  simulate   estimate savings before training
  report     show what a run did: a page of figures          trl-dataeff report OUTPUT_DIR
  compare    what several runs needed for the same accuracy  trl-dataeff compare RUN RUN

options:
  -h, --help    show this help; `trl-dataeff COMMAND --help` shows that of a command
  --version     show the version

to begin:
  trl-dataeff recipes list
  trl-dataeff recipes copy Qwen2.5-0.5B-Instruct/gsm8k/uniform recipe.yaml
  trl-dataeff grpo --config recipe.yaml --max_steps 20
"""


#: The module of each sub-command, imported when it is called
COMMANDS = {
    "grpo": "trl_dataeff.cli.grpo",
    "recipes": "trl_dataeff.cli.recipes",
    "fit-predictor": "trl_dataeff.cli.fit_predictor",
    "simulate": "trl_dataeff.cli.simulate",
    "report": "trl_dataeff.cli.report",
    "compare": "trl_dataeff.cli.compare",
    "env": "trl_dataeff.cli.main",
}


def main(argv: list[str] | None = None) -> int:
    """
    Run the command and return its exit code: 0, 2 for a mistake in what was given, 1 for a recipe that is not valid, 130
    after Ctrl-C. A run that SIGTERM stops raises `SystemExit(143)`.

    Args:
        argv (`list[str]`, *optional*): arguments; those of the process if not given.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if not argv or argv[0] in ("-h", "--help", "help"):
            print(HELP, end="")
            return 0
        if argv[0] in ("--version", "-V"):
            print(f"trl-dataeff {__version__}")
            return 0
        if argv[0] not in COMMANDS:
            hint = closest(argv[0], COMMANDS)
            raise UserError(f"There is no command {argv[0]!r}.{hint} `trl-dataeff --help` lists all.")
        return int(importlib.import_module(COMMANDS[argv[0]]).run(argv[1:]))
    except UserError as error:
        show(error)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


def run(argv: list[str]) -> int:
    """`trl-dataeff env`: TRL's report, with our versions at its end."""
    from trl.scripts.env import print_env

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        print_env()
    try:
        math_verify = version("math-verify")
    except PackageNotFoundError:
        math_verify = "not installed"
    print(output.getvalue().rstrip())
    print(f"- trl-dataeff version: {__version__}\n- math-verify version: {math_verify}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
