r"""
Estimates of every prompt's present success rate, by a policy that changes at an unknown speed.

Several experts estimate side by side. Each has a half-life for evidence: the predictor is fitted to groups weighted by
it, and a prompt's own groups fade by it (see [`SuccessHistory`]). One more expert ignores the embeddings and predicts the
mean of the recent groups for every prompt; its prediction may count for less. Experts are weighted by how well they predicted
the latest groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trl_dataeff.difficulty.online import RollingDifficulty


#: Half-lives of the experts, in generation batches
HALF_LIVES = (1.0, 3.0, 9.0, 27.0)
#: Generation batches after which a prediction counts half in the weights of the experts.
SCORE_HALF_LIFE = 4.0
#: Completions that a group counts for in those weights, whatever its size: its completions are not independent trials.
SCORE_TRIALS = 2.0
#: Half-life of the intercepts, and of the mean: the level of success rates changes before their order does.
LEVEL_HALF_LIFE = 2.0
#: Strength of the prior that holds an intercept where the fit put it, in groups.
LEVEL_PRIOR = 1.0
CLIP = 1e-3  # of predictions whose logarithm is taken


class SuccessHistory:
    """
    Faded successes and trials of every prompt, for K experts: 8 K + 4 bytes a prompt.

    The success rate of a prompt is taken as Beta distributed, with a prior of mean q, the prediction, and strength s, in
    completions. Its own completions are evidence that fades with a half-life, since the policy changes:

        p = (s q + sum_t f_t successes_t) / (s + sum_t f_t trials_t),    f_t = 0.5 ** (generation batches since t / half-life)

    Args:
        size (`int`): number of prompts, N.
        priors (`Sequence[float]`): s of each expert, strength of its prediction, in completions.
        half_lives (`Sequence[float]`): of each expert, generation batches after which evidence counts half.
    """

    def __init__(self, size: int, priors: Sequence[float], half_lives: Sequence[float]):
        self.priors, self.half_lives = (np.array(x, dtype=np.float32)[:, None] for x in (priors, half_lives))  # (K, 1)
        self.successes, self.trials = (np.zeros((len(half_lives), size), dtype=np.float32) for _ in range(2))
        self.batch = np.zeros(size, dtype=np.int32)

    def observe(self, ids: np.ndarray, rates: np.ndarray, trials: np.ndarray, batch: int) -> None:
        """
        Enter groups of generation batch `batch`: prompts `ids` `(n,)`, of which one may occur more than once, their success
        `rates` `(n,)` (groups with NaN are ignored), and the completions that were scored, `trials` `(n,)`.
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
        Means of the posteriors of prompts `ids`, by default of all, in generation batch `batch`: float32 `(K, n)`. `predicted`
        `(K, n)` are predictions in [0, 1], by expert.
        """
        fade = self._fade(ids, batch)
        successes, trials = self.successes[:, ids], self.trials[:, ids]
        return (self.priors * predicted + fade * successes) / (self.priors + fade * trials)

    def rescale(self, scale: float, offset: float) -> None:
        """Map the rates entered so far to `scale * rate + offset`, in [0, 1]: the range of rewards has changed."""
        self.successes = np.clip(np.float32(scale) * self.successes + np.float32(offset) * self.trials, 0, self.trials)

    def _fade(self, ids: np.ndarray | slice, batch: int) -> np.ndarray:
        return np.exp2((self.batch[ids] - batch).astype(np.float32) / self.half_lives)

    def state_dict(self) -> dict[str, np.ndarray]:
        return {"successes": self.successes.copy(), "trials": self.trials.copy(), "batch": self.batch.copy()}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        self.successes, self.trials, self.batch = (state[name].copy() for name in ("successes", "trials", "batch"))


class PromptEstimator:
    """
    Args:
        difficulty ([`RollingDifficulty`]): predicts from embeddings; keeps the recent groups.
        priors (`tuple[float, float]`): strength of a prediction from embeddings against a prompt's own groups, and that of the
            mean as a prediction, in completions.
        half_lives (`Sequence[float]`): of the experts, in generation batches.

    Attributes:
        weights (`np.ndarray` of shape `(K,)`): of the experts, float64; they sum to 1.
    """

    def __init__(self, difficulty: RollingDifficulty, priors: tuple[float, float], half_lives: Sequence[float]):
        self.difficulty, self.half_lives, (prior, of_mean) = difficulty, tuple(half_lives), priors
        strengths = [prior] * len(half_lives) + [of_mean]
        self.history = SuccessHistory(len(difficulty.embeddings), strengths, (*half_lives, half_lives[-1]))
        self._log_weights = np.zeros(len(strengths))
        self._batch = 0
        self.refresh()

    @property
    def weights(self) -> np.ndarray:
        unnormalised = np.exp(self._log_weights - self._log_weights.max())
        return unnormalised / unnormalised.sum()

    @property
    def fitted(self) -> bool:
        """Whether the estimates rest on groups, of this run or of an earlier one."""
        return self.difficulty.predictor.fitted or len(self.difficulty.ids) > 0

    def estimates(self, ids: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Success rates of prompts `ids`, by default of all: float32 `(K, n)`, a row per expert, one per half-life and the mean."""
        return self.history.estimate(self.predicted[:, ids], self._batch, ids)

    def mean(self, ids: np.ndarray | slice = slice(None)) -> np.ndarray:
        """The experts' weighted mean for prompts `ids`, float32 `(n,)`."""
        mean: np.ndarray = self.weights.astype(np.float32) @ self.estimates(ids)
        return mean.astype(np.float32)

    def observe(self, ids: np.ndarray, rates: np.ndarray, trials: np.ndarray, batch: int) -> None:
        """Enter the groups of generation batch `batch`; see [`SuccessHistory.observe`]."""
        known = ~np.isnan(rates)
        p = np.clip(self.estimates(ids[known]).astype(np.float64), CLIP, 1 - CLIP)  # (K, n)
        y = rates[known].astype(np.float64)
        scores = SCORE_TRIALS * (y * np.log(p) + (1 - y) * np.log1p(-p)).sum(axis=1)
        self._log_weights = self._log_weights * 0.5 ** (1 / SCORE_HALF_LIFE) + scores
        self._log_weights -= self._log_weights.max()
        self.history.observe(ids, rates, trials, batch)
        self.difficulty.observe(ids, rates, batch)
        self._batch = batch

    def start_from(self, ids: np.ndarray, rates: np.ndarray, trials: np.ndarray) -> None:
        """
        Enter what is known of prompts before the first generation batch, each with at most the strength of a prediction from
        embeddings, and predict from it. It fades as groups of this run do, at the pace of the experts that predict this run best.
        """
        self.history.observe(ids, rates, np.minimum(trials, self.history.priors.max()), self._batch)
        self.difficulty.observe(ids, rates, self._batch)
        self.refresh()

    def refresh(self) -> None:
        """Predict all prompts from the groups observed so far."""
        predicted = np.stack([self.difficulty.refresh(self._batch, half_life) for half_life in self.half_lives])
        ids, rates = self.difficulty.ids, self.difficulty.rates.astype(np.float64)
        weight = 0.5 ** ((self._batch - self.difficulty.batches) / LEVEL_HALF_LIFE)
        mean = (0.5 * LEVEL_PRIOR + weight @ rates) / (LEVEL_PRIOR + weight.sum())
        if len(ids):
            p = np.clip(predicted, CLIP, 1 - CLIP)
            logits = np.log(p) - np.log1p(-p)
            offsets = fit_offsets(logits[:, ids], rates, weight)
            predicted = _sigmoid(logits + offsets[:, None].astype(np.float32))
        of_mean = np.full((1, predicted.shape[1]), mean)
        self.predicted = np.concatenate([predicted, of_mean]).astype(np.float32)  # (K, N)

    def rescale(self, scale: float, offset: float) -> None:
        """Map all rates to `scale * rate + offset`, in [0, 1]: the range of rewards has changed."""
        self.history.rescale(scale, offset)
        self.difficulty.rescale(scale, offset)
        self.predicted = np.clip(scale * self.predicted + offset, 0, 1).astype(np.float32)

    def state_dict(self) -> dict[str, Any]:
        return {
            "batch": self._batch,
            "log_weights": self._log_weights.copy(),
            "predicted": self.predicted.copy(),
            "history": self.history.state_dict(),
            "difficulty": self.difficulty.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], *, predictor: bool = True) -> None:
        """Restore what `state_dict` returned; without `predictor`, predictors are fitted anew (other embeddings)."""
        self.history.load_state_dict(state["history"])
        self.difficulty.load_state_dict(state["difficulty"], predictor=predictor)
        self._batch = state["batch"]
        self._log_weights, self.predicted = state["log_weights"].copy(), state["predicted"].copy()


def fit_offsets(logits: np.ndarray, rates: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """
    The offset of each row of `logits` `(K, n)` that fits the `rates` `(n,)` of n groups best: the mode of the posterior with a
    Gaussian prior, float64 `(K,)`. Minimises `sum_j weight_j BCE(sigmoid(logits_kj + o_k), rates_j) + LEVEL_PRIOR / 8 o_k^2`
    by Newton's method.
    """
    logits, offset = logits.astype(np.float64), np.zeros(len(logits))
    ridge = LEVEL_PRIOR / 4  # the curvature of a group at a rate of one half
    for _ in range(50):
        p = _sigmoid(logits + offset[:, None])
        gradient = (p - rates) @ weight + ridge * offset
        step = gradient / ((p * (1 - p)) @ weight + ridge)
        offset -= np.clip(step, -1.0, 1.0)
        if np.abs(step).max() < 1e-8:
            break
    return offset


def _sigmoid(z: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-z))
