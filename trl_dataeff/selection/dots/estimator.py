r"""
Estimates of every prompt's present success rate, by a policy that changes at an unknown speed.

The success rate of a prompt is taken as Beta distributed. Its mean is at first what is predicted for the prompt:

    q = sum_j v_j q_j            over sources: the embeddings, a column of success rates, the mean of recent groups

and its own groups are evidence that fades:

    a = s q + sum_t f_t successes_t,    b = s (1 - q) + sum_t f_t failures_t,    f_t = 0.5 ** (passes since t / h)

The strength s of a prediction and the half-life h are unknown: several pairs estimate side by side. Sources and pairs
are weighted by the likelihood of the latest groups before these were known.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trl_dataeff.difficulty.logistic import LogisticDifficultyPredictor
from trl_dataeff.difficulty.online import RollingDifficulty
from trl_dataeff.selection.dots.beta_binomial import chance_effective, log_likelihood
from trl_dataeff.selection.dots.history import SuccessHistory


#: Half-lives of groups in the fits to embeddings, in generation batches
FIT_HALF_LIVES = (1.0, 3.0, 9.0, 27.0)
#: Half-lives of a prompt's own groups, in passes
HISTORY_HALF_LIVES = (1 / 16, 1 / 4, 1.0, 4.0)
#: Strengths of a prediction against a prompt's own groups, in completions
STRENGTHS = (0.5, 2.0, 8.0, 32.0)
#: Pairs of a strength and the index of a half-life
STRENGTH_OF_PAIR = np.repeat(np.array(STRENGTHS, dtype=np.float32), len(HISTORY_HALF_LIVES))
HALF_LIFE_OF_PAIR = np.tile(np.arange(len(HISTORY_HALF_LIVES)), len(STRENGTHS))
NEGLIGIBLE_WEIGHT = 1e-4  # of a pair
#: That by which sources are compared
SOURCE_STRENGTH = 1.0
#: Generation batches after which a prediction counts half in the weights of sources, and of pairs
SOURCE_SCORE_HALF_LIFE = 4.0
PAIR_SCORE_HALF_LIFE = 32.0
#: Half-life of the intercepts, and of the mean: the level of success rates changes before their order does.
LEVEL_HALF_LIFE = 2.0
#: Strength of the prior that holds an intercept where the fit put it, in groups.
LEVEL_PRIOR = 1.0
CLIP = 1e-3  # of predictions whose logarithm is taken
SMALLEST_PARAMETER = 1e-3  # of a Beta distribution
HEAD_START = 5.0  # of a column of success rates over other sources, in log-weight
EARLIER_TRIALS = 4.0  # completions that an earlier run counts for at most
COLUMN_RIDGE = 0.1  # a column may be of another model, or hold difficulties: its fit follows the groups
KNOWN_CLIP = 0.02  # of given success rates: those of a few completions are often 0 or 1

NEWTON_STEPS = 50
NEWTON_TOLERANCE = 1e-8


class Weights:
    """
    Weights of K estimates by how well they predicted the latest groups.

    Args:
        log_weights (`np.ndarray` of shape `(K,)`): at first.
        half_life (`float`): generation batches after which a prediction counts half.

    Attributes:
        values (`np.ndarray` of shape `(K,)`): float64, sum 1.
    """

    def __init__(self, log_weights: np.ndarray, half_life: float):
        self.half_life = half_life
        self.at_first = log_weights
        self.log_weights = log_weights

    @property
    def values(self) -> np.ndarray:
        unnormalised = np.exp(self.log_weights - self.log_weights.max())
        return unnormalised / unnormalised.sum()

    def begin_again(self) -> None:
        """Forget what was predicted."""
        self.log_weights = self.at_first

    def update(self, log_likelihoods: np.ndarray) -> None:
        """Add those of a generation batch `(K,)`. What was known before fades."""
        fade = 0.5 ** (1 / self.half_life)
        log_weights = self.log_weights * fade + log_likelihoods
        self.log_weights = log_weights - log_weights.max()  # only differences count


def column_difficulty(success_rates: np.ndarray) -> RollingDifficulty:
    """
    Predictions from a column of success rates: a logistic regression on their logits, which begins with the rates as
    they are, and follows the run's groups. Prompts without a rate begin at the mean, with an intercept of their own.

    Args:
        success_rates (`np.ndarray` of shape `(N,)`): in [0, 1], or NaN.

    Returns:
        [`RollingDifficulty`]: without groups.
    """
    missing = np.isnan(success_rates)
    clipped = np.clip(success_rates, KNOWN_CLIP, 1 - KNOWN_CLIP)
    logits = np.log(clipped) - np.log1p(-clipped)
    features = np.stack([np.where(missing, 0.0, logits), missing], axis=1).astype(np.float32)  # (N, 2)
    mean = np.clip(np.nanmean(success_rates), KNOWN_CLIP, 1 - KNOWN_CLIP)
    level = float(np.log(mean) - np.log1p(-mean))  # at which prompts without a rate begin
    predictor = LogisticDifficultyPredictor(components=2, l2=COLUMN_RIDGE)
    predictor.load_tensors(
        {
            "mean": torch.zeros(2),
            "basis": torch.eye(2),
            "coefficients": torch.tensor([1.0, level]),
            "intercept": torch.zeros(1),
        }
    )
    longest = FIT_HALF_LIVES[-1]
    return RollingDifficulty(features, predictor, half_life=longest, fit_every=0)


class PromptEstimator:
    """
    Success rates of all prompts.

    Args:
        difficulty ([`RollingDifficulty`]): predicts from embeddings; keeps the recent groups.
        known ([`RollingDifficulty`], *optional*): predicts from a column, see [`column_difficulty`].

    Attributes:
        prior (`np.ndarray` of shape `(N,)`): float32, what is predicted without a prompt's own groups.
        history ([`SuccessHistory`]): the prompts' own groups.
    """

    def __init__(self, difficulty: RollingDifficulty, known: RollingDifficulty | None = None):
        self.difficulty = difficulty
        self.known = known
        size = len(difficulty.embeddings)
        self.history = SuccessHistory(size, HISTORY_HALF_LIVES)
        head_start = [] if known is None else [HEAD_START]
        self._sources = Weights(np.array([0.0] * (len(FIT_HALF_LIVES) + 1) + head_start), SOURCE_SCORE_HALF_LIFE)
        self._pairs = Weights(np.zeros(len(STRENGTH_OF_PAIR)), PAIR_SCORE_HALF_LIFE)
        self._batch = 0
        self._passes = 0.0
        self.refresh()

    @property
    def fitted(self) -> bool:
        """Whether the estimates rest on groups, of this run or of an earlier one, or on a column."""
        return self.difficulty.predictor.fitted or len(self.difficulty.ids) > 0 or self.known is not None

    @property
    def passes(self) -> float:
        """Groups observed, as a multiple of the number of prompts."""
        return self._passes

    def own_means(self) -> np.ndarray:
        """The mean rate of each prompt's own groups, float32 `(N,)`; NaN for a prompt without."""
        trials = self.history.trials[-1]
        return np.divide(self.history.successes[-1], trials, out=np.full_like(trials, np.nan), where=trials > 0)

    def forget_trust(self) -> None:
        """Trust sources and pairs as before the first group."""
        self._pairs.begin_again()
        self._sources.begin_again()

    def posteriors(
        self, ids: np.ndarray | slice = slice(None), pairs: np.ndarray | slice = slice(None)
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Parameters a and b of the Beta distributions of prompts' success rates.

        Args:
            ids (`np.ndarray` of shape `(n,)` or `slice`, *optional*): prompts; by default all.
            pairs (`np.ndarray` of shape `(k,)` or `slice`, *optional*): pairs of a strength and a half-life; by
                default all, the half-lives of the first strength first.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: float32 `(k, n)`.
        """
        successes, trials = self.history.faded(self._passes, ids)  # (H, n)
        half_life = HALF_LIFE_OF_PAIR[pairs]
        strength = STRENGTH_OF_PAIR[pairs][:, None]
        prior = self.prior[ids]  # (n,)
        a = strength * prior + successes[half_life]
        b = strength * (1 - prior) + (trials - successes)[half_life]
        return (
            torch.from_numpy(np.maximum(a, SMALLEST_PARAMETER)),
            torch.from_numpy(np.maximum(b, SMALLEST_PARAMETER)),
        )

    def mean(self, ids: np.ndarray | slice = slice(None)) -> np.ndarray:
        """
        Expected success rates of prompts.

        Args:
            ids (`np.ndarray` of shape `(n,)` or `slice`, *optional*): prompts; by default all.

        Returns:
            `np.ndarray` of shape `(n,)`: float32 in [0, 1].
        """
        pairs, weights = self._trusted_pairs()
        a, b = self.posteriors(ids, pairs)
        mean: np.ndarray = (weights @ (a / (a + b)).double()).float().numpy()
        return mean

    def chances(self, group_size: int) -> torch.Tensor:
        """
        Probabilities that groups of all prompts have successes and failures.

        Args:
            group_size (`int`): G.

        Returns:
            `torch.Tensor` of shape `(N,)`: float64 in [0, 1).
        """
        pairs, weights = self._trusted_pairs()
        a, b = self.posteriors(pairs=pairs)
        return weights @ chance_effective(a, b, group_size)

    def _trusted_pairs(self) -> tuple[np.ndarray, torch.Tensor]:
        """Pairs whose weight is not negligible, int64 `(k,)`, and their weights, float64 `(k,)`, sum 1."""
        weights = self._pairs.values
        pairs = np.flatnonzero(weights > NEGLIGIBLE_WEIGHT)
        trusted = weights[pairs]
        return pairs, torch.from_numpy(trusted / trusted.sum())

    def observe(self, ids: np.ndarray, rates: np.ndarray, trials: np.ndarray, batch: int) -> None:
        """
        Weight sources and pairs by what they predicted for the groups of a generation batch, and enter these groups.
        Predictions follow with [`refresh`].

        Args:
            ids (`np.ndarray` of shape `(n,)`): prompt of each group; one may occur more than once.
            rates (`np.ndarray` of shape `(n,)`): success rates; groups with NaN are ignored.
            trials (`np.ndarray` of shape `(n,)`): completions that were scored.
            batch (`int`): number of the generation batch, not below that of earlier groups.
        """
        known = ~np.isnan(rates)
        self._weigh(ids[known], rates[known], trials[known])
        self._passes += len(ids) / len(self.prior)
        self._batch = batch
        self._enter(ids, rates, trials)

    def _weigh(self, ids: np.ndarray, rates: np.ndarray, trials: np.ndarray) -> None:
        num_trials = torch.from_numpy(trials).double()
        successes = torch.from_numpy(rates).double() * num_trials
        a, b = self.posteriors(ids)
        of_pairs = log_likelihood(a, b, successes, num_trials).sum(dim=-1)
        self._pairs.update(of_pairs.numpy())
        q = torch.from_numpy(self.predicted[:, ids])  # (K, n)
        a = (SOURCE_STRENGTH * q).clamp_min(SMALLEST_PARAMETER)
        b = (SOURCE_STRENGTH * (1 - q)).clamp_min(SMALLEST_PARAMETER)
        of_sources = log_likelihood(a, b, successes, num_trials).sum(dim=-1)
        self._sources.update(of_sources.numpy())

    def _enter(self, ids: np.ndarray, rates: np.ndarray, trials: np.ndarray) -> None:
        self.history.observe(ids, rates, trials, self._passes)
        self.difficulty.observe(ids, rates, self._batch)
        if self.known is not None:
            self.known.observe(ids, rates, self._batch)

    def start_from(self, ids: np.ndarray, rates: np.ndarray, trials: np.ndarray) -> None:
        """
        Enter what is known of prompts before the first generation batch, and predict from it. It fades as groups of
        this run do.

        Args:
            ids (`np.ndarray` of shape `(n,)`): prompts.
            rates (`np.ndarray` of shape `(n,)`): success rates.
            trials (`np.ndarray` of shape `(n,)`): completions that they rest on.
        """
        self._enter(ids, rates, np.minimum(trials, EARLIER_TRIALS))
        self.refresh()

    def refresh(self) -> None:
        """Predict all prompts from the groups observed so far."""
        predictions = [self.difficulty.refresh(self._batch, half_life) for half_life in FIT_HALF_LIVES]
        if self.known is not None:
            predictions.append(self.known.refresh(self._batch))
        predicted = np.stack(predictions)  # (K - 1, N)
        ids = self.difficulty.ids
        rates = self.difficulty.rates.astype(np.float64)
        age = self._batch - self.difficulty.batches
        weight = 0.5 ** (age / LEVEL_HALF_LIFE)
        if len(ids):
            predicted = _adjust_level(predicted, ids, rates, weight)
        mean = (0.5 * LEVEL_PRIOR + weight @ rates) / (LEVEL_PRIOR + weight.sum())
        mean_for_all = np.full((1, predicted.shape[1]), mean)
        self.predicted = np.concatenate([mean_for_all, predicted]).astype(np.float32)  # (K, N)
        self.prior = self._sources.values.astype(np.float32) @ self.predicted

    def rescale(self, scale: float, offset: float) -> None:
        """
        Map all rates, since the range of rewards has changed.

        Args:
            scale (`float`): a rate becomes `scale * rate + offset`, in [0, 1].
            offset (`float`): see `scale`.
        """
        self.history.rescale(scale, offset)
        self.difficulty.rescale(scale, offset)
        if self.known is not None:
            self.known.rescale(scale, offset)
        self.predicted = np.clip(scale * self.predicted + offset, 0, 1).astype(np.float32)
        self.prior = np.clip(scale * self.prior + offset, 0, 1).astype(np.float32)

    def state_dict(self) -> dict[str, Any]:
        """What restores the estimates."""
        state = {
            "batch": self._batch,
            "passes": self._passes,
            "sources": self._sources.log_weights.copy(),
            "pairs": self._pairs.log_weights.copy(),
            "predicted": self.predicted.copy(),
            "prior": self.prior.copy(),
            "history": self.history.state_dict(),
            "difficulty": self.difficulty.state_dict(),
        }
        if self.known is not None:
            state["known"] = self.known.state_dict()
        return state

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
        if self.known is not None:
            self.known.load_state_dict(state["known"])
        self._batch = state["batch"]
        self._passes = state["passes"]
        self._sources.log_weights = state["sources"].copy()
        self._pairs.log_weights = state["pairs"].copy()
        self.predicted = state["predicted"].copy()
        self.prior = state["prior"].copy()


def _adjust_level(predicted: np.ndarray, ids: np.ndarray, rates: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """
    Shift the predictions of each source, in logits, to the level of the recent groups.

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
        logits (`np.ndarray` of shape `(K, n)`): predictions of the groups, by source.
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
