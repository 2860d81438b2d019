"""`RolloutGroup`: the G completions of one prompt as data, and the one classifier of groups.

History, controllers, metrics, dynamic sampling and replay all ask here whether a group teaches. What is deliberately
not here: padding and devices. A group holds compact arrays on the CPU; TRL pads what is trained on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


#: What a group is, in the order of its codes. `"easy"` and `"hard"` are the two kinds of zero-variance group.
KINDS = ("effective", "easy", "hard")
EFFECTIVE, EASY, HARD = 0, 1, 2


def total_rewards(rewards: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """
    Weighted sum of the reward functions, as TRL forms it: a function that gave no score (NaN) is left out, and a
    completion that no function scored is NaN (unscorable).

    The sum runs in float64 and is then rounded to float32; what one function gave with weight 1 is left as it is.

    Args:
        rewards (`np.ndarray` of shape `(..., F)`): one column per reward function, NaN where it gave no score.
        weights (`np.ndarray` of shape `(F,)`): weights of the functions.

    Returns:
        `np.ndarray` of shape `(...)` and dtype float32.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    unscored = np.isnan(rewards)
    totals = np.where(unscored, 0.0, rewards) @ np.asarray(weights, dtype=np.float64)
    totals[unscored.all(axis=-1)] = np.nan
    return totals.astype(np.float32)


def all_equal(values: np.ndarray, tolerance: np.ndarray | float = 0.0) -> np.ndarray:
    """
    Whether the values of each row that are not NaN are all equal; true for rows with fewer than two of them.

    Args:
        values (`np.ndarray` of shape `(n, G)`).
        tolerance (`np.ndarray` of shape `(n,)` or `float`, *optional*, defaults to `0.0`): spread that counts as equal.

    Returns:
        `np.ndarray` of shape `(n,)` and dtype bool.
    """
    unscored = np.isnan(values)
    low = np.where(unscored, np.inf, values).min(axis=1)
    high = np.where(unscored, -np.inf, values).max(axis=1)
    with np.errstate(invalid="ignore"):  # a row of infinities, or of NaN
        return (low >= high) | (high - low <= tolerance)


def is_zero_variance(rewards: np.ndarray, weights: np.ndarray, aggregation: str = "sum_then_normalize") -> np.ndarray:
    """
    Whether a group carries no gradient: all of its scorable rewards are equal. So does a group with an infinite reward,
    whose advantages TRL sets to 0. Totals of several functions are compared up to the rounding of their sum (four units
    in the last place of float32), totals of one exactly.

    Under TRL's `multi_objective_aggregation="normalize_then_sum"` each function is normalised in the group on its own,
    so there every function with a weight has to give equal rewards; else the weighted totals have to be equal.

    Args:
        rewards (`np.ndarray` of shape `(n, G, F)`): rewards of n groups, NaN where a function gave no score.
        weights (`np.ndarray` of shape `(F,)`): weights of the functions.
        aggregation (`str`, *optional*, defaults to `"sum_then_normalize"`): TRL's option of that name.

    Returns:
        `np.ndarray` of shape `(n,)` and dtype bool.
    """
    totals = total_rewards(rewards, weights)
    infinite = np.isinf(totals).any(axis=1)
    weighted = np.flatnonzero(weights)
    if aggregation == "normalize_then_sum":
        columns = [all_equal(rewards[:, :, k]) for k in weighted]
        return infinite | np.logical_and.reduce([np.ones(len(rewards), dtype=bool), *columns])
    tolerance: np.ndarray | float = 0.0
    if len(weighted) > 1:
        sizes = total_rewards(np.abs(rewards), np.abs(weights))
        tolerance = 4 * np.finfo(np.float32).eps * np.where(np.isnan(sizes), 0.0, sizes).max(axis=1)
    return infinite | all_equal(totals, tolerance)


def teaches_nothing_untruncated(rewards: np.ndarray, weights: np.ndarray, truncated: np.ndarray) -> np.ndarray:
    """
    Whether all completions that differ from their group's mean reward were cut off, and so are not trained on under
    `mask_truncated_completions`.

    Args:
        rewards (`np.ndarray` of shape `(n, G, F)`), weights (`np.ndarray` of shape `(F,)`): see [`is_zero_variance`].
        truncated (`np.ndarray` of shape `(n, G)` and dtype bool): completions that did not end by themselves.

    Returns:
        `np.ndarray` of shape `(n,)` and dtype bool.
    """
    totals = total_rewards(rewards, weights).astype(np.float64)
    scored = ~np.isnan(totals)
    mean = np.where(scored, totals, 0.0).sum(axis=1) / np.maximum(scored.sum(axis=1), 1)
    teaches = scored & ~truncated & (totals != mean[:, None])
    return ~teaches.any(axis=1)


