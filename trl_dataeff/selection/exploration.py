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
"""

from __future__ import annotations

import math

import numpy as np


HALF_LIFE = 8.0  # generation batches after which a group counts half
MARGIN = 1.25  # selection has to raise the effective share by this factor
PRIOR = 1.0  # effective groups, and zero-variance groups, of average weight that are taken as seen before the run


class ExplorationShare:
    """
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
        fade = 0.5 ** (1 / HALF_LIFE)
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
