"""TRL's parser, which also takes values from YAML: types and choices are those of the command line."""

from __future__ import annotations

from argparse import Action, ArgumentTypeError
from dataclasses import fields
from typing import Any, get_args, get_type_hints

from trl import TrlParser
from trl.scripts.utils import DatasetConfig

from trl_dataeff.cli.arguments import ON_BY_DEFAULT
from trl_dataeff.fields import choices_in_words, fits, in_words
from trl_dataeff.utils import closest, listed


#: What TRL's documentation allows beyond the annotation of its field.
ALSO_ALLOWED: dict[str, Any] = {
    "scale_rewards": bool,
    "lora_target_modules": str,
    "lora_target_parameters": str,
    "resume_from_checkpoint": bool,
}


class WrongValue(ValueError):
    """A value from YAML that its field does not take; the message begins with the field."""


class FieldParser(TrlParser):
    """[`~trl.TrlParser`] with the defaults of this command; `options`, `defaults` and `hints` (annotated types) by field."""

    def __init__(self, dataclass_types: Any, **kwargs: Any):
        super().__init__(dataclass_types, add_help=False, allow_abbrev=False, exit_on_error=False, **kwargs)
        names = [f.name for dataclass_type in self.dataclass_types for f in fields(dataclass_type) if f.init]
        self.options: dict[str, Action] = {name: self._option_string_actions[f"--{name}"] for name in names}
        self.set_defaults(**{name: True for name in ON_BY_DEFAULT if name in self.options})
        self.defaults: dict[str, Any] = {name: option.default for name, option in self.options.items()}
        self.hints: dict[str, Any] = {}
        for dataclass_type in self.dataclass_types:
            self.hints |= get_type_hints(dataclass_type)
        for name in ALSO_ALLOWED.keys() & self.hints.keys():
            self.hints[name] |= ALSO_ALLOWED[name]

    def convert(self, name: str, value: Any) -> Any:
        """
        Return a value from YAML as the field `name` takes it, or raise a [`WrongValue`].

        Text is converted as on the command line: YAML 1.1 reads `1e-6` as text, not as a number. Nothing else is
        converted: `8.0` is not an integer and `true` is not a number.
        """
        option, hint = self.options[name], self.hints[name]
        if value is None and self.defaults[name] is None:
            return None
        if get_args(hint)[:1] == (DatasetConfig,):
            _check_entries(name, value)
            return value
        if option.choices is None or value is None:
            converted = value if fits(value, hint) else _read(value, option.type)
            taken, takes = fits(converted, hint), in_words(hint)
        else:
            converted = _read(value, option.type)
            taken = converted in option.choices
            takes = choices_in_words(list(option.choices))
        if not taken:
            raise WrongValue(f"`{name}` is {got(value)}; it takes {takes}.")
        return converted


def _read(value: Any, convert: Any) -> Any:
    """Text, or the texts of a list, as an option reads them; what it cannot read stays as it is."""
    if isinstance(value, list):
        return [_read(item, convert) for item in value]
    try:
        return convert(value) if isinstance(value, str) else value
    except (ValueError, ArgumentTypeError):
        return value


def got(value: Any) -> str:
    """Return a value and its type as they stand in a message; with the cause, where YAML's reading surprises."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return f"{str(value).lower()} (YAML reads yes, no, on and off without quotes as true or false)"
    names = {str: "text", dict: "a mapping", list: "a list", int: "an integer", float: "a number"}
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({names.get(type(value), type(value).__name__)})"


def _check_entries(name: str, entries: Any) -> None:
    """Raise a [`WrongValue`] if these are not entries of a dataset mixture, each of which makes a `DatasetConfig`."""
    hints = get_type_hints(DatasetConfig)
    if not isinstance(entries, list):
        raise WrongValue(f"`{name}` is {got(entries)}; it takes a list of mappings with {listed(hints)}.")
    for entry in entries:
        if not isinstance(entry, dict) or "path" not in entry:
            raise WrongValue(
                f"`{name}` has the entry {got(entry)}; an entry is a mapping with {listed(hints)}; `path` is required."
            )
        for key, value in entry.items():
            if key not in hints:
                raise WrongValue(f"`{name}` has an entry with the unknown key `{key}`.{closest(str(key), hints)}")
            if not fits(value, hints[key]):
                takes = in_words(hints[key])
                raise WrongValue(f"`{name}` has an entry whose `{key}` is {got(value)}; it takes {takes}.")
