"""`RewardScale`: maps total rewards to success rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers.utils import logging

from trl_dataeff.rollouts.group import RolloutGroup


logger = logging.get_logger(__name__)


@dataclass
class RewardScale:
    """
    Maps total rewards to success rates in [0, 1]: from the ends of `reward_range`, or the lowest and highest total
    seen so far. While only one value has been seen, it counts as success if it is positive.

    Attributes:
        low: the total that maps to 0; infinite before any total.
        high: the total that maps to 1; minus infinite before any total.
        fixed: whether the ends are given, so that they do not widen.
    """

    low: float = math.inf
    high: float = -math.inf
    fixed: bool = False

    @classmethod
    def of(cls, reward_range: Sequence[float] | None) -> RewardScale:
        """The scale of a configuration's `reward_range`."""
        if reward_range is None:
            return cls()
        low, high = (float(np.float32(bound)) for bound in reward_range)  # totals are float32, and may lie on a bound
        return cls(low, high, fixed=True)

    def reset(self) -> None:
        """Forget the totals seen so far."""
        if not self.fixed:
            self.low = math.inf
            self.high = -math.inf

    def observe(self, totals: np.ndarray) -> None:
        """Widen the range by totals of any shape; NaN and infinite ones are passed over."""
        seen = totals[np.isfinite(totals)]
        if self.fixed:
            is_outside = (seen < self.low) | (seen > self.high)
            if is_outside.any():
                logger.warning_once(
                    f"Total rewards lie outside of `reward_range` ({self.low:g} to {self.high:g}) and count as its "
                    "nearer end for selection, while training uses them as they are. Widen the range, or leave it "
                    "unset."
                )
        elif seen.size:
            self.low = min(self.low, float(seen.min()))
            self.high = max(self.high, float(seen.max()))

    def state_dict(self) -> dict[str, float] | None:
        """Its ends as JSON values; `None` before any reward."""
        if not math.isfinite(self.low):
            return None
        return {"low": self.low, "high": self.high}

    def load_state_dict(self, state: dict[str, float] | None) -> None:
        """Restore the ends, unless they are given."""
        if state is not None and not self.fixed:
            self.low = state["low"]
            self.high = state["high"]

    def mapping_from(self, earlier: RewardScale) -> tuple[float, float] | None:
        """
        How success rates change from an earlier range to this one.

        Args:
            earlier ([`RewardScale`]): the scale under which the success rates were computed.

        Returns:
            `(a, b)`: a success rate r under `earlier` is `a * r + b` under this range, or its nearer end where a
            resumed run gives a narrower one. `None` if there is nothing to map: the range is the same, or `earlier`
            had seen nothing.
        """
        is_same = (self.low, self.high) == (earlier.low, earlier.high)
        if is_same or not np.isfinite(earlier.low):
            return None
        width = self.high - self.low
        return (earlier.high - earlier.low) / width, (earlier.low - self.low) / width

    def success_rate(self, totals: np.ndarray) -> np.ndarray:
        """Mean success of each row of `totals`, `(n, G)` -> `(n,)`, in [0, 1]; NaN for a row with no scorable one."""
        totals = np.asarray(totals, dtype=np.float64)
        if self.high > self.low:
            success = np.clip((totals - self.low) / (self.high - self.low), 0.0, 1.0)
        else:
            is_positive = (totals > 0).astype(np.float64)
            success = np.where(np.isnan(totals), np.nan, is_positive)
        scored = ~np.isnan(success)
        count = scored.sum(axis=1)
        total = np.where(scored, success, 0.0).sum(axis=1)
        mean = total / np.maximum(count, 1)
        return np.where(count > 0, mean, np.nan)

    def success_rates(self, groups: Sequence[RolloutGroup]) -> np.ndarray:
        """Success rates of groups by the range seen so far, float64 `(n,)`, in [0, 1] or NaN."""
        if not groups:
            return np.empty(0)
        totals = np.stack([group.totals for group in groups])
        return self.success_rate(totals)
