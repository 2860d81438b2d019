"""What is wrong with the values of a run on any machine, before data and model are loaded."""

from __future__ import annotations

import json
import os
import re
import reprlib
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trl_dataeff.cli.data import REWARDS, load_reward
from trl_dataeff.cli.options import how_to_list, lists_of_names
from trl_dataeff.config import DataEfficientGRPOConfig
from trl_dataeff.selection import resolve_selector
from trl_dataeff.utils import listed


_SEPARATED = re.compile(r"[\w./-]+(?:[\s;,]+[\w./-]+)+")  # `a;b`, `a, b` or `a b`, but no regular expression


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
    for name in lists_of_names():
        value = values[name]
        items = value if isinstance(value, list) else [value]
        for item in items:
            if isinstance(item, str) and _SEPARATED.fullmatch(item):
                yield f"`{name}` has {item!r} as one value. {how_to_list(name, item)}"
                break


def problems_of_json(values: Mapping[str, Any]) -> Iterator[str]:
    """
    Find text that is not JSON, in fields that take a mapping. Transformers names neither the field nor the text.

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
            try:
                json.loads(value)
            except (json.JSONDecodeError, RecursionError) as error:
                yield f"`{name}` is {reprlib.repr(value)}, which is not JSON: {error}."
        elif name == "model_init_kwargs":  # which `train` merges with other fields
            yield f"`{name}` is {reprlib.repr(value)}; it takes a JSON object, such as '{{\"name\": 1}}'."


def message_of(function: Callable[..., Any], *args: Any) -> Iterator[str]:
    """Yield the message of the error that a function raises, if it raises one."""
    try:
        function(*args)
    except (ValueError, ImportError) as error:
        yield str(error)
