r"""
When replay pauses: while the policy moves so fast that replayed rollouts say little about it.

With \(w = \pi_\theta / \pi_b\) the ratio of the present policy to the one that sampled, n replayed tokens are worth
\((\sum w)^2 / \sum w^2\) fresh ones (their effective sample size), a share of n that is near 1 where the policy has hardly moved.
It falls with the size of the optimizer's steps. At a learning rate that is near the largest that plain GRPO survives, further steps on
the same rollouts overshoot, and a batch of fresh groups is worth more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


DECAY = 0.8  # of earlier generation batches


@dataclass
class ReplayPause:
    """
    Args:
        least_ess (`float`): running effective sample size of replayed tokens, as a share, below which replay pauses; 0: never.

    Attributes:
        tokens (`float`), total (`float`), squares (`float`): of replayed tokens the number, and sums of w and of w^2; they fade.
    """

    least_ess: float = 0.0
    tokens: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    @property
    def ess(self) -> float:
        """The running effective sample size, as a share; 1 before anything was replayed."""
        return self.total**2 / (self.tokens * self.squares) if self.squares else 1.0

    @property
    def active(self) -> bool:
        return self.ess < self.least_ess

    def begin_batch(self) -> None:
        """Let what earlier generation batches showed fade."""
        self.tokens, self.total, self.squares = DECAY * self.tokens, DECAY * self.total, DECAY * self.squares

    def observe(self, gathered: torch.Tensor) -> None:
        """Enter all processes' [`ratio_statistics`] of a micro-batch."""
        tokens, total, squares = gathered.view(-1, 7)[:, :3].double().sum(0).tolist()
        self.tokens, self.total, self.squares = self.tokens + tokens, self.total + total, self.squares + squares

    def state(self) -> list[float]:
        return [self.tokens, self.total, self.squares]

    def load_state(self, state: Sequence[float]) -> None:
        self.tokens, self.total, self.squares = map(float, state)
