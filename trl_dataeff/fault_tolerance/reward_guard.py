"""Reward functions that hang or return non-numeric rewards (`reward_timeout`): the run continues without those rewards."""

from __future__ import annotations

import asyncio
import functools
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from transformers.utils import logging
from trl.trainer.utils import is_async_callable

from trl_dataeff.rollouts.scoring import shown


if TYPE_CHECKING:
    from trl import GRPOTrainer


logger = logging.get_logger(__name__)
# Not SIGALRM, which reward functions use themselves (math-verify does)
_SIGNAL = getattr(signal, "SIGVTALRM", None)


class _OutOfTime(BaseException):
    """Raised in the reward function; no `Exception`, so that its own error handling lets it pass."""


class RewardGuard:
    """
    Wraps reward functions. A non-numeric reward (a string, a list, an object) and every reward of a call that takes longer
    than `timeout` becomes `None`: no score. Numbers and `None` are passed on as they are.

    Args:
        timeout (`float` or `None`): seconds that one call of a function may take; `None` for no limit.

    Attributes:
        faults (`int`): rewards that were non-numeric, infinite, or late, since [`take_faults`] was last called.
    """

    def __init__(self, timeout: float | None = None):
        self.timeout = timeout
        self.faults = 0
        self._warned: set[tuple[str, str]] = set()

    @classmethod
    def install(cls, trainer: GRPOTrainer, timeout: float) -> RewardGuard:
        """Guard the reward functions of a trainer."""
        guard = cls(timeout)
        trainer.reward_funcs = list(map(guard.wrap, trainer.reward_funcs, trainer.reward_func_names))
        return guard

    def take_faults(self) -> int:
        """Return `faults`, and count from 0 again."""
        faults, self.faults = self.faults, 0
        return faults

    def wrap(self, function: Any, name: str) -> Any:
        """The guarded function; a model is returned as it is."""
        if isinstance(function, nn.Module):
            return function
        if is_async_callable(function):
            return self._wrap_async(function, name)

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> list[float | None]:
            try:
                with _time_limit(self.timeout):
                    rewards = function(*args, **kwargs)
            except _OutOfTime:
                return self._late(name, _rows(kwargs))
            return self._numbers(rewards, name)

        return guarded

    def _wrap_async(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        async def guarded(*args: Any, **kwargs: Any) -> list[float | None]:
            try:
                async with asyncio.timeout(self.timeout) as limit:
                    rewards = await function(*args, **kwargs)
            except TimeoutError:
                if not limit.expired():
                    raise  # its own
                return self._late(name, _rows(kwargs))
            return self._numbers(rewards, name)

        return guarded

    def _late(self, name: str, n: int) -> list[float | None]:
        self.faults += n
        self._warn_once(
            name,
            "late",
            f"did not return within `reward_timeout` ({self.timeout} s): its {n} completions have no score",
        )
        return [None] * n

    def _numbers(self, rewards: Any, name: str) -> list[float | None]:
        if isinstance(rewards, (torch.Tensor, np.ndarray)):
            rewards = rewards.tolist()
        if isinstance(rewards, (str, bytes, Mapping)) or not isinstance(rewards, Iterable):
            raise TypeError(
                f"The reward function '{name}' returned {shown(rewards)}; it must return a list of numbers, one per "
                "completion (None for a completion that it does not apply to)."
            )
        return [None if reward is None else self._number(reward, name) for reward in rewards]

    def _number(self, reward: Any, name: str) -> float | None:
        number = None
        if not isinstance(reward, (str, bytes)):
            try:
                number = float(reward)
            except (TypeError, ValueError, OverflowError, RuntimeError):  # the last for tensors of several elements
                number = None
        if number is None:
            self.faults += 1
            self._warn_once(name, "type", f"returned {shown(reward)}, which is not a number, as a reward: no score")
        elif math.isinf(number):
            self.faults += 1  # `RewardChecks` warns of them
        return number

    def _warn_once(self, name: str, kind: str, what: str) -> None:
        if (name, kind) not in self._warned:
            logger.warning(
                f"The reward function '{name}' {what}. This warning is shown once; `dataeff/reward_faults` counts all."
            )
        self._warned.add((name, kind))


@contextmanager
def _time_limit(seconds: float | None) -> Iterator[None]:
    """Raises `_OutOfTime` in the body, be it in Python code or waiting for the network, after `seconds`."""
    if seconds is None:
        yield
        return
    if threading.current_thread() is not threading.main_thread() or _SIGNAL is None:
        raise RuntimeError(
            "`reward_timeout` interrupts reward functions by a signal, which needs training in the main thread of a "
            "POSIX system. Train there, leave it unset, or limit the time in the functions themselves."
        )
    deadline, running = time.monotonic() + seconds, True

    def interrupt(number: int, frame: FrameType | None) -> None:
        if running and time.monotonic() >= deadline:
            raise _OutOfTime

    former = signal.signal(_SIGNAL, interrupt)
    # Two clocks: a thread, which a regular expression that keeps the interpreter would keep waiting, and the system's
    # clock of CPU time, which stands still while the function waits for the network
    timer = threading.Timer(seconds, signal.pthread_kill, (threading.main_thread().ident, _SIGNAL))
    timer.daemon = True
    timer.start()
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, max(seconds / 10, 0.1))
    try:
        yield
    finally:
        running = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        timer.cancel()
        timer.join()  # one that has just run out sends its signal while `interrupt` is there to take it
        signal.signal(_SIGNAL, former)


def _rows(kwargs: Mapping[str, Any]) -> int:
    """Completions of a call, by the arguments that TRL gives: one entry each."""
    return next(len(kwargs[name]) for name in ("completions", "prompts", "environments") if name in kwargs)
