"""The parser of `trl-dataeff grpo`: TRL's, strict about recipes, with help that can be read."""

from __future__ import annotations

import os
import warnings
from argparse import Action, ArgumentError
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, fields
from typing import Any, NamedTuple, NoReturn

from trl import TrlParser
from trl.cli.commands.training import _subtract_subsequence

from trl_dataeff.cli.arguments import PORTABLE_TYPES, TYPES, GRPOArguments
from trl_dataeff.cli.checks import launch_problems
from trl_dataeff.cli.errors import UserError
from trl_dataeff.cli.findings import Findings, mentioned
from trl_dataeff.cli.help import HelpFormatter, format_help
from trl_dataeff.cli.launch import check_launch_args
from trl_dataeff.cli.recipe import Recipe, check_recipe, find_recipe, read_recipe
from trl_dataeff.fields import FieldError, Problem


class ParsedCommand(NamedTuple):
    """
    A command line and its recipe, checked.

    Args:
        arguments ([`GRPOArguments`]):
            What is trained, and how.
        launch_args (`list[str]`):
            Options of `accelerate launch`.
        training_args (`list[str]`):
            The command line without them.
    """

    arguments: GRPOArguments
    launch_args: list[str]
    training_args: list[str]


class GRPOParser(TrlParser):
    """
    [`~trl.TrlParser`] that refuses a wrong recipe or command line with all of its problems in a [`UserError`], where argparse
    would print every option and exit at the first one.

    Args:
        portable (`bool`, *optional*, defaults to `False`):
            Check values without looking at this machine, see [`PortableConfig`].
    """

    def __init__(self, portable: bool = False):
        types: tuple[Any, ...] = PORTABLE_TYPES if portable else TYPES
        self.findings = Findings()
        super().__init__(types, prog="trl-dataeff grpo", formatter_class=HelpFormatter, add_help=False)
        self.allow_abbrev = False
        self.set_defaults(save_on_signal=True, skip_nonfinite_steps=True, vllm_reconnect=True)  # off in Python
        self.portable = portable

    def parse(
        self, args: list[str], check: Callable[[GRPOArguments], Iterable[Problem]] = lambda arguments: ()
    ) -> ParsedCommand:
        """
        Parse a command line with its `--config`; wrong input is a [`UserError`] with everything that was found.

        Args:
            args (`list[str]`):
                What follows `trl-dataeff grpo`.
            check (`Callable`, *optional*):
                Finds what the configurations alone do not show.
        """
        config, rest = _take_config(args)
        recipe = self.load_recipe(config) if config is not None else None
        self.findings = findings = Findings(recipe, {t[2:].partition("=")[0] for t in rest if t.startswith("--")})
        namespace, remaining = self.parse_known_args(rest)
        launch_args = recipe.launch if recipe else []
        try:
            launch_args = launch_args + check_launch_args(remaining, self.field_names)
        except UserError as error:
            findings.note(*error.messages)
        findings.extend(launch_problems(launch_args))
        made = [self._make(dataclass_type, vars(namespace)) for dataclass_type in self.dataclass_types]
        arguments = GRPOArguments(*made)
        if all(made):
            findings.extend(check(arguments))
        if findings.messages:
            raise UserError(*findings.sorted())
        with_recipe = ["--config", str(recipe.path)] if recipe else []
        return ParsedCommand(arguments, launch_args, with_recipe + _subtract_subsequence(rest, remaining))

    def load_recipe(self, name: str) -> Recipe:
        """Read and check a recipe, make its values the defaults of this parser, and set its environment variables."""
        recipe = read_recipe(find_recipe(name))
        check_recipe(recipe, self.dataclass_types)
        os.environ.update(recipe.env)
        self.set_defaults_with_config(**recipe.values)
        return recipe

    @property
    def field_names(self) -> list[str]:
        """Names of all fields, in order."""
        return [f.name for dataclass_type in self.dataclass_types for f in fields(dataclass_type) if f.init]

    def format_help(self, everything: bool = False) -> str:
        return format_help(self, everything)

    def error(self, message: str) -> NoReturn:
        raise UserError(*self.findings.sorted(), _from_argparse(message))

    def _get_values(self, action: Action, arg_strings: list[str]) -> Any:
        """Argparse's conversion of the values of an option: a wrong one is a finding, and parsing goes on."""
        try:
            return super()._get_values(action, arg_strings)
        except ArgumentError as error:
            self.findings.note(_from_argparse(str(error)), fields=[action.dest])
            return action.default

    def _make(self, dataclass_type: Any, given: dict[str, Any]) -> Any:
        """
        Make a dataclass of its fields among `given`. What it refuses is a finding, and the default takes its place, so that
        the next mistake is found too. `None` if it refuses to say which fields are wrong.
        """
        defaults = {f.name: _default(f) for f in fields(dataclass_type) if f.init}
        values = {name: given[name] for name in defaults}
        while True:
            try:
                with warnings.catch_warnings():
                    if self.portable:  # the dataclasses are made again for training, with their warnings
                        warnings.simplefilter("ignore")
                    return dataclass_type(**values)
            except FieldError as error:
                problems = error.problems
            except (ValueError, ImportError, OSError) as error:
                problems = [Problem(str(error), mentioned(str(error), defaults))]
            self.findings.extend(problems)
            culprits = {n for problem in problems for n in problem.fields if values[n] != defaults.get(n)}
            if not culprits:
                return None
            values.update({name: defaults[name] for name in culprits})


def _default(f: Field[Any]) -> Any:
    return f.default_factory() if f.default_factory is not MISSING else f.default


def _from_argparse(message: str) -> str:
    return f"{message[:1].upper()}{message[1:]}. `trl-dataeff grpo --help` lists the options."


def _take_config(args: list[str]) -> tuple[str | None, list[str]]:
    """Return the value of `--config` and the other arguments."""
    config: str | None = None
    rest: list[str] = []
    remaining = iter(args)
    for token in remaining:
        if token != "--config" and not token.startswith("--config="):
            rest.append(token)
            continue
        if config is not None:
            raise UserError("`--config` is given twice. Join the two recipes in one file.")
        config = token.partition("=")[2] or next(remaining, None)
        if config is None or config.startswith("--"):
            raise UserError("`--config` needs the path or the name of a recipe, as in `--config recipe.yaml`.")
    return config, rest
