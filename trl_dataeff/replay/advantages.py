"""
Advantages that TRL normalises over the batch: those of fresh groups are normalised over all groups generated for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from trl.trainer.utils import nanstd

from trl_dataeff.replay.logprobs import GroupInBatch
from trl_dataeff.rollouts.classification import GroupClassifier, total_rewards
from trl_dataeff.rollouts.group import RolloutGroup


EPSILON = 1e-4  # TRL adds it to the deviations by which it divides


def renormalize(
    advantages: torch.Tensor,
    own: Sequence[GroupInBatch],
    *,
    generated: Sequence[RolloutGroup],
    trained: Sequence[RolloutGroup],
    classifier: GroupClassifier,
) -> torch.Tensor:
    """
    TRL has normalised advantages over all groups trained on (`scale_rewards="batch"`, and `normalize_then_sum`). Those
    of fresh groups are normalised over all groups generated for the batch instead: with replayed groups, which are all
    effective, they would be smaller.

    Args:
        advantages (`torch.Tensor` of shape `(rows,)`): TRL's.
        own (`Sequence[GroupInBatch]`): this process's groups.
        generated (`Sequence[RolloutGroup]`): all groups that were generated for the batch.
        trained (`Sequence[RolloutGroup]`): all groups of the batch.
        classifier ([`GroupClassifier`]): knows the weights of reward functions.

    Returns:
        `torch.Tensor` of shape `(rows,)`: unchanged if rewards are not finite.
    """
    # TRL also subtracts the mean over the batch, which is 0 because each group's mean is 0
    deviation_of_trained = deviation_over_batch(trained, classifier) + EPSILON
    deviation_of_generated = deviation_over_batch(generated, classifier) + EPSILON
    factor = deviation_of_trained / deviation_of_generated
    if not 0 < factor < math.inf:
        return advantages
    is_fresh = torch.zeros(len(advantages), dtype=torch.bool, device=advantages.device)
    for group in own:
        is_fresh[group.rows] = not group.is_stale
    return torch.where(is_fresh, advantages * factor, advantages)


def deviation_over_batch(groups: Sequence[RolloutGroup], classifier: GroupClassifier) -> float:
    """
    The deviation by which TRL divides if these groups are the batch; 0 without any, NaN or infinite for rewards that
    are not finite.
    """
    if not groups:
        return 0.0
    return nanstd(_normalized(groups, classifier)).item()


def _normalized(groups: Sequence[RolloutGroup], classifier: GroupClassifier) -> torch.Tensor:
    """
    What TRL normalises over the batch: total rewards, or the sums of each function's normalised rewards. `(n * G,)`,
    NaN for a completion without a score.
    """
    rewards = np.stack([group.rewards for group in groups])  # (n, G, F)
    totals = torch.from_numpy(total_rewards(rewards, classifier.weights))  # (n, G)
    if classifier.aggregation != "normalize_then_sum":
        return totals.flatten()
    by_function = torch.from_numpy(rewards)
    mean = by_function.nanmean(1, keepdim=True)  # (n, 1, F)
    deviation = nanstd(by_function, dim=1, keepdim=True)
    normalized = (by_function - mean) / (deviation + EPSILON)
    sums = (normalized * torch.from_numpy(classifier.weights)).nansum(-1)  # (n, G)
    return torch.where(totals.isnan(), totals, sums).flatten()
