"""Reads a recipe, a YAML file of training fields, and a command line, which overrides it, by TRL's parser."""

from __future__ import annotations

import argparse
import os
import re
import warnings
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml
from trl import DatasetMixtureConfig, ModelConfig, TrlParser

from trl_dataeff.cli.data import DataEfficientGRPOScriptArguments
from trl_dataeff.cli.launch import check_launch_options, launch_option, launch_parser
from trl_dataeff.cli.main import find_recipe
from trl_dataeff.config import DataEfficientGRPOConfig
from trl_dataeff.utils import UserError, closest, listed


TYPES: list[Any] = [DataEfficientGRPOScriptArguments, DataEfficientGRPOConfig, ModelConfig, DatasetMixtureConfig]
USAGE = "trl-dataeff grpo --config RECIPE [--field VALUE ...] [accelerate launch options]"
DESCRIPTION = """\
Train a language model with GRPO (TRL's GRPOTrainer), and generate fewer rollouts that carry no gradient.

A recipe is a YAML file of the fields below; a field on the command line overrides the recipe. RECIPE is a file, or a
name from `trl-dataeff recipes list`. `--num_processes 4`, `--accelerate_config zero2` and every other option of
`accelerate launch` are passed on.

examples:
  # a recipe that comes with the package, for 20 steps
  trl-dataeff grpo --config Qwen2.5-0.5B-Instruct/gsm8k/dots --max_steps 20

  # your own data, without a recipe: a file with the columns `prompt` and `answer`
  trl-dataeff grpo --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name train.jsonl \\
      --prompt_as_chat --reward_funcs numeric_answer_reward --use_peft --output_dir out

  # four GPUs
  trl-dataeff grpo --config recipe.yaml --num_processes 4
"""
EPILOG = "The fields of this package are explained in docs/configuration.md, the command in docs/command.md."
#: Fields of which a value can be rejected because of the machine, and values that are valid on every machine
MACHINE: dict[str, Any] = {"use_cpu": True, "tf32": None, "deepspeed": None}


class GRPOArguments(NamedTuple):
    """What a recipe and the command line say, in the order in which `train` takes it."""

    script: DataEfficientGRPOScriptArguments
    training: DataEfficientGRPOConfig
    model: ModelConfig
    dataset: DatasetMixtureConfig


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


class GRPOParser(TrlParser):
    """[`~trl.TrlParser`] of this command, whose errors are [`UserError`]s. `options` has the option of each field."""

    def __init__(self) -> None:
        texts = {"usage": USAGE, "description": DESCRIPTION, "epilog": EPILOG}
        super().__init__(TYPES, prog="trl-dataeff grpo", allow_abbrev=False, formatter_class=_Help, **texts)
        self.add_argument("--config", metavar="RECIPE", help="a file, or a name from `trl-dataeff recipes list`.")
        names = [f.name for kind in TYPES for f in fields(kind) if f.init]
        self.options: dict[str, argparse.Action] = {name: self._option_string_actions[f"--{name}"] for name in names}

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. `trl-dataeff grpo --help` lists the options.")


@dataclass
class Recipe:
    """Value and line of every key of a recipe."""

    path: Path | None = None
    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)

    def located(self, message: str, without: set[str]) -> str:
        """The message, with file and line if the first field that it mentions is one of the recipe, and not one of `without`."""
        names = [name for name in re.findall(r"\w+", message) if name in self.lines.keys() | without]
        if not names or names[0] in without:
            return message
        return f"{self.path}:{self.lines[names[0]]}: {message}"


def read_recipe(path: Path) -> Recipe:
    """Read a recipe; a file that is missing, is not YAML or not a mapping is a [`UserError`]."""
    try:
        text = path.read_text(encoding="utf-8")
        node, values = yaml.compose(text, yaml.SafeLoader), yaml.safe_load(text)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a UTF-8 text file. A recipe is a YAML file in UTF-8.") from error
    except OSError as error:
        raise UserError(f"The recipe {str(path)!r} cannot be read: {error.strerror or error}.") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        reason = getattr(error, "problem", None) or str(error)
        raise UserError(f"{where}: not YAML: {reason}. A recipe has one `key: value` a line.") from error
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{path}: not a recipe: it must have one `key: value` a line.")
    recipe = Recipe(path, {str(key): value for key, value in values.items()})
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if key.value in recipe.lines:
            raise UserError(
                f"{path}:{line}: `{key.value}` is given twice, here and on line {recipe.lines[key.value]}."
            )
        recipe.lines[key.value] = line
    return recipe


