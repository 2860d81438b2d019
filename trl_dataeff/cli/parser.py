"""Reads a recipe, a YAML file of training fields, and the command line, which overrides it, with the parsers of TRL and accelerate."""

from __future__ import annotations

import argparse
import json
import os
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from accelerate.utils import patch_environment
from trl import DatasetMixtureConfig, ModelConfig, TrlParser
from trl.scripts.grpo import GRPOScriptArguments

from trl_dataeff.cli.main import find_recipe
from trl_dataeff.config import DataEfficientGRPOConfig
from trl_dataeff.utils import UserError, closest


@dataclass
class DataEfficientGRPOScriptArguments(GRPOScriptArguments):
    """Script arguments of `trl-dataeff grpo`: every argument of TRL's GRPO script, and those below."""

    prompt_column: str | None = field(
        default=None, metadata={"help": "Column that becomes `prompt`, e.g. `question` of GSM8K."}
    )
    prompt_as_chat: bool = field(
        default=False,
        metadata={
            "help": "Turn a text prompt into the user's message of a conversation, so that the model's chat template is "
            "applied; use it for instruct models."
        },
    )
    system_prompt: str | None = field(
        default=None, metadata={"help": "System message before every prompt; implies `prompt_as_chat`."}
    )
    answer_column: str | None = field(
        default=None, metadata={"help": "Column that is passed to reward functions as `answer` and as `solution`."}
    )


TYPES: list[Any] = [DataEfficientGRPOScriptArguments, DataEfficientGRPOConfig, ModelConfig, DatasetMixtureConfig]
USAGE = "trl-dataeff grpo --config RECIPE [--field VALUE ...] [accelerate launch options]"
DESCRIPTION = """\
Train a language model with GRPO (TRL's GRPOTrainer), and generate fewer rollouts that carry no gradient.

A recipe is a YAML file of the fields below; a field on the command line overrides the recipe. RECIPE is a file, or a
name from `trl-dataeff recipes list`. `--num_processes 4`, `--accelerate_config zero2` and every other option of
`accelerate launch` are passed on. `dataset_name` also takes a local .parquet, .jsonl, .json or .csv file, or a folder
from `save_to_disk`. `reward_funcs` also takes `exact_answer_reward`, `numeric_answer_reward` and `math_verify_reward`.

examples:
  # a recipe that comes with the package, for 20 steps
  trl-dataeff grpo --config Qwen2.5-0.5B-Instruct/gsm8k/dots --max_steps 20

  # your own data, without a recipe: a file with the columns `prompt` and `answer`
  trl-dataeff grpo --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name train.jsonl \\
      --prompt_as_chat --reward_funcs numeric_answer_reward --use_peft --lora_dropout 0 --output_dir out
"""
#: Fields of which a value can be rejected because of the machine, and values that are valid on every machine
MACHINE: dict[str, Any] = {"use_cpu": True, "tf32": None, "deepspeed": None, "ddp_backend": None}
_SCRIPT = "<script>"  # stands for the script that `accelerate launch` expects behind its options


class GRPOArguments(NamedTuple):
    """What a recipe and the command line say, in the order in which `train` takes it."""

    script: DataEfficientGRPOScriptArguments
    training: DataEfficientGRPOConfig
    model: ModelConfig
    dataset: DatasetMixtureConfig


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


def grpo_parser() -> TrlParser:
    """Return the parser of all fields and of `--config`. Like `launch_parser`'s, it raises an `argparse.ArgumentError`."""
    texts = {"usage": USAGE, "description": DESCRIPTION, "formatter_class": _Help}
    parser = TrlParser(TYPES, prog="trl-dataeff grpo", allow_abbrev=False, exit_on_error=False, **texts)
    parser._negative_number_matcher = re.compile(r"-\.?\d")  # also -1e-05, in lists; Python's before 3.14 is narrower
    parser.add_argument("--config", metavar="RECIPE", help="a file, or a name from `trl-dataeff recipes list`.")
    return parser


def launch_parser() -> argparse.ArgumentParser:
    """Return the parser of `accelerate launch`, with TRL's option for a configuration that TRL ships (`fsdp2`, `zero3`, ...)."""
    from accelerate.commands.launch import launch_command_parser

    parser: argparse.ArgumentParser = launch_command_parser()
    parser.exit_on_error = False
    parser.add_argument("--accelerate_config", dest="config_file", type=_config_file)
    return parser


def _config_file(name: str) -> str:
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    try:
        return str(resolve_accelerate_config_argument(["--accelerate_config", name])[1])
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


@dataclass
class Recipe:
    """Value and line of every key of a recipe."""

    path: Path | None = None
    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)

    def at(self, name: str) -> str:
        """File and line of a key, as the beginning of a message; empty if the recipe does not give it."""
        return f"{self.path}:{self.lines[name]}: " if name in self.lines else ""

    def located(self, message: str, overridden: set[str]) -> str:
        """The message, with file and line of the first field in it that the recipe gives and the command line does not."""
        names = [name for name in re.findall(r"\w+", message) if name in self.lines.keys() - overridden]
        return self.at(names[0]) + message if names else message


