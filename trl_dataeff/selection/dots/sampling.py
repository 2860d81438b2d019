"""Weights of prompts in log space, draws without replacement, and passes over the prompts."""

from __future__ import annotations

import torch
from torch.nn.functional import softplus


#: Power of the mean chance at which the weight of a prompt is one half: a third of the way, in logarithms, from what
#: uniform draws would find to a certain gradient
THRESHOLD_POWER = 2 / 3
PASS_ENDS = 0.3  # a pass over a kind ends when less than this share of its weight is left

#: How far the log-weight of excluded prompts lies below that of all others. Gumbel noise in float64 lies between -4
#: and 40, so that it does not bridge this distance.
EXCLUDED_DISTANCE = 100.0


def log_weights_of(chance: torch.Tensor, kinds: torch.Tensor, sharpness: float) -> torch.Tensor:
    r"""
    The log-weights of prompts: \(\log \frac{P^k}{P^k + t^k}\) with \(t = \bar P^{2/3}\), where \(\bar P\) is the mean
    chance of the prompts of a kind, which is what uniform draws would find. Well above t the weight is flat, so that a
    batch is of many prompts; well below it, it falls as \(P^k\). If nothing is known, chances are equal, and so are
    weights.

    Args:
        chance (`torch.Tensor` of shape `(N,)`): P > 0, the probability that a group has a gradient.
        kinds (`torch.Tensor` of shape `(N,)`): int64, kind of each prompt, from 0 on.
        sharpness (`float`): k, at least 0.

    Returns:
        `torch.Tensor` of shape `(N,)`: log-weights, at most 0.
    """
    totals = torch.zeros(int(kinds.max()) + 1, dtype=chance.dtype).index_add_(0, kinds, chance)
    mean = totals / torch.bincount(kinds)
    log_threshold = THRESHOLD_POWER * mean.log()[kinds]
    return -softplus(sharpness * (log_threshold - chance.log()))