def read(argv: list[str], portable: bool = False) -> tuple[GRPOArguments, list[str]]:
    """
    Return what `parse` returns, and the options of `accelerate launch`. If `portable`, nothing depends on this machine: a
    recipe for a GPU can be read on a laptop.
    """
    parser, launcher = GRPOParser(), launch_parser()
    config = parser.parse_known_args(argv)[0].config
    recipe = read_recipe(find_recipe(config)) if config is not None else Recipe()
    launch_args = _take(recipe, parser, launcher)
    namespace, remaining = parser.parse_known_args(argv)
    remaining = [part for token in remaining for part in (token.split("=", 1) if token[:2] == "--" else [token])]
    for options in (launch_args, remaining):
        check_launch_options(launcher, options, list(parser.options))
    values, given = vars(namespace), {token[2:].partition("=")[0].replace("-", "_") for token in argv}
    machine = {name: values[name] for name in MACHINE}
    try:
        with warnings.catch_warnings():
            if portable:  # training reads everything once more, with its warnings
                warnings.simplefilter("ignore")
                values |= MACHINE
            made = [kind(**{f.name: values[f.name] for f in fields(kind) if f.init}) for kind in TYPES]
    except (ValueError, TypeError, ImportError, OSError) as error:
        raise UserError(recipe.located(str(error), given)) from error
    arguments = GRPOArguments(*made)
    if portable:
        vars(arguments.training).update(machine)
    return arguments, launch_args + remaining


def _take(recipe: Recipe, parser: GRPOParser, launcher: argparse.ArgumentParser) -> list[str]:
    """Make a recipe's values the defaults of the parser, set its environment variables, return its launch options."""
    launch_args: list[str] = []
    values, problems = {}, []
    known = [*parser.options, "env", *(option.removeprefix("--") for option in launcher._option_string_actions)]
    for name, value in recipe.values.items():
        at = f"{recipe.path}:{recipe.lines.get(name)}: `{name}`"
        if name == "env" and isinstance(value, dict):
            os.environ.update({str(key): str(text) for key, text in value.items()})
        elif name == "env":
            problems.append(f"{at} is {value!r}; it takes a mapping of environment variables.")
        elif name in parser.options:
            try:
                values[name] = _as_typed(parser.options[name], value)
            except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
                problems.append(f"{at} is {value!r}: {error}")
        elif (tokens := launch_option(launcher, name, value)) is not None:
            launch_args += tokens
        else:
            problems.append(f"{at} is an unknown field.{closest(name, known)}")
    if problems:
        raise UserError(*problems)
    parser.set_defaults_with_config(**values)
    return launch_args


def _as_typed(option: argparse.Action, value: Any) -> Any:
    """Return a value from YAML as the command line reads the same text; YAML 1.1 takes `1e-6` for text."""
    if isinstance(value, dict) or (value is None and option.default is None):
        return value
    if option.nargs == "+":
        return [_as_typed_item(option, item) for item in (value if isinstance(value, list) else [value])]
    return value if isinstance(value, list) else _as_typed_item(option, value)


def _as_typed_item(option: argparse.Action, value: Any) -> Any:
    if isinstance(value, dict) or (option.type is str and isinstance(value, bool)):
        return value
    read = option.type("none" if value is None else str(value))  # type: ignore[operator, misc]
    if option.choices is not None and read not in option.choices:
        yaml = " YAML reads yes, no, on and off without quotes as true or false." if isinstance(value, bool) else ""
        raise ValueError(
            f"it takes {listed(map(str, option.choices))}.{yaml}{closest(str(read), map(str, option.choices))}"
        )
    return read
