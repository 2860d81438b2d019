"""`AdvantageWeights`: how much replayed groups count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from trl.trainer.utils import nanstd

from trl_dataeff.collector.rounds import GenerationBatch, ZeroVarianceShare
from trl_dataeff.rollouts.classification import GroupClassifier, total_rewards
from trl_dataeff.rollouts.group import RolloutGroup


EPSILON = 1e-4  # TRL adds it to the deviations by which it divides


@dataclass(frozen=True)
class AdvantageWeights:
    """
    Scales the advantages that TRL has computed for a generation batch.

    Args:
        classifier ([`GroupClassifier`]): knows the weights of the reward functions and how they are added up.
        zero_share ([`ZeroVarianceShare`]): running share of zero-variance groups.
        refills (`bool`): whether zero-variance groups are dropped and replaced (dynamic sampling).
        over_batch (`bool`): whether TRL divides advantages by the deviation over the whole batch (`scale_rewards="batch"`,
            `multi_objective_aggregation="normalize_then_sum"`).
        replayed (`float`, *optional*): factor on the advantages of replayed groups; `None`: see [`of_replayed`].
        rank (`int`): of this process.
    """

    classifier: GroupClassifier
    zero_share: ZeroVarianceShare
    refills: bool
    over_batch: bool
    replayed: float | None
    rank: int

    @property
    def of_replayed(self) -> float:
        """
        Factor on the advantages of replayed groups.

        By default that is the running share of effective groups among those generated. Replayed groups are all effective; they
        stand in for as many fresh ones, of which that share would have had a gradient. So the gradient keeps the scale of plain
        GRPO's, and steps become smaller as more groups have zero variance. With dynamic sampling all groups are effective.
        """
        if self.replayed is not None:
            return self.replayed
        return 1.0 if self.refills else 1 - self.zero_share.value

    def of_rows(self, groups: Sequence[RolloutGroup]) -> torch.Tensor:
        """By how much the advantages of each completion of these groups count, `(completions,)`."""
        weights = torch.tensor([self.of_replayed if group.origin == "replayed" else 1.0 for group in groups])
        return weights.repeat_interleave(torch.tensor([group.size for group in groups]))

    def apply(self, tensors: dict[str, Any], batch: GenerationBatch) -> None:
        """
        Weigh the advantages of replayed groups, and keep those of fresh ones at the scale that they have without them.

        Args:
            tensors (`dict`): TRL's batch of this process; its `advantages` (rows,) are replaced.
            batch ([`GenerationBatch`]): with all groups that are trained on, in the order of ranks.
        """
        if self.over_batch and batch.replayed:
            rewards = np.stack([group.rewards for group in batch.trained])
            fresh = np.array([group.origin != "replayed" for group in batch.trained])
            scale = scale_of_fresh(rewards, self.classifier.weights, fresh, self.classifier.aggregation)
            tensors["advantages"] = tensors["advantages"] * scale
        if batch.trained_stale:
            weights = self.of_rows([group for group in batch.trained if group.owner == self.rank])
            tensors["advantages"] = tensors["advantages"] * weights.to(tensors["advantages"])


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
