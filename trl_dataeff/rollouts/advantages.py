"""The scale of TRL's advantages where they are normalised over a batch that has replayed groups."""

from __future__ import annotations

import math

import numpy as np
import torch
from trl.trainer.utils import nanstd

from trl_dataeff.rollouts.classification import total_rewards


EPSILON = 1e-4  # TRL adds it to the deviations by which it divides


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
