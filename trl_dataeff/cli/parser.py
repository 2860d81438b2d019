"""The parser of `trl-dataeff grpo`: TRL's, which finds all mistakes of a recipe and a command line at once."""

from __future__ import annotations

import difflib
import os
import re
import warnings
from argparse import ArgumentError, ArgumentParser
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import cached_property
from operator import itemgetter
from typing import Any

import torch
from trl import DatasetMixtureConfig, ModelConfig

from trl_dataeff.cli.arguments import DataEfficientGRPOScriptArguments, GRPOArguments
from trl_dataeff.cli.command_parser import in_our_words
from trl_dataeff.cli.field_parser import FieldParser, WrongValue, got
from trl_dataeff.cli.launch import launch_option, launch_options, launch_parser, launch_problems
from trl_dataeff.cli.recipe import Recipe, find_recipe, read_recipe
from trl_dataeff.config import DataEfficientGRPOConfig
from trl_dataeff.fields import FieldError, Problem
from trl_dataeff.utils import UserError, closest


class PortableConfig(DataEfficientGRPOConfig):
    """
    A [`DataEfficientGRPOConfig`] that is checked without looking at this machine, so that a recipe for a GPU can be
    validated on a laptop. What depends on the machine is left out: whether it has bf16 or TF32, DeepSpeed's own
    configuration, and the number of processes, which is taken to be one.
    """

    _LEFT_OUT: dict[str, Any] = {"use_cpu": True, "tf32": None, "deepspeed": None}  # noqa: RUF012

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in self._LEFT_OUT}
        self.__dict__.update(self._LEFT_OUT)
        super().__post_init__()
        self.__dict__.update(given)

    @cached_property
    def _setup_devices(self) -> torch.device:
        return torch.device("cpu")

    @property
    def world_size(self) -> int:
        return 1


TYPES = (DataEfficientGRPOScriptArguments, DataEfficientGRPOConfig, ModelConfig, DatasetMixtureConfig)
PORTABLE_TYPES = (DataEfficientGRPOScriptArguments, PortableConfig, ModelConfig, DatasetMixtureConfig)


class Findings:
    """What is wrong with a recipe, each with file and line, and with the command line, whose fields are `given`."""

    def __init__(self, recipe: Recipe, given: Iterable[str]):
        self._path = recipe.path
        self._lines = recipe.lines | dict.fromkeys(given, 0)  # the command line is line 0
        self._rejected: set[str] = set()
        self._found: list[tuple[int, str]] = []

    def add(self, *problems: Problem, line: int | None = None) -> None:
        """
        Enter problems that were found together, but not those of fields that were wrong before: they would follow from that.
        Without the `line` of the recipe, their place is that of the first field that is given somewhere.
        """
        before = set(self._rejected)
        for message, names in problems:
            if before.isdisjoint(names):
                at = line or next((self._lines[name] for name in names if name in self._lines), None)
                if self._path is not None and at != 0:
                    message = f"{self._path}:{at}: {message}" if at else f"{self._path}: {message}"
                self._found.append((at or 0, message))
                self._rejected.update(names)

    @property
    def messages(self) -> list[str]:
        """In the order of the file; those of the command line first."""
        return [message for _, message in sorted(self._found, key=itemgetter(0))]


