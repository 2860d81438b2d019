"""`RolloutGroup`: the G completions of one prompt as data.

What is deliberately not here: padding and devices. A group holds compact arrays on the CPU; TRL pads what is trained on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np


#: What a group is, in the order of its codes. `"easy"` and `"hard"` are the two kinds of zero-variance group.
KINDS = ("effective", "easy", "hard")
EFFECTIVE, EASY, HARD = 0, 1, 2

#: Where a group of a generation batch comes from: generated for this batch, generated for an earlier one and not trained
#: on yet, drawn from the replay buffer, or generated to fit predictions.
Origin: TypeAlias = Literal["fresh", "leftover", "replayed", "reference"]
#: What becomes of it: trained on, kept for a later batch, or dropped.
Disposition: TypeAlias = Literal["trained", "leftover", "dropped"]
PLACE = ("origin", "disposition", "owner", "rollouts")  # what may change of a group


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
        behavior_logps: log-probabilities under the policy that sampled, float32 of shape `(T_i,)`; `None` until they
            are known. Groups that are used again need them (see `trl_dataeff.replay.logprobs`).
        excluded: whether TRL's importance-sampling mask (vLLM) excluded each completion from the loss; `None` without it.
        logged: columns that reward functions logged for the completions table.
    """

    prompt_tokens: np.ndarray
    completion_tokens: list[np.ndarray]
    completions: list[Any]
    tool_masks: list[np.ndarray] | None = None
    sampling_logps: list[np.ndarray] | None = None
    behavior_logps: list[np.ndarray] | None = None
    excluded: list[bool] | None = None
    logged: dict[str, list[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.completion_tokens)


@dataclass(eq=False)
class RolloutGroup:
    """
    One group. Every process knows all groups of a generation batch; `rollouts` is set only on the process that owns them.

    Its rewards and rollouts never change. What changes is its place: origin and disposition in each generation batch, and the owner.

    Attributes:
        prompt_id: row index of the prompt in the training dataset; -1 if it is not known (streaming).
        step: optimizer step at which it was rolled out.
        round: round of its generation batch, from 0.
        rewards: float32 of shape `(G, F)`, one column per reward function.
        totals: total rewards, float32 of shape `(G,)`, NaN for a completion without a score.
        success_rate: in [0, 1] by the rewards seen until then, or NaN. The range of rewards may widen later: see
            [`SelectorContext.success_rates`].
        kind: code of its kind (see `KINDS`).
        lengths: tokens generated for each completion, int32 of shape `(G,)`.
        truncated: whether each completion was cut off, bool of shape `(G,)`.
        owner: index of the process that holds `rollouts`.
        origin: where it comes from, in the generation batch that it belongs to now.
        disposition: what becomes of it there; `None` until that is decided. Membership of the replay buffer is separate.
        rollouts: its completions.
    """

    prompt_id: int
    step: int
    round: int
    rewards: np.ndarray
    totals: np.ndarray
    success_rate: float
    kind: int
    lengths: np.ndarray
    truncated: np.ndarray
    owner: int = 0
    origin: Origin = "fresh"
    disposition: Disposition | None = None
    rollouts: Rollouts | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self) and name not in PLACE:
            raise AttributeError(f"`{name}` of a group never changes.")
        super().__setattr__(name, value)

    @property
    def effective(self) -> bool:
        return self.kind == EFFECTIVE

    @property
    def generated_now(self) -> bool:
        """Whether it was generated for the present generation batch."""
        return self.origin in ("fresh", "reference")

    @property
    def tokens(self) -> int:
        """Tokens generated for it."""
        return int(self.lengths.sum())

    @property
    def size(self) -> int:
        """G, its completions."""
        return len(self.lengths)

    @property
    def scored(self) -> int:
        """Completions to which a reward function gave a score."""
        return int((~np.isnan(self.totals)).sum())


_LISTS = (
    ("completion_tokens", np.int32),
    ("tool_masks", np.int8),
    ("sampling_logps", np.float32),
    ("behavior_logps", np.float32),
)
_ARRAYS = (("rewards", np.float32), ("totals", np.float32), ("lengths", np.int32), ("truncated", np.bool_))
_SCALARS = ("prompt_id", "step", "round", "success_rate", "kind", "owner")


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
        entry.update(completions=rollouts.completions, logged=rollouts.logged, excluded=rollouts.excluded)
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
            excluded=entry["excluded"],
            **lists,
        )
        values = {name: entry[name] for name in _SCALARS} | {name: arrays[f"{i}.{name}"] for name, _ in _ARRAYS}
        groups.append(RolloutGroup(**values, rollouts=rollouts))
    return groups