def gumbel_keys(log_weights: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """
    Random keys whose n largest are n different indices, each drawn with probabilities proportional to
    `exp(log_weights)` of those that are left: the Gumbel-max trick (Kool et al. 2019, arXiv 1903.06059). Weights of
    -inf come last, in random order.

    Everything is in log space and float64: a softmax at the paper's temperature underflows in float32, and
    `torch.multinomial` then returns rows of probability 0.

    Args:
        log_weights (`torch.Tensor` of shape `(N,)`): not normalised.
        generator (`torch.Generator`, *optional*): source of randomness; torch's own if not given.

    Returns:
        `torch.Tensor` of shape `(N,)`: float64, finite.

    Raises:
        ValueError: a weight is NaN.
    """
    if log_weights.isnan().any():
        raise ValueError("Weights of prompts are NaN: their predicted success rates are.")
    log_weights = log_weights.double()
    # Minus the logarithm of an exponential variable is a Gumbel variable
    exponential = torch.empty(log_weights.shape, dtype=torch.float64).exponential_(generator=generator)
    noise = -exponential.log()
    excluded = log_weights.isneginf()
    lowest = 0.0 if bool(excluded.all()) else log_weights[~excluded].min()
    finite = torch.where(excluded, lowest - EXCLUDED_DISTANCE, log_weights)
    return finite + noise


def gumbel_top_k(log_weights: torch.Tensor, n: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """
    Draw n different indices by [`gumbel_keys`].

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
    return gumbel_keys(log_weights, generator).topk(n).indices


def top_of_kinds(keys: torch.Tensor, kinds: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """
    The indices of the largest keys of each kind.

    Args:
        keys (`torch.Tensor` of shape `(N,)`): float.
        kinds (`torch.Tensor` of shape `(N,)`): int64, from 0 to K - 1.
        counts (`torch.Tensor` of shape `(K,)`): int64, how many of each kind, at most those there are.

    Returns:
        `torch.Tensor` of shape `(n,)`: int64 indices, the largest key first.
    """
    descending = keys.argsort(descending=True)
    by_kind = descending[kinds[descending].argsort(stable=True)]  # of each kind, the largest key first
    sizes = torch.bincount(kinds, minlength=len(counts))
    starts = sizes.cumsum(0) - sizes
    rank = torch.arange(len(keys)) - starts[kinds[by_kind]]
    chosen = by_kind[rank < counts[kinds[by_kind]]]
    return chosen[keys[chosen].argsort(descending=True)]


class PromptPass:
    """
    Passes over the prompts of each kind: no prompt is drawn twice while the others of its kind carry enough of the
    weight. Draws by a sharp weight alone come back to the same few prompts.

    Args:
        kinds (`torch.Tensor` of shape `(N,)`): int64, kind of each prompt, from 0 to K - 1; each has a prompt.

    Attributes:
        drawn (`torch.Tensor` of shape `(N,)`): bool, prompts of the present passes. Who draws a prompt enters it here.
    """

    def __init__(self, kinds: torch.Tensor):
        self.kinds = kinds
        self.drawn = torch.zeros(len(kinds), dtype=torch.bool)

    def restrict(self, log_weights: torch.Tensor, excluded: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """
        Leave out the prompts of the present passes. A new pass over a kind begins if its prompts that are left carry
        less than 30 % of its weight, or are too few; `excluded` prompts belong to the new pass, too.

        Args:
            log_weights (`torch.Tensor` of shape `(N,)`): finite log-weights.
            excluded (`torch.Tensor` of shape `(N,)`): bool, prompts that the present generation batch has already.
            counts (`torch.Tensor` of shape `(K,)`): int64, number of prompts of each kind that are to be drawn.

        Returns:
            `torch.Tensor` of shape `(N,)`: the log-weights, -inf for the prompts of the present passes.
        """
        largest = torch.full((len(counts),), -torch.inf, dtype=log_weights.dtype)
        largest = largest.scatter_reduce(0, self.kinds, log_weights, "amax")
        weights = (log_weights - largest[self.kinds]).exp()  # of a sharp draw all may be too small for a float
        left = ~self.drawn
        share_left = self._of_kinds(weights * left) / self._of_kinds(weights)
        available = self._of_kinds((left & ~excluded).double())
        is_over = (share_left < PASS_ENDS) | (available < counts)
        self.drawn = torch.where(is_over[self.kinds], excluded, self.drawn)
        return log_weights.masked_fill(self.drawn, -torch.inf)

    def _of_kinds(self, values: torch.Tensor) -> torch.Tensor:
        """Sums by kind, `(N,)` to `(K,)`."""
        return torch.bincount(self.kinds, weights=values)


class KindShares:
    """
    How many prompts of each kind are drawn: over time, the kind's share of the dataset.

    Args:
        kinds (`torch.Tensor` of shape `(N,)`): int64, kind of each prompt, from 0 to K - 1; each has a prompt.

    Attributes:
        due (`torch.Tensor` of shape `(K,)`): float64, by how many prompts each kind has been drawn too few.
    """

    def __init__(self, kinds: torch.Tensor):
        self.shares = torch.bincount(kinds).double() / len(kinds)
        self.due = torch.zeros_like(self.shares)

    def take(self, n: int, available: torch.Tensor) -> torch.Tensor:
        """
        Divide n draws.

        Args:
            n (`int`): number of prompts.
            available (`torch.Tensor` of shape `(K,)`): int64, prompts of each kind that can be drawn; at least n.

        Returns:
            `torch.Tensor` of shape `(K,)`: int64, prompts of each kind that are to be drawn; sum n.
        """
        self.due = self.due + n * self.shares
        # One prompt after the other, of the kind of which most is due: the j-th of a kind when `due - j` are due
        j = torch.arange(n)
        still_due = self.due[:, None] - j  # (K, n)
        still_due = still_due.masked_fill(j >= available[:, None], -torch.inf)
        chosen = still_due.flatten().topk(n).indices
        counts = torch.bincount(chosen // n, minlength=len(available))
        self.due = self.due - counts
        return counts
