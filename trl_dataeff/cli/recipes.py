"""`trl-dataeff recipes list|show|copy|validate`."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trl_dataeff.cli.main import find_recipe, shipped_recipes
from trl_dataeff.utils import UserError


def run(argv: list[str]) -> int:
    """Run the sub-command and return its exit code."""
    args = _parser().parse_args(argv)
    args.run(args)
    return 0


def problems_of(path: Path) -> list[str]:
    """Return what is wrong with a recipe on any machine, one message per problem. Imports reward functions, and loads nothing."""
    from trl_dataeff.cli import grpo
    from trl_dataeff.cli.parser import read

    try:
        return list(grpo.problems_of(read(["--config", str(path)], portable=True)[0]))
    except UserError as error:
        return list(error.messages)


def description_of(path: Path) -> str:
    """Return a recipe's first line, a comment."""
    return path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ").strip()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "trl-dataeff recipes",
        description="List, show, copy and validate recipes: YAML files of training fields, named <model>/<task>/<method>.",
    )
    commands = parser.add_subparsers(required=True, metavar="list|show|copy|validate")

    def add(run: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(run.__name__[1:], help=text, description=f"{text.capitalize()}.")
        command.set_defaults(run=run)
        return command

    name: dict[str, Any] = {"metavar": "NAME", "help": "recipe, as `trl-dataeff recipes list` prints it"}
    add(_list, "list the recipes that come with the package")
    add(_show, "print a recipe").add_argument("name", **name)
    copy = add(_copy, "copy a recipe to a file that you can edit")
    copy.add_argument("name", **name)
    text = "target file (.yaml) or folder, created if needed (default: <task>-<method>.yaml in the current folder)"
    copy.add_argument("dest", metavar="DEST", nargs="?", default="", help=text)
    copy.add_argument("--force", action="store_true", help="overwrite an existing file")
    validate = add(_validate, "check that recipes are valid, without loading a model or data")
    validate.add_argument("paths", metavar="PATH", nargs="+", help="recipe file, or name of a recipe")
    return parser


def _list(args: argparse.Namespace) -> None:
    for name, path in shipped_recipes().items():
        print(name)
        print(textwrap.fill(description_of(path), 100, initial_indent="    ", subsequent_indent="    "))
    print("\nTrain with one:   trl-dataeff grpo --config NAME\nChange one first: trl-dataeff recipes copy NAME")


def _show(args: argparse.Namespace) -> None:
    print(find_recipe(args.name).read_text(encoding="utf-8"), end="")


def _copy(args: argparse.Namespace) -> None:
    source = find_recipe(args.name).resolve()
    dest = Path(args.dest).expanduser()
    if dest.is_dir() or (not dest.is_file() and dest.suffix not in (".yaml", ".yml")):  # one to make
        dest = dest / f"{source.parent.name}-{source.name}"
    if dest.exists() and not args.force:
        raise UserError(f"{str(dest)!r} exists already. Name another file, or replace it with --force.")
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, dest)
    except OSError as error:
        raise UserError(f"{str(dest)!r} cannot be written: {error}. Name another file.") from error
    print(f"Copied to {dest}. Train with it: trl-dataeff grpo --config {dest}")


def _validate(args: argparse.Namespace) -> None:
    paths = [find_recipe(name) for name in args.paths]
    found = [(f"{path}:", problem) for path in paths for problem in problems_of(path)]
    problems = [text if text.startswith(path) else f"{path} {text}" for path, text in found]
    if problems:
        raise UserError(*problems, exit_code=1)
    print(f"{len(paths)} valid." if len(paths) > 1 else f"{paths[0]}: valid.")
