"""Weights of prompts in log space, draws without replacement, passes over the prompts, and the share drawn uniformly."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.nn.functional import softplus


GAIN_HALF_LIFE = 8.0  # generation batches after which a group counts half
MARGIN = 1.25  # selection has to raise the effective share by this factor
PRIOR = 1.0  # effective groups, and zero-variance groups, of average weight that are taken as seen before the run


def log_chance_effective(p: torch.Tensor, group_size: int) -> torch.Tensor:
    r"""
    \(\log(1 - p^G - (1 - p)^G)\): the log-probability that a group has a gradient.

    Args:
        p (`torch.Tensor`): success rates in [0, 1].
        group_size (`int`): G, at least 2.

    Returns:
        `torch.Tensor`: float64, of the shape of `p`, at most 0; -inf where p is 0 or 1.
    """
    p = p.double()
    rare = torch.minimum(p, 1 - p)  # 1 - (1 - rare)^G without cancellation
    return torch.log(-torch.expm1(group_size * torch.log1p(-rare)) - rare**group_size)


def log_weight_effective(log_chance: torch.Tensor, sharpness: float, threshold: float | None) -> torch.Tensor:
    r"""
    \(\log \frac{P^\kappa}{P^\kappa + t^\kappa}\) with P the probability that a group has a gradient: near 0, so flat, well above the
    threshold t, and \(\kappa \log (P / t)\) well below it. Without a threshold \(\kappa \log P\).

    Args:
        log_chance (`torch.Tensor`): log P.
        sharpness (`float`): kappa.
        threshold (`float`, *optional*): t, in (0, 1].

    Returns:
        `torch.Tensor`: of the shape and dtype of `log_chance`, at most 0.
    """
    if threshold is None:
        return sharpness * log_chance
    return -softplus(sharpness * (math.log(threshold) - log_chance))


def log_weight_target(p: torch.Tensor, target: float, temperature: float) -> torch.Tensor:
    r"""
    \(-|p - \alpha| / \tau\), the paper's equation for sampling by difficulty.

    Args:
        p (`torch.Tensor`): success rates in [0, 1].
        target (`float`): alpha.
        temperature (`float`): tau.

    Returns:
        `torch.Tensor`: float64, of the shape of `p`, at most 0.
    """
    return -(p.double() - target).abs() / temperature


def rate_of_difference(label: torch.Tensor) -> torch.Tensor:
    r"""
    \(\tilde p = (1 - \sqrt{1 - 2 d}) / 2\), the success rate at which two completions of a binary reward differ with
    probability d = `label` / 2, in [0, 1/2].

    Args:
        label (`torch.Tensor`): twice the probability that two completions' rewards differ, in [0, 1].
    """
    return (1 - (1 - label.clamp(0, 1)).sqrt()) / 2


def gumbel_keys(log_weights: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """
    Keys whose descending order is a draw without replacement with probabilities proportional to `exp(log_weights)`
    (the Gumbel-max trick; Kool et al. 2019, arXiv 1903.06059). Prompts of weight 0 come last, in random order.
    """
    noise = -torch.empty(log_weights.shape, dtype=torch.float64).exponential_(generator=generator).log()
    excluded, log_weights = log_weights.isneginf(), log_weights.double()
    # Below all others: in float64 Gumbel noise lies between -4 and 40
    last = (log_weights[~excluded].min() if bool((~excluded).any()) else 0.0) - 100.0
    return torch.where(excluded, last, log_weights) + noise


def gumbel_top_k(log_weights: torch.Tensor, n: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """
    Draw n different indices, each time with probabilities proportional to `exp(log_weights)` of those that are left.

    Everything is in log space and float64: a softmax at the paper's temperature underflows in float32, and
    `torch.multinomial` then returns rows of probability 0.

    Args:
        log_weights (`torch.Tensor` of shape `(N,)`): not normalised; -inf only where nothing else is left.
        n (`int`): at most N.
        generator (`torch.Generator`, *optional*): the only source of randomness.

    Returns:
        `torch.Tensor` of shape `(n,)` and dtype int64, in the order of the draw.

    Raises:
        `ValueError`: n is not in [0, N], or a weight is NaN.
    """
    if not 0 <= n <= len(log_weights):
        raise ValueError(f"{n} indices were asked for; {len(log_weights)} weights give from 0 to {len(log_weights)}.")
    if log_weights.isnan().any():
        raise ValueError("Weights of prompts are NaN: their predicted success rates are.")
    return gumbel_keys(log_weights, generator).topk(n).indices


class PromptPass:
    """
    Passes over the prompts: no prompt is selected twice while the others carry enough of the weight. Draws by a sharp weight
    alone come back to the same few prompts. A pass draws without replacement across generation batches, as an epoch does.

    Args:
        size (`int`): number of prompts, N.
        coverage (`float`): share of all weight that is drawn before a prompt may be drawn again, in [0, 1]: 0 allows repeats
            at any time, and 1 draws every prompt first, but for those that are too few for a whole batch.

    Attributes:
        drawn (`np.ndarray` of shape `(N,)`): bool, the prompts of the present pass.
    """

    def __init__(self, size: int, coverage: float):
        self.coverage = coverage
        self.drawn = np.zeros(size, dtype=bool)

    def restrict(self, log_weights: torch.Tensor, excluded: torch.Tensor, n: int) -> torch.Tensor:
        """
        Log-weights without those of the present pass. A new pass begins if the prompts that are left carry less than
        `1 - coverage` of the weight, or if fewer than `n` of them are not excluded.

        Args:
            log_weights (`torch.Tensor` of shape `(N,)`): of all prompts, finite.
            excluded (`torch.Tensor` of shape `(N,)`): bool, prompts that must not be drawn in any case: those that the present
                generation batch has already. They belong to the new pass, too.
            n (`int`): prompts that are to be drawn.

        Returns:
            `torch.Tensor` of shape `(N,)`: `log_weights`, with -inf for the prompts of the present pass.
        """
        if not self.coverage:
            return log_weights
        left = torch.from_numpy(~self.drawn)
        if log_weights.softmax(0)[left].sum() < 1 - self.coverage or int((left & ~excluded).sum()) < n:
            self.drawn[:] = excluded.numpy()
            return log_weights
        return log_weights.masked_fill(~left, -torch.inf)

    def add(self, ids: np.ndarray) -> None:
        """Enter prompts that are rolled out."""
        self.drawn[ids] = True


class ExplorationShare:
    r"""
    How much of a proposal is drawn uniformly: most of it at first, and little once selection is seen to gain.

    What selection would gain is estimated from every group, however it was drawn. With N prompts, of which i is selected with
    probability \(w_i / N\), and a share x drawn uniformly, a group's prompt was drawn \(m_i = x + (1 - x) w_i\) times as often as
    by uniform sampling. So with \(e_i = 1\) for effective groups and 0 for others

        e_u = sum_i (e_i / m_i) / sum_i (1 / m_i),    e_s = sum_i (e_i w_i / m_i) / sum_i (w_i / m_i)

    estimate the effective share of uniform sampling and of selection alone (self-normalised importance sampling), both from
    the same groups. The weights \(w_i\) were computed before the groups were rolled out, so that a predictor that knows only noise
    gains nothing. Selection also changes which prompts are trained on, so it has to gain a quarter (`MARGIN`) to be worth that. With
    z the difference \(e_s - 1.25 e_u\) in standard errors (of the linearised ratios), the share is

        least + (1 - least) Phi(1 - z)

    where Phi is the normal distribution function: 0.84 of the remainder as long as nothing is known, 0.16 at z = 2, 0.02 at z = 3,
    and 0.98 at z = -1. Selection that gains less gives way to uniform sampling.

    Args:
        least (`float`): lowest share, in [0, 1]; 0 switches exploration off.
    """

    def __init__(self, least: float):
        self.least = least
        # Of all groups and of effective ones: 1 / m, w / m; and, fading twice as fast, their squares and product
        self._sums, self._squares = np.zeros((2, 2)), np.zeros((2, 3))

    def observe(self, effective: np.ndarray, weights: np.ndarray, share: np.ndarray) -> None:
        """
        Enter the groups of a generation batch.

        Args:
            effective (`np.ndarray` of shape `(n,)`): bool, whether each carries a gradient.
            weights (`np.ndarray` of shape `(n,)`): w, probability of each prompt in the draw by weight, times the number of
                prompts.
            share (`np.ndarray` of shape `(n,)`): x, the share that was drawn uniformly.
        """
        if not self.least:  # nothing is ever explored, and what was never drawn would count without bound
            return
        fade = 0.5 ** (1 / GAIN_HALF_LIFE)
        times = share + (1 - share) * weights
        u, v = 1 / times, weights / times
        counted = np.stack([np.ones(len(effective)), effective])  # (2, n)
        self._sums = fade * self._sums + counted @ np.stack([u, v], axis=1)
        self._squares = fade**2 * self._squares + counted @ np.stack([u * u, v * v, u * v], axis=1)

    @property
    def gain(self) -> float:
        """z: what selection adds to the effective share, in standard errors."""
        # Before the run selection is taken to gain as much as it has to
        (total_u, total_v), (effective_u, effective_v) = self._sums + PRIOR * np.array([[2.0, 2.0], [1.0, MARGIN]])
        squares, effective_squares = self._squares + PRIOR * np.array([[2.0], [1.0]])
        r, s = effective_u / total_u, effective_v / total_v

        def products(place: int, a: float, b: float) -> float:
            """Sum of (e - a) (e - b) times a product of weights, for e of 0 and 1."""
            return float(effective_squares[place] * (1 - a - b) + a * b * squares[place])

        variance = MARGIN**2 * products(0, r, r) / total_u**2 + products(1, s, s) / total_v**2
        variance -= 2 * MARGIN * products(2, r, s) / (total_u * total_v)
        return (s - MARGIN * r) / math.sqrt(variance) if variance > 1e-12 else 0.0

    @property
    def value(self) -> float:
        """The share, in [`least`, 1]."""
        if not self.least:
            return 0.0
        return self.least + (1 - self.least) * 0.5 * math.erfc((self.gain - 1) / math.sqrt(2))

    def state_dict(self) -> dict[str, np.ndarray]:
        return {"sums": self._sums.copy(), "squares": self._squares.copy()}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        self._sums, self._squares = (state[name].astype(np.float64) for name in ("sums", "squares"))
