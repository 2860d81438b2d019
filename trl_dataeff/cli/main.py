"""The command `trl-dataeff`: passes the arguments of a sub-command to its module, and prints user errors without traceback."""

from __future__ import annotations

import importlib
import io
import logging
import os
import sys
import warnings
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trl_dataeff.utils import UserError, __version__, closest


#: What each sub-command does; but for `env`, the module of the same name has its `run`
COMMANDS = {
    "grpo": "train a model with GRPO from a recipe",
    "recipes": "list, show, copy and validate recipes",
    "env": "print versions for a bug report",
    "audit": "show how much of a run carried no gradient",
    "report": "show what runs did, as a page of figures",
}
_LIST = "\n".join(f"  {name:<15}{text}" for name, text in COMMANDS.items())
HELP = f"""\
usage: trl-dataeff COMMAND [options]

Data-efficient GRPO for Hugging Face TRL: generate fewer rollouts that carry no gradient.

commands:
{_LIST}

options:
  -h, --help    show this help; for a command's help, run `trl-dataeff COMMAND --help`
  --version     show the version

to get started:
  trl-dataeff recipes list
  trl-dataeff recipes copy Qwen2.5-0.5B-Instruct/gsm8k/dots recipe.yaml
  trl-dataeff grpo --config recipe.yaml --max_steps 20
"""
INTERRUPTED = 130  # exit code after Ctrl-C
BROKEN_PIPE = 141  # as a shell reports SIGPIPE
#: Whose future warnings are not shown: a user of the command cannot act on them. Those of a reward function's module are.
LIBRARIES = ("accelerate", "datasets", "huggingface_hub", "peft", "torch", "transformers", "trl", "trl_dataeff")


def main(argv: list[str] | None = None) -> int:
    """
    Run the command with `argv`, or the arguments of the process, and return its exit code: 0, 2 for a mistake in what was given,
    1 for a recipe that is not valid, 130 after Ctrl-C, 141 if the reader of its output has closed the pipe. A run that SIGTERM
    stops raises `SystemExit(143)`.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # some consoles cannot encode every character
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        try:
            print(flush=True)
        except BrokenPipeError:  # it is standard output, whose reader, such as `head`, has closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left to flush at exit
            return BROKEN_PIPE
        raise


def _run(argv: list[str]) -> int:
    try:
        if not argv or argv[0] in ("-h", "--help", "help"):
            print(HELP, end="")
            return 0
        if argv[0] in ("--version", "-V"):
            print(f"trl-dataeff {__version__}")
            return 0
        if argv[0] not in COMMANDS:
            hint = closest(argv[0], COMMANDS)
            raise UserError(f"{argv[0]!r} is not a command.{hint} `trl-dataeff --help` lists all commands.")
        with quiet_libraries():
            if argv[0] == "env":
                return print_versions(argv[1:])
            module = importlib.import_module(f"trl_dataeff.cli.{argv[0]}")
            return int(module.run(argv[1:]))
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":  # of several processes, the first one speaks
            for message in error.messages:
                print(f"trl-dataeff: error: {message}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


def print_versions(argv: list[str]) -> int:
    """`trl-dataeff env`: TRL's report, with our versions at its end."""
    ArgumentParser("trl-dataeff env", description="Print versions for a bug report.").parse_args(argv)
    from trl.scripts.env import print_env

    print_env()
    print(f"- trl-dataeff version: {__version__}\n")
    return 0


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """
    Within this context, no future warnings of libraries and no notices of math-verify. Python's `-W` and
    `PYTHONWARNINGS` win.
    """
    math_verify = logging.getLogger("math_verify")
    level = math_verify.level
    with warnings.catch_warnings():
        if not sys.warnoptions:
            modules = "|".join(LIBRARIES)
            for category in (FutureWarning, DeprecationWarning):
                warnings.filterwarnings("ignore", category=category, module=rf"({modules})(\.|$)")
        math_verify.setLevel(logging.ERROR)
        try:
            yield
        finally:
            math_verify.setLevel(level)


def find_recipe(name: str) -> Path:
    """Return the path of a recipe given as a file or by the name that `trl-dataeff recipes list` prints."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    shipped = shipped_recipes()
    wanted = name.removesuffix(".yaml")
    if wanted in shipped:
        return shipped[wanted]
    if path.is_dir():
        raise UserError(f"The recipe {name!r} is a folder; name one of the files in it.")
    raise UserError(
        f"The recipe {name!r} does not exist: there is no such file, and no recipe of that name comes with the package "
        f"(`trl-dataeff recipes list`).{closest(name, [*map(str, path.parent.glob('*.yaml')), *shipped])}"
    )


def shipped_recipes() -> dict[str, Path]:
    """Return the recipes that come with the package by their names, `<model>/<task>/<method>`, in alphabetical order."""
    package = Path(__file__).resolve().parents[1]
    folder = next(
        f for f in (package / "recipes", package.parent / "recipes") if f.is_dir()
    )  # in the wheel, or a checkout
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.glob("*/*/*.yaml"))}


if __name__ == "__main__":
    raise SystemExit(main())
