"""
`RolloutGroup`: the G completions of one prompt as data.

What is deliberately not here: padding and devices. A group holds compact arrays on the CPU; TRL pads what is trained
on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import DTypeLike


#: What a group is, in the order of its codes. `"easy"` and `"hard"` are the two kinds of zero-variance group.
KINDS = ("effective", "easy", "hard")
EFFECTIVE = 0
EASY = 1
HARD = 2

#: Where a group of a generation batch comes from: generated for this batch, generated for an earlier one and not
#: trained on yet, drawn from the replay buffer, or generated to fit predictions.
Origin: TypeAlias = Literal["fresh", "leftover", "replayed", "reference"]
#: Prompt of a group whose row in the dataset is not known, as of a stream
UNKNOWN_PROMPT = -1
#: What becomes of it: trained on, kept for a later batch, or dropped.
Disposition: TypeAlias = Literal["trained", "leftover", "dropped"]


def is_stale(origin: Origin) -> bool:
    """Whether an earlier policy sampled a group: it is left over from an earlier generation batch, or replayed."""
    return origin in ("leftover", "replayed")


@dataclass
class Rollouts:
    """
    What the G completions of a group consist of. Every list has one entry per completion.

    Log-probs and exclusions are entered once, when the update knows them; nothing else changes.

    Attributes:
        prompt_tokens: the prompt's tokens, int32 of shape `(P,)`.
        completion_tokens: int32 of shape `(T_i,)`.
        completions: the decoded completion: text, or messages.
        tool_masks: 1 for tokens of the model and 0 for tokens of a tool, int8 of shape `(T_i,)`; `None` without tools.
        sampling_logps: the sampler's log-probabilities (vLLM), float32 of shape `(T_i,)`, NaN where it gave none.
        behavior_logps: log-probabilities under the policy that sampled, float32 of shape `(T_i,)`; `None` until they
            are known. Groups that are used again need them (see `trl_dataeff.replay.logprobs`).
        excluded: whether TRL's importance-sampling mask (vLLM) excluded each completion from the loss; `None` without
        it.
        logged: columns that reward functions logged for the completions table.
        extra_fields: columns that a `rollout_func` returned beside the completions. From a checkpoint they come as
            JSON gives them back.
    """

    prompt_tokens: np.ndarray
    completion_tokens: list[np.ndarray]
    completions: list[Any]
    tool_masks: list[np.ndarray] | None = None
    sampling_logps: list[np.ndarray] | None = None
    behavior_logps: list[np.ndarray] | None = None
    excluded: list[bool] | None = None
    logged: dict[str, list[Any]] = field(default_factory=dict)
    extra_fields: dict[str, list[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.completion_tokens)


@dataclass(frozen=True, eq=False)
class RolloutGroup:
    """
    One group. Every process knows all groups of a generation batch; `rollouts` is set only on the process that owns
    them.

    A group never changes: one that moves to another process becomes a new object. Where it comes from and what becomes
    of it are facts of each generation batch that it takes part in (see [`GenerationBatch`]).

    Attributes:
        prompt_id: row index of the prompt in the training dataset, or in a default run a hash of the prompt;
            `UNKNOWN_PROMPT` (-1) for a stream.
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
        is_reference: whether it was generated to fit predictions.
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
    is_reference: bool = False
    rollouts: Rollouts | None = None

    @property
    def effective(self) -> bool:
        return self.kind == EFFECTIVE

    @property
    def tokens(self) -> int:
        """Tokens generated for it."""
        return int(self.lengths.sum())

    @property
    def size(self) -> int:
        """G, its completions."""
        return len(self.lengths)

    @property
    def num_scored(self) -> int:
        """Completions to which a reward function gave a score."""
        return int((~np.isnan(self.totals)).sum())

    @property
    def held_rollouts(self) -> Rollouts:
        """Its completions, on the process that holds them."""
        assert self.rollouts is not None, "this process does not hold the group"
        return self.rollouts


# Packing, for checkpoints

_LISTS: tuple[tuple[str, DTypeLike], ...] = (
    ("completion_tokens", np.int32),
    ("tool_masks", np.int8),
    ("sampling_logps", np.float32),
    ("behavior_logps", np.float32),
)
_ARRAYS: tuple[tuple[str, DTypeLike], ...] = (
    ("rewards", np.float32),
    ("totals", np.float32),
    ("lengths", np.int32),
    ("truncated", np.bool_),
)
# Not `is_reference`, which is read only in the generation batch for which a group was generated
_SCALARS = ("prompt_id", "step", "round", "success_rate", "kind", "owner")


def pack_groups(groups: Sequence[RolloutGroup]) -> dict[str, np.ndarray]:
    """
    Groups with their rollouts as flat arrays for a safetensors file; the inverse of [`unpack_groups`]. Texts,
    messages and logged columns travel as JSON bytes.

    Raises:
        `ValueError`: another process holds the rollouts of a group.
    """
    meta: list[dict[str, Any]] = []
    arrays: dict[str, np.ndarray] = {}
    for i, group in enumerate(groups):
        rollouts = group.rollouts
        if rollouts is None:
            raise ValueError(f"Group {i} of {len(groups)} is held by process {group.owner}: gather it before packing.")
        lengths = [len(tokens) for tokens in rollouts.completion_tokens]
        entry: dict[str, Any] = {name: getattr(group, name) for name in _SCALARS}
        entry["completions"] = rollouts.completions
        entry["logged"] = rollouts.logged
        entry["extra_fields"] = rollouts.extra_fields
        entry["excluded"] = rollouts.excluded
        entry["ends"] = np.cumsum(lengths)[:-1].tolist()
        meta.append(entry)
        for name, dtype in _ARRAYS:
            arrays[f"{i}.{name}"] = np.ascontiguousarray(getattr(group, name), dtype)
        arrays[f"{i}.prompt_tokens"] = rollouts.prompt_tokens.astype(np.int32)
        for name, dtype in _LISTS:
            values = getattr(rollouts, name)
            if values is not None:
                arrays[f"{i}.{name}"] = np.concatenate(values).astype(dtype)
    text = json.dumps(meta, default=_plain)
    arrays["meta"] = np.frombuffer(text.encode(), dtype=np.uint8).copy()
    return arrays


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy or torch as Python's own; anything else that JSON does not know as its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def unpack_groups(arrays: dict[str, np.ndarray]) -> list[RolloutGroup]:
    """Groups from the arrays of [`pack_groups`]."""
    meta = json.loads(arrays["meta"].tobytes().decode())
    groups = []
    for i, entry in enumerate(meta):
        lists = {name: np.split(arrays[f"{i}.{name}"], entry["ends"]) for name, _ in _LISTS if f"{i}.{name}" in arrays}
        rollouts = Rollouts(
            prompt_tokens=arrays[f"{i}.prompt_tokens"],
            completions=entry["completions"],
            logged=entry["logged"],
            extra_fields=entry.get("extra_fields", {}),  # a checkpoint of an earlier version has none
            excluded=entry["excluded"],
            **lists,
        )
        values: dict[str, Any] = {name: entry[name] for name in _SCALARS}
        values.update({name: arrays[f"{i}.{name}"] for name, _ in _ARRAYS})
        groups.append(RolloutGroup(**values, rollouts=rollouts))
    return groups
