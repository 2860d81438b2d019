"""
Passes over the prompts: no prompt is selected twice while the others carry enough of the weight.

Draws by a sharp weight alone come back to the same few prompts. A pass draws without replacement across generation batches,
as an epoch does, and ends when the prompts that are left carry too little of the weight.
"""

from __future__ import annotations

import numpy as np
import torch


class PromptPass:
    """
    Which prompts the present pass has had, and when the next one begins.

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
