"""`trl-dataeff recipes list|show|copy|validate`."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

from trl_dataeff.cli.main import RECIPES_COMMANDS, find_recipe, shipped_recipes
from trl_dataeff.utils import UserError, closest, listed, terminal_width


#: Characters of a line at most, in a wide terminal too
LONGEST_LINE = 100


def run(argv: list[str]) -> int:
    """Run the sub-command and return its exit code."""
    args = _parser().parse_args(argv)
    args.run(args)
    return 0


class Findings(NamedTuple):
    """
    What was found in a recipe.

    Attributes:
        problems (`list[str]`): what is wrong on any machine.
        warnings (`list[str]`): what may be a mistake; only of a recipe without problems.
    """

    problems: list[str]
    warnings: list[str]


def validate(path: Path) -> Findings:
    """
    Check a recipe.

    Reward functions are imported. No model and no data are loaded.

    Args:
        path (`Path`):
            File of the recipe.

    Returns:
        [`Findings`]: One message for each problem, or for each warning.
    """
    from trl_dataeff.cli import grpo
    from trl_dataeff.cli.data import datasets_of, find_source
    from trl_dataeff.cli.parser import read

    try:
        command = read(["--config", str(path)], portable=True)
    except UserError as error:
        return Findings(list(error.messages), [])
    recipe = command.recipe
    problems = [recipe.located(problem) for problem in grpo.problems_of(command.arguments)]
    script, _, _, mixture = command.arguments
    # Model and data may be on the machine that trains
    missing = [recipe.located(message) for message in grpo.missing_model(command.arguments, path)]
    for index, entry in enumerate(datasets_of(script, mixture)):
        try:
            find_source(entry)
        except UserError as error:
            at = recipe.at(f"datasets[{index}].path" if mixture.datasets else "dataset_name")
            missing.append(f"{at}{error}")
    return Findings(problems, [*recipe.warnings, *missing])


def description_of(path: Path) -> str:
    """Return a recipe's first line, a comment."""
    first_line, _, _ = path.read_text(encoding="utf-8").partition("\n")
    return first_line.lstrip("# ").strip()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "trl-dataeff recipes",
        description="List, show, copy and validate recipes: YAML files of training fields, named "
        "<model>/<task>/<method>.",
    )
    commands = parser.add_subparsers(required=True, metavar="|".join(RECIPES_COMMANDS))
    name_help = "recipe, as `trl-dataeff recipes list` prints it"

    list_command = commands.add_parser(
        "list",
        help="list the recipes that come with the package",
        description="List the recipes that come with the package.",
    )
    list_command.set_defaults(run=_list)
    list_command.add_argument(
        "text",
        metavar="MODEL",
        nargs="?",
        default="",
        help="only those whose names contain this, in upper or lower case; a task or a method will do as well",
    )

    show = commands.add_parser("show", help="print a recipe", description="Print a recipe.")
    show.set_defaults(run=_show)
    show.add_argument("name", metavar="NAME", help=name_help)

    copy = commands.add_parser(
        "copy",
        help="copy a recipe to a file that you can edit",
        description="Copy a recipe to a file that you can edit.",
    )
    copy.set_defaults(run=_copy)
    copy.add_argument("name", metavar="NAME", help=name_help)
    copy.add_argument(
        "dest",
        metavar="DEST",
        nargs="?",
        default="",
        help="target file (.yaml) or folder, created if needed (default: <task>-<method>.yaml in the current folder)",
    )
    copy.add_argument("--force", action="store_true", help="overwrite an existing file")

    validate = commands.add_parser(
        "validate",
        help="check that recipes are valid, without loading a model or data",
        description="Check that recipes are valid, without loading a model or data.",
    )
    validate.set_defaults(run=_validate)
    validate.add_argument("paths", metavar="PATH", nargs="+", help="recipe file, or name of a recipe")
    return parser


def _list(args: argparse.Namespace) -> None:
    shipped = shipped_recipes()
    names = [name for name in shipped if args.text.lower() in name.lower()]
    if not names:
        models = list(dict.fromkeys(name.partition("/")[0] for name in shipped))
        raise UserError(
            f"No recipe has {args.text!r} in its name.{closest(args.text, models)} There are recipes for "
            f"{listed(models)}."
        )
    width = min(terminal_width() or LONGEST_LINE, LONGEST_LINE)
    for name in names:
        print(name)
        print(textwrap.fill(description_of(shipped[name]), width, initial_indent="    ", subsequent_indent="    "))
    print()
    print("Train with one:   trl-dataeff grpo --config NAME")
    print("Change one first: trl-dataeff recipes copy NAME")


def _show(args: argparse.Namespace) -> None:
    print(find_recipe(args.name).read_text(encoding="utf-8"), end="")


def _copy(args: argparse.Namespace) -> None:
    source = find_recipe(args.name).resolve()
    dest = Path(args.dest).expanduser()
    is_new_folder = not dest.exists() and dest.suffix not in (".yaml", ".yml")
    if dest.is_dir() or is_new_folder:
        dest = dest / f"{source.parent.name}-{source.name}"
    if dest.exists() and not args.force:
        raise UserError(f"{str(dest)!r} exists already. Name another file, or replace it with --force.")
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, dest)
    except OSError as error:
        raise UserError(f"{str(dest)!r} cannot be written: {error}. Name another file.") from error
    print(f"Copied to {dest}. Change it, and train: trl-dataeff grpo --config {dest}")


def _validate(args: argparse.Namespace) -> None:
    problems = []
    paths = []
    for name in args.paths:
        try:
            path = find_recipe(name)
        except UserError as error:
            problems.append(str(error))
            continue
        paths.append(path)
        found = validate(path)
        for warning in found.warnings:
            print(f"trl-dataeff: warning: {warning}", file=sys.stderr)
        for problem in found.problems:
            names_file = problem.startswith(f"{path}:")
            problems.append(problem if names_file else f"{path}: {problem}")
    if problems:
        raise UserError(*problems, exit_code=1)
    if len(paths) == 1:
        print(f"{paths[0]}: valid.")
    else:
        print(f"{len(paths)} valid.")
