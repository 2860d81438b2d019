"""Weights of prompts in log space, draws without replacement, and passes over the prompts."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.nn.functional import softplus


SHARPNESS = 4.0  # of the weight at its threshold

#: How far the log-weight of excluded prompts lies below that of all others. Gumbel noise in float64 lies between -4
#: and 40, so that it does not bridge this distance.
EXCLUDED_DISTANCE = 100.0


def chance_effective(p: torch.Tensor, group_size: int) -> torch.Tensor:
    r"""
    The probability that a group has a gradient: \(1 - p^G - (1 - p)^G\).

    Args:
        p (`torch.Tensor`): success rates in [0, 1], of any shape.
        group_size (`int`): G, at least 2.

    Returns:
        `torch.Tensor` of the shape of `p`: float64 in [0, 1); 0 where p is 0 or 1.
    """
    p = p.double()
    # The formula is symmetric in p and 1 - p. With the smaller one, "rare", it keeps its digits near 0 and 1
    rare = torch.minimum(p, 1 - p)
    any_rare = -torch.expm1(group_size * torch.log1p(-rare))  # 1 - (1 - rare)^G without cancellation
    all_rare = rare**group_size
    return any_rare - all_rare


def log_weight(chance: torch.Tensor, threshold: float) -> torch.Tensor:
    r"""
    The log-weight of prompts: \(\log \frac{P^4}{P^4 + t^4}\), near 0, so flat, well above the threshold, and
    \(4 \log (P / t)\) well below it.

    Args:
        chance (`torch.Tensor` of shape `(N,)`): P > 0, the probability that a group has a gradient.
        threshold (`float`): t, in (0, 1].

    Returns:
        `torch.Tensor` of shape `(N,)`: log-weights, at most 0.
    """
    # log(P^4 / (P^4 + t^4)) = -log(1 + (t / P)^4) = -softplus(4 log(t / P))
    return -softplus(SHARPNESS * (math.log(threshold) - chance.log()))


def gumbel_top_k(log_weights: torch.Tensor, n: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """
    Draw n different indices, each time with probabilities proportional to `exp(log_weights)` of those that are left,
    by the Gumbel-max trick (Kool et al. 2019, arXiv 1903.06059). Weights of -inf come last, in random order.

    Everything is in log space and float64: a softmax at the paper's temperature underflows in float32, and
    `torch.multinomial` then returns rows of probability 0.

    Args:
        log_weights (`torch.Tensor` of shape `(N,)`): not normalised.
        n (`int`): number of indices, in [0, N].
        generator (`torch.Generator`, *optional*): source of randomness; torch's own if not given.

    Returns:
        `torch.Tensor` of shape `(n,)`: int64 indices in the order of the draw.

    Raises:
        ValueError: n is not in [0, N], or a weight is NaN.
    """
    if not 0 <= n <= len(log_weights):
        raise ValueError(f"{n} indices were asked for; {len(log_weights)} weights give from 0 to {len(log_weights)}.")
    if log_weights.isnan().any():
        raise ValueError("Weights of prompts are NaN: their predicted success rates are.")
    log_weights = log_weights.double()
    # Minus the logarithm of an exponential variable is a Gumbel variable
    exponential = torch.empty(log_weights.shape, dtype=torch.float64).exponential_(generator=generator)
    noise = -exponential.log()
    excluded = log_weights.isneginf()
    lowest = 0.0 if bool(excluded.all()) else log_weights[~excluded].min()
    finite = torch.where(excluded, lowest - EXCLUDED_DISTANCE, log_weights)
    return (finite + noise).topk(n).indices


class PromptPass:
    """
    Passes over N prompts: no prompt is selected twice while the others carry enough of the weight. Draws by a sharp
    weight alone come back to the same few prompts.

    Args:
        size (`int`): N, number of prompts.
        coverage (`float`): share of all weight that is drawn before a prompt may be drawn again, in [0, 1]: 0 allows
            repeats at any time, and 1 draws every prompt first, but for those that are too few for a whole batch.

    Attributes:
        drawn (`np.ndarray` of shape `(N,)`): bool, prompts of the present pass. Who draws a prompt enters it here.
    """

    def __init__(self, size: int, coverage: float):
        self.coverage = coverage
        self.drawn = np.zeros(size, dtype=bool)

    def restrict(self, log_weights: torch.Tensor, excluded: torch.Tensor, n: int) -> torch.Tensor:
        """
        Leave out the prompts of the present pass. A new pass begins if the prompts that are left carry less than
        `1 - coverage` of the weight, or are too few; `excluded` prompts belong to the new pass, too.

        Args:
            log_weights (`torch.Tensor` of shape `(N,)`): finite log-weights.
            excluded (`torch.Tensor` of shape `(N,)`): bool, prompts that the present generation batch has already.
            n (`int`): number of prompts that are to be drawn.

        Returns:
            `torch.Tensor` of shape `(N,)`: the log-weights, -inf for the prompts of the present pass.
        """
        if not self.coverage:
            return log_weights
        left = torch.from_numpy(~self.drawn)
        share_left = log_weights.softmax(0)[left].sum()
        num_available = int((left & ~excluded).sum())
        if share_left < 1 - self.coverage or num_available < n:
            self.drawn[:] = excluded.numpy()
            return log_weights
        return log_weights.masked_fill(~left, -torch.inf)
