"""
Reads a recipe, a YAML file of training fields, and the command line, which overrides it, with the parsers of TRL and
accelerate. What is added to them: file and line of what is wrong in a recipe, and all that is wrong in it at once.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import warnings
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

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
            "help": "Turn a text prompt into the user's message of a conversation, so that the model's chat template "
            "is applied; use it for instruct models."
        },
    )
    system_prompt: str | None = field(
        default=None, metadata={"help": "System message before every prompt; implies `prompt_as_chat`."}
    )
    answer_column: str | None = field(
        default=None, metadata={"help": "Column that is passed to reward functions as `answer` and as `solution`."}
    )


TYPES: list[Any] = [
    DataEfficientGRPOScriptArguments,
    DataEfficientGRPOConfig,
    ModelConfig,
    DatasetMixtureConfig,
]
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
MACHINE: dict[str, Any] = {
    "use_cpu": True,
    "tf32": None,
    "deepspeed": None,
    "ddp_backend": None,
}
_SCRIPT = "<script>"  # stands for the script that `accelerate launch` expects behind its options
_OPTION = re.compile(r"--([\w-]+)(=.*)?", re.DOTALL)  # `--name` or `--name=value`


class GRPOArguments(NamedTuple):
    """What a recipe and the command line say, in the order in which `train` takes it."""

    script: DataEfficientGRPOScriptArguments
    training: DataEfficientGRPOConfig
    model: ModelConfig
    dataset: DatasetMixtureConfig


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


def grpo_parser() -> TrlParser:
    """Return the parser of all fields and of `--config`. It raises an `ArgumentError` for a wrong value."""
    parser = TrlParser(
        TYPES,
        prog="trl-dataeff grpo",
        usage=USAGE,
        description=DESCRIPTION,
        formatter_class=_Help,
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


@dataclass
class Recipe:
    """Value and line of every key of a recipe."""

    path: Path | None = None
    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)

    def at(self, name: str) -> str:
        """File and line of a key, as the beginning of a message; empty if the recipe does not give it."""
        if name not in self.lines:
            return ""
        return f"{self.path}:{self.lines[name]}: "

    def located(self, message: str, overridden: set[str]) -> str:
        """The message, with file and line of the first field in it that the recipe gives, unless it is overridden."""
        for word in re.findall(r"\w+", message):
            if word in self.lines and word not in overridden:
                return self.at(word) + message
        return message


def read_recipe(path: Path) -> Recipe:
    """
    Read a recipe.

    Args:
        path (`Path`):
            A YAML file.

    Returns:
        [`Recipe`]: What the file says. Its keys and values are not checked.

    Raises:
        UserError: If the file cannot be read, is not a YAML mapping, or gives a key twice.
    """
    recipe = Recipe(path)
    try:
        with open(path, encoding="utf-8") as file:
            loader = yaml.SafeLoader(file)
            node = loader.get_single_node()
            if not isinstance(node, yaml.MappingNode):
                raise UserError(f"{path}: not a recipe: it must have one `key: value` a line.")
            for key_node, value_node in node.value:
                name = str(key_node.value)
                line = key_node.start_mark.line + 1
                if name in recipe.lines:
                    raise UserError(f"{path}:{line}: `{name}` is given twice, here and on line {recipe.lines[name]}.")
                recipe.lines[name] = line
                recipe.values[name] = loader.construct_object(value_node, deep=True)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{path} cannot be read as YAML in UTF-8: {reason}. A recipe has one `key: value` a line."
        ) from error
    return recipe


def read(argv: list[str], portable: bool = False) -> tuple[GRPOArguments, list[str]]:
    """
    Read a command line and the recipe that it names.

    Args:
        argv (`list[str]`):
            What follows `trl-dataeff grpo`.
        portable (`bool`, *optional*, defaults to `False`):
            Whether a recipe for another machine can be read: one for a GPU on a laptop.

    Returns:
        `tuple[GRPOArguments, list[str]]`: The arguments, and the options of `accelerate launch`.

    Raises:
        UserError: If something is unknown or wrong, with one message for each problem.
    """
    parser = grpo_parser()
    launcher = launch_parser()
    recipe = Recipe()
    given = _options_of(argv)
    overridden = {name.replace("-", "_") for name in given}
    try:
        config = parser.parse_known_args(argv)[0].config
        unknown = [name for name in given if not _has_option(parser, name) and not _has_option(launcher, name)]
        if unknown:
            raise _unknown_fields(unknown, recipe, launcher)  # before a list takes them for values
        launch_options: list[str] = []
        if config is not None:
            recipe = read_recipe(find_recipe(config))
            launch_options = apply_recipe(recipe, parser, launcher)
        namespace, not_fields = parser.parse_known_args(argv)
        launch_options += not_fields
        launch, not_options = launcher.parse_known_args([*launch_options, _SCRIPT])
    except argparse.ArgumentError as error:
        option, _, _ = str(error.argument_name).partition("/")
        raise UserError(_wrong_value(option, error)) from error
    values_without_option = [*not_options, launch.training_script]
    first = values_without_option[0]
    if first != _SCRIPT:
        raise UserError(f"{first!r} stands alone: every value follows its option, as in `--config recipe.yaml`.")
    try:
        return _arguments(parser, vars(namespace), portable), launch_options
    except json.JSONDecodeError as error:
        reason = f"{error.doc!r} is not JSON: {error}."
        raise UserError(recipe.located(reason, overridden)) from error
    except (ValueError, TypeError, ImportError, OSError) as error:
        raise UserError(recipe.located(str(error), overridden)) from error


def _options_of(argv: list[str]) -> list[str]:
    """
    Return the names of the options on a command line, as they are written.

    An unknown `--optoin=two words` is one of them. argparse takes it for a value of the option before it, because of
    the space.
    """
    matches = [_OPTION.fullmatch(token) for token in argv]
    return [match[1] for match in matches if match is not None]


def _has_option(parser: argparse.ArgumentParser, name: str) -> bool:
    """Return whether a parser knows an option, by trying it with an empty value."""
    token = f"--{name}="
    try:
        _, unknown = parser.parse_known_args([token, _SCRIPT])
    except argparse.ArgumentError:  # the option does not take this value
        return True
    return token not in unknown


def _unknown_fields(names: list[str], recipe: Recipe, launcher: argparse.ArgumentParser) -> UserError:
    """Return the error for unknown fields, with the names that come closest to them."""
    launch_options = vars(launcher.parse_args([_SCRIPT]))
    known = [*_field_types(), *launch_options, "accelerate_config", "env"]
    messages = [f"{recipe.at(name)}`{name}` is an unknown field.{closest(name, known)}" for name in names]
    return UserError(*messages)


def _wrong_value(option: str, error: argparse.ArgumentError) -> str:
    """Return the message for a value that an option does not take."""
    return f"`{option}`: {error.message.rstrip('.')}."


def _arguments(parser: TrlParser, values: dict[str, Any], portable: bool) -> GRPOArguments:
    if not portable:
        return GRPOArguments(*parser.parse_dict(values, allow_extra_keys=True))
    # Training reads everything once more, with its warnings. Where the environment names a rank, accelerate would make
    # the process group already here, for CPUs
    with warnings.catch_warnings(action="ignore"), patch_environment(LOCAL_RANK=-1, PMI_SIZE=1):
        arguments = _arguments(parser, values | MACHINE, portable=False)
    for name in MACHINE:
        setattr(arguments.training, name, values[name])
    return arguments


def apply_recipe(recipe: Recipe, parser: TrlParser, launcher: argparse.ArgumentParser) -> list[str]:
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
        `list[str]`: The options of `accelerate launch` that the recipe gives.

    Raises:
        UserError: If keys are unknown, with one message for each; otherwise if values are wrong, with one for each.
    """
    types = _field_types()
    unknown = [name for name in recipe.values if name not in types and not _is_launch_key(launcher, name)]
    if unknown:
        raise _unknown_fields(unknown, recipe, launcher)
    defaults: dict[str, Any] = {}
    launch_options: list[str] = []
    problems: list[str] = []
    for name, value in recipe.values.items():
        try:
            if name in types:
                defaults[name] = _field_value(parser, name, types[name], value)
            elif name == "env":
                _set_environment(value)
            else:
                launch_options += _launch_option(launcher, name, value)
        except argparse.ArgumentError as error:
            problems.append(recipe.at(name) + _wrong_value(f"--{name}", error))
        except UserError as error:
            problems.append(recipe.at(name) + str(error))
    if problems:
        raise UserError(*problems)
    parser.set_defaults_with_config(**defaults)
    return launch_options