class GRPOParser(FieldParser):
    """
    The parser of `trl-dataeff grpo`. Wrong input is a [`UserError`] with everything that was found, where argparse would
    print every option and exit at the first mistake. If `portable`, values are checked without looking at this machine.
    """

    def __init__(self, portable: bool = False):
        super().__init__(PORTABLE_TYPES if portable else TYPES, prog="trl-dataeff grpo")
        self.portable = portable

    def parse(
        self, args: list[str], check: Callable[[GRPOArguments], Iterable[Problem]] = lambda arguments: ()
    ) -> tuple[GRPOArguments, list[str]]:
        """
        Parse what follows `trl-dataeff grpo`, with its `--config`: what is trained and how, and the options of `accelerate
        launch`. `check` finds what the configurations alone do not show.
        """
        config, rest = _take_config(args)
        recipe = read_recipe(find_recipe(config)) if config is not None else Recipe()
        given = [token[2:].partition("=")[0].replace("-", "_") for token in rest if token.startswith("--")]
        findings = Findings(recipe, given)
        launcher = launch_parser()
        launch_args = self._take(recipe, launcher, findings)
        values, remaining = self._parse_known(rest, findings)
        more = [part for t in remaining for part in (t.split("=", 1) if t.startswith("--") else [t])]
        for options in (launch_args, more):
            findings.add(*launch_problems(launcher, options, self.options))
        made = [self._make(dataclass_type, values, findings) for dataclass_type in self.dataclass_types]
        arguments = GRPOArguments(*made)
        if all(made):
            findings.add(*check(arguments))
        if findings.messages:
            raise UserError(*findings.messages)
        return arguments, launch_args + more

    def _take(self, recipe: Recipe, launcher: ArgumentParser, findings: Findings) -> list[str]:
        """Make a recipe's values the defaults of this parser, set its environment variables, return its launch options."""
        launch_args: list[str] = []
        values = {}
        for key, line, before in recipe.repeated:
            findings.add(Problem(f"`{key}` is given twice, here and on line {before}. Keep one of them."), line=line)
        for key, value in recipe.values.items():
            problem = None
            if key == "env" and isinstance(value, dict):
                os.environ.update({str(name): str(text) for name, text in value.items()})
            elif key == "env":
                problem = Problem(f"`env` is {got(value)}; it takes a mapping of environment variables.")
            elif key in self.options:
                try:
                    values[key] = self.convert(key, value)
                except WrongValue as error:
                    problem = Problem(str(error), (key,))
            elif (tokens := launch_option(launcher, key, value)) is not None:
                launch_args += tokens
            else:
                hint = closest(key, [*self.options, "env", *launch_options(launcher)])
                meant = set(difflib.get_close_matches(key, self.options)) - set(recipe.lines)
                problem = Problem(f"`{key}` is not a field of `trl-dataeff grpo`.{hint}", tuple(meant))
            if problem is not None:
                findings.add(problem, line=recipe.lines.get(key))
        self.set_defaults_with_config(**values)
        return launch_args

    def _parse_known(self, args: list[str], findings: Findings) -> tuple[dict[str, Any], list[str]]:
        """Argparse's own, but an option with a wrong value is a finding, and is left out."""
        while True:
            try:
                namespace, remaining = self.parse_known_args(args)
                return vars(namespace), remaining
            except ArgumentError as error:
                names = str(error.argument_name).split("/")
                message = f"{in_our_words(str(error))} `trl-dataeff grpo --help` lists the options."
                findings.add(Problem(message, (names[0][2:],)))
                start = next(i for i, token in enumerate(args) if token.partition("=")[0] in names)
                stop = next((i for i in range(start + 1, len(args)) if args[i].startswith("--")), len(args))
                args = args[:start] + args[stop:]

    def _make(self, dataclass_type: Any, given: dict[str, Any], findings: Findings) -> Any:
        """
        Make a dataclass of its fields among `given`. What it rejects is a finding, and the default takes its place, so that
        the next mistake is found too. `None` if it does not say which fields are wrong.
        """
        names = [f.name for f in fields(dataclass_type) if f.init]
        values = {name: given[name] for name in names}
        while True:
            try:
                with warnings.catch_warnings():
                    if self.portable:  # the dataclasses are made again for training, with their warnings
                        warnings.simplefilter("ignore")
                    return dataclass_type(**values)
            except FieldError as error:
                problems = error.problems
            except (ValueError, ImportError, OSError) as error:
                problems = [Problem(str(error), _mentioned(str(error), names))]
            findings.add(*problems)
            wrong = {n for problem in problems for n in problem.fields if values[n] != self.defaults[n]}
            if not wrong:
                return None
            values.update({name: self.defaults[name] for name in wrong})


def _mentioned(message: str, names: Iterable[str]) -> tuple[str, ...]:
    """The names that a message mentions, in its order."""
    return tuple(sorted(set(re.findall(r"\w+", message)) & set(names), key=message.index))


def _take_config(args: list[str]) -> tuple[str | None, list[str]]:
    """The value of `--config`, and the other arguments."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", action="append", default=[])
    try:
        namespace, rest = parser.parse_known_args(args)
    except ArgumentError as error:
        raise UserError("`--config` needs the path or the name of a recipe, as in `--config recipe.yaml`.") from error
    if len(namespace.config) > 1:
        raise UserError("`--config` is given twice. Join the two recipes in one file.")
    return (namespace.config or [None])[0], rest
