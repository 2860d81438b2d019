"""`SuccessHistory`: what is known of prompts from their own groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class SuccessHistory:
    """
    Faded successes and trials of every prompt, by K half-lives: 8 K + 4 bytes a prompt. A group counts
    `0.5 ** (passes since then / half-life)`, since the policy changes. A pass is as many groups as there are prompts:
    prompts come again after about one.

    Args:
        size (`int`): number of prompts, N.
        half_lives (`Sequence[float]`): passes after which a group counts half.

    Attributes:
        half_lives (`np.ndarray` of shape `(K, 1)`): float32.
        successes (`np.ndarray` of shape `(K, N)`): float32, as faded at each prompt's latest group.
        trials (`np.ndarray` of shape `(K, N)`): float32, likewise.
        latest (`np.ndarray` of shape `(N,)`): float32, passes at each prompt's latest group.
    """

    def __init__(self, size: int, half_lives: Sequence[float]):
        self.half_lives = np.array(half_lives, dtype=np.float32)[:, None]
        self.successes = np.zeros((len(half_lives), size), dtype=np.float32)
        self.trials = np.zeros((len(half_lives), size), dtype=np.float32)
        self.latest = np.zeros(size, dtype=np.float32)

    def observe(self, ids: np.ndarray, rates: np.ndarray, trials: np.ndarray, passes: float) -> None:
        """
        Enter groups.

        Args:
            ids (`np.ndarray` of shape `(n,)`): prompt of each group; one may occur more than once.
            rates (`np.ndarray` of shape `(n,)`): success rates; groups with NaN are ignored.
            trials (`np.ndarray` of shape `(n,)`): completions that were scored.
            passes (`float`): the time, not before that of earlier groups.
        """
        known = ~np.isnan(rates)
        ids = ids[known]
        trials = trials[known]
        successes = rates[known] * trials
        distinct = np.unique(ids)  # a prompt's earlier evidence fades once
        fade = self._fade(distinct, passes)  # (K, number of distinct prompts)
        self.successes[:, distinct] *= fade
        self.trials[:, distinct] *= fade
        self.latest[distinct] = passes
        # Rows of the transposed arrays (N, K) are prompts, and each group adds the same for all half-lives: (n, 1) to
        # (n, K). `+=` would count a prompt that occurs twice only once
        np.add.at(self.successes.T, ids, successes[:, None])
        np.add.at(self.trials.T, ids, trials[:, None])

    def faded(self, passes: float, ids: np.ndarray | slice = slice(None)) -> tuple[np.ndarray, np.ndarray]:
        """
        What prompts' own groups count at a time.

        Args:
            passes (`float`): the time.
            ids (`np.ndarray` of shape `(n,)` or `slice`, *optional*): prompts; by default all.

        Returns:
            `tuple[np.ndarray, np.ndarray]`: successes and trials, float32 `(K, n)`.
        """
        fade = self._fade(ids, passes)
        return fade * self.successes[:, ids], fade * self.trials[:, ids]

    def rescale(self, scale: float, offset: float) -> None:
        """
        Map the rates entered so far, since the range of rewards has changed.

        Args:
            scale (`float`): a rate becomes `scale * rate + offset`, in [0, 1].
            offset (`float`): see `scale`.
        """
        mapped = np.float32(scale) * self.successes + np.float32(offset) * self.trials
        self.successes = np.clip(mapped, 0, self.trials)

    def _fade(self, ids: np.ndarray | slice, passes: float) -> np.ndarray:
        """What groups of prompts count at a time: float32 `(K, n)`."""
        minus_age = self.latest[ids] - np.float32(passes)  # (n,)
        return np.exp2(minus_age / self.half_lives)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Arrays for `load_state_dict`."""
        return {
            "successes": self.successes.copy(),
            "trials": self.trials.copy(),
            "latest": self.latest.copy(),
        }

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state_dict` returned."""
        self.successes = state["successes"].copy()
        self.trials = state["trials"].copy()
        self.latest = state["latest"].copy()
