"""Advantages that TRL normalises over the batch: over all groups generated for it, whatever is trained on."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from trl.trainer.utils import nanstd

from trl_dataeff.rollouts.classification import GroupClassifier, total_rewards
from trl_dataeff.rollouts.group import RolloutGroup
from trl_dataeff.tracking.metrics import group_metrics


EPSILON = 1e-4  # TRL adds it to the deviations by which it divides


def renormalize(
    advantages: torch.Tensor,
    trained: Sequence[RolloutGroup],
    generated: Sequence[RolloutGroup],
    classifier: GroupClassifier,
) -> torch.Tensor:
    """
    Advantages that were normalised over the groups trained on, normalised over the groups generated for the batch instead
    (`scale_rewards="batch"`, and `normalize_then_sum`). Replayed groups are all effective and stand in for zero-variance
    ones: with them the deviation would be larger, and every advantage smaller.

    Args:
        advantages (`torch.Tensor` of shape `(rows,)`): TRL's, of this process.
        trained: all groups trained on, of all processes.
        generated: all groups generated for the batch, of all processes.
        classifier ([`GroupClassifier`]): knows the weights of the reward functions and how they are added up.

    Returns:
        `torch.Tensor` of shape `(rows,)`: unchanged if the rewards of the generated groups are all equal.
    """
    deviation = deviation_over_batch(generated, classifier)
    if not deviation > 0 or not math.isfinite(deviation):
        return advantages
    # TRL takes the mean over the batch away as well, which is 0: that of each group is
    return advantages * ((deviation_over_batch(trained, classifier) + EPSILON) / (deviation + EPSILON))


def deviation_over_batch(groups: Sequence[RolloutGroup], classifier: GroupClassifier) -> float:
    """The deviation by which TRL divides if these groups are the batch; 0 without any, NaN for rewards that are not finite."""
    return nanstd(_normalized(groups, classifier)).item() if groups else 0.0


def batch_metrics(
    groups: Sequence[RolloutGroup], names: Sequence[str], classifier: GroupClassifier, over_batch: bool
) -> dict[str, float]:
    """
    TRL's metrics of rewards and lengths over these groups.

    Args:
        groups: all groups generated for a batch.
        names (`list[str]`): the reward functions.
        classifier ([`GroupClassifier`]): knows their weights.
        over_batch (`bool`): whether TRL divides advantages by the deviation over the batch; then it logs whether that is 0.
    """
    values = group_metrics(groups, names, classifier.weights)
    if over_batch:
        values["frac_reward_zero_std"] = float(np.isclose(deviation_over_batch(groups, classifier), 0))
    return values


def _normalized(groups: Sequence[RolloutGroup], classifier: GroupClassifier) -> torch.Tensor:
    """What TRL normalises over the batch: total rewards, or the sums of each function's normalised rewards; NaN if unscored."""
    rewards = np.stack([group.rewards for group in groups])  # (n, G, F)
    values = torch.from_numpy(total_rewards(rewards, classifier.weights))
    if classifier.aggregation == "normalize_then_sum":
        each = torch.from_numpy(rewards)
        each = (each - each.nanmean(1, keepdim=True)) / (nanstd(each, dim=1, keepdim=True) + EPSILON)
        values = (each * torch.from_numpy(classifier.weights)).nansum(-1).where(~values.isnan(), values)
    return values.flatten()
