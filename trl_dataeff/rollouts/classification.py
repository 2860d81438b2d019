"""What a group of rewards is worth: success rate, zero variance, and kind; and rewards that are most likely a mistake."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers.utils import logging

from trl_dataeff.rollouts.group import EASY, EFFECTIVE, HARD, RolloutGroup
from trl_dataeff.utils import listed


logger = logging.get_logger(__name__)
FEWEST_BATCHES = 20  # generation batches before a run without any effective group is warned of
ADVICE = "Check that the columns it reads hold what it expects. It may return None for completions that it does not apply to."


def total_rewards(rewards: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """
    Weighted sum of the reward functions, as TRL forms it: a function that gave no score (NaN) is left out, and a completion
    that no function scored is NaN. The sum runs in float64 and is rounded to float32. `rewards` `(..., F)`, `weights` `(F,)`
    -> `(...)`.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    unscored = np.isnan(rewards)
    totals = np.where(unscored, 0.0, rewards) @ np.asarray(weights, dtype=np.float64)
    totals[unscored.all(axis=-1)] = np.nan
    return totals.astype(np.float32)


def all_equal(values: np.ndarray, tolerance: np.ndarray | float = 0.0) -> NDArray[np.bool_]:
    """
    Whether the values of each row that are not NaN are all equal, up to a tolerance (`(n,)` or a number); true for rows with
    fewer than two of them. `values` `(n, G)` -> bool `(n,)`.
    """
    unscored = np.isnan(values)
    low = np.where(unscored, np.inf, values).min(axis=1)
    high = np.where(unscored, -np.inf, values).max(axis=1)
    with np.errstate(invalid="ignore"):  # a row of infinities, or of NaN
        equal: NDArray[np.bool_] = (low >= high) | (high - low <= tolerance)
    return equal


def is_zero_variance(rewards: np.ndarray, weights: np.ndarray, aggregation: str = "sum_then_normalize") -> np.ndarray:
    """
    Whether groups carry no gradient, bool `(n,)`: all scorable rewards are equal, or one is infinite, where TRL sets advantages
    to 0. Totals of several functions are compared up to the rounding of their sum (four units in the last place of float32),
    totals of one exactly. Under TRL's `multi_objective_aggregation="normalize_then_sum"`, which normalises each function on its
    own, every function with a weight has to give equal rewards.

    Args:
        rewards (`np.ndarray` of shape `(n, G, F)`): NaN where a function gave no score.
        weights (`np.ndarray` of shape `(F,)`): weights of the functions.
        aggregation (`str`, *optional*, defaults to `"sum_then_normalize"`): TRL's option of that name.
    """
    totals = total_rewards(rewards, weights)
    infinite: NDArray[np.bool_] = np.isinf(totals).any(axis=1)
    weighted = np.flatnonzero(weights)
    if aggregation == "normalize_then_sum":
        columns = [all_equal(rewards[:, :, k]) for k in weighted]
        equal: NDArray[np.bool_] = np.logical_and.reduce([np.ones(len(rewards), dtype=bool), *columns])
        return infinite | equal
    return infinite | all_equal(totals, rounding(rewards, weights))


