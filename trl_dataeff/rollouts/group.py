"""`RolloutGroup`: the G completions of one prompt as data.

What is deliberately not here: padding and devices. A group holds compact arrays on the CPU; TRL pads what is trained on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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


DIFFERENT_PROMPTS = (
    "The completions of a group have different `prompt_ids`, as a `rollout_func` may return them. Rollouts that are kept, "
    "replayed, or generated in two parts need one prompt per group: return the same for all completions of a prompt, or set "
    "`replay_fraction=0`, `dynamic_sampling=False` and `sequential_rollouts=False`."
)

#: Lists of `Rollouts` that may be `None`: what stands for an unknown value of a token, and the dtype
_OPTIONAL_LISTS: dict[str, tuple[float, type]] = {
    "tool_masks": (1, np.int8),
    "sampling_logps": (float("nan"), np.float32),
    "behavior_logps": (float("nan"), np.float32),
}


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

    def rows(self, indices: Sequence[int]) -> Rollouts:
        """The completions of these indices, which may repeat."""
        lists = {name: getattr(self, name) for name in ("completion_tokens", "completions", *_OPTIONAL_LISTS)}
        taken = {name: None if values is None else [values[i] for i in indices] for name, values in lists.items()}
        logged = {column: [values[i] for i in indices] for column, values in self.logged.items()}
        return Rollouts(prompt_tokens=self.prompt_tokens, logged=logged, **taken)  # type: ignore[arg-type]

    def extend(self, others: Rollouts) -> None:
        """Append completions of the same prompt. What only one of the two has stays unknown for the other."""
        if not np.array_equal(self.prompt_tokens, others.prompt_tokens):
            raise ValueError(DIFFERENT_PROMPTS)
        for name, (missing, dtype) in _OPTIONAL_LISTS.items():
            if getattr(self, name) is not None or getattr(others, name) is not None:
                parts = [
                    getattr(part, name) or [np.full(len(tokens), missing, dtype) for tokens in part.completion_tokens]
                    for part in (self, others)
                ]
                setattr(self, name, [*parts[0], *parts[1]])
        columns = dict.fromkeys([*self.logged, *others.logged])
        self.logged = {
            column: [value for part in (self, others) for value in part.logged.get(column, [None] * len(part))]
            for column in columns
        }
        self.completion_tokens = [*self.completion_tokens, *others.completion_tokens]
        self.completions = [*self.completions, *others.completions]


@dataclass(eq=False)
class RolloutGroup:
    """
    One group. Every process knows all groups of a generation batch; `rollouts` is set only on the process that owns them.
    A group that was stopped (see `sequential_rollouts`) has fewer than G completions.

    Attributes:
        prompt_id: row index of the prompt in the training dataset; -1 if it is not known (streaming).
        step: optimizer step at which it was rolled out.
        round: round of its generation batch, from 0.
        rewards: float32 of shape `(G, F)`, one column per reward function.
        success_rate: in [0, 1], or NaN.
        kind: code of its kind (see `KINDS`).
        lengths: tokens generated for each completion, int32 of shape `(G,)`.
        truncated: whether each completion was cut off, bool of shape `(G,)`.
        seconds: its share of the time its round took.
        owner: index of the process that holds `rollouts`.
        predicted: success rate predicted before it was rolled out, or NaN.
        explored: whether its prompt was drawn uniformly, and not for its prediction.
        spread: share of its pairs of completions with different total rewards, or NaN.
        graded: whether more than two different totals had occurred in the run by then.
        origin: where it comes from, in the generation batch that it belongs to now.
        disposition: what becomes of it there; `None` until that is decided. Membership of the replay buffer is separate.
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
    spread: float = float("nan")
    graded: bool = False
    explored: bool = False
    origin: Origin = "fresh"
    disposition: Disposition | None = None
    rollouts: Rollouts | None = None

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
        """Completions generated for it: G, or fewer if it was stopped."""
        return len(self.lengths)

    @property
    def scored(self) -> int:
        """Completions to which a reward function gave a score."""
        return int((~np.isnan(self.rewards).all(axis=1)).sum())

    def extend(self, others: RolloutGroup) -> None:
        """Append further completions of its prompt. Its success rate, kind and spread are then to be computed anew."""
        for name in ("rewards", "lengths", "truncated"):
            setattr(self, name, np.concatenate([getattr(self, name), getattr(others, name)]))
        self.seconds += others.seconds
        if self.rollouts is not None and others.rollouts is not None:
            self.rollouts.extend(others.rollouts)

    def filled(self, size: int) -> RolloutGroup:
        """
        This group, with `size` completions: if it was stopped, a copy that repeats its own in turn. These all got the same
        reward, so that their advantages are 0 either way.
        """
        if self.size == size:
            return self
        rows = np.arange(size) % self.size
        return replace(
            self,
            rewards=self.rewards[rows],
            lengths=self.lengths[rows],
            truncated=self.truncated[rows],
            rollouts=None if self.rollouts is None else self.rollouts.rows(rows.tolist()),
        )


_LISTS = (
    ("completion_tokens", np.int32),
    ("tool_masks", np.int8),
    ("sampling_logps", np.float32),
    ("behavior_logps", np.float32),
)
_ARRAYS = (("rewards", np.float32), ("lengths", np.int32), ("truncated", np.bool_))
_SCALARS = ("prompt_id", "step", "round", "success_rate", "kind", "seconds", "owner", "predicted", "spread", "graded")


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
