"""The parser of every sub-command but `grpo`: argparse's, with the command's own way of telling mistakes."""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from trl_dataeff.fields import Range, choices_in_words, in_words
from trl_dataeff.utils import UserError, closest


_OPTION = re.compile(r"^--([^=]+)")


class CommandParser(ArgumentParser):
    """
    An `ArgumentParser` whose mistakes are [`UserError`]s, with the nearest name for one that is unknown. Options have
    underscores, and may be written with hyphens.
    """

    def __init__(self, prog: str, **kwargs: Any):
        super().__init__(prog=prog, allow_abbrev=False, formatter_class=RawDescriptionHelpFormatter, **kwargs)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Namespace:  # type: ignore[override]
        return self.parse_known_args(_with_underscores(list(args or [])), namespace)[0]

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Namespace, list[str]]:
        """Of a sub-command argparse calls this one: its own name and options are in the message, not its parent's."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            name = next((token.partition("=")[0] for token in unknown if token.startswith("-")), None)
            hint = closest(name, self._option_string_actions) if name else ""
            what = f"`{name}` is not an option" if name else f"{unknown[0]!r} is one argument too many"
            raise UserError(f"{what} of `{self.prog}`.{hint} {self._see_help()}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{in_our_words(message)} {self._see_help()}")

    def _see_help(self) -> str:
        return f"`{self.prog} --help` lists what it takes."


def in_our_words(message: str) -> str:
    """A message of argparse as this command says it: what was given, and what is allowed."""
    option, says = re.fullmatch(r"(?:argument ([^:]+): )?(.*)", message, re.DOTALL).groups()  # type: ignore[union-attr]
    if option is None:
        return f"{says[:1].upper()}{says[1:]}."
    option = f"`{option.split('/')[0]}`"
    if wrong := re.fullmatch(r"invalid choice: (.*) \(choose from (.*)\)", says):
        choices = [choice.strip("'") for choice in wrong[2].split(", ")]
        hint = closest(wrong[1].strip("'"), choices)
        return f"{option} is {wrong[1]}; it takes {choices_in_words(choices)}.{hint}"
    if wrong := re.fullmatch(r"invalid (int|float) value: (.*)", says):
        return f"{option} is {wrong[2]}; it takes {'an integer' if wrong[1] == 'int' else 'a number'}."
    return f"{option}: {says}."


def _with_underscores(argv: list[str]) -> list[str]:
    """Write the names of options with underscores. Arguments after `--` stay as they are."""
    end = argv.index("--") if "--" in argv else len(argv)
    return [_OPTION.sub(lambda name: f"--{name[1].replace('-', '_')}", token) for token in argv[:end]] + argv[end:]


def out_of_range(args: Namespace, ranges: Mapping[str, Range]) -> list[str]:
    """What is wrong with the numbers of a command line, a sentence for each option. Those that are not given are fine."""
    return [
        f"`--{name}` is {value}; it takes {in_words(int if allowed.integer else float, allowed)}."
        for name, allowed in ranges.items()
        if (value := getattr(args, name)) is not None and value not in allowed
    ]