def _is_launch_key(launcher: argparse.ArgumentParser, name: str) -> bool:
    """Return whether a key of a recipe is `env` or an option of `accelerate launch`."""
    if name == "env":
        return True
    return name.isidentifier() and name != "help" and _has_option(launcher, name)


def _field_types() -> dict[str, set[Any]]:
    """Return the types that each field takes, without their parameters: `{list, str}` for `list[str] | str`."""
    types = {}
    for arguments_type in TYPES:
        hints = get_type_hints(arguments_type)
        for argument in fields(arguments_type):
            hint = hints[argument.name]
            is_union = get_origin(hint) in (Union, UnionType)
            alternatives = get_args(hint) if is_union else (hint,)
            types[argument.name] = {get_origin(alternative) or alternative for alternative in alternatives}
    return types


def _field_value(parser: TrlParser, name: str, types: set[Any], value: Any) -> Any:
    """
    Return the value of a field in a recipe, converted and checked as on the command line.

    Args:
        parser (`TrlParser`):
            Parser of the fields.
        name (`str`):
            Name of the field.
        types (`set`):
            Types that the field takes.
        value (`Any`):
            The value as YAML reads it.

    Returns:
        `Any`: The value for the configuration.

    Raises:
        ArgumentError: If the field does not take the value.
    """
    if isinstance(value, (dict, list)):
        return _structured_value(parser, name, types, value)
    if isinstance(value, bool):
        return _boolean_value(parser, name, value)
    if value is None:
        if parser.get_default(name) is None:
            return None
        return _parse(parser, name, "none")
    return _parse(parser, name, value)


def _structured_value(parser: TrlParser, name: str, types: set[Any], value: dict[str, Any] | list[Any]) -> Any:
    if type(value) not in types:
        wanted = "a single value"
        if dict in types:
            wanted = "a mapping"
        elif list in types:
            wanted = "a list"
        raise argparse.ArgumentError(None, f"takes {wanted}, not {value!r}")
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
        os.environ[str(name)] = str(value)


def _launch_option(launcher: argparse.ArgumentParser, name: str, value: Any) -> list[str]:
    """Return an option of `accelerate launch` as it is written on a command line: none for a flag that is false."""
    if _is_flag(launcher, name):
        if value is True:
            return [f"--{name}"]
        if not value:
            return []
    option = f"--{name}={value}"
    launcher.parse_known_args([option, _SCRIPT])  # raises an `ArgumentError` if the value is wrong
    return [option]


def _is_flag(launcher: argparse.ArgumentParser, name: str) -> bool:
    """Return whether an option of `accelerate launch` takes no value."""
    try:
        launcher.parse_known_args([f"--{name}", "--", _SCRIPT])  # no value comes after `--`
    except argparse.ArgumentError:
        return False
    return True