def rounding(rewards: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Spread of each group's totals that is due to the rounding of their sum, `(n,)`; 0 for a single function."""
    if np.count_nonzero(weights) <= 1:
        return np.zeros(len(rewards))
    sizes = total_rewards(np.abs(rewards), np.abs(weights))
    return 4 * np.finfo(np.float32).eps * np.where(np.isnan(sizes), 0.0, sizes).max(axis=1)


def is_masked_out(
    rewards: np.ndarray, weights: np.ndarray, truncated: np.ndarray, aggregation: str = "sum_then_normalize"
) -> NDArray[np.bool_]:
    """
    Whether truncation removes a group's gradient under `mask_truncated_completions`: all completions that differ from their
    group's mean reward, under `normalize_then_sum` from that of some function, were cut off (`truncated`, bool `(n, G)`).
    Other arguments and the result are those of [`is_zero_variance`].
    """
    values = total_rewards(rewards, weights)[:, :, None]
    if aggregation == "normalize_then_sum":
        values = rewards[:, :, np.flatnonzero(weights)]
    values = values.astype(np.float64)
    scored = ~np.isnan(values)
    mean = np.where(scored, values, 0.0).sum(axis=1, keepdims=True) / np.maximum(scored.sum(axis=1, keepdims=True), 1)
    has_gradient = scored & ~truncated[:, :, None] & (values != mean)
    return ~has_gradient.any(axis=(1, 2))


@dataclass
class RewardScale:
    """
    Maps total rewards to success rates in [0, 1]: from the ends of `reward_range`, or the lowest and highest total seen so far.
    While only one value has been seen, it counts as success if it is positive.
    """

    low: float = float("inf")
    high: float = float("-inf")
    fixed: bool = False

    @classmethod
    def of(cls, reward_range: Sequence[float] | None) -> RewardScale:
        if reward_range is None:
            return cls()
        low, high = (float(np.float32(bound)) for bound in reward_range)  # totals are float32, and may lie on a bound
        return cls(low, high, fixed=True)

    def reset(self) -> None:
        """Forget the totals seen so far."""
        if not self.fixed:
            self.low, self.high = float("inf"), float("-inf")

    def observe(self, totals: np.ndarray) -> None:
        """Widen the range by totals of any shape; NaN and infinite ones are passed over."""
        seen = totals[np.isfinite(totals)]
        if self.fixed and ((seen < self.low) | (seen > self.high)).any():
            logger.warning_once(
                f"Total rewards lie outside of `reward_range` ({self.low:g} to {self.high:g}) and count as its nearer end for "
                "selection, while training uses them as they are. Widen the range, or leave it unset."
            )
        if not self.fixed and seen.size:
            self.low, self.high = min(self.low, float(seen.min())), max(self.high, float(seen.max()))

    def state_dict(self) -> dict[str, float] | None:
        """Its ends as JSON values; `None` before any reward."""
        return {"low": self.low, "high": self.high} if math.isfinite(self.low) else None

    def load_state_dict(self, state: dict[str, float] | None) -> None:
        """Restore the ends, unless they are given."""
        if state is not None and not self.fixed:
            self.low, self.high = state["low"], state["high"]

    def mapping_from(self, earlier: RewardScale) -> tuple[float, float] | None:
        """
        `(a, b)`: a success rate r under `earlier` is `a * r + b` under this range, or its nearer end where a resumed run gives
        a narrower one. `None` if there is nothing to map: the range is the same, or `earlier` had seen nothing.
        """
        if (self.low, self.high) == (earlier.low, earlier.high) or not np.isfinite(earlier.low):
            return None
        width = self.high - self.low
        return (earlier.high - earlier.low) / width, (earlier.low - self.low) / width

    def success_rate(self, totals: np.ndarray) -> np.ndarray:
        """Mean success of each row of `totals`, `(n, G)` -> `(n,)`, in [0, 1]; NaN for a row with no scorable one."""
        totals = np.asarray(totals, dtype=np.float64)
        if self.high > self.low:
            success = np.clip((totals - self.low) / (self.high - self.low), 0.0, 1.0)
        else:
            success = np.where(np.isnan(totals), np.nan, (totals > 0).astype(np.float64))
        scored = ~np.isnan(success)
        count = scored.sum(axis=1)
        mean = np.where(scored, success, 0.0).sum(axis=1) / np.maximum(count, 1)
        return np.where(count > 0, mean, np.nan)

    def success_rates(self, groups: Sequence[RolloutGroup]) -> np.ndarray:
        """Success rates of groups by the range seen so far, float64 `(n,)`, in [0, 1] or NaN."""
        return self.success_rate(np.stack([group.totals for group in groups])) if groups else np.empty(0)


class Classified(NamedTuple):
    """What rewards say of n groups: total rewards `(n, G)`, success rates `(n,)`, NaN without a score, and kinds `(n,)`, int8."""

    totals: np.ndarray
    success_rates: np.ndarray
    kinds: np.ndarray


class GroupClassifier:
    """
    Total rewards, success rates and kinds of groups, from their rewards. Its `scale` widens with them.

    Args:
        weights (`np.ndarray` of shape `(F,)`): weights of the reward functions.
        reward_range (`tuple[float, float]`, *optional*): lowest and highest total; by default those seen so far.
        aggregation (`str`, *optional*, defaults to `"sum_then_normalize"`): TRL's `multi_objective_aggregation`.
        masks_truncated (`bool`, *optional*, defaults to `False`): TRL's `mask_truncated_completions`.
    """

    def __init__(
        self,
        weights: np.ndarray,
        *,
        reward_range: Sequence[float] | None = None,
        aggregation: str = "sum_then_normalize",
        masks_truncated: bool = False,
    ):
        self.weights = np.asarray(weights, dtype=np.float32)
        self.scale = RewardScale.of(reward_range)
        self.aggregation = aggregation
        self.masks_truncated = masks_truncated

    def classify(self, rewards: np.ndarray, truncated: np.ndarray) -> Classified:
        """
        Classify the groups of a round, and widen the scale: `rewards` `(n, G, F)`, NaN where a function gave no score, and
        `truncated` `(n, G)`, bool, completions that did not end by themselves. Zero-variance groups are easy at the top of the
        range of rewards, and hard anywhere else.
        """
        totals = total_rewards(rewards, self.weights)
        self.scale.observe(totals)
        success_rates = self.scale.success_rate(totals)
        zero_variance = is_zero_variance(rewards, self.weights, self.aggregation)
        if self.masks_truncated:
            zero_variance |= is_masked_out(rewards, self.weights, truncated, self.aggregation)
        zero_variance_kinds = np.where(
            success_rates >= 1.0 - 1e-6, EASY, HARD
        )  # but for the rounding of a sum of rewards
        kinds = np.where(zero_variance, zero_variance_kinds, EFFECTIVE).astype(np.int8)
        return Classified(totals, success_rates, kinds)

    def groups(
        self, prompt_ids: Iterable[int], rewards: np.ndarray, lengths: np.ndarray, truncated: np.ndarray, **shared: Any
    ) -> list[RolloutGroup]:
        """
        The groups of a round, [`classify`]-ed: of prompts `(n,)`, from `rewards` `(n, G, F)`, `lengths` and `truncated` `(n, G)`.
        `shared`: the fields of [`RolloutGroup`] in which they agree.
        """
        totals, success_rates, kinds = self.classify(rewards, truncated)
        return [
            RolloutGroup(
                prompt_id=int(prompt_id),
                rewards=rewards[i],
                totals=totals[i],
                success_rate=float(success_rates[i]),
                kind=int(kinds[i]),
                lengths=lengths[i],
                truncated=truncated[i],
                **shared,
            )
            for i, prompt_id in enumerate(prompt_ids)
        ]


class RewardChecks:
    """
    Finds rewards of the functions `names` that are most likely a mistake, and warns of them on the main process. `most_unscored`
    completions without any score, from the start of training, are an error; `None`: never.
    """

    def __init__(self, names: Sequence[str], *, most_unscored: int | None = None, is_main_process: bool = True):
        self.names = list(names)
        self.most_unscored = most_unscored
        self.is_main_process = is_main_process
        self.scores = np.zeros(len(self.names), dtype=bool)  # functions that gave a score so far
        self.completions = 0  # checked so far
        self.batches = 0  # generation batches so far
        self.effective = False  # whether any group so far was effective
        self._warned: set[str] = set()

    def check(self, rewards: np.ndarray) -> None:
        """
        Check the rewards `(n, G, F)` of a round, NaN where a function gave no score. Raises a `ValueError` if `most_unscored`
        completions have no score, and none before them has one.
        """
        infinite = np.isinf(rewards).any(axis=(0, 1))
        if infinite.any():
            self._warn_once(
                "infinite",
                f"{self._listed(infinite)} returned an infinite reward. TRL gives its group no gradient, `scale_rewards='batch'` gives "
                "the whole batch none, and 'none' ruins the model. Return a finite number, or None for no score.",
            )
        self.completions += rewards.shape[0] * rewards.shape[1]
        self.scores |= ~np.isnan(rewards).all(axis=(0, 1))
        if self.scores.all():
            return
        names = self._listed(~self.scores)
        if not self.scores.any() and self.most_unscored is not None and self.completions >= self.most_unscored:
            raise ValueError(
                f"No reward function gave a score for any of the first {self.completions} completions: {names} returned only None or "
                f"NaN. {ADVICE}"
            )
        self._warn_once(
            names, f"{names} returned only None or NaN for the first {self.completions} completions. {ADVICE}"
        )

    def check_gradient(self, effective: bool, progress: float) -> None:
        """
        Enter a generation batch, of which a group was `effective` or none, after a share `progress` of the run. Warns once if
        a tenth of the run has passed, and no group has carried a gradient.
        """
        self.batches += 1
        self.effective |= effective
        if not self.effective and self.batches >= FEWEST_BATCHES and progress >= 0.1:
            self._warn_once(
                "gradient",
                f"No group of the first {self.batches} generation batches has carried a gradient: the rewards of each were equal. Look "
                "at completions (`log_completions=True`): the reward may reject right answers, or the prompts be too hard or too easy.",
            )

    def state_dict(self) -> list[Any]:
        """What was seen, for JSON."""
        return [self.scores.tolist(), self.completions, self.batches, self.effective]

    def load_state_dict(self, state: list[Any]) -> None:
        """Restore what [`state_dict`] returned; scores only if the functions are as many as then."""
        scores, self.completions, self.batches, self.effective = state
        if len(scores) == len(self.names):
            self.scores = np.array(scores, dtype=bool)

    def _listed(self, chosen: np.ndarray) -> str:
        return listed(name for name, c in zip(self.names, chosen, strict=True) if c)

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self._warned and self.is_main_process:
            logger.warning(message)
        self._warned.add(key)
