"""`PromptPool`: the prompts of a run, known by their row index, and what each has given so far.

History is a struct of arrays, so that looking at ten million prompts is a few vector operations.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

import numpy as np
from datasets import Dataset

from trl_dataeff.rollouts.group import EFFECTIVE, RolloutGroup


_ARRAYS = {
    "visits": (np.int32, 0),
    "streak": (np.int32, 0),
    "streak_kind": (np.int8, EFFECTIVE),
    "last_success_rate": (np.float32, np.nan),
    "last_step": (np.int32, -1),
}
_FINGERPRINT_ROWS = 1024


class PromptPool:
    """
    Prompt ids and per-prompt history. A *visit* is a group that was rolled out for the prompt.

    Args:
        size (`int`): number of prompts, N.
        fingerprint (`str`, *optional*): identifies the dataset in a checkpoint.

    Attributes:
        visits: int32 `(N,)`, groups rolled out so far.
        streak: int32 `(N,)`, trailing zero-variance visits of one kind; 0 after an effective one.
        streak_kind: int8 `(N,)`, the kind of that streak (see `trl_dataeff.rollouts.group.KINDS`).
        last_success_rate: float32 `(N,)`, NaN before the first visit.
        last_step: int32 `(N,)`, optimizer step of the last visit, -1 before the first.
    """

    visits: np.ndarray
    streak: np.ndarray
    streak_kind: np.ndarray
    last_success_rate: np.ndarray
    last_step: np.ndarray

    def __init__(self, size: int, fingerprint: str = ""):
        self.size = size
        self.fingerprint = fingerprint
        for name, (dtype, empty) in _ARRAYS.items():
            setattr(self, name, np.full(size, empty, dtype=dtype))

    @classmethod
    def from_dataset(cls, dataset: Dataset) -> PromptPool:
        return cls(len(dataset), dataset_fingerprint(dataset))

    def __len__(self) -> int:
        return self.size

    def observe(self, groups: Iterable[RolloutGroup]) -> None:
        """Enter groups in the order in which they were rolled out. A prompt may occur more than once."""
        groups = list(groups)
        if not groups:
            return
        ids = np.array([group.prompt_id for group in groups], dtype=np.int64)
        kinds = np.array([group.kind for group in groups], dtype=np.int8)
        rates = np.array([group.success_rate for group in groups], dtype=np.float32)
        steps = np.array([group.step for group in groups], dtype=np.int32)
        # Vector updates see a prompt once: occurrences are entered in turn, first all first ones, then the second ones
        while ids.size:
            _, first = np.unique(ids, return_index=True)
            self._observe_distinct(ids[first], kinds[first], rates[first], steps[first])
            rest = np.setdiff1d(np.arange(ids.size), first)
            ids, kinds, rates, steps = ids[rest], kinds[rest], rates[rest], steps[rest]

    def _observe_distinct(self, ids: np.ndarray, kinds: np.ndarray, rates: np.ndarray, steps: np.ndarray) -> None:
        self.visits[ids] += 1
        goes_on = (self.streak[ids] > 0) & (self.streak_kind[ids] == kinds)
        streak = np.where(goes_on, self.streak[ids] + 1, 1)
        self.streak[ids] = np.where(kinds == EFFECTIVE, 0, streak)
        self.streak_kind[ids] = kinds
        self.last_success_rate[ids] = rates
        self.last_step[ids] = steps

    def state_dict(self) -> dict[str, np.ndarray]:
        return {name: getattr(self, name).copy() for name in _ARRAYS}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        for name, (dtype, _) in _ARRAYS.items():
            if state[name].shape != (self.size,):
                raise ValueError(f"History of {state[name].shape[0]} prompts does not fit a pool of {self.size}.")
            setattr(self, name, state[name].astype(dtype))


def dataset_fingerprint(dataset: Dataset) -> str:
    """
    A short hash of the dataset's length and of the prompts of up to 1024 rows spread over it (of whole rows, where a
    transform makes the prompts): the same on every machine, at a cost that does not grow with the dataset.
    """
    n = len(dataset)
    rows = np.unique(np.linspace(0, n - 1, min(n, _FINGERPRINT_ROWS)).astype(np.int64)) if n else np.array([], int)
    stored = dataset.with_format("arrow")  # what is stored: no transform runs, no image is decoded
    if "prompt" in dataset.column_names:
        stored = stored.select_columns(["prompt"])
    digest = hashlib.sha256(str(n).encode())
    for row in stored[rows.tolist()].to_pylist() if n else []:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]
