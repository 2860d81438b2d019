r"""
Estimates of every prompt's present success rate, by a policy that changes at an unknown speed.

Several experts estimate side by side. Each has a half-life for evidence: the predictor is fitted to groups weighted by
it, and a prompt's own groups fade by it (see [`SuccessHistory`]). One more expert ignores the embeddings and predicts
the mean of the recent groups for every prompt; its prediction may count for less. Experts are weighted by how well
they predicted the latest groups.
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

NEWTON_STEPS = 50
NEWTON_TOLERANCE = 1e-8


class SuccessHistory:
    """
    Faded successes and trials of every prompt, for K experts: 8 K + 4 bytes a prompt.

    The success rate of a prompt is taken as Beta distributed, with a prior of mean q, the prediction, and strength s,
    in completions. Its own completions are evidence that fades with a half-life, since the policy changes:

        p = (s q + sum_t f_t successes_t) / (s + sum_t f_t trials_t)
        f_t = 0.5 ** (generation batches since t / half-life)

    Args:
        size (`int`): number of prompts, N.
        priors (`Sequence[float]`): s of each expert, strength of its prediction, in completions.
        half_lives (`Sequence[float]`): of each expert, generation batches after which evidence counts half.

    Attributes:
        priors (`np.ndarray` of shape `(K, 1)`): float32.
        half_lives (`np.ndarray` of shape `(K, 1)`): float32.
        successes (`np.ndarray` of shape `(K, N)`): float32, as faded at each prompt's latest group.
        trials (`np.ndarray` of shape `(K, N)`): float32, likewise.
        latest_batch (`np.ndarray` of shape `(N,)`): int32, generation batch of each prompt's latest group.
    """

    def __init__(self, size: int, priors: Sequence[float], half_lives: Sequence[float]):
        self.priors = np.array(priors, dtype=np.float32)[:, None]
        self.half_lives = np.array(half_lives, dtype=np.float32)[:, None]
        self.successes = np.zeros((len(half_lives), size), dtype=np.float32)
        self.trials = np.zeros((len(half_lives), size), dtype=np.float32)
        self.latest_batch = np.zeros(size, dtype=np.int32)

    def observe(self, ids: np.ndarray, rates: np.ndarray, trials: np.ndarray, batch: int) -> None:
        """
        Enter the groups of a generation batch.

        Args:
            ids (`np.ndarray` of shape `(n,)`): prompt of each group; one may occur more than once.
            rates (`np.ndarray` of shape `(n,)`): success rates; groups with NaN are ignored.
            trials (`np.ndarray` of shape `(n,)`): completions that were scored.
            batch (`int`): number of the generation batch, not below that of earlier groups.
        """
        known = ~np.isnan(rates)
        ids = ids[known]
        trials = trials[known]
        successes = rates[known] * trials
        distinct = np.unique(ids)  # a prompt's earlier evidence fades once
        fade = self._fade(distinct, batch)  # (K, number of distinct prompts)
        self.successes[:, distinct] *= fade
        self.trials[:, distinct] *= fade
        self.latest_batch[distinct] = batch
        # Rows of the transposed arrays (N, K) are prompts, and each group adds the same for all experts: (n, 1) to
        # (n, K). `+=` would count a prompt that occurs twice only once
        np.add.at(self.successes.T, ids, successes[:, None])
        np.add.at(self.trials.T, ids, trials[:, None])

    def estimate(self, predicted: np.ndarray, batch: int, ids: np.ndarray | slice = slice(None)) -> np.ndarray:
        """
        Means of the posteriors of prompts in a generation batch.

        Args:
            predicted (`np.ndarray` of shape `(K, n)`): predictions in [0, 1], by expert.
            batch (`int`): number of the generation batch.
            ids (`np.ndarray` of shape `(n,)` or `slice`, *optional*): prompts; by default all.

        Returns:
            `np.ndarray` of shape `(K, n)`: float32.
        """
        # (K, n) each; the priors (K, 1) are the same for all prompts
        fade = self._fade(ids, batch)
        successes = self.priors * predicted + fade * self.successes[:, ids]
        trials = self.priors + fade * self.trials[:, ids]
        return successes / trials

    def rescale(self, scale: float, offset: float) -> None:
        """
        Map the rates entered so far, since the range of rewards has changed.

        Args:
            scale (`float`): a rate becomes `scale * rate + offset`, in [0, 1].
            offset (`float`): see `scale`.
        """
        mapped = np.float32(scale) * self.successes + np.float32(offset) * self.trials
        self.successes = np.clip(mapped, 0, self.trials)

    def _fade(self, ids: np.ndarray | slice, batch: int) -> np.ndarray:
        """What evidence of prompts counts in a later generation batch: float32 `(K, n)`."""
        minus_age = (self.latest_batch[ids] - batch).astype(np.float32)  # (n,)
        return np.exp2(minus_age / self.half_lives)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Arrays for `load_state_dict`."""
        return {
            "successes": self.successes.copy(),
            "trials": self.trials.copy(),
            "batch": self.latest_batch.copy(),
        }

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state_dict` returned."""
        self.successes = state["successes"].copy()
        self.trials = state["trials"].copy()
        self.latest_batch = state["batch"].copy()


class PromptEstimator:
    """
    Success rates of all prompts by several experts, weighted by how well they predicted the latest groups.

    K experts: one for each half-life, which predicts from the embeddings, and, last, the mean of the recent groups.

    Args:
        difficulty ([`RollingDifficulty`]): predicts from embeddings; keeps the recent groups.
        priors (`tuple[float, float]`): strength of a prediction from embeddings against a prompt's own groups, and
            that of the mean as a prediction, in completions.
        half_lives (`Sequence[float]`): of the experts, in generation batches.

    Attributes:
        predicted (`np.ndarray` of shape `(K, N)`): float32, each expert's predictions without a prompt's own groups.
        history ([`SuccessHistory`]): the prompts' own groups.
    """

    def __init__(self, difficulty: RollingDifficulty, priors: tuple[float, float], half_lives: Sequence[float]):
        self.difficulty = difficulty
        self.half_lives = tuple(half_lives)
        prior, prior_of_mean = priors
        self.history = SuccessHistory(
            size=len(difficulty.embeddings),
            priors=[prior] * len(half_lives) + [prior_of_mean],
            half_lives=[*half_lives, half_lives[-1]],
        )
        self._log_weights = np.zeros(len(half_lives) + 1)
        self._batch = 0
        self.refresh()

    @property
    def weights(self) -> np.ndarray:
        """Weights of the experts, float64 `(K,)`; they sum to 1."""
        unnormalised = np.exp(self._log_weights - self._log_weights.max())
        return unnormalised / unnormalised.sum()

    @property
    def fitted(self) -> bool:
        """Whether the estimates rest on groups, of this run or of an earlier one."""
        return self.difficulty.predictor.fitted or len(self.difficulty.ids) > 0

    def estimates(self, ids: np.ndarray | slice = slice(None)) -> np.ndarray:
        """
        Success rates of prompts, by expert.

        Args:
            ids (`np.ndarray` of shape `(n,)` or `slice`, *optional*): prompts; by default all.

        Returns:
            `np.ndarray` of shape `(K, n)`: float32 in [0, 1].
        """
        return self.history.estimate(self.predicted[:, ids], self._batch, ids)

    def mean(self, ids: np.ndarray | slice = slice(None)) -> np.ndarray:
        """
        The experts' weighted mean for prompts.

        Args:
            ids (`np.ndarray` of shape `(n,)` or `slice`, *optional*): prompts; by default all.

        Returns:
            `np.ndarray` of shape `(n,)`: float32 in [0, 1].
        """
        mean: np.ndarray = self.weights.astype(np.float32) @ self.estimates(ids)  # (K,) x (K, n) -> (n,)
        return mean.astype(np.float32)

    def observe(self, ids: np.ndarray, rates: np.ndarray, trials: np.ndarray, batch: int) -> None:
        """
        Weight the experts by their predictions of the groups of a generation batch, and enter these groups.
        Predictions follow with [`refresh`]. Arguments are those of [`SuccessHistory.observe`].
        """
        self._weight_experts(ids, rates)
        self.history.observe(ids, rates, trials, batch)
        self.difficulty.observe(ids, rates, batch)
        self._batch = batch

    def _weight_experts(self, ids: np.ndarray, rates: np.ndarray) -> None:
        """Add the log-likelihood of groups `(n,)` under each expert to its log-weight, in which earlier ones fade."""
        known = ~np.isnan(rates)
        observed = rates[known].astype(np.float64)  # (n,)
        estimates = self.estimates(ids[known]).astype(np.float64)
        p = np.clip(estimates, CLIP, 1 - CLIP)  # (K, n)
        log_likelihood = observed * np.log(p) + (1 - observed) * np.log1p(-p)  # (K, n)
        scores = SCORE_TRIALS * log_likelihood.sum(axis=1)  # (K,)
        fade = 0.5 ** (1 / SCORE_HALF_LIFE)
        self._log_weights = self._log_weights * fade + scores
        self._log_weights -= self._log_weights.max()  # only differences count

    def start_from(self, ids: np.ndarray, rates: np.ndarray, trials: np.ndarray) -> None:
        """
        Enter what is known of prompts before the first generation batch, and predict from it. It fades as groups of
        this run do, at the pace of the experts that predict this run best.

        Args:
            ids (`np.ndarray` of shape `(n,)`): prompts.
            rates (`np.ndarray` of shape `(n,)`): success rates.
            trials (`np.ndarray` of shape `(n,)`): completions that they rest on. Each prompt counts for at most the
                strength of a prediction from embeddings.
        """
        at_most = self.history.priors.max()
        self.history.observe(ids, rates, np.minimum(trials, at_most), self._batch)
        self.difficulty.observe(ids, rates, self._batch)
        self.refresh()

    def refresh(self) -> None:
        """Predict all prompts from the groups observed so far."""
        predictions = [self.difficulty.refresh(self._batch, half_life) for half_life in self.half_lives]
        predicted = np.stack(predictions)  # (K - 1, N)
        ids = self.difficulty.ids
        rates = self.difficulty.rates.astype(np.float64)
        age = self._batch - self.difficulty.batches
        weight = 0.5 ** (age / LEVEL_HALF_LIFE)
        if len(ids):
            predicted = _adjust_level(predicted, ids, rates, weight)
        mean = (0.5 * LEVEL_PRIOR + weight @ rates) / (LEVEL_PRIOR + weight.sum())
        mean_for_all = np.full((1, predicted.shape[1]), mean)
        self.predicted = np.concatenate([predicted, mean_for_all]).astype(np.float32)  # (K, N)

    def rescale(self, scale: float, offset: float) -> None:
        """
        Map all rates, since the range of rewards has changed.

        Args:
            scale (`float`): a rate becomes `scale * rate + offset`, in [0, 1].
            offset (`float`): see `scale`.
        """
        self.history.rescale(scale, offset)
        self.difficulty.rescale(scale, offset)
        self.predicted = np.clip(scale * self.predicted + offset, 0, 1).astype(np.float32)

    def state_dict(self) -> dict[str, Any]:
        """What restores the estimates and the weights of the experts."""
        return {
            "batch": self._batch,
            "log_weights": self._log_weights.copy(),
            "predicted": self.predicted.copy(),
            "history": self.history.state_dict(),
            "difficulty": self.difficulty.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], *, predictor: bool = True) -> None:
        """
        Restore what `state_dict` returned.

        Args:
            state (`dict[str, Any]`): what `state_dict` returned.
            predictor (`bool`, *optional*, defaults to `True`): without it, predictors are fitted anew, to other
                embeddings.
        """
        self.history.load_state_dict(state["history"])
        self.difficulty.load_state_dict(state["difficulty"], predictor=predictor)
        self._batch = state["batch"]
        self._log_weights = state["log_weights"].copy()
        self.predicted = state["predicted"].copy()


def _adjust_level(predicted: np.ndarray, ids: np.ndarray, rates: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """
    Shift each expert's predictions, in logits, to the level of the recent groups.

    Args:
        predicted (`np.ndarray` of shape `(K, N)`): float32, predictions of all prompts.
        ids (`np.ndarray` of shape `(n,)`): prompt of each group.
        rates (`np.ndarray` of shape `(n,)`): success rates of the groups.
        weight (`np.ndarray` of shape `(n,)`): weights of the groups.

    Returns:
        `np.ndarray` of shape `(K, N)`: float32.
    """
    p = np.clip(predicted, CLIP, 1 - CLIP)
    logits = np.log(p) - np.log1p(-p)  # (K, N)
    offsets = fit_offsets(logits[:, ids], rates, weight)  # (K,)
    return _sigmoid(logits + offsets[:, None].astype(np.float32))


def fit_offsets(logits: np.ndarray, rates: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """
    The offset of each row of logits that fits the success rates of n groups best: the mode of the posterior with a
    Gaussian prior. Minimises, by Newton's method,

        sum_j weight_j BCE(sigmoid(logits_kj + o_k), rates_j) + LEVEL_PRIOR / 8 o_k^2

    Args:
        logits (`np.ndarray` of shape `(K, n)`): predictions of the groups, by expert.
        rates (`np.ndarray` of shape `(n,)`): success rates in [0, 1].
        weight (`np.ndarray` of shape `(n,)`): weights of the groups.

    Returns:
        `np.ndarray` of shape `(K,)`: float64.
    """
    logits = logits.astype(np.float64)
    offset = np.zeros(len(logits))
    ridge = LEVEL_PRIOR / 4  # the curvature of a group at a rate of one half
    for _ in range(NEWTON_STEPS):
        p = _sigmoid(logits + offset[:, None])  # (K, n)
        gradient = (p - rates) @ weight + ridge * offset  # (K, n) x (n,) -> (K,)
        curvature = (p * (1 - p)) @ weight + ridge
        step = gradient / curvature
        offset -= np.clip(step, -1.0, 1.0)
        if np.abs(step).max() < NEWTON_TOLERANCE:
            break
    return offset


def _sigmoid(z: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-z))
