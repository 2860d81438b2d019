"""
TRL's `_calculate_rewards`, recorded, with errors that name the reward function.

What is deliberately not here: wrappers of reward functions (see `fault_tolerance.reward_guard`, which is opt-in).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from trl.trainer import grpo_trainer

from trl_dataeff.rollouts.capture import Recording


def score(
    recording: Recording | None, calculate_rewards: Callable[..., torch.Tensor], names: Sequence[str], *args: Any
) -> torch.Tensor:
    """
    TRL's `_calculate_rewards` of `args`, recorded if there is a recording. TRL's error about a reward function that did not
    return a list of numbers gets a note with its name, what it returned, and what it must return.

    Args:
        recording ([`Recording`], *optional*): of the round that is scored.
        calculate_rewards (`Callable`): TRL's method.
        names (`list[str]`): the reward functions.
    """
    try:
        return calculate_rewards(*args) if recording is None else recording.score(calculate_rewards, *args)
    except (TypeError, ValueError, RuntimeError) as error:
        name, returned = _what_trl_was_reading(error, names)
        problem = None if name is None else problem_with(returned)
        if problem is not None:
            error.add_note(
                f"The reward function '{name}' returned {problem}; it must return a list of numbers, one per completion "
                "(None for a completion that it does not apply to)."
            )
        raise


def problem_with(rewards: Any) -> str | None:
    """What a reward function returned, in words, if it is not a list of numbers and `None`; else `None`."""
    if isinstance(rewards, (str, bytes, Mapping)) or not isinstance(rewards, Iterable):
        return shown(rewards)
    for i, reward in enumerate(rewards):
        if reward is not None and not _is_number(reward):
            return f"{shown(reward)} for completion {i}"
    return None


def shown(value: Any) -> str:
    """A value and its type, as they stand in a message."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _is_number(value: Any) -> bool:
    if isinstance(value, (str, bytes)):
        return False
    try:
        float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last for tensors of several elements
        return False
    return True


def _what_trl_was_reading(error: Exception, names: Sequence[str]) -> tuple[str | None, Any]:
    """
    The reward function whose output TRL was reading when it failed, and that output; `None` if the function itself failed.
    Both are local variables of TRL's method: its error names neither.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if frames[-1].f_code.co_filename != grpo_trainer.__file__:
        return None, None
    for frame in reversed(frames):
        local = frame.f_locals
        if frame.f_code.co_name == "_invoke_async" and "output" in local:
            return local["func_name"], local["output"]
        if frame.f_code.co_name == "_calculate_rewards" and "output_reward_func" in local:
            read = local.get("idx", local.get("i"))  # `idx` once the asynchronous functions have returned
            return (None, None) if read is None else (names[read], local["output_reward_func"])
    return None, None
