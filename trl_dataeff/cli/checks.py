"""What is wrong with the values of a run on any machine, before data and model are loaded."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trl_dataeff.cli.data import REWARDS, load_reward
from trl_dataeff.config import DataEfficientGRPOConfig
from trl_dataeff.utils import listed
from trl_dataeff.validation import resolve_selector


#: Lists of names, none of which contains a separator
_LISTS_OF_NAMES = (
    "reward_funcs",
    "lora_target_modules",
    "lora_target_parameters",
    "lora_modules_to_save",
    "label_names",
    "include_for_metrics",
)
#: The same where the command line takes a single name
_LISTS_IN_RECIPES = ("report_to", "optim_target_modules")
_SEPARATED = re.compile(r"[\w./-]+(?:[\s;,]+[\w./-]+)+")  # `a;b`, `a, b` or `a b`, but no regular expression
#: Fields that take JSON text, or the path of a JSON file
_JSON_OR_FILE = ("accelerator_config", "fsdp_config", "deepspeed")


def problems_of_values(values: Mapping[str, Any]) -> Iterator[str]:
    """
    Find what would be wrong on any machine, given a model and data that can be reached.

    The current folder joins the folders from which Python imports, for rewards and a selector by dotted path.

    Args:
        values (`Mapping[str, Any]`):
            All fields and their values.

    Yields:
        `str`: One message per problem.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    names = values["reward_funcs"] or []
    num_rewards = len(names)
    if values["reward_model_name_or_path"]:
        num_rewards += 1
    if num_rewards == 0:
        yield (
            f"No reward: set `reward_funcs` to one or more of {listed(REWARDS)}, or to the dotted path of a function."
        )
    for name in names:
        for message in message_of(load_reward, name):
            yield f"`reward_funcs`: {message}"
    weights = values["reward_weights"]
    if num_rewards > 0 and weights is not None and len(weights) != num_rewards:
        yield (
            f"`reward_weights` has {len(weights)} numbers for {num_rewards} rewards (a reward model comes first, then "
            "`reward_funcs`). Give one for each."
        )
    if not values["dataset_name"] and not values["datasets"]:
        yield "No dataset: set `dataset_name` to a Hub id, a folder or a file, or give a mixture under `datasets`."
    if not values["model_name_or_path"]:
        yield "No model: set `model_name_or_path` to a Hub id or a local folder."
    if not isinstance(values["selector_args"], str):  # JSON text of a command line that has other problems
        yield from message_of(resolve_selector, Namespace(**values))


def problems_of_lists(values: Mapping[str, Any]) -> Iterator[str]:
    """
    Find lists of names that were written as one text, such as `q_proj;v_proj`.

    Args:
        values (`Mapping[str, Any]`):
            All fields and their values.

    Yields:
        `str`: One message per field.
    """
    for name in (*_LISTS_OF_NAMES, *_LISTS_IN_RECIPES):
        value = values[name]
        items = value if isinstance(value, list) else [value]
        for item in items:
            if isinstance(item, str) and _SEPARATED.fullmatch(item):
                yield f"`{name}` has {item!r} as one value. {how_to_list(name, item)}"
                break


def how_to_list(name: str, text: str) -> str:
    """
    Say how several values of a field are given.

    Args:
        name (`str`):
            Name of the field.
        text (`str`):
            Values that are separated by semicolons, commas or spaces.

    Returns:
        `str`: A sentence, or an empty string if the text is a single value.
    """
    items = re.split(r"[\s;,]+", text)
    if len(items) < 2:
        return ""
    in_recipe = f"in a recipe as a list (`{name}: [{', '.join(items)}]`)"
    if name in _LISTS_IN_RECIPES:
        return f"Give several values {in_recipe}."
    return f"Give several values with spaces between them (`--{name} {' '.join(items)}`), or {in_recipe}."


