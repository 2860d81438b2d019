r"""
Beta-binomial distributions: of the number of successes in a group whose success rate is itself uncertain.

If a prompt's success rate is Beta distributed with parameters a and b, k of n completions succeed with probability
\(\binom{n}{k} B(a + k, b + n - k) / B(a, b)\).
"""

from __future__ import annotations

import torch


def chance_effective(a: torch.Tensor, b: torch.Tensor, group_size: int) -> torch.Tensor:
    r"""
    The probability that a group has a gradient, which is that neither none nor all of its completions succeed, where
    the success rate is uncertain. It is smaller than with the mean rate for certain, as the rate may be near 0 or 1.

    Args:
        a (`torch.Tensor`): parameters of Beta distributions, above 0, of any shape.
        b (`torch.Tensor`): likewise.
        group_size (`int`): G, at least 2.

    Returns:
        `torch.Tensor` of their shape: float64 in [0, 1).
    """
    a = a.double()
    b = b.double()
    total = a + b
    none = torch.ones_like(total)
    every = torch.ones_like(total)
    for j in range(group_size):
        trials = total + j
        none *= (b + j) / trials
        every *= (a + j) / trials
    return (1 - none - every).clamp_min(0)


def chance_at(p: torch.Tensor, group_size: int) -> torch.Tensor:
    r"""
    The probability that a group has a gradient, where the success rate is known: \(1 - p^G - (1 - p)^G\).

    Args:
        p (`torch.Tensor`): success rates in [0, 1], of any shape.
        group_size (`int`): G.

    Returns:
        `torch.Tensor` of the shape of `p`.
    """
    return 1 - p**group_size - (1 - p) ** group_size


def log_likelihood(a: torch.Tensor, b: torch.Tensor, successes: torch.Tensor, trials: torch.Tensor) -> torch.Tensor:
    """
    The log-likelihood of groups, but for the binomial coefficient, which is the same for every distribution.

    Args:
        a (`torch.Tensor`): parameters of Beta distributions, above 0.
        b (`torch.Tensor`): likewise.
        successes (`torch.Tensor`): of each group, in [0, trials]; broadcast with the parameters.
        trials (`torch.Tensor`): completions of each group.

    Returns:
        `torch.Tensor` of the broadcast shape: float64, at most 0.
    """
    a = a.double()
    b = b.double()
    return _log_beta(a + successes, b + trials - successes) - _log_beta(a, b)


def _log_beta(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)