def read_recipe(path: Path) -> Recipe:
    """Read a recipe; a file that cannot be read, is not a YAML mapping or gives a key twice is a [`UserError`]."""
    try:
        with open(path, encoding="utf-8") as file:
            loader = yaml.SafeLoader(file)
            node = loader.get_single_node()
            if not isinstance(node, yaml.MappingNode):
                raise UserError(f"{path}: not a recipe: it must have one `key: value` a line.")
            recipe = Recipe(path, {str(key): value for key, value in loader.construct_document(node).items()})
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{path} cannot be read as YAML in UTF-8: {reason}. A recipe has one `key: value` a line."
        ) from error
    for key, _ in node.value:
        line = key.start_mark.line + 1
        first = recipe.lines.setdefault(key.value, line)
        if first != line:
            raise UserError(f"{path}:{line}: `{key.value}` is given twice, here and on line {first}.")
    return recipe


def read(argv: list[str], portable: bool = False) -> tuple[GRPOArguments, list[str]]:
    """Return the arguments and the options of `accelerate launch`. If `portable`, a recipe for a GPU can be read on a laptop."""
    parser, recipe = grpo_parser(), Recipe()
    overridden = {token[2:].partition("=")[0].replace("-", "_") for token in argv}
    try:
        config = parser.parse_known_args(argv)[0].config
        launcher = launch_parser()
        if config is not None:
            recipe = read_recipe(find_recipe(config))
        options = _as_options(recipe, parser, launcher)
        namespace, launch_options = parser.parse_known_args([*options, *argv])
        launch, unknown = launcher.parse_known_args([*launch_options, _SCRIPT])
    except argparse.ArgumentError as error:
        option = str(error.argument_name).partition("/")[0]
        raise UserError(recipe.located(f"`{option}`: {error.message.rstrip('.')}.", overridden)) from error
    if unknown:
        options = [*parser._option_string_actions, *launcher._option_string_actions]
        known = ["env", *(text[2:] for text in options if "-" not in text[2:])]
        names = [token.lstrip("-").partition("=")[0] for token in unknown]
        raise UserError(*(f"{recipe.at(name)}`{name}` is an unknown field.{closest(name, known)}" for name in names))
    if (token := launch.training_script) != _SCRIPT:  # the first value that no option has taken
        raise UserError(f"{token!r} stands alone: every value follows its option, as in `--config recipe.yaml`.")
    try:
        return _arguments(parser, vars(namespace), portable), launch_options
    except (ValueError, TypeError, ImportError, OSError) as error:
        reason = f"{error.doc!r} is not JSON: {error}." if isinstance(error, json.JSONDecodeError) else str(error)
        raise UserError(recipe.located(reason, overridden)) from error


def _arguments(parser: TrlParser, values: dict[str, Any], portable: bool) -> GRPOArguments:
    if not portable:
        return GRPOArguments(*parser.parse_dict(values, allow_extra_keys=True))
    # Training reads everything once more, with its warnings. Where the environment names a rank, accelerate would make the
    # process group already here, for CPUs
    with warnings.catch_warnings(action="ignore"), patch_environment(LOCAL_RANK=-1, PMI_SIZE=1):
        arguments = _arguments(parser, values | MACHINE, portable=False)
    vars(arguments.training).update({name: values[name] for name in MACHINE})
    return arguments


def _as_options(recipe: Recipe, parser: TrlParser, launcher: argparse.ArgumentParser) -> list[str]:
    """
    Return a recipe as options of the command line, so that both are read alike; values that it cannot write, such as mappings,
    become defaults of the parser. Sets the recipe's environment variables.
    """
    options: list[str] = []
    for name, value in recipe.values.items():
        launch_option = launcher._option_string_actions.get(f"--{name}")
        if name == "env":
            if not isinstance(value, dict):
                raise UserError(f"{recipe.at(name)}`env` is {value!r}; it takes a mapping of environment variables.")
            os.environ.update({str(key): str(text) for key, text in value.items()})
        elif f"--{name}" in parser._option_string_actions:
            options += _as_option(parser, name, value)
        elif launch_option is not None and launch_option.nargs == 0:
            options += [f"--{name}"] if value is True else [f"--{name}={value}"] if value else []
        else:
            options.append(f"--{name}={value}")
    return options


def _as_option(parser: TrlParser, name: str, value: Any) -> list[str]:
    option = parser._option_string_actions[f"--{name}"]
    takes_both = option.nargs is None and option.type is str  # a text or a list, such as `report_to`
    if isinstance(value, list) and value and not isinstance(value[0], dict) and not takes_both:
        if option.nargs is None:
            raise argparse.ArgumentError(option, f"takes a single value, not {value!r}")
        return [f"--{name}", *map(str, value)]
    is_default = value is None and option.default is None
    if is_default or isinstance(value, (dict, list)) or (isinstance(value, bool) and option.type is str):
        parser.set_defaults_with_config(**{option.dest: value})
        return []
    if value is False and option.choices is not None:  # as YAML reads `no` and `off`
        value = next((word for word in ("no", "off") if word in option.choices), value)
    return [f"--{name}={'none' if value is None else value}"]
