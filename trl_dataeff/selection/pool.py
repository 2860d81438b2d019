"""`PromptPool`: the prompts of a run, known by their row index, and their streaks of zero-variance groups."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from trl_dataeff.rollouts.group import EFFECTIVE, RolloutGroup


_DTYPES = {"streak": np.float32, "streak_kind": np.int8, "batch": np.int32}


class PromptPool:
    """
    Streaks of zero-variance groups, per prompt: 9 bytes a prompt.

    A streak counts the latest groups of a prompt that are of one zero-variance kind. With a half-life, each of them counts
    `0.5 ** (age / half_life)`, its age being the generation batches observed since.

    Args:
        size (`int`): number of prompts, N.
        half_life (`float`, *optional*, defaults to `inf`): generation batches after which a group counts half; by default
            streaks do not fade, and are integers.

    Attributes:
        streak: float32 `(N,)`, as of the prompt's latest group; 0 after an effective one. [`faded`] has the present value.
        streak_kind: int8 `(N,)`, code of the kind (see `trl_dataeff.rollouts.group.KINDS`).
        batch: int32 `(N,)`, generation batch of the prompt's latest group.
        now (`int`): generation batches observed.
    """

    streak: np.ndarray
    streak_kind: np.ndarray
    batch: np.ndarray

    def __init__(self, size: int, half_life: float = math.inf):
        self.size, self.half_life = size, half_life
        self.now = 0
        self.streak = np.zeros(size, dtype=_DTYPES["streak"])
        self.streak_kind = np.full(size, EFFECTIVE, dtype=_DTYPES["streak_kind"])
        self.batch = np.zeros(size, dtype=_DTYPES["batch"])

    def __len__(self) -> int:
        return self.size

    def faded(self, ids: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Streaks of prompts `ids`, by default all, as they count now: float64 `(n,)`, at least 0."""
        return self.streak[ids] * np.exp2((self.batch[ids] - self.now) / self.half_life)

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        """Enter the groups of a generation batch, in the order of their generation. A prompt may occur more than once."""
        self.now += 1
        ids = np.array([group.prompt_id for group in groups], dtype=np.int64)
        kinds = np.array([group.kind for group in groups], dtype=np.int8)
        # A vector update sees a prompt once, so that the first group of every prompt is entered, then the second, ...
        while ids.size:
            _, first = np.unique(ids, return_index=True)
            self._observe_distinct(ids[first], kinds[first])
            rest = np.setdiff1d(np.arange(ids.size), first)
            ids, kinds = ids[rest], kinds[rest]

    def _observe_distinct(self, ids: np.ndarray, kinds: np.ndarray) -> None:
        streak = np.where(self.streak_kind[ids] == kinds, self.faded(ids) + 1, 1)
        self.streak[ids] = np.where(kinds == EFFECTIVE, 0, streak)
        self.streak_kind[ids] = kinds
        self.batch[ids] = self.now

    def state_dict(self) -> dict[str, np.ndarray]:
        return {"now": np.array([self.now]), **{name: getattr(self, name).copy() for name in _DTYPES}}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state_dict` returned. Raises a `ValueError` if it is of another number of prompts."""
        for name, dtype in _DTYPES.items():
            if state[name].shape != (self.size,):
                raise ValueError(f"Streaks of {state[name].shape[0]} prompts do not fit a pool of {self.size}.")
            setattr(self, name, state[name].astype(dtype))
        self.now = int(state["now"][0])
