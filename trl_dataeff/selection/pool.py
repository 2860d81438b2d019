"""`PromptPool`: the prompts of a run, known by their row index, and their streaks of zero-variance groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trl_dataeff.rollouts.group import EFFECTIVE, RolloutGroup


_DTYPES = {"streak": np.int32, "streak_kind": np.int8}


class PromptPool:
    """
    Streaks of zero-variance groups, per prompt: 5 bytes a prompt.

    Args:
        size (`int`): number of prompts, N.

    Attributes:
        streak: int32 `(N,)`, latest zero-variance groups in a row that are of one kind; 0 after an effective one.
        streak_kind: int8 `(N,)`, code of that kind (see `trl_dataeff.rollouts.group.KINDS`).
    """

    streak: np.ndarray
    streak_kind: np.ndarray

    def __init__(self, size: int):
        self.size = size
        self.streak = np.zeros(size, dtype=_DTYPES["streak"])
        self.streak_kind = np.full(size, EFFECTIVE, dtype=_DTYPES["streak_kind"])

    def __len__(self) -> int:
        return self.size

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        """Enter groups in the order in which they were generated. A prompt may occur more than once."""
        ids = np.array([group.prompt_id for group in groups], dtype=np.int64)
        kinds = np.array([group.kind for group in groups], dtype=np.int8)
        # A vector update sees a prompt once, so that the first group of every prompt is entered, then the second, ...
        while ids.size:
            _, first = np.unique(ids, return_index=True)
            self._observe_distinct(ids[first], kinds[first])
            rest = np.setdiff1d(np.arange(ids.size), first)
            ids, kinds = ids[rest], kinds[rest]

    def _observe_distinct(self, ids: np.ndarray, kinds: np.ndarray) -> None:
        continues = (self.streak[ids] > 0) & (self.streak_kind[ids] == kinds)
        streak = np.where(continues, self.streak[ids] + 1, 1)
        self.streak[ids] = np.where(kinds == EFFECTIVE, 0, streak)
        self.streak_kind[ids] = kinds

    def state_dict(self) -> dict[str, np.ndarray]:
        return {name: getattr(self, name).copy() for name in _DTYPES}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state_dict` returned. Raises a `ValueError` if it is of another number of prompts."""
        for name, dtype in _DTYPES.items():
            if state[name].shape != (self.size,):
                raise ValueError(f"Streaks of {state[name].shape[0]} prompts do not fit a pool of {self.size}.")
            setattr(self, name, state[name].astype(dtype))
