r"""
How much of a proposal is drawn uniformly: more of it, the less selection is seen to gain.

Selected and uniformly drawn groups are compared by their effective shares, \(e_s\) and \(e_u\), over the recent generation
batches. With z their difference in standard errors, the share drawn uniformly is

    least + (1 - least) Phi(-1 - z)

where Phi is the normal distribution function: 0.16 of the remainder as long as nothing is known, close to `least` once
selection has proved better (0.0014 at z = 2), and nearly all once it has proved worse (0.84 at z = -2). Selection that
does not raise the effective share so gives way to uniform sampling.
"""

from __future__ import annotations

import math

import numpy as np


HALF_LIFE = 8.0  # generation batches after which a group counts half


class ExplorationShare:
    """
    Args:
        least (`float`): lowest share, in [0, 1]; 0 switches exploration off.
    """

    def __init__(self, least: float):
        self.least = least
        self._counts = np.zeros((2, 2))  # selected and explored groups: effective ones, all

    def observe(self, effective: np.ndarray, explored: np.ndarray) -> None:
        """
        Enter the groups of a generation batch.

        Args:
            effective (`np.ndarray` of shape `(n,)`), explored (`np.ndarray` of shape `(n,)`): bool, whether each carries a
                gradient, and whether it was drawn uniformly.
        """
        self._counts *= 0.5 ** (1 / HALF_LIFE)
        for row, chosen in enumerate((~explored, explored)):
            self._counts[row] += effective[chosen].sum(), chosen.sum()

    @property
    def value(self) -> float:
        """The share, in [`least`, 1]."""
        if not self.least:
            return 0.0
        successes, total = (self._counts + np.array([1.0, 2.0])).T  # Laplace's rule: one success and one failure more
        rate = successes / total
        z = (rate[0] - rate[1]) / math.sqrt((rate * (1 - rate) / total).sum())
        return self.least + (1 - self.least) * 0.5 * math.erfc((1 + z) / math.sqrt(2))

    def state_dict(self) -> dict[str, np.ndarray]:
        return {"counts": self._counts.copy()}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        self._counts = state["counts"].astype(np.float64)
