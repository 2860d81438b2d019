"""What rewards say of groups: total rewards, success rates, zero variance, and kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trl_dataeff.rollouts.group import EASY, EFFECTIVE, HARD, RolloutGroup, Rollouts
from trl_dataeff.rollouts.scale import RewardScale


def total_rewards(rewards: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """
    Weighted sum of the reward functions, as TRL forms it. The sum runs in float64 and is rounded to float32.

    Args:
        rewards (`np.ndarray` of shape `(..., F)`): NaN where a function gave no score, which is left out of the sum.
            So is an infinite reward with weight 0.
        weights (`np.ndarray` of shape `(F,)`): weights of the functions.

    Returns:
        `np.ndarray` of shape `(...)`, float32: NaN for a completion that no function scored.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    with np.errstate(invalid="ignore"):  # 0 times infinity
        weighted = rewards * np.asarray(weights, dtype=np.float64)
    totals: np.ndarray = np.where(np.isnan(weighted), 0.0, weighted).sum(axis=-1)
    totals[np.isnan(rewards).all(axis=-1)] = np.nan
    return totals.astype(np.float32)


def all_equal(values: np.ndarray, tolerance: np.ndarray | float = 0.0) -> NDArray[np.bool_]:
    """
    Whether the values of each row that are not NaN are all equal.

    Args:
        values (`np.ndarray` of shape `(n, G)`): NaN where there is none.
        tolerance (`np.ndarray` of shape `(n,)` or `float`, *optional*, defaults to `0.0`): spread that counts as
            equal.

    Returns:
        `np.ndarray` of shape `(n,)`, bool: true also for rows with fewer than two values.
    """
    unscored = np.isnan(values)
    low = np.where(unscored, np.inf, values).min(axis=1)
    high = np.where(unscored, -np.inf, values).max(axis=1)
    with np.errstate(invalid="ignore"):  # a row of infinities, or of NaN
        equal: NDArray[np.bool_] = (low >= high) | (high - low <= tolerance)
    return equal


def is_zero_variance(rewards: np.ndarray, weights: np.ndarray, aggregation: str = "sum_then_normalize") -> np.ndarray:
    """
    Whether groups carry no gradient: all scorable rewards are equal, or one is infinite, so that TRL sets the
    advantages to 0.

    Totals of several functions are compared up to the rounding of their sum (four units in the last place of float32),
    totals of one exactly. Under TRL's `multi_objective_aggregation="normalize_then_sum"`, which normalises each
    function on its own, every function with a weight has to give equal rewards.

    Args:
        rewards (`np.ndarray` of shape `(n, G, F)`): NaN where a function gave no score.
        weights (`np.ndarray` of shape `(F,)`): weights of the functions.
        aggregation (`str`, *optional*, defaults to `"sum_then_normalize"`): TRL's option of that name.

    Returns:
        `np.ndarray` of shape `(n,)`, bool.
    """
    totals = total_rewards(rewards, weights)
    infinite: NDArray[np.bool_] = np.isinf(totals).any(axis=1)
    if aggregation == "normalize_then_sum":
        equal = np.ones(len(rewards), dtype=bool)
        for k in np.flatnonzero(weights):
            equal &= all_equal(rewards[:, :, k])
    else:
        equal = all_equal(totals, rounding(rewards, weights))
    return infinite | equal


