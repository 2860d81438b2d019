"""Gives the parser the values of a recipe, converted and checked as on the command line."""

from __future__ import annotations

import argparse
import os
import reprlib
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, NamedTuple

from trl import TrlParser
from trl.scripts.utils import DatasetConfig

from trl_dataeff.cli.options import SCRIPT, field_types, has_option, unknown_field, wrong_value
from trl_dataeff.cli.recipe_file import Recipe
from trl_dataeff.utils import UserError, closest, listed


_NEVER_NULL = ("num_generations",)  # annotated as if it were; TRL computes with it


class Applied(NamedTuple):
    """
    What [`apply_recipe`] finds.

    Attributes:
        launch_options (`list[str]`): the options of `accelerate launch` that the recipe gives.
        problems (`list[str]`): one message for each key that is unknown, and for each value that is wrong.
    """

    launch_options: list[str]
    problems: list[str]


def apply_recipe(recipe: Recipe, parser: TrlParser, launcher: argparse.ArgumentParser) -> Applied:
    """
    Make the values of a recipe the defaults of the parser, and set its environment variables.

    Args:
        recipe ([`Recipe`]):
            Keys and values, as YAML reads them.
        parser (`TrlParser`):
            Parser of the fields. Its defaults are replaced.
        launcher (`ArgumentParser`):
            Parser of `accelerate launch`.

    Returns:
        [`Applied`]: The options of `accelerate launch` that the recipe gives, and what is wrong with it.
    """
    defaults: dict[str, Any] = {}
    launch_options: list[str] = []
    problems: list[str] = []
    for name, value in recipe.values.items():
        try:
            unknown_keys: list[str] = []
            if name == "datasets" and isinstance(value, list):
                unknown_keys += _unknown_keys_of_datasets(recipe, value)
            if unknown_keys:
                problems += unknown_keys
            elif name in field_types():
                defaults[name] = _field_value(parser, name, value)
            elif name == "env":
                _set_environment(value)
            elif _is_launch_key(launcher, name):
                launch_options += _launch_option(launcher, name, value)
            else:
                problems.append(recipe.at(name) + unknown_field(name, launcher))
        except argparse.ArgumentError as error:
            problems.append(recipe.at(name) + wrong_value(f"--{name}", error))
        except UserError as error:
            problems.append(recipe.at(name) + str(error))
    parser.set_defaults_with_config(**defaults)
    return Applied(launch_options, problems)


def _unknown_keys_of_datasets(recipe: Recipe, entries: list[Any]) -> Iterator[str]:
    """Find unknown keys in the entries of a mixture (`datasets`)."""
    known = [argument.name for argument in fields(DatasetConfig)]
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict):
            continue
        for key in entry:
            if key in known:
                continue
            at = recipe.at(f"datasets[{index}].{key}")
            hint = closest(str(key), known)
            yield f"{at}`{key}` is an unknown key of `datasets`.{hint} Known are {listed(known)}."


def _is_launch_key(launcher: argparse.ArgumentParser, name: str) -> bool:
    """Return whether a key of a recipe is an option of `accelerate launch`."""
    return name.isidentifier() and name != "help" and has_option(launcher, name)


def _field_value(parser: TrlParser, name: str, value: Any) -> Any:
    """
    Return the value of a field in a recipe, converted and checked as on the command line.

    Args:
        parser (`TrlParser`):
            Parser of the fields.
        name (`str`):
            Name of the field.
        value (`Any`):
            The value as YAML reads it.

    Returns:
        `Any`: The value for the configuration.

    Raises:
        ArgumentError: If the field does not take the value.
    """
    if isinstance(value, (dict, list)):
        return _structured_value(parser, name, value)
    if isinstance(value, bool):
        return _boolean_value(parser, name, value)
    if value is None:
        takes_none = type(None) in field_types()[name] and name not in _NEVER_NULL
        if takes_none or parser.get_default(name) is None:
            return None
        raise argparse.ArgumentError(None, "takes a value, not null")
    return _parse(parser, name, value)


def _structured_value(parser: TrlParser, name: str, value: dict[str, Any] | list[Any]) -> Any:
    types = field_types()[name]
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
    launcher.parse_known_args([option, SCRIPT])  # raises an `ArgumentError` if the value is wrong
    return [option]


def _is_flag(launcher: argparse.ArgumentParser, name: str) -> bool:
    """Return whether an option of `accelerate launch` takes no value."""
    try:
        launcher.parse_known_args([f"--{name}", "--", SCRIPT])  # no value comes after `--`
    except argparse.ArgumentError:
        return False
    return True
