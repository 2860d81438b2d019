r"""
When replay pauses: while the policy moves so fast that replayed rollouts say little about the present policy.

With \(w = \pi_\theta / \pi_b\) the ratio of the present policy to the one that sampled, n replayed tokens are worth
\((\sum w)^2 / \sum w^2\) fresh ones (their effective sample size): as a share of n near 1 where the policy has hardly moved. It falls with
the size of the optimizer's steps, and with the age of what is replayed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


DECAY = 0.8  # of earlier generation batches
MOST = 10.0  # a token's ratio is bounded by it and its inverse, so that no single token decides for dozens of batches


def token_sums(logps: torch.Tensor, behavior_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """
    Number of tokens, and sums of w and of w^2: `(3,)`.

    Args:
        logps (`torch.Tensor` of shape `(B, T)`): log-probs of the present policy, without gradient.
        behavior_logps (`torch.Tensor` of shape `(B, T)`): of the policy that sampled; NaN where they are not known, as for
            rows that were generated for this batch. Such tokens do not count.
        mask (`torch.Tensor` of shape `(B, T)`): 1 for the tokens that are trained on.
    """
    counted = mask.bool() & ~behavior_logps.isnan()
    bound = math.log(MOST)
    w = (logps - behavior_logps)[counted].float().clamp(-bound, bound).exp()
    return torch.stack([w.new_tensor(float(w.numel())), w.sum(), (w**2).sum()])


@dataclass
class ReplayPause:
    """
    Args:
        least_ess (`float`): running effective sample size of replayed tokens, as a share, below which replay pauses; 0: never.

    Attributes:
        means (`list[float]`): over generation batches with replayed tokens, the faded number of batches, and sums of their means
            of w and of w^2. A batch that replays one group counts like any other.
        sums (`list[float]`): of the present generation batch, see [`token_sums`].
    """

    least_ess: float = 0.0
    means: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])

    @property
    def ess(self) -> float:
        """The running effective sample size, as a share, of the batches before this one; 1 before anything was replayed."""
        batches, w, squares = self.means
        return w / batches * (w / squares) if batches else 1.0

    @property
    def active(self) -> bool:
        """Whether replay pauses."""
        return self.ess < self.least_ess

    def begin_batch(self) -> None:
        """Enter what the last generation batch has shown, if it replayed anything; earlier ones fade."""
        tokens, total, squares = self.sums
        if tokens:
            batch = (1.0, total / tokens, squares / tokens)
            self.means = [DECAY * before + now for before, now in zip(self.means, batch, strict=True)]
        self.sums = [0.0, 0.0, 0.0]

    def observe(self, sums: torch.Tensor) -> None:
        """Enter all processes' [`token_sums`] of a micro-batch, `(processes, 3)`, if they are finite."""
        total = sums.double().sum(0)
        if bool(total.isfinite().all()):
            self.sums = [before + now for before, now in zip(self.sums, total.tolist(), strict=True)]

    def state(self) -> list[list[float]]:
        return [self.means, self.sums]

    def load_state(self, state: Sequence[Sequence[float]]) -> None:
        self.means, self.sums = list(map(float, state[0])), list(map(float, state[1]))
