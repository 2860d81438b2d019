"""Checks of rewards while training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers.utils import logging

from trl_dataeff.utils import listed


logger = logging.get_logger(__name__)
FEWEST_BATCHES = 20  # generation batches before a run without any effective group is warned of
ADVICE = (
    "Check that the columns it reads are in the dataset and hold what it expects. A function may return None for "
    "completions that it does not apply to."
)


class RewardChecks:
    """
    Finds rewards that are most likely a mistake.

    Args:
        names (`list[str]`): the reward functions.
        most_unscored (`int`, *optional*): completions without any score, from the start of training, after which it is an
            error; `None`: never.
        is_main_process (`bool`, *optional*, defaults to `True`): whether this process warns.
    """

    def __init__(self, names: Sequence[str], *, most_unscored: int | None = None, is_main_process: bool = True):
        self.names = list(names)
        self.most_unscored = most_unscored
        self.is_main_process = is_main_process
        self.scores = np.zeros(len(self.names), dtype=bool)  # functions that gave a score so far
        self.completions = 0  # checked so far
        self.batches = 0  # generation batches so far
        self.effective = False  # whether any group so far was effective
        self._warned: set[str] = set()

    def check(self, rewards: np.ndarray) -> None:
        """
        Check the rewards of a round.

        Args:
            rewards (`np.ndarray` of shape `(n, G, F)`): NaN where a function gave no score.

        Raises:
            `ValueError`: `most_unscored` completions have no score, and none before them has one.
        """
        infinite = np.isinf(rewards).any(axis=(0, 1))
        if infinite.any():
            self._warn_once(
                "infinite",
                f"{self._listed(infinite)} returned an infinite reward. TRL gives no gradient to a group that holds one, "
                "so it counts as a zero-variance group; with `scale_rewards='batch'` it gives none to the whole batch, and with "
                "'none' it ruins the model: the group's other completions get an advantage of -3.4e38. Return finite numbers, or "
                "None for a completion without a score.",
            )
        self.completions += rewards.shape[0] * rewards.shape[1]
        self.scores |= ~np.isnan(rewards).all(axis=(0, 1))
        if self.scores.all():
            return
        names = self._listed(~self.scores)
        if not self.scores.any() and self.most_unscored is not None and self.completions >= self.most_unscored:
            raise ValueError(
                f"No reward function gave a score for any of the first {self.completions} completions: {names} returned only "
                f"None or NaN. {ADVICE} Each completion needs a score from one function to be trained on."
            )
        self._warn_once(
            names, f"{names} returned only None or NaN for the first {self.completions} completions. {ADVICE}"
        )

    def check_gradient(self, effective: bool, progress: float) -> None:
        """
        Enter a generation batch. Warns once if a tenth of the run has passed, and no group has carried a gradient.

        Args:
            effective (`bool`): whether a group of the batch was effective.
            progress (`float`): share of the run that has passed.
        """
        self.batches += 1
        self.effective |= effective
        if not self.effective and self.batches >= FEWEST_BATCHES and progress >= 0.1:
            self._warn_once(
                "gradient",
                f"No group of the first {self.batches} generation batches has carried a gradient: the completions of every "
                "prompt got equal rewards, so the model learned nothing from them. Look at completions (`log_completions=True`): the "
                "reward function may reject right answers, or the prompts may be too hard or too easy for this model.",
            )

    def state_dict(self) -> list[Any]:
        """What was seen, for JSON."""
        return [self.scores.tolist(), self.completions, self.batches, self.effective]

    def load_state_dict(self, state: list[Any]) -> None:
        """Restore what [`state_dict`] returned; scores only if the functions are as many as then."""
        scores, self.completions, self.batches, self.effective = state
        if len(scores) == len(self.names):
            self.scores = np.array(scores, dtype=bool)

    def _listed(self, chosen: np.ndarray) -> str:
        return listed(name for name, c in zip(self.names, chosen, strict=True) if c)

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self._warned and self.is_main_process:
            logger.warning(message)
        self._warned.add(key)
