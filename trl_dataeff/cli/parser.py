"""
Reads the command line of `trl-dataeff grpo` and the recipe that it names. The command line overrides the recipe.
Problems that are known at once are named at once, with file and line where the recipe is to blame.
"""

from __future__ import annotations

import argparse
import os
import re
from typing import NamedTuple

import yaml

from trl_dataeff.cli.arguments import GRPOArguments, make_arguments
from trl_dataeff.cli.checks import problems_of_json, problems_of_lists, problems_of_values
from trl_dataeff.cli.main import find_recipe
from trl_dataeff.cli.options import (
    SCRIPT,
    fields_in,
    grpo_parser,
    has_option,
    launch_parser,
    optional_fields,
    unknown_field,
    wrong_value,
)
from trl_dataeff.cli.recipe_file import Recipe, read_recipe, words_of
from trl_dataeff.cli.recipe_values import apply_recipe
from trl_dataeff.utils import UserError, number_problem


_NULL = ("null", "None", ["null"], ["None"])  # as values on a command line
_OPTION = re.compile(r"--([\w-]+)(=.*)?", re.DOTALL)  # `--name` or `--name=value`


class Command(NamedTuple):
    """
    What a command line and its recipe say.

    Attributes:
        arguments ([`GRPOArguments`]): of training.
        launch_options (`list[str]`): options of `accelerate launch`.
        recipe ([`Recipe`]): the recipe, without the lines that the command line overrides.
    """

    arguments: GRPOArguments
    launch_options: list[str]
    recipe: Recipe


def read(argv: list[str], portable: bool = False) -> Command:
    """
    Read a command line and the recipe that it names.

    Args:
        argv (`list[str]`):
            What follows `trl-dataeff grpo`.
        portable (`bool`, *optional*, defaults to `False`):
            Whether a recipe for another machine can be read, one for a GPU on a laptop; and whether as many processes
            count as will be started.

    Returns:
        [`Command`]: The arguments, and the options of `accelerate launch`.

    Raises:
        UserError: If something is unknown or wrong, with one message for each problem.
    """
    parsed = _parse_command(argv)
    recipe = parsed.recipe
    values = vars(parsed.fields)
    problems = list(parsed.problems)
    problems += map(recipe.located, [*problems_of_lists(values), *problems_of_json(values)])
    num_processes: int | None = None
    if portable:
        try:
            num_processes = _num_processes(parsed.launch, parsed.fields.use_cpu)
        except UserError as error:
            problems.append(recipe.located(str(error)))
            num_processes = 1
    wrong = fields_in(problems)
    defaults = vars(grpo_parser().parse_args([]))
    values = values | {name: defaults[name] for name in wrong}
    refusals: tuple[str, ...] = ()
    try:
        arguments = make_arguments(values, num_processes)
        if not problems:
            return Command(arguments, parsed.launch_options, recipe)
    except UserError as error:
        refusals = error.messages
    possible = [*refusals, *problems_of_values(values)]
    independent = [message for message in possible if wrong.isdisjoint(words_of(message))]
    raise UserError(*sorted([*problems, *map(recipe.located, independent)], key=recipe.line_of))


class _Parsed(NamedTuple):
    """
    A command line after argparse.

    Attributes:
        fields (`Namespace`): all fields and their values.
        launch (`Namespace`): the options of `accelerate launch` and their values.
        launch_options (`list[str]`): those that were given, as they are written.
        recipe ([`Recipe`]): the recipe, without the lines that the command line overrides.
        problems (`list[str]`): what is wrong with keys and values of the recipe.
    """

    fields: argparse.Namespace
    launch: argparse.Namespace
    launch_options: list[str]
    recipe: Recipe
    problems: list[str]


def _parse_command(argv: list[str]) -> _Parsed:
    """Parse a command line and its recipe. Raises a [`UserError`] for a command line that cannot be parsed."""
    parser = grpo_parser()
    launcher = launch_parser()
    recipe = Recipe()
    given = _options_of(argv)
    try:
        config = parser.parse_known_args(argv)[0].config
        unknown = [name for name in given if not has_option(parser, name) and not has_option(launcher, name)]
        if unknown:  # before a list takes them for values
            raise UserError(*(unknown_field(name, launcher) for name in unknown))
        problems: list[str] = []
        launch_options: list[str] = []
        if config is not None:
            recipe = read_recipe(find_recipe(config))
            applied = apply_recipe(recipe, parser, launcher)
            problems += [*recipe.problems, *applied.problems]
            launch_options += applied.launch_options
        namespace, not_fields = parser.parse_known_args(argv)
        launch_options += not_fields
        launch, not_options = launcher.parse_known_args([*launch_options, SCRIPT])
    except argparse.ArgumentError as error:
        option, _, _ = str(error.argument_name).partition("/")
        raise UserError(wrong_value(option, error)) from error
    values_without_option = [*not_options, launch.training_script]
    first = values_without_option[0]
    if first != SCRIPT:
        raise UserError(f"{first!r} stands alone: every value follows its option, as in `--config recipe.yaml`.")
    for name, value in vars(namespace).items():
        if value in _NULL and name in optional_fields():
            setattr(namespace, name, None)
    overridden = {name.replace("-", "_") for name in given}
    return _Parsed(namespace, launch, launch_options, recipe.overridden_by(overridden), problems)


def _num_processes(launch: argparse.Namespace, use_cpu: bool) -> int:
    """
    Return how many processes will train.

    Args:
        launch (`Namespace`):
            Options of `accelerate launch`.
        use_cpu (`bool`):
            Whether the run stays on the CPU.

    Returns:
        `int`: The number that is given as an option or in the configuration of accelerate, else that of devices here.

    Raises:
        UserError: If the number is not positive, or the configuration cannot be read.
    """
    import torch
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file

    if launch.num_processes is not None:
        problem = number_problem("num_processes", launch.num_processes, "[1, inf)", integer=True)
        if problem is not None:
            raise UserError(problem)
        return int(launch.num_processes)
    if launch.config_file is not None or os.path.isfile(default_config_file):
        path = launch.config_file or default_config_file
        try:
            return max(1, load_config_from_file(path).num_processes)
        except (ValueError, TypeError, AttributeError, OSError, yaml.YAMLError) as error:  # AttributeError: empty
            raise UserError(f"{path} cannot be read as a configuration of accelerate: {error}.") from error
    return 1 if use_cpu else max(1, torch.accelerator.device_count())


def _options_of(argv: list[str]) -> list[str]:
    """
    Return the names of the options on a command line, as they are written.

    An unknown `--optoin=two words` is one of them. argparse takes it for a value of the option before it, because of
    the space.
    """
    matches = [_OPTION.fullmatch(token) for token in argv]
    return [match[1] for match in matches if match is not None]
