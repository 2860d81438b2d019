"""
Reads a recipe, a YAML file of training fields, and the command line, which overrides it, with the parsers of TRL and
accelerate. What is added to them: file and line of what is wrong in a recipe, and all that is wrong in it at once.
"""

from __future__ import annotations

import argparse
import os
import re
import reprlib
import warnings
from collections.abc import Iterator
from dataclasses import fields
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import yaml
from accelerate.utils import patch_environment
from trl import DatasetMixtureConfig, ModelConfig, TrlParser
from trl.scripts.utils import DatasetConfig

from trl_dataeff.cli.checks import (
    how_to_list,
    problems_of_batches,
    problems_of_json,
    problems_of_lists,
    problems_of_values,
)
from trl_dataeff.cli.data import DataEfficientGRPOScriptArguments
from trl_dataeff.cli.help import DESCRIPTION, USAGE, GRPOParser, HelpFormatter
from trl_dataeff.cli.main import find_recipe
from trl_dataeff.cli.recipe_file import Recipe, read_recipe, words_of
from trl_dataeff.cli.trl_fields import refused_values, what_became_of
from trl_dataeff.config import DataEfficientGRPOConfig, problems_of_fields
from trl_dataeff.utils import UserError, closest, listed, number_problem


TYPES: list[Any] = [
    DataEfficientGRPOScriptArguments,
    DataEfficientGRPOConfig,
    ModelConfig,
    DatasetMixtureConfig,
]
#: Fields of which a value can be rejected because of the machine, and values that are valid on every machine
MACHINE: dict[str, Any] = {
    "use_cpu": True,
    "tf32": None,
    "deepspeed": None,
    "ddp_backend": None,
}
_SCRIPT = "<script>"  # stands for the script that `accelerate launch` expects behind its options
_OPTION = re.compile(r"--([\w-]+)(=.*)?", re.DOTALL)  # `--name` or `--name=value`


class GRPOArguments(NamedTuple):
    """What a recipe and the command line say, in the order in which `train` takes it."""

    script: DataEfficientGRPOScriptArguments
    training: DataEfficientGRPOConfig
    model: ModelConfig
    dataset: DatasetMixtureConfig


