"""Reward functions by name or dotted path, found and checked before a model is loaded."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trl_dataeff.rewards as our_rewards
from trl_dataeff.utils import UserError, closest, listed


RewardFunction = Callable[..., Any]

_OF_SOLUTION = ("accuracy_reward", "reasoning_accuracy_reward")  # TRL's, which compare with the column `solution`
#: Reward functions that can be given by name; TRL's, whose import takes a while, by the path that they are imported from.
REWARDS: dict[str, RewardFunction | str] = {
    **{name: getattr(our_rewards, name) for name in our_rewards.__all__},
    **{name: f"trl.rewards.{name}" for name in (*_OF_SOLUTION, "think_format_reward", "get_soft_overlong_punishment")},
}
#: Columns of which each needs one.
COLUMNS = {
    **dict.fromkeys(our_rewards.__all__, ("answer", "solution")),
    **dict.fromkeys(_OF_SOLUTION, ("solution",)),
}
NEED_MATH_VERIFY = ("math_verify_reward", *_OF_SOLUTION)
_NEED_CHAT = (*_OF_SOLUTION, "think_format_reward")


def load_rewards(names: list[str] | None, reward_model: str | None = None) -> list[str | RewardFunction]:
    """Return the rewards of a run, the model first; a name or path that leads to none is a [`UserError`]."""
    return [*([reward_model] if reward_model else []), *(load_reward(name) for name in names or [])]


def load_reward(name: str) -> RewardFunction:
    """Return one reward function by its name or dotted path."""
    reward = REWARDS.get(name, name)
    function = _imported(reward) if isinstance(reward, str) else reward
    if name == "get_soft_overlong_punishment":
        function = function(max_completion_len=1280, soft_punish_cache=256)
    return function


def check_name(name: str) -> None:
    """Raise a [`UserError`] if there is no reward function of this name or dotted path. Whether it can run is not checked."""
    if name not in REWARDS:
        _imported(name)


def check_rewards(names: list[str] | None, row: dict[str, Any], given: str) -> None:
    """Raise a [`UserError`] if a reward function reads what this row of a dataset, `given` in words, does not have."""
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
                + (", or use `math_verify_reward`." if name in NEED_MATH_VERIFY else ".")
            )


def _imported(path: str) -> RewardFunction:
    module_name, _, function_name = path.rpartition(".")
    if not module_name:
        raise UserError(
            f"The reward function {path!r} is unknown.{closest(path, REWARDS)} Known are {listed(REWARDS)}; any other "
            "is given by its dotted path, as in `my_rewards.brevity`."
        )
    wrong = f"The reward function {path!r} cannot be imported"
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {error} ({place.filename}, line {place.lineno})."
        if isinstance(error, ModuleNotFoundError) and error.name in (module_name, module_name.partition(".")[0]):
            reason = (
                f"there is no module {error.name!r}, neither installed nor in {Path.cwd()}. Start the command in the "
                f"folder that has {error.name}.py, or set PYTHONPATH."
            )
        raise UserError(f"{wrong}: {reason}") from error
    function: Callable[..., Any] | None = getattr(module, function_name, None)
    if function is None:
        hint = closest(function_name, [name for name in dir(module) if not name.startswith("_")])
        raise UserError(f"{wrong}: the module {module_name!r} has no {function_name!r}.{hint}")
    if not callable(function):
        raise UserError(f"The reward function {path!r} is {type(function).__name__}, which cannot be called.")
    return function
