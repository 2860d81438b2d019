"""Reward functions by name or dotted path, found and checked before a model is loaded."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trl.rewards as trl_rewards

import trl_dataeff.rewards as our_rewards
from trl_dataeff.cli.errors import UserError, closest, listed
from trl_dataeff.rewards.math import require_math_verify


RewardFunction = Callable[..., Any]

#: Reward functions that can be given by name.
REWARDS: dict[str, RewardFunction] = {
    "exact_answer_reward": our_rewards.exact_answer_reward,
    "numeric_answer_reward": our_rewards.numeric_answer_reward,
    "math_verify_reward": our_rewards.math_verify_reward,
    "accuracy_reward": trl_rewards.accuracy_reward,
    "reasoning_accuracy_reward": trl_rewards.reasoning_accuracy_reward,
    "think_format_reward": trl_rewards.think_format_reward,
    "get_soft_overlong_punishment": trl_rewards.get_soft_overlong_punishment(
        max_completion_len=1280, soft_punish_cache=256
    ),
}
#: Columns of which each needs one.
COLUMNS = {
    "exact_answer_reward": ("answer", "solution"),
    "numeric_answer_reward": ("answer", "solution"),
    "math_verify_reward": ("answer", "solution"),
    "accuracy_reward": ("solution",),
    "reasoning_accuracy_reward": ("solution",),
}
_NEED_MATH_VERIFY = ("math_verify_reward", "accuracy_reward", "reasoning_accuracy_reward")
_NEED_CHAT = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")


def load_rewards(names: list[str] | None, reward_model: str | None = None) -> list[str | RewardFunction]:
    """
    Return the reward functions of a run; a name or path that leads to none is a [`UserError`].

    Args:
        names (`list[str]`, *optional*):
            Names of `REWARDS`, or dotted paths.
        reward_model (`str`, *optional*):
            Reward model, which comes first.
    """
    rewards: list[str | RewardFunction] = [reward_model] if reward_model else []
    rewards += [load_reward(name) for name in names or []]
    if not rewards:
        raise UserError(
            f"No reward: set `reward_funcs` to one or more of {listed(REWARDS)}, or to the dotted path of a function."
        )
    return rewards


def load_reward(name: str) -> RewardFunction:
    """Return one reward function by its name or dotted path; one whose packages are missing is a [`UserError`]."""
    require_packages(name)
    return find_reward(name)


def require_packages(name: str) -> None:
    """Raise a [`UserError`] if the reward function of this name needs a package that is not installed."""
    if name in _NEED_MATH_VERIFY:
        try:
            require_math_verify(name)
        except ImportError as error:
            raise UserError(str(error)) from error


def find_reward(name: str) -> RewardFunction:
    """Return one reward function by its name or dotted path, whether it can run here or not."""
    if name in REWARDS:
        return REWARDS[name]
    if "." not in name:
        raise UserError(
            f"The reward function {name!r} is unknown.{closest(name, REWARDS)} Known are {listed(REWARDS)}; any other "
            "is given by its dotted path, as in `my_rewards.brevity`."
        )
    return _import_reward(name)


def check_rewards(names: list[str] | None, row: dict[str, Any], given: str) -> None:
    """
    Check that the dataset has what the reward functions given by name read.

    Args:
        names (`list[str]`, *optional*):
            Reward functions.
        row (`dict`):
            First row of the dataset.
        given (`str`):
            The dataset in words, for the message.
    """
    for name in names or []:
        columns = COLUMNS.get(name, ())
        if columns and not any(column in row for column in columns):
            raise UserError(
                f"`{name}` reads the column {' or '.join(f'`{c}`' for c in columns)}, but {given} has {listed(row)}. "
                "Name the column with the gold answers as `answer_column`."
            )
        if name in _NEED_CHAT and isinstance(row["prompt"], str):
            raise UserError(
                f"`{name}` reads conversations, but {given} has prompts of plain text. Set `prompt_as_chat`"
                + (", or use `math_verify_reward`." if name in _NEED_MATH_VERIFY else ".")
            )


def _import_reward(path: str) -> RewardFunction:
    module_name, _, function_name = path.rpartition(".")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise UserError(_not_imported(path, module_name, error)) from error
    function: RewardFunction | None = getattr(module, function_name, None)
    if function is None:
        names = [name for name in dir(module) if not name.startswith("_")]
        raise UserError(
            f"The reward function {path!r} cannot be imported: the module {module_name!r} has no "
            f"{function_name!r}.{closest(function_name, names)}"
        )
    if not callable(function):
        raise UserError(f"The reward function {path!r} is {type(function).__name__}, which cannot be called.")
    return function


def _not_imported(path: str, module_name: str, error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name in (module_name, module_name.partition(".")[0]):
        return (
            f"The reward function {path!r} cannot be imported: there is no module {error.name!r}, neither installed "
            f"nor in {Path.cwd()}. Start the command in the folder that has {error.name}.py, or set PYTHONPATH."
        )
    where = ""
    frame = error.__traceback__
    while frame is not None:
        if "importlib" not in frame.tb_frame.f_code.co_filename:
            where = f" ({frame.tb_frame.f_code.co_filename}, line {frame.tb_lineno})"
        frame = frame.tb_next
    return f"The reward function {path!r} cannot be imported: {type(error).__name__}: {error}{where}."
