r"""
A prompt's own results, joined with its prediction.

The success rate of a prompt is taken as Beta distributed, with a prior of mean q, the prediction, and strength s, in
completions. Its own completions are evidence that fades with a half-life, since the policy changes:

    p = (s q + sum_t f_t successes_t) / (s + sum_t f_t trials_t),    f_t = 0.5 ** (generation batches since t / half-life)

How fast the policy changes is not known beforehand, so evidence is kept for several half-lives at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class SuccessHistory:
    """
    Faded successes and trials of every prompt, for K half-lives: 8 K + 4 bytes a prompt.

    Args:
        size (`int`): number of prompts, N.
        prior (`float`): s, strength of the prediction, in completions.
        half_lives (`Sequence[float]`): generation batches after which evidence counts half.
    """

    def __init__(self, size: int, prior: float, half_lives: Sequence[float]):
        self.size, self.prior = size, prior
        self.half_lives = np.array(half_lives, dtype=np.float32)[:, None]  # (K, 1)
        self.successes, self.trials = (np.zeros((len(half_lives), size), dtype=np.float32) for _ in range(2))
        self.batch = np.zeros(size, dtype=np.int32)

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
        self.successes[:, distinct] *= fade
        self.trials[:, distinct] *= fade
        self.batch[distinct] = batch
        np.add.at(self.successes.T, ids, (rates * trials)[:, None])
        np.add.at(self.trials.T, ids, trials[:, None])

    def estimate(self, predicted: np.ndarray, batch: int, ids: np.ndarray | slice = slice(None)) -> np.ndarray:
        """
        Means of the posteriors of prompts `ids`, by default of all.

        Args:
            predicted (`np.ndarray` of shape `(K, n)`): predictions in [0, 1], by half-life.
            batch (`int`): number of the present generation batch.
            ids (`np.ndarray` of shape `(n,)`, *optional*): prompts.

        Returns:
            `np.ndarray` of shape `(K, n)`: float32.
        """
        fade = self._fade(ids, batch)
        successes, trials = self.successes[:, ids], self.trials[:, ids]
        return (self.prior * predicted + fade * successes) / (self.prior + fade * trials)

    def size_of(self, batch: int, ids: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Completions, prior included, that the posteriors of prompts `ids` rest on, `(K, n)`."""
        size: np.ndarray = self.prior + self._fade(ids, batch) * self.trials[:, ids]
        return size

    def rescale(self, scale: float, offset: float) -> None:
        """Map the rates entered so far to `scale * rate + offset`: the reward's range has widened."""
        self.successes *= np.float32(scale)
        self.successes += np.float32(offset) * self.trials

    def _fade(self, ids: np.ndarray | slice, batch: int) -> np.ndarray:
        fade: np.ndarray = np.exp2((self.batch[ids] - batch).astype(np.float32) / self.half_lives)
        return fade

    def state_dict(self) -> dict[str, np.ndarray]:
        return {"successes": self.successes.copy(), "trials": self.trials.copy(), "batch": self.batch.copy()}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        if state["successes"].shape != self.successes.shape:
            raise ValueError(
                f"Evidence for {state['successes'].shape[-1]} prompts and {len(state['successes'])} half-lives does not fit "
                f"a pool of {self.size} prompts and {len(self.half_lives)} half-lives."
            )
        self.successes, self.trials = (state[name].astype(np.float32) for name in ("successes", "trials"))
        self.batch = state["batch"].astype(np.int32)
