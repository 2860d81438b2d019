"""The parser of `trl-dataeff grpo`: TRL's, strict about recipes, with help that can be read."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, NamedTuple, NoReturn

from trl import TrlParser
from trl.cli.commands.training import _subtract_subsequence

from trl_dataeff.cli.arguments import PORTABLE_TYPES, TYPES, GRPOArguments
from trl_dataeff.cli.errors import UserError
from trl_dataeff.cli.help import HelpFormatter, format_help
from trl_dataeff.cli.launch import check_launch_args
from trl_dataeff.cli.recipe import Recipe, check_recipe, find_recipe, read_recipe


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
    [`~trl.TrlParser`] that refuses a wrong recipe with all of its problems, and raises [`UserError`] where argparse
    would print every option and exit.

    Args:
        portable (`bool`, *optional*, defaults to `False`):
            Check values without looking at this machine, see [`PortableConfig`].
    """

    def __init__(self, portable: bool = False):
        types = PORTABLE_TYPES if portable else TYPES
        super().__init__(types, prog="trl-dataeff grpo", formatter_class=HelpFormatter, add_help=False)
        self.allow_abbrev = False
        self.set_defaults(save_on_signal=True, skip_nonfinite_steps=True, vllm_reconnect=True)  # off in Python
        self.portable = portable

    def parse(self, args: list[str]) -> ParsedCommand:
        """Parse a command line with its `--config`; wrong input is a [`UserError`]."""
        config, rest = _take_config(args)
        recipe = self.load_recipe(config) if config is not None else None
        with_recipe = ["--config", str(recipe.path)] if recipe else []
        *arguments, remaining = self._build(rest)
        cli_launch = check_launch_args(remaining, self.field_names)
        return ParsedCommand(
            arguments=GRPOArguments(*arguments),
            launch_args=(recipe.launch if recipe else []) + cli_launch,
            training_args=with_recipe + _subtract_subsequence(rest, remaining),
        )

    def load_recipe(self, name: str) -> Recipe:
        """Read and check a recipe, make its values the defaults of this parser, and set its environment variables."""
        recipe = read_recipe(find_recipe(name))
        problems = check_recipe(recipe, self.dataclass_types)
        if problems:
            raise UserError(*problems)
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
        raise UserError(f"{message[:1].upper()}{message[1:]}. `trl-dataeff grpo --help` lists the options.")

    def _build(self, args: Iterable[str]) -> tuple[Any, ...]:
        """Make the dataclasses. They refuse a value with a `ValueError` that is written for the user."""
        try:
            with warnings.catch_warnings():
                if self.portable:  # the dataclasses are made again for training, with their warnings
                    warnings.simplefilter("ignore")
                return self.parse_args_into_dataclasses(
                    list(args), return_remaining_strings=True, look_for_args_file=False
                )
        except UserError:
            raise
        except (ValueError, ImportError, OSError) as error:
            raise UserError(str(error)) from error


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