@dataclass
class RewardScale:
    """
    Maps total rewards to success rates in [0, 1].

    With `reward_range` the ends are given; without it they are the lowest and the highest total seen so far. While
    only one value has been seen, it counts as success if it is positive and as failure if it is not.
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

    def observe(self, totals: np.ndarray) -> None:
        """Widen the range by totals of any shape; NaN and infinite ones are passed over."""
        seen = totals[np.isfinite(totals)]
        if not self.fixed and seen.size:
            self.low, self.high = min(self.low, float(seen.min())), max(self.high, float(seen.max()))

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


def classify(zero_variance: np.ndarray, success_rate: np.ndarray) -> np.ndarray:
    """
    Codes of the groups' kinds (see `KINDS`), `(n,)`. A zero-variance group is easy at the top of the reward range and
    hard everywhere else: at the bottom, in the middle, and where no completion could be scored.
    """
    zero_variance_kind = np.where(success_rate >= 1.0 - 1e-6, EASY, HARD)  # but for the rounding of a sum of rewards
    return np.where(zero_variance, zero_variance_kind, EFFECTIVE).astype(np.int8)


@dataclass
class Rollouts:
    """
    What the G completions of a group consist of. Every list has one entry per completion.

    Attributes:
        prompt_tokens: the prompt's tokens, int32 of shape `(P,)`.
        completion_tokens: int32 of shape `(T_i,)`.
        completions: the decoded completion: text, or messages.
        tool_masks: 1 for tokens of the model and 0 for tokens of a tool, int8 of shape `(T_i,)`; `None` without tools.
        sampling_logps: the sampler's log-probabilities (vLLM), float32 of shape `(T_i,)`, NaN where it gave none.
        behavior_logps: the policy's log-probabilities when it sampled, float32 of shape `(T_i,)`; set for groups that
            outlive their window.
        logged: columns that reward functions logged for the completions table.
    """

    prompt_tokens: np.ndarray
    completion_tokens: list[np.ndarray]
    completions: list[Any]
    tool_masks: list[np.ndarray] | None = None
    sampling_logps: list[np.ndarray] | None = None
    behavior_logps: list[np.ndarray] | None = None
    logged: dict[str, list[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.completion_tokens)


@dataclass
class RolloutGroup:
    """
    One group. Every process knows all groups of a window; `rollouts` is there only on the process that holds them.

    Attributes:
        prompt_id: row index of the prompt in the training dataset; -1 if it is not known (streaming).
        step: optimizer step at which it was rolled out.
        round: round of its window, from 0.
        rewards: float32 of shape `(G, F)`, one column per reward function.
        success_rate: in [0, 1], or NaN.
        kind: code of its kind (see `KINDS`).
        lengths: tokens generated for each completion, int32 of shape `(G,)`.
        truncated: whether each completion was cut off, bool of shape `(G,)`.
        seconds: its share of the time its round took.
        owner: index of the process that holds `rollouts`.
        predicted: success rate predicted before it was rolled out, or NaN.
        reference: whether it was rolled out for the sake of predictions.
    """

    prompt_id: int
    step: int
    round: int
    rewards: np.ndarray
    success_rate: float
    kind: int
    lengths: np.ndarray
    truncated: np.ndarray
    seconds: float
    owner: int = 0
    predicted: float = float("nan")
    reference: bool = False
    rollouts: Rollouts | None = None

    @property
    def effective(self) -> bool:
        return self.kind == EFFECTIVE

    @property
    def tokens(self) -> int:
        """Tokens generated for it."""
        return int(self.lengths.sum())


_LISTS = (
    ("completion_tokens", np.int32),
    ("tool_masks", np.int8),
    ("sampling_logps", np.float32),
    ("behavior_logps", np.float32),
)
_ARRAYS = (("rewards", np.float32), ("lengths", np.int32), ("truncated", np.bool_))
_SCALARS = ("prompt_id", "step", "round", "success_rate", "kind", "seconds", "owner", "predicted", "reference")


def pack_groups(groups: Sequence[RolloutGroup]) -> dict[str, np.ndarray]:
    """
    Groups with their rollouts as flat arrays for a safetensors file; the inverse of [`unpack_groups`]. Texts,
    messages and logged columns travel as JSON bytes.
    """
    meta: list[dict[str, Any]] = []
    arrays: dict[str, np.ndarray] = {}
    for i, group in enumerate(groups):
        if group.rollouts is None:
            raise ValueError(f"Group {i} of {len(groups)} is held by process {group.owner}: gather it before packing.")
        rollouts = group.rollouts
        entry: dict[str, Any] = {name: getattr(group, name) for name in _SCALARS}
        entry.update(completions=rollouts.completions, logged=rollouts.logged)
        entry["ends"] = np.cumsum([len(tokens) for tokens in rollouts.completion_tokens])[:-1].tolist()
        arrays.update({f"{i}.{name}": np.ascontiguousarray(getattr(group, name), dtype) for name, dtype in _ARRAYS})
        arrays[f"{i}.prompt_tokens"] = rollouts.prompt_tokens.astype(np.int32)
        for name, dtype in _LISTS:
            values = getattr(rollouts, name)
            if values is not None:
                arrays[f"{i}.{name}"] = np.concatenate(values).astype(dtype)
        meta.append(entry)
    arrays["meta"] = np.frombuffer(json.dumps(meta, default=_plain).encode(), dtype=np.uint8).copy()
    return arrays


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy or torch as Python's own; anything else that JSON does not know as its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def unpack_groups(arrays: dict[str, np.ndarray]) -> list[RolloutGroup]:
    """Groups from the arrays of [`pack_groups`]."""
    groups = []
    for i, entry in enumerate(json.loads(arrays["meta"].tobytes().decode())):
        lists = {name: np.split(arrays[f"{i}.{name}"], entry["ends"]) for name, _ in _LISTS if f"{i}.{name}" in arrays}
        rollouts = Rollouts(
            prompt_tokens=arrays[f"{i}.prompt_tokens"],
            completions=entry["completions"],
            logged=entry["logged"],
            **lists,
        )
        values = {name: entry[name] for name in _SCALARS} | {name: arrays[f"{i}.{name}"] for name, _ in _ARRAYS}
        groups.append(RolloutGroup(**values, rollouts=rollouts))
    return groups
