"""The contract of selectors. Everything but `propose` has a default that does nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from trl_dataeff.group import RolloutGroup


class Selector(ABC):
    """
    Answers which prompts to roll out next.

    A selector decides the same on every process: it may use its own state, the pool's history, and `rng`, all of
    which are equal everywhere, and nothing else.
    """

    @abstractmethod
    def propose(self, n: int, rng: torch.Generator) -> np.ndarray:
        """
        Propose prompts.

        Args:
            n (`int`): how many, at most as many as the pool holds.
            rng (`torch.Generator`): the only source of randomness.

        Returns:
            `np.ndarray` of shape `(n,)` and dtype int64: prompt ids without repetition.
        """

    def observe(self, groups: Sequence[RolloutGroup], step: int) -> None:  # noqa: B027
        """Learn from the groups that a window rolled out at optimizer step `step`, those that are dropped included."""

    def state_dict(self) -> dict[str, np.ndarray]:
        """All that decides later proposals, as arrays (`rng` and the pool are kept by the trainer)."""
        return {}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:  # noqa: B027
        """The inverse of `state_dict`."""

    def metrics(self) -> dict[str, float]:
        """Numbers to log, by their names in `trl_dataeff.metrics`."""
        return {}


def check_request(n: int, size: int) -> None:
    """Raise a `ValueError` if `n` distinct prompts cannot be had from a pool of `size`."""
    if not 0 < n <= size:
        raise ValueError(f"{n} prompts were asked for; a pool of {size} gives from 1 to {size} without repetition.")