def problems_of_json(values: Mapping[str, Any]) -> Iterator[str]:
    """
    Find text that is not JSON, in fields that take a mapping.

    Args:
        values (`Mapping[str, Any]`):
            All fields and their values.

    Yields:
        `str`: One message per field.
    """
    for name in DataEfficientGRPOConfig._VALID_DICT_FIELDS:
        value = values[name]
        if not isinstance(value, str):
            continue
        if value.startswith("{"):
            yield from _json_problem(f"`{name}` is {_shortened(value)}", value)
        elif name not in _JSON_OR_FILE:
            yield f"`{name}` is {_shortened(value)}; it takes a JSON object, such as '{{\"name\": 1}}'."
        elif os.path.isfile(value):
            text = Path(value).read_text(encoding="utf-8", errors="replace")
            yield from _json_problem(f"`{name}` is the file {value!r}", text)


def _json_problem(given: str, text: str) -> Iterator[str]:
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        hint = " JSON has double quotes around names and text." if "'" in text else ""
        yield f"{given}, which is not JSON: {error}.{hint}"
    except RecursionError:
        yield f"{given}, which is nested too deeply."


def _shortened(text: str, at_most: int = 60) -> str:
    return repr(text) if len(text) <= at_most else f"{text[:at_most]!r}..."


def problems_of_batches(values: Mapping[str, Any], num_processes: int) -> Iterator[str]:
    """
    Find batches that do not hold whole groups, which TRL's configuration refuses.

    Args:
        values (`Mapping[str, Any]`):
            All fields and their values.
        num_processes (`int`):
            Processes that will train.

    Yields:
        `str`: One message per problem, with the fields that make up the batch, and values that would do.
    """
    processes = "1 process" if num_processes == 1 else f"{num_processes} processes (`num_processes`)"
    yield from _problems_of_generation_batch(values, num_processes, processes)
    if values["eval_strategy"] == "no":
        return
    eval_rows = values["per_device_eval_batch_size"]
    size = eval_rows * num_processes
    group_name = "num_generations_eval" if values["num_generations_eval"] else "num_generations"
    group = values[group_name]
    if size % group != 0:
        step = group // math.gcd(group, num_processes)
        yield (
            f"An evaluation batch has {size} completions: `per_device_eval_batch_size` ({eval_rows}) x {processes}. "
            f"These are not whole groups of `{group_name}` ({group}). Set `per_device_eval_batch_size` to a multiple "
            f"of {step}, or `num_generations_eval` to a divisor of {size}."
        )


def _problems_of_generation_batch(values: Mapping[str, Any], num_processes: int, processes: str) -> Iterator[str]:
    group = values["num_generations"]
    rows = values["per_device_train_batch_size"]
    size = values["generation_batch_size"]
    steps = values["steps_per_generation"]
    if size is not None:
        rows_of_all = rows * num_processes
        step = math.lcm(rows_of_all, group)
        if steps is None and size % step != 0:  # TRL takes only one of the two, and says so
            yield (
                f"`generation_batch_size` is {size}; it takes a multiple of {step}: of {rows_of_all}, which is "
                f"`per_device_train_batch_size` ({rows}) x {processes}, and of `num_generations` ({group})."
            )
        return
    steps_name = "steps_per_generation"
    if steps is None:
        steps_name = "gradient_accumulation_steps"
        steps = values[steps_name]
    size = rows * steps * num_processes
    if size % group != 0:
        step_of_rows = group // math.gcd(group, steps * num_processes)
        step_of_steps = group // math.gcd(group, rows * num_processes)
        yield (
            f"A generation batch has {size} completions: `per_device_train_batch_size` ({rows}) x `{steps_name}` "
            f"({steps}) x {processes}. These are not whole groups of `num_generations` ({group}). Set "
            f"`per_device_train_batch_size` to a multiple of {step_of_rows}, or `{steps_name}` to a multiple of "
            f"{step_of_steps}, or choose another `num_generations`."
        )


def message_of(function: Callable[..., Any], *args: Any) -> Iterator[str]:
    """Yield the message of the error that a function raises, if it raises one."""
    try:
        function(*args)
    except (ValueError, ImportError) as error:
        yield str(error)
