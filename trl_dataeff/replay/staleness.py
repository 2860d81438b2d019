r"""
Which stored groups are too far from the policy to be replayed, by what the loss's own forward pass shows of replayed tokens.

With \(w = \pi_\theta / \pi_b\) the ratio of the present policy to the one that sampled:

- *effective sample size* of a group's tokens, \((\sum w)^2 / (n \sum w^2)\): 1 where all count equally;
- *unclipped share*: of its tokens, those whose gradient the clip leaves;
- *movement*: the mean \(|\log w|\), how far the policy has moved since the rollouts were sampled.

The first two are measured for each group that a batch replays. Movement is also needed of groups that it does not replay: their age in
steps times the measured movement per step. A high learning rate moves the policy faster, and groups leave after fewer steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trl_dataeff.rollouts.group import RolloutGroup


DECAY = 0.8  # of earlier batches, in the movement per step


def row_sums(log_ratio: torch.Tensor, ratio: torch.Tensor, clipped: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """
    What is summed over a row's tokens: 1, w, w^2, whether the token is clipped, and |log w|.

    Args:
        log_ratio (`torch.Tensor` of shape `(B, T)`): log w by token.
        ratio (`torch.Tensor` of shape `(B, T)` or `(B, 1)`): w, by which the loss weighs.
        clipped (`torch.Tensor` of shape `(B, T)` or `(B, 1)`): bool.
        mask (`torch.Tensor` of shape `(B, T)`): 1 for the tokens that are trained on.

    Returns:
        `torch.Tensor` of shape `(B, 5)`.
    """
    mask, ratio = mask.float(), ratio.float().expand_as(mask)
    values = (torch.ones_like(mask), ratio, ratio**2, clipped.expand_as(mask), log_ratio.float().abs())
    return torch.stack([(value * mask).sum(1) for value in values], dim=1)


@dataclass
class Staleness:
    """
    Args:
        max_movement (`float`, *optional*): movement beyond which a group is stale; `None`: none.
        min_ess (`float`), min_unclipped (`float`): effective sample size and unclipped share below which a group is.
        least_age (`int`): steps; no group up to this age is stale by its movement. Groups of the last batch have to be within
            it: without replayed tokens nothing would be measured.

    Attributes:
        moved (`float`), steps (`float`): sums over measured tokens, of |log w| and of the groups' ages; they fade.
        step (`int`): optimizer step at which the last generation batch began.
    """

    max_movement: float | None = None
    min_ess: float = 0.0
    min_unclipped: float = 0.0
    least_age: int = 1
    moved: float = 0.0
    steps: float = 0.0
    step: int = 0

    @property
    def speed(self) -> float:
        """Movement per step."""
        return self.moved / self.steps if self.steps else 0.0

    def observe(self, measured: Sequence[RolloutGroup], step: int) -> None:
        """Enter the groups that the last generation batch replayed; the next one begins at `step`."""
        sums = [(group.ratio_sums, self.step - group.step) for group in measured]
        if measured:
            self.moved = DECAY * self.moved + sum(values[4] for values, _ in sums if values)
            self.steps = DECAY * self.steps + sum(values[0] * age for values, age in sums if values)
        self.step = step

    def is_stale(self, group: RolloutGroup, step: int) -> bool:
        """Whether a group is not to be replayed at `step`."""
        if group.ratio_sums is not None and group.ratio_sums[0]:
            tokens, total, squares, clipped, _ = group.ratio_sums
            ess = total**2 / (tokens * squares) if squares else 0.0
            if ess < self.min_ess or 1 - clipped / tokens < self.min_unclipped:
                return True
        age = step - group.step
        return self.max_movement is not None and age > self.least_age and self.speed * age > self.max_movement

    def state(self) -> list[float]:
        return [self.moved, self.steps, self.step]

    def load_state(self, state: Sequence[float]) -> None:
        self.moved, self.steps, self.step = float(state[0]), float(state[1]), int(state[2])
