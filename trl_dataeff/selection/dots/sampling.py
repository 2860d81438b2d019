"""Weights of prompts in log space, draws without replacement, and passes over the prompts."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.nn.functional import softplus


SHARPNESS = 4.0  # of the weight at its threshold


def chance_effective(p: torch.Tensor, group_size: int) -> torch.Tensor:
    r"""
    \(1 - p^G - (1 - p)^G\): the probability that a group has a gradient, float64 in [0, 1), from success rates p in [0, 1] and
    the group size G, at least 2; 0 where p is 0 or 1.
    """
    p = p.double()
    rare = torch.minimum(p, 1 - p)  # 1 - (1 - rare)^G without cancellation
    return -torch.expm1(group_size * torch.log1p(-rare)) - rare**group_size


def log_weight(chance: torch.Tensor, threshold: float) -> torch.Tensor:
    r"""
    \(\log \frac{P^4}{P^4 + t^4}\) with P > 0, the probability that a group has a gradient, and t in (0, 1], the threshold:
    near 0, so flat, well above the threshold, and \(4 \log (P / t)\) well below it.
    """
    return -softplus(SHARPNESS * (math.log(threshold) - chance.log()))


def gumbel_top_k(log_weights: torch.Tensor, n: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """
    Draw n different indices, int64 `(n,)` in the order of the draw, each time with probabilities proportional to
    `exp(log_weights)` of those that are left, by the Gumbel-max trick (Kool et al. 2019, arXiv 1903.06059). Weights of -inf come
    last, in random order. Raises a `ValueError` if n is not in [0, N], or a weight is NaN.

    Everything is in log space and float64: a softmax at the paper's temperature underflows in float32, and
    `torch.multinomial` then returns rows of probability 0.

    Args:
        log_weights (`torch.Tensor` of shape `(N,)`): not normalised.
    """
    if not 0 <= n <= len(log_weights):
        raise ValueError(f"{n} indices were asked for; {len(log_weights)} weights give from 0 to {len(log_weights)}.")
    if log_weights.isnan().any():
        raise ValueError("Weights of prompts are NaN: their predicted success rates are.")
    noise = -torch.empty(log_weights.shape, dtype=torch.float64).exponential_(generator=generator).log()
    excluded, log_weights = log_weights.isneginf(), log_weights.double()
    # Below all others: in float64 Gumbel noise lies between -4 and 40
    last = (log_weights[~excluded].min() if bool((~excluded).any()) else 0.0) - 100.0
    return (torch.where(excluded, last, log_weights) + noise).topk(n).indices


class PromptPass:
    """
    Passes over N prompts: no prompt is selected twice while the others carry enough of the weight. Draws by a sharp weight
    alone come back to the same few prompts. `drawn`, bool `(N,)`, has the prompts of the present pass.

    Args:
        coverage (`float`): share of all weight that is drawn before a prompt may be drawn again, in [0, 1]: 0 allows repeats
            at any time, and 1 draws every prompt first, but for those that are too few for a whole batch.
    """

    def __init__(self, size: int, coverage: float):
        self.coverage = coverage
        self.drawn = np.zeros(size, dtype=bool)

    def restrict(self, log_weights: torch.Tensor, excluded: torch.Tensor, n: int) -> torch.Tensor:
        """
        `log_weights` `(N,)`, finite, with -inf for the prompts of the present pass. A new pass begins if the prompts that are
        left carry less than `1 - coverage` of the weight, or if fewer than `n`, which are to be drawn, are not `excluded`
        (bool `(N,)`: prompts that the present generation batch has already). These belong to the new pass, too.
        """
        if not self.coverage:
            return log_weights
        left = torch.from_numpy(~self.drawn)
        if log_weights.softmax(0)[left].sum() < 1 - self.coverage or int((left & ~excluded).sum()) < n:
            self.drawn[:] = excluded.numpy()
            return log_weights
        return log_weights.masked_fill(~left, -torch.inf)
