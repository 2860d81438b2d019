"""The contract of selectors. Everything but `propose` has a default that does nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from trl_dataeff.rollouts.group import RolloutGroup


class Selector(ABC):
    """
    Answers which prompts to roll out next.

    A selector decides the same on every process: it may use its own state, the pool's history, and `rng`, all of
    which are equal everywhere, and nothing else.

    Attributes:
        exact (`bool`): whether that holds to the last bit on any machine, since nothing is computed that rounds. If it
            does not, the main process's proposals are taken everywhere.
    """

    exact: bool = False

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

    def predict(self, prompt_ids: np.ndarray) -> np.ndarray:
        """Success rates expected of prompts that are about to be rolled out, float32 `(n,)`; NaN where unknown."""
        return np.full(len(prompt_ids), np.nan, dtype=np.float32)

    def propose_references(self, rng: torch.Generator) -> np.ndarray:
        """Ids of prompts that this window is to roll out for the sake of predictions, before anything is proposed."""
        return np.empty(0, dtype=np.int64)

    def observe_references(self, groups: Sequence[RolloutGroup]) -> None:  # noqa: B027
        """Learn from their groups at once; `observe` gets them too."""

    def observe(self, groups: Sequence[RolloutGroup], step: int) -> None:  # noqa: B027
        """Learn from the groups that a window rolled out at optimizer step `step`, those that are dropped included."""

    def state_dict(self) -> dict[str, np.ndarray]:
        """All that decides later proposals, as arrays (`rng` and the pool are kept by the trainer)."""
        return {}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:  # noqa: B027
        """The inverse of `state_dict`."""

    def metrics(self) -> dict[str, float]:
        """Numbers to log, by their names in `trl_dataeff.tracking.metrics`."""
        return {}


def check_request(n: int, size: int) -> None:
    """Raise a `ValueError` if `n` distinct prompts cannot be had from a pool of `size`."""
    if not 0 < n <= size:
        raise ValueError(f"{n} prompts were asked for; a pool of {size} gives from 1 to {size} without repetition.")