def grpo_parser() -> GRPOParser:
    """Return the parser of all fields and of `--config`. It raises an `ArgumentError` for a wrong value."""
    parser = GRPOParser(
        TYPES,
        prog="trl-dataeff grpo",
        usage=USAGE,
        description=DESCRIPTION,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--config", metavar="RECIPE", help="a file, or a name from `trl-dataeff recipes list`.")
    return parser


def launch_parser() -> argparse.ArgumentParser:
    """
    Return the parser of `accelerate launch`, with TRL's option for a configuration that TRL ships (`fsdp2`, `zero3`,
    ...). It raises an `ArgumentError` for a wrong value.
    """
    from accelerate.commands.launch import launch_command_parser

    parser: argparse.ArgumentParser = launch_command_parser()
    parser.exit_on_error = False
    parser.add_argument("--accelerate_config", dest="config_file", type=_config_file)
    return parser


def _config_file(name: str) -> str:
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    try:
        _, path = resolve_accelerate_config_argument(["--accelerate_config", name])
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return str(path)


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
    problems = [*recipe.problems, *map(recipe.located, _refused(values))]
    num_processes: int | None = None
    if portable:
        try:
            num_processes = _num_processes(parsed.launch, parsed.fields.use_cpu)
        except UserError as error:
            problems.append(recipe.located(str(error)))
            num_processes = 1
    wrong = _fields_in(problems)
    arguments, refusals = _make_arguments(values, num_processes, wrong)
    if arguments is not None and not problems and not refusals:
        return Command(arguments, parsed.launch_options, recipe)
    possible = [*refusals, *problems_of_values(values)]
    independent = [message for message in possible if wrong.isdisjoint(words_of(message))]
    raise UserError(*sorted([*problems, *map(recipe.located, independent)], key=recipe.line_of))


def _fields_in(messages: list[str]) -> set[str]:
    """Return the fields that messages name."""
    return set(_field_types()).intersection(words_of(" ".join(messages)))


class _Parsed(NamedTuple):
    """Fields and options of `accelerate launch` as they were given, and the recipe without what is overridden."""

    fields: argparse.Namespace
    launch: argparse.Namespace
    launch_options: list[str]
    recipe: Recipe


def _parse_command(argv: list[str]) -> _Parsed:
    """Parse a command line and its recipe. Raises a [`UserError`] for a command line that cannot be parsed."""
    parser = grpo_parser()
    launcher = launch_parser()
    recipe = Recipe()
    given = _options_of(argv)
    try:
        config = parser.parse_known_args(argv)[0].config
        unknown = [name for name in given if not _has_option(parser, name) and not _has_option(launcher, name)]
        if unknown:
            raise UserError(*_unknown_fields(unknown, recipe, launcher))  # before a list takes them for values
        launch_options: list[str] = []
        if config is not None:
            recipe = read_recipe(find_recipe(config))
            launch_options = apply_recipe(recipe, parser, launcher)
        namespace, not_fields = parser.parse_known_args(argv)
        launch_options += not_fields
        launch, not_options = launcher.parse_known_args([*launch_options, _SCRIPT])
    except argparse.ArgumentError as error:
        option, _, _ = str(error.argument_name).partition("/")
        raise UserError(_wrong_value(option, error)) from error
    values_without_option = [*not_options, launch.training_script]
    first = values_without_option[0]
    if first != _SCRIPT:
        raise UserError(f"{first!r} stands alone: every value follows its option, as in `--config recipe.yaml`.")
    overridden = {name.replace("-", "_") for name in given}
    return _Parsed(namespace, launch, launch_options, recipe.overridden_by(overridden))


def _refused(values: dict[str, Any]) -> Iterator[str]:
    """Find values that are wrong by themselves: of TRL's fields and of those of this package."""
    yield from refused_values(values)
    yield from problems_of_lists(values)
    yield from problems_of_json(values)
    own = argparse.Namespace(**values)
    if isinstance(own.selector_args, str):
        own.selector_args = None  # JSON text, which becomes a mapping later
    yield from problems_of_fields(own)


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


def _has_option(parser: argparse.ArgumentParser, name: str) -> bool:
    """Return whether a parser knows an option, by trying it with an empty value."""
    token = f"--{name}="
    try:
        _, unknown = parser.parse_known_args([token, _SCRIPT])
    except argparse.ArgumentError:  # the option does not take this value
        return True
    return token not in unknown


def _unknown_fields(names: list[str], recipe: Recipe, launcher: argparse.ArgumentParser) -> list[str]:
    """Return a message for each unknown field, with what became of it, or the names that come closest."""
    launch_options = vars(launcher.parse_args([_SCRIPT]))
    known = [*_field_types(), *launch_options, "accelerate_config", "env"]
    messages = []
    for name in names:
        advice = what_became_of(name) or closest(name, known)
        messages.append(f"{recipe.at(name)}`{name}` is an unknown field.{advice}")
    return messages


def _wrong_value(option: str, error: argparse.ArgumentError) -> str:
    """Return the message for a value that an option does not take."""
    message = f"`{option}`: {error.message.rstrip('.')}."
    name = option.removeprefix("--")
    value = re.search(r"value: '(.*)'", error.message, re.DOTALL)
    if value is not None and list in _field_types().get(name, ()):
        message = f"{message} {how_to_list(name, value[1])}".rstrip()
    return message


def _make_arguments(
    values: dict[str, Any], num_processes: int | None, wrong: set[str]
) -> tuple[GRPOArguments | None, list[str]]:
    """
    Make the arguments of a run, and find all that the configurations refuse, of which they name only the first.

    Args:
        values (`dict[str, Any]`):
            All fields and their values.
        num_processes (`int` or `None`):
            Processes that will train, as in [`_arguments`].
        wrong (`set[str]`):
            Fields whose values are known to be wrong.

    Returns:
        `tuple[GRPOArguments | None, list[str]]`: The arguments, with defaults for all fields that are wrong; `None` if
            they cannot be made. And one message for each refusal.
    """
    values = _with_defaults(values, wrong)
    refusals: list[str] = []
    if num_processes is not None:
        refusals += problems_of_batches(values, num_processes)
        wrong = wrong | _fields_in(refusals)
        values = _with_defaults(values, wrong)
    while True:
        try:
            return _arguments(values, num_processes), refusals
        except UserError as error:
            found = list(error.messages)
        except RecursionError:
            found = ["A value is nested too deeply."]
        except OSError as error:  # of a file that a field names
            names = [name for name, value in values.items() if value is not None and value == error.filename]
            found = [f"{listed(names)}: {error}." if names else str(error)]
        except (ValueError, TypeError, ImportError) as error:
            found = [str(error)]
        named = _fields_in(found)
        if named.isdisjoint(wrong):
            refusals += found
        if named <= wrong:
            return None, refusals
        wrong = wrong | named
        values = _with_defaults(values, named)


def _with_defaults(values: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """Return the values with the defaults of some fields."""
    if not names:
        return values
    defaults = vars(grpo_parser().parse_args([]))
    return values | {name: defaults[name] for name in names}


def _arguments(values: dict[str, Any], num_processes: int | None) -> GRPOArguments:
    """
    Make the arguments of a run.

    Args:
        values (`dict[str, Any]`):
            All fields and their values.
        num_processes (`int` or `None`):
            Processes that count, where the machine is not to be looked at; `None`: those that are there.

    Returns:
        [`GRPOArguments`]: The arguments.
    """
    if num_processes is None:
        return GRPOArguments(*(_make(arguments_type, values) for arguments_type in TYPES))

    class Launched(DataEfficientGRPOConfig):
        world_size = num_processes

    script_type, _, model_type, dataset_type = TYPES
    # Training reads everything once more, with its warnings. Where the environment names a rank, accelerate would make
    # the process group already here, for CPUs
    with warnings.catch_warnings(action="ignore"), patch_environment(LOCAL_RANK=-1, PMI_SIZE=1):
        training = _make(Launched, values | MACHINE)
    training.__class__ = DataEfficientGRPOConfig
    for name in MACHINE:
        setattr(training, name, values[name])
    return GRPOArguments(_make(script_type, values), training, _make(model_type, values), _make(dataset_type, values))


def _make(arguments_type: Any, values: dict[str, Any]) -> Any:
    """Make a dataclass of those values that are its fields."""
    names = [argument.name for argument in fields(arguments_type) if argument.init]
    return arguments_type(**{name: values[name] for name in names})


def apply_recipe(recipe: Recipe, parser: TrlParser, launcher: argparse.ArgumentParser) -> list[str]:
    """
    Make the values of a recipe the defaults of the parser, and set its environment variables.

    Args:
        recipe ([`Recipe`]):
            Keys and values, as YAML reads them. Its problems get one for each key that is unknown, and for each value
            that is wrong.
        parser (`TrlParser`):
            Parser of the fields. Its defaults are replaced.
        launcher (`ArgumentParser`):
            Parser of `accelerate launch`.

    Returns:
        `list[str]`: The options of `accelerate launch` that the recipe gives.

    Raises:
        UserError: If the file is a configuration of accelerate.
    """
    if "compute_environment" in recipe.values:
        raise UserError(
            f"{recipe.path} is a configuration of accelerate, not a recipe. Give it as "
            f"`--accelerate_config {recipe.path}`, beside `--config RECIPE`."
        )
    types = _field_types()
    defaults: dict[str, Any] = {}
    launch_options: list[str] = []
    problems: list[str] = []
    for name, value in recipe.values.items():
        try:
            if name == "datasets" and isinstance(value, list):
                found = list(_problems_of_datasets(recipe, value))
                problems += found
                if not found:
                    defaults[name] = _field_value(parser, name, types[name], value)
            elif name in types:
                defaults[name] = _field_value(parser, name, types[name], value)
            elif name == "env":
                _set_environment(value)
            elif _is_launch_key(launcher, name):
                launch_options += _launch_option(launcher, name, value)
            else:
                problems += _unknown_fields([name], recipe, launcher)
        except argparse.ArgumentError as error:
            problems.append(recipe.at(name) + _wrong_value(f"--{name}", error))
        except UserError as error:
            problems.append(recipe.at(name) + str(error))
    recipe.problems += problems
    parser.set_defaults_with_config(**defaults)
    return launch_options


def _problems_of_datasets(recipe: Recipe, entries: list[Any]) -> Iterator[str]:
    """Find unknown and missing keys in the entries of a mixture (`datasets`)."""
    known = [argument.name for argument in fields(DatasetConfig)]
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict):
            continue
        unknown = [key for key in entry if key not in known]
        for key in unknown:
            at = recipe.at(f"datasets[{index}].{key}")
            hint = closest(str(key), known)
            yield f"{at}`{key}` is an unknown key of `datasets`.{hint} Known are {listed(known)}."
        if "path" not in entry and not unknown:
            yield f"{recipe.at('datasets')}`datasets` has an entry without `path` (number {index + 1})."


def _is_launch_key(launcher: argparse.ArgumentParser, name: str) -> bool:
    """Return whether a key of a recipe is an option of `accelerate launch`."""
    return name.isidentifier() and name != "help" and _has_option(launcher, name)


def _field_types() -> dict[str, set[Any]]:
    """Return the types that each field takes, without their parameters: `{list, str}` for `list[str] | str`."""
    types = {}
    for arguments_type in TYPES:
        hints = get_type_hints(arguments_type)
        for argument in fields(arguments_type):
            hint = hints[argument.name]
            is_union = get_origin(hint) in (Union, UnionType)
            alternatives = get_args(hint) if is_union else (hint,)
            types[argument.name] = {get_origin(alternative) or alternative for alternative in alternatives}
    return types


def _field_value(parser: TrlParser, name: str, types: set[Any], value: Any) -> Any:
    """
    Return the value of a field in a recipe, converted and checked as on the command line.

    Args:
        parser (`TrlParser`):
            Parser of the fields.
        name (`str`):
            Name of the field.
        types (`set`):
            Types that the field takes.
        value (`Any`):
            The value as YAML reads it.

    Returns:
        `Any`: The value for the configuration.

    Raises:
        ArgumentError: If the field does not take the value.
    """
    if isinstance(value, (dict, list)):
        return _structured_value(parser, name, types, value)
    if isinstance(value, bool):
        return _boolean_value(parser, name, value)
    if value is None:
        if parser.get_default(name) is None:
            return None
        return _parse(parser, name, "none")
    return _parse(parser, name, value)


def _structured_value(parser: TrlParser, name: str, types: set[Any], value: dict[str, Any] | list[Any]) -> Any:
    if type(value) not in types:
        wanted = "a single value"
        if dict in types:
            wanted = "a mapping"
        elif list in types:
            wanted = "a list"
        raise argparse.ArgumentError(None, f"takes {wanted}, not {reprlib.repr(value)}")
    if isinstance(value, dict):
        return value
    items: list[Any] = []
    for item in value:
        if isinstance(item, dict):  # as in `datasets`
            return value
        parsed = _parse(parser, name, item)
        if not isinstance(parsed, list):  # `report_to` takes a text or a list, and on the command line only a text
            return value
        items += parsed
    return items


def _boolean_value(parser: TrlParser, name: str, value: bool) -> Any:
    if value is False and not _takes(parser, name, value):
        for word in ("no", "off"):  # YAML reads them as `False` where they are not quoted
            if _takes(parser, name, word):
                return word
    parsed = _parse(parser, name, value)
    if isinstance(parsed, str):  # `scale_rewards` is annotated as text, and takes `False` too
        return value
    return parsed


def _parse(parser: TrlParser, name: str, value: Any) -> Any:
    """Return what a field becomes if the command line gives it a value. Raises an `ArgumentError` for a wrong one."""
    namespace, _ = parser.parse_known_args([f"--{name}={value}"])
    return getattr(namespace, name)


def _takes(parser: TrlParser, name: str, value: Any) -> bool:
    try:
        _parse(parser, name, value)
    except argparse.ArgumentError:
        return False
    return True


def _set_environment(variables: Any) -> None:
    if not isinstance(variables, dict):
        raise UserError(f"`env` is {variables!r}; it takes a mapping of environment variables.")
    for name, value in variables.items():
        try:
            os.environ[str(name)] = str(value)
        except (ValueError, OSError) as error:  # an empty name, "=" in a name, or a null character
            raise UserError(f"`env` has {name!r}: {value!r}, which cannot be set ({error}).") from error


def _launch_option(launcher: argparse.ArgumentParser, name: str, value: Any) -> list[str]:
    """Return an option of `accelerate launch` as it is written on a command line: none for a flag that is false."""
    if _is_flag(launcher, name):
        if value is True:
            return [f"--{name}"]
        if not value:
            return []
    option = f"--{name}={value}"
    launcher.parse_known_args([option, _SCRIPT])  # raises an `ArgumentError` if the value is wrong
    return [option]


def _is_flag(launcher: argparse.ArgumentParser, name: str) -> bool:
    """Return whether an option of `accelerate launch` takes no value."""
    try:
        launcher.parse_known_args([f"--{name}", "--", _SCRIPT])  # no value comes after `--`
    except argparse.ArgumentError:
        return False
    return True
