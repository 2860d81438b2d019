"""Is a value from YAML of the type that a field is annotated with? Pure functions on type hints."""

from __future__ import annotations

import types
import typing
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any, Literal, Union

from trl.scripts._hf_argparser import string_to_bool

from trl_dataeff.cli.errors import closest


class WrongType(Exception):
    """A value does not fit a hint; the message is the hint in words."""


class WrongEntry(WrongType):
    """An entry of a list of mappings is wrong; the message says how."""


def fit(value: Any, hint: Any) -> Any:
    """
    Return `value` as `hint` wants it, or raise [`WrongType`].

    Strings are converted as on the command line: YAML 1.1 reads `1e-6` as a string, not as a number. Nothing else is
    converted: `8.0` is no integer and `true` no number.
    """
    origin = typing.get_origin(hint)
    if origin is Union or isinstance(hint, types.UnionType):
        return _fit_union(value, hint)
    if hint is Any:
        return value
    if origin is Literal:
        return _fit_choice(value, typing.get_args(hint), hint)
    if origin in (list, tuple):
        return _fit_list(value, hint)
    if hint is dict or origin is dict:
        return _require(isinstance(value, dict), value, hint)
    if hint is type(None):
        return _require(value is None, value, hint)
    if hint in _SCALARS:
        return _SCALARS[hint](value, hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _fit_choice(value, [member.value for member in hint], hint)
    if is_dataclass(hint):
        return _fit_dataclass(value, hint)
    return _require(isinstance(value, hint), value, hint)


def describe(hint: Any) -> str:
    """Return a type hint in words, e.g. `"a list of numbers, or nothing"`."""
    origin = typing.get_origin(hint)
    if origin is Union or isinstance(hint, types.UnionType):
        # An enum beside `str` says which strings there are.
        members = [m for m in typing.get_args(hint) if m is not type(None)]
        if any(_is_enum(m) for m in members):
            members = [m for m in members if m is not str]
        words = list(dict.fromkeys(describe(m) for m in members))
        if type(None) in typing.get_args(hint):
            words.append("nothing")
        return " or ".join(words)
    if origin is Literal:
        return " or ".join(repr(choice) for choice in typing.get_args(hint))
    if _is_enum(hint):
        return "one of " + ", ".join(repr(member.value) for member in hint)
    if origin in (list, tuple):
        return f"a list of {_PLURALS.get(typing.get_args(hint)[0], 'mappings')}"
    if hint is dict or origin is dict or is_dataclass(hint):
        return "a mapping"
    return _WORDS.get(hint, getattr(hint, "__name__", str(hint)))


def got(value: Any) -> str:
    """Return a value and its type as they stand in a message; with the cause, where YAML's reading surprises."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return f"{str(value).lower()} (YAML reads yes, no, on and off without quotes as true or false)"
    names = {str: "text", dict: "a mapping", list: "a list", int: "an integer", float: "a number"}
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({names.get(type(value), type(value).__name__)})"


_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "text", type(None): "nothing"}
_PLURALS = {bool: "true/false", int: "integers", float: "numbers", str: "texts"}


def _is_enum(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Enum)


def _require(ok: bool, value: Any, hint: Any) -> Any:
    if not ok:
        raise WrongType(describe(hint))
    return value


def _convert(value: str, convert: Callable[[str], Any], hint: Any) -> Any:
    try:
        return convert(value)
    except (ValueError, ArgumentTypeError) as error:
        raise WrongType(describe(hint)) from error


def _fit_bool(value: Any, hint: Any) -> Any:
    if isinstance(value, str):
        return _convert(value, string_to_bool, hint)
    return _require(isinstance(value, bool), value, hint)


def _fit_int(value: Any, hint: Any) -> Any:
    if isinstance(value, str):
        return _convert(value, int, hint)
    return _require(isinstance(value, int) and not isinstance(value, bool), value, hint)


def _fit_float(value: Any, hint: Any) -> Any:
    if isinstance(value, str):
        return _convert(value, float, hint)
    return _require(isinstance(value, (int, float)) and not isinstance(value, bool), value, hint)


def _fit_str(value: Any, hint: Any) -> Any:
    return _require(isinstance(value, str), value, hint)


_SCALARS: dict[Any, Callable[[Any, Any], Any]] = {bool: _fit_bool, int: _fit_int, float: _fit_float, str: _fit_str}


def _fit_union(value: Any, hint: Any) -> Any:
    members = typing.get_args(hint)
    enums = [member for member in members if _is_enum(member)]
    if enums:
        return fit(value, enums[0])
    for member in members:
        try:
            return fit(value, member)
        except WrongType:
            continue
    raise WrongType(describe(hint))


def _fit_choice(value: Any, choices: Any, hint: Any) -> Any:
    value = getattr(value, "value", value)
    return _require(any(value == choice and type(value) is type(choice) for choice in choices), value, hint)


def _fit_list(value: Any, hint: Any) -> list[Any]:
    _require(isinstance(value, list), value, hint)
    try:
        return [fit(item, typing.get_args(hint)[0]) for item in value]
    except WrongType as error:
        raise error if isinstance(error, WrongEntry) else WrongType(describe(hint)) from error


def _fit_dataclass(value: Any, hint: Any) -> Any:
    hints = typing.get_type_hints(hint)
    keys = ", ".join(f"`{key}`" for key in hints)
    if not isinstance(value, dict):
        raise WrongEntry(f"has the entry {got(value)}; an entry is a mapping with {keys}.")
    required = [f.name for f in fields(hint) if f.default is MISSING and f.default_factory is MISSING]
    for key in required:
        if key not in value:
            raise WrongEntry(f"has the entry {value!r} without `{key}`; an entry is a mapping with {keys}.")
    fitted = {}
    for key, item in value.items():
        if key not in hints:
            raise WrongEntry(f"has an entry with the unknown key `{key}`.{closest(str(key), hints)}")
        try:
            fitted[key] = fit(item, hints[key])
        except WrongType as error:
            raise WrongEntry(f"has an entry whose `{key}` is {got(item)}; it takes {error}.") from error
    return fitted
