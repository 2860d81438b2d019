r"""
Advantages with a tracked baseline: the prediction made before the rollout, joined with the other completions' rewards.

With p the predicted mean reward, worth s completions, and r_j the rewards of a group of G, completion i has the baseline

    b_i = (s p + sum_{j != i} r_j) / (s + G - 1)

which does not depend on r_i, so that (r_i - b_i) grad log pi is an unbiased estimate of the policy gradient at any G >= 2 and
for any p. With s = 0 it is the leave-one-out mean of RLOO, with s -> inf the tracked value of SPO (arXiv 2509.13232); between
them it shrinks the one towards the other (arXiv 2511.03710). A zero-variance group has a gradient by as much as its outcome
was not expected (compare RL-ZVP, arXiv 2509.21880).

The deviation by which advantages are divided is that of the same posterior: the s completions that the prediction stands for,
and the G - 1 others. For rewards of 0 and 1 it is the square root of b_i (1 - b_i).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from trl.trainer.utils import nanstd

from trl_dataeff.rollouts.classification import total_rewards


EPSILON = 1e-4  # TRL adds it to the deviations by which it divides


class Prior(NamedTuple):
    """
    What was believed of n groups before they were rolled out, in units of the total reward.

    Attributes:
        mean: predicted mean rewards, float64 of shape `(n,)`; NaN where there is no prediction.
        strength: completions that each prediction is worth, float64 of shape `(n,)`, finite and at least 0.
        variance: of a completion's reward under the prediction, float64 of shape `(n,)`.
        least_variance: lower bound of the variance by which a completion's advantage is divided.
    """

    mean: np.ndarray
    strength: np.ndarray
    variance: np.ndarray
    least_variance: float = 0.0


class Posterior(NamedTuple):
    """
    What is known of each completion's reward without that reward: float64 of shape `(n, G)`, NaN where nothing is, and for
    completions without a score.

    Attributes:
        mean: the baseline b.
        variance: around it.
        least_variance: see [`Prior`]; without a prediction 0.
    """

    mean: np.ndarray
    variance: np.ndarray
    least_variance: np.ndarray


def leave_one_out(rewards: np.ndarray, prior: Prior) -> Posterior:
    """
    Join predictions with the rewards of the other completions.

    A group without a prediction has the leave-one-out mean as its baseline, and the sample variance of the whole group, as in
    TRL: two completions leave one other, which has no variance.

    Args:
        rewards (`np.ndarray` of shape `(n, G)`): total rewards; NaN is left out.
        prior ([`Prior`]): of the n groups.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    scored = ~np.isnan(rewards)
    others = scored[:, None, :] & ~np.eye(
        rewards.shape[1], dtype=bool
    )  # (n, i, j): whether j is one of the others of i
    values = np.where(scored, rewards, 0.0)[:, None, :]  # (n, 1, j)
    predicted = ~np.isnan(prior.mean)[:, None]  # (n, 1)
    p, v = (np.where(predicted, x[:, None], 0.0) for x in (prior.mean, prior.variance))
    s = np.where(predicted, prior.strength[:, None], 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        weight = np.where(scored, s + others.sum(axis=2), np.nan)  # (n, G)
        mean = (s * p + (others * values).sum(axis=2)) / weight
        squares = (others * (values - mean[:, :, None]) ** 2).sum(axis=2)
        variance = (s * (v + (p - mean) ** 2) + squares) / weight
    variance = np.where(predicted, variance, _sample_variance(rewards)[:, None])
    return Posterior(mean, variance, np.where(predicted, prior.least_variance, 0.0) + np.zeros_like(mean))


def advantages(rewards: np.ndarray, posterior: Posterior, scale: str) -> np.ndarray:
    """
    Advantages of groups, float64 of shape `(n, G)`; 0 for completions without a score, and for groups with an infinite reward,
    as in TRL.

    Args:
        rewards (`np.ndarray` of shape `(n, G)`), posterior ([`Posterior`]): see [`leave_one_out`].
        scale (`str`): TRL's `scale_rewards`. `"group"` divides by the posterior's deviation, by completion; `"batch"` by the
            deviation of a reward of these n groups: within posteriors and between their means; `"none"` by nothing.
    """
    infinite = np.isinf(rewards).any(axis=1, keepdims=True)
    known = ~np.isnan(posterior.mean) & ~infinite
    with np.errstate(invalid="ignore"):
        differences = rewards - posterior.mean
    if scale == "group":
        differences = differences / (np.sqrt(np.fmax(posterior.variance, posterior.least_variance)) + EPSILON)
    elif scale == "batch" and known.any():
        total = posterior.variance[known].mean() + posterior.mean[known].var()
        differences = differences / (np.sqrt(total) + EPSILON)
    return np.where(known, np.nan_to_num(differences, nan=0.0), 0.0)


def _sample_variance(rewards: np.ndarray) -> np.ndarray:
    """Unbiased variance of each row without its NaN, `(n,)`; 0 for rows of one."""
    scored = ~np.isnan(rewards)
    count = scored.sum(axis=1)
    with np.errstate(invalid="ignore"):  # infinity - infinity
        mean = np.where(scored, rewards, 0.0).sum(axis=1) / np.maximum(count, 1)
        squares = np.where(scored, (rewards - mean[:, None]) ** 2, 0.0).sum(axis=1)
    variance: np.ndarray = squares / np.maximum(count - 1, 1)
    return variance


def scale_of_fresh(rewards: np.ndarray, weights: np.ndarray, fresh: np.ndarray, aggregation: str) -> float:
    """
    Factor on TRL's advantages that divides them by the deviation of the fresh groups' rewards in place of the whole batch's,
    where TRL normalises over the batch (`scale_rewards="batch"`, and `normalize_then_sum`). Replayed groups all have a
    gradient, so that with them the deviation is larger and every advantage smaller.

    Args:
        rewards (`np.ndarray` of shape `(n, G, F)`): of all groups of the batch, NaN where a function gave no score.
        weights (`np.ndarray` of shape `(F,)`): weights of the functions.
        fresh (`np.ndarray` of shape `(n,)` and dtype bool): groups that are not replayed.
        aggregation (`str`): TRL's `multi_objective_aggregation`.

    Returns:
        `float`: above 0; 1 if the fresh groups' rewards are all equal.
    """
    values = torch.from_numpy(total_rewards(rewards, weights))
    if aggregation == "normalize_then_sum":
        each = torch.from_numpy(rewards)
        each = (each - each.nanmean(1, keepdim=True)) / (nanstd(each, dim=1, keepdim=True) + EPSILON)
        values = (each * torch.from_numpy(weights)).nansum(-1).where(~values.isnan(), values)
    whole, own = nanstd(values).item(), nanstd(values[torch.from_numpy(fresh)]).item()
    return (whole + EPSILON) / (own + EPSILON) if own > 0 and math.isfinite(whole) else 1.0