def rounding(rewards: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Spread of each group's totals that is due to the rounding of their sum, `(n,)`; 0 for a single function."""
    if np.count_nonzero(weights) <= 1:
        return np.zeros(len(rewards))
    sizes = total_rewards(np.abs(rewards), np.abs(weights))
    largest = np.where(np.isnan(sizes), 0.0, sizes).max(axis=1)
    return 4 * np.finfo(np.float32).eps * largest


def is_masked_out(
    rewards: np.ndarray, weights: np.ndarray, truncated: np.ndarray, aggregation: str = "sum_then_normalize"
) -> NDArray[np.bool_]:
    """
    Whether truncation removes a group's gradient under `mask_truncated_completions`: all completions that differ from
    their group's mean reward, under `normalize_then_sum` from that of some function, were cut off.

    Args:
        rewards (`np.ndarray` of shape `(n, G, F)`): NaN where a function gave no score.
        weights (`np.ndarray` of shape `(F,)`): weights of the functions.
        truncated (`np.ndarray` of shape `(n, G)`, bool): completions that were cut off.
        aggregation (`str`, *optional*, defaults to `"sum_then_normalize"`): TRL's `multi_objective_aggregation`.

    Returns:
        `np.ndarray` of shape `(n,)`, bool.
    """
    if aggregation == "normalize_then_sum":
        values = rewards[:, :, np.flatnonzero(weights)]  # (n, G, functions with a weight)
    else:
        values = total_rewards(rewards, weights)[:, :, None]  # (n, G, 1)
    values = values.astype(np.float64)
    scored = ~np.isnan(values)
    count = scored.sum(axis=1, keepdims=True)
    mean = np.where(scored, values, 0.0).sum(axis=1, keepdims=True) / np.maximum(count, 1)
    has_gradient = scored & ~truncated[:, :, None] & (values != mean)
    return ~has_gradient.any(axis=(1, 2))


class Classified(NamedTuple):
    """
    What rewards say of n groups.

    Attributes:
        totals: total rewards, float32 of shape `(n, G)`, NaN for a completion without a score.
        success_rates: float64 of shape `(n,)`, in [0, 1], NaN for a group without a score.
        kinds: codes of kinds (see `KINDS`), int8 of shape `(n,)`.
    """

    totals: np.ndarray
    success_rates: np.ndarray
    kinds: np.ndarray


class GroupClassifier:
    """
    Total rewards, success rates and kinds of groups, from their rewards. Its `scale` widens with them.

    Args:
        weights (`np.ndarray` of shape `(F,)`): weights of the reward functions.
        reward_range (`Sequence[float]`, *optional*): lowest and highest total; by default those seen so far.
        aggregation (`str`, *optional*, defaults to `"sum_then_normalize"`): TRL's `multi_objective_aggregation`.
        masks_truncated (`bool`, *optional*, defaults to `False`): TRL's `mask_truncated_completions`.
    """

    def __init__(
        self,
        weights: np.ndarray,
        *,
        reward_range: Sequence[float] | None = None,
        aggregation: str = "sum_then_normalize",
        masks_truncated: bool = False,
    ):
        self.weights = np.asarray(weights, dtype=np.float32)
        self.scale = RewardScale.of(reward_range)
        self.aggregation = aggregation
        self.masks_truncated = masks_truncated

    def read_options(self, weights: np.ndarray, aggregation: str, masks_truncated: bool) -> None:
        """Take over what decides totals and kinds from now on. The arguments are those of the class."""
        self.weights = weights
        self.aggregation = aggregation
        self.masks_truncated = masks_truncated

    def classify(self, rewards: np.ndarray, truncated: np.ndarray) -> Classified:
        """
        Classify the groups of a round, and widen the scale. Zero-variance groups are easy at the top of the range of
        rewards, and hard anywhere else.

        Args:
            rewards (`np.ndarray` of shape `(n, G, F)`): NaN where a function gave no score.
            truncated (`np.ndarray` of shape `(n, G)`, bool): completions that did not end by themselves.
        """
        totals = total_rewards(rewards, self.weights)
        self.scale.observe(totals)
        success_rates = self.scale.success_rate(totals)
        zero_variance = is_zero_variance(rewards, self.weights, self.aggregation)
        if self.masks_truncated:
            zero_variance |= is_masked_out(rewards, self.weights, truncated, self.aggregation)
        at_the_top = success_rates >= 1.0 - 1e-6  # but for the rounding of a sum of rewards
        kinds = np.full(len(totals), EFFECTIVE, dtype=np.int8)
        kinds[zero_variance & at_the_top] = EASY
        kinds[zero_variance & ~at_the_top] = HARD
        return Classified(totals, success_rates, kinds)

    def groups(
        self,
        prompt_ids: Sequence[int] | np.ndarray,
        rewards: np.ndarray,
        lengths: np.ndarray,
        truncated: np.ndarray,
        *,
        step: int,
        round: int,
        is_reference: bool = False,
        owners: Sequence[int] | None = None,
        rollouts: Sequence[Rollouts | None] | None = None,
    ) -> list[RolloutGroup]:
        """
        The groups of a round, classified.

        Args:
            prompt_ids (`np.ndarray` of shape `(n,)`): rows of the training dataset.
            rewards (`np.ndarray` of shape `(n, G, F)`): NaN where a function gave no score.
            lengths (`np.ndarray` of shape `(n, G)`): tokens of each completion.
            truncated (`np.ndarray` of shape `(n, G)`, bool): completions that did not end by themselves.
            step, round, is_reference, owners, rollouts: fields of [`RolloutGroup`]; the last two by group.
        """
        totals, success_rates, kinds = self.classify(rewards, truncated)
        n = len(prompt_ids)
        owners = [0] * n if owners is None else owners
        rollouts = [None] * n if rollouts is None else rollouts
        return [
            RolloutGroup(
                prompt_id=int(prompt_ids[i]),
                step=step,
                round=round,
                rewards=rewards[i],
                totals=totals[i],
                success_rate=float(success_rates[i]),
                kind=int(kinds[i]),
                lengths=lengths[i],
                truncated=truncated[i],
                owner=owners[i],
                is_reference=is_reference,
                rollouts=rollouts[i],
            )
            for i in range(n)
        ]
