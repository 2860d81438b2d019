"""`RewardChecks`: rewards that are most likely a mistake, said before they cost a run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers.utils import logging


logger = logging.get_logger(__name__)


class RewardChecks:
    """
    Args:
        names (`list[str]`): the reward functions.
        speaks (`bool`): whether this process warns; the main one speaks for all.
    """

    def __init__(self, names: Sequence[str], *, speaks: bool):
        self.names = list(names)
        self.speaks = speaks
        self._warned: set[str] = set()

    def check(self, rewards: np.ndarray, *, first_window: bool) -> None:
        """
        Look at the rewards of a round.

        Args:
            rewards (`np.ndarray` of shape `(n, G, F)`): NaN where a function gave no score.
            first_window (`bool`): whether the run has only begun.

        Raises:
            `ValueError`: in the first window, if no completion got a score.
        """
        infinite = np.isinf(rewards).any(axis=(0, 1))
        if infinite.any():
            self._warn_once(
                f"{self._listed(infinite)} returned an infinite reward. TRL gives no gradient to a group that holds one, "
                "so it counts as a group of zero variance."
            )
        silent = np.isnan(rewards).all(axis=(0, 1))
        if not silent.any() or not first_window:
            return
        names = self._listed(silent)
        count = rewards.shape[0] * rewards.shape[1]
        if silent.all():
            raise ValueError(
                f"No reward function gave a score for any of the first {count} completions: {names} returned only "
                "None or NaN. Check that the columns it reads are in the dataset and hold what it expects; a function "
                "may return None for completions it does not apply to, but each needs a score from one of them."
            )
        self._warn_once(
            f"{names} returned only None or NaN for the first {count} completions and has no part in training so far. "
            "Check that the columns it reads are in the dataset."
        )

    def _listed(self, chosen: np.ndarray) -> str:
        return ", ".join(f"`{name}`" for name, c in zip(self.names, chosen, strict=True) if c)

    def _warn_once(self, message: str) -> None:
        if message not in self._warned and self.speaks:
            logger.warning(message)
        self._warned.add(message)
