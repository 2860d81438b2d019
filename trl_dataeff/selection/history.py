r"""
A prompt's own results, joined with its prediction.

The success rate of a prompt is taken as Beta distributed, with a prior of mean q, the prediction, and strength s, in
completions. Its own completions are evidence that fades with a half-life, since the policy changes:

    p = (s q + sum_t f_t successes_t) / (s + sum_t f_t trials_t),    f_t = 0.5 ** (generation batches since t / half-life)
"""

from __future__ import annotations

import numpy as np


_ARRAYS = {"successes": np.float32, "trials": np.float32, "batch": np.int32}


class SuccessHistory:
    """
    Faded successes and trials of every prompt: 12 bytes a prompt.

    Args:
        size (`int`): number of prompts, N.
        prior (`float`): s, strength of the prediction, in completions.
        half_life (`float`): generation batches after which evidence counts half.
    """

    def __init__(self, size: int, prior: float, half_life: float):
        self.size, self.prior, self.half_life = size, prior, half_life
        self.successes, self.trials, self.batch = (np.zeros(size, dtype) for dtype in _ARRAYS.values())

    def observe(self, ids: np.ndarray, rates: np.ndarray, trials: np.ndarray, batch: int) -> None:
        """
        Enter groups.

        Args:
            ids (`np.ndarray` of shape `(n,)`): prompts; one may occur more than once.
            rates (`np.ndarray` of shape `(n,)`): success rates; groups with NaN are ignored.
            trials (`np.ndarray` of shape `(n,)`): completions that were scored.
            batch (`int`): number of the generation batch.
        """
        known = ~np.isnan(rates)
        ids, rates, trials = ids[known], rates[known], trials[known]
        distinct = np.unique(ids)
        fade = self._fade(distinct, batch)
        self.successes[distinct] *= fade
        self.trials[distinct] *= fade
        self.batch[distinct] = batch
        np.add.at(self.successes, ids, rates * trials)
        np.add.at(self.trials, ids, trials)

    def estimate(self, predicted: np.ndarray, batch: int, ids: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Mean of the posterior of prompts `ids`, by default all, float32 `(n,)`, from predictions `(n,)` in [0, 1]."""
        fade = self._fade(ids, batch)
        return (self.prior * predicted + fade * self.successes[ids]) / (self.prior + fade * self.trials[ids])

    def _fade(self, ids: np.ndarray | slice, batch: int) -> np.ndarray:
        return np.exp2((self.batch[ids] - batch).astype(np.float32) / np.float32(self.half_life))

    def state_dict(self) -> dict[str, np.ndarray]:
        return {name: getattr(self, name).copy() for name in _ARRAYS}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        for name, dtype in _ARRAYS.items():
            if state[name].shape != (self.size,):
                raise ValueError(f"Evidence for {state[name].shape[0]} prompts does not fit a pool of {self.size}.")
            setattr(self, name, state[name].astype(dtype))
