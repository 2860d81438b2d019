"""How many groups a round of rollouts generates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trl_dataeff.rollouts.group import RolloutGroup


SMALLEST = 0.25  # round of dynamic sampling, as a share of the batch
LARGEST = 1.5


@dataclass
class ZeroVarianceShare:
    """
    Running share of zero-variance groups: counts of groups that fade with every round.

    Attributes:
        decay: what is left of earlier counts after a round, in (0, 1).
        zero: count of zero-variance groups.
        total: count of groups.
    """

    decay: float = 0.8
    zero: float = 0.0
    total: float = 0.0

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        """Enter the groups of a round."""
        num_zero_variance = sum(not group.effective for group in groups)
        self.zero = self.decay * self.zero + num_zero_variance
        self.total = self.decay * self.total + len(groups)

    def state_dict(self) -> dict[str, float]:
        return {"zero": self.zero, "total": self.total}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.zero = state["zero"]
        self.total = state["total"]

    @property
    def value(self) -> float:
        """The share, in [0, 1]; 0 before the first round."""
        return self.zero / self.total if self.total else 0.0


@dataclass(frozen=True)
class RoundSizes:
    """
    Rounds of rollouts in a generation batch, and their sizes.

    A single round has as many groups as places are missing. Several rounds replace zero-variance groups (dynamic
    sampling, DAPO, arXiv 2503.14476); each has `ceil(margin * missing / (1 - zero_share))` groups, within 0.25 and 1.5
    times the batch (GRESO, arXiv 2506.02177, section on adaptive batch size), and never fewer than are missing while
    the bounds allow it.

    Attributes:
        most: rounds at most.
        margin: oversampling factor, at least 1.
    """

    most: int = 1
    margin: float = 1.0

    def size(self, missing: int, *, batch_groups: int, zero_share: float, world_size: int, num_prompts: int) -> int:
        """
        Groups to generate in a round.

        Args:
            missing (`int`): places that are empty, 1 to `batch_groups`.
            batch_groups (`int`): B, groups trained on.
            zero_share (`float`): expected share of zero-variance groups, in [0, 1]; at 1 the upper bound is taken.
            world_size (`int`): number of processes, of which the size is a multiple.
            num_prompts (`int`): N, prompts of the dataset, which bound it.
        """
        size = missing
        if self.most > 1:
            smallest = math.ceil(SMALLEST * batch_groups)
            largest = math.floor(LARGEST * batch_groups)
            wanted = largest
            if zero_share < 1:
                wanted = math.ceil(self.margin * missing / (1 - zero_share))
            size = min(max(wanted, missing, smallest), largest)
        rounded_up = math.ceil(size / world_size) * world_size
        most_prompts = num_prompts // world_size * world_size
        return min(rounded_up, most_prompts)
