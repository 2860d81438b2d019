"""The options of the command: parsers of the fields and of `accelerate launch`, and what they know of an option."""

from __future__ import annotations

import argparse
import functools
import re
from dataclasses import fields
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from trl import DatasetMixtureConfig, ModelConfig

from trl_dataeff.cli.data import DataEfficientGRPOScriptArguments
from trl_dataeff.cli.help import DESCRIPTION, GRPOParser, HelpFormatter, names_of_own_fields
from trl_dataeff.cli.main import GRPO_USAGE
from trl_dataeff.cli.recipe_file import words_of
from trl_dataeff.config import DataEfficientGRPOConfig
from trl_dataeff.utils import closest


TYPES: list[Any] = [
    DataEfficientGRPOScriptArguments,
    DataEfficientGRPOConfig,
    ModelConfig,
    DatasetMixtureConfig,
]
SCRIPT = "<script>"  # stands for the script that `accelerate launch` expects behind its options


def grpo_parser() -> GRPOParser:
    """Return the parser of all fields and of `--config`. It raises an `ArgumentError` for a wrong value."""
    parser = GRPOParser(
        TYPES,
        prog="trl-dataeff grpo",
        usage=GRPO_USAGE,
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


@functools.cache
def _annotations() -> dict[str, tuple[Any, ...]]:
    """Return the types that each field takes: `(list[str], str)` for `list[str] | str`."""
    types = {}
    for arguments_type in TYPES:
        hints = get_type_hints(arguments_type)
        for argument in fields(arguments_type):
            hint = hints[argument.name]
            is_union = get_origin(hint) in (Union, UnionType)
            types[argument.name] = get_args(hint) if is_union else (hint,)
    return types


@functools.cache
def field_types() -> dict[str, set[Any]]:
    """Return the types that each field takes, without their parameters: `{list, str}` for `list[str] | str`."""
    return {
        name: {get_origin(alternative) or alternative for alternative in alternatives}
        for name, alternatives in _annotations().items()
    }


@functools.cache
def optional_fields() -> set[str]:
    """
    Return the fields that a word of the command line sets to `None`: with that default, or of this package. TRL reads
    the words of others as text, such as `--report_to none`.
    """
    own = names_of_own_fields()
    optional = set()
    for arguments_type in TYPES:
        for argument in fields(arguments_type):
            takes_none = type(None) in field_types()[argument.name]
            if takes_none and (argument.default is None or argument.name in own):
                optional.add(argument.name)
    return optional


def lists_of_names() -> list[str]:
    """Return the fields that take a list of texts."""
    return [name for name, alternatives in _annotations().items() if list[str] in alternatives]


def how_to_list(name: str, text: str) -> str:
    """
    Say how several values of a field are given.

    Args:
        name (`str`):
            Name of the field.
        text (`str`):
            Values that are separated by semicolons, commas or spaces.

    Returns:
        `str`: A sentence, or an empty string if the text is a single value.
    """
    items = re.split(r"[\s;,]+", text)
    if len(items) < 2:
        return ""
    in_recipe = f"in a recipe as a list (`{name}: [{', '.join(items)}]`)"
    if str in field_types()[name]:  # the command line takes a single text
        return f"Give several values {in_recipe}."
    return f"Give several values with spaces between them (`--{name} {' '.join(items)}`), or {in_recipe}."


def fields_in(messages: list[str]) -> set[str]:
    """Return the fields that messages name."""
    return set(field_types()).intersection(words_of(" ".join(messages)))


def has_option(parser: argparse.ArgumentParser, name: str) -> bool:
    """Return whether a parser knows an option, by trying it with an empty value."""
    token = f"--{name}="
    try:
        _, unknown = parser.parse_known_args([token, SCRIPT])
    except argparse.ArgumentError:  # the option does not take this value
        return True
    return token not in unknown


def unknown_field(name: str, launcher: argparse.ArgumentParser) -> str:
    """Return the message for an unknown field, with the names that come closest."""
    launch_options = vars(launcher.parse_args([SCRIPT]))
    known = [*field_types(), *launch_options, "accelerate_config", "env"]
    return f"`{name}` is an unknown field.{closest(name, known)}"


def wrong_value(option: str, error: argparse.ArgumentError) -> str:
    """Return the message for a value that an option does not take."""
    message = f"`{option}`: {error.message.rstrip('.')}."
    name = option.removeprefix("--")
    value = re.search(r"value: '(.*)'", error.message, re.DOTALL)
    if value is not None and list in field_types().get(name, ()):
        message = f"{message} {how_to_list(name, value[1])}".rstrip()
    return message
