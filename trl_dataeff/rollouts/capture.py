"""
`collect()`: rounds of propose -> generate -> score -> keep, until a window has its groups.

The rounds run in lockstep on all processes: every decision here is taken on numbers that all of them hold. What is
deliberately not here: models and collectives (see `trainer.py` and `distributed.py`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from trl_dataeff.replay.buffer import ReplayBuffer
from trl_dataeff.rollouts.group import RolloutGroup, Rollouts


@dataclass
class Collection:
    """
    What the rounds of a window gave. `trained + surplus + dropped` is `carried + fresh + replayed`, each group once.

    Attributes:
        trained: the groups to train on, as many as a window holds.
        surplus: effective groups beyond them.
        dropped: zero-variance groups that are not trained on.
        fresh: all groups rolled out in this window, in their order.
        replayed: those of `trained` that came out of the replay buffer.
        rounds: rounds taken.
        padded: how many of `trained` are zero-variance groups that complete a short window.
    """

    trained: list[RolloutGroup] = field(default_factory=list)
    surplus: list[RolloutGroup] = field(default_factory=list)
    dropped: list[RolloutGroup] = field(default_factory=list)
    fresh: list[RolloutGroup] = field(default_factory=list)
    replayed: list[RolloutGroup] = field(default_factory=list)
    rounds: int = 0
    padded: int = 0

    @property
    def stale(self) -> list[RolloutGroup]:
        """Those of `trained` that an earlier window rolled out: carried over, or replayed."""
        return _without(self.trained, self.fresh)

    @property
    def fresh_trained(self) -> list[RolloutGroup]:
        return _without(self.trained, self.stale)

    @property
    def fresh_surplus(self) -> list[RolloutGroup]:
        return _without(self.surplus, _without(self.surplus, self.fresh))


def _without(groups: Sequence[RolloutGroup], others: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    left_out = {id(group) for group in others}
    return [group for group in groups if id(group) not in left_out]


def collect(
    roll_out: Callable[[int, int], Sequence[RolloutGroup]],
    round_size: Callable[[int], int],
    *,
    batch_groups: int,
    max_rounds: int | None = None,
    carried: Sequence[RolloutGroup] = (),
    references: Sequence[RolloutGroup] = (),
    buffer: ReplayBuffer | None = None,
    replay_groups: int = 0,
    rng: torch.Generator | None = None,
) -> Collection:
    """
    Roll out until a window has its groups, `replay_groups` of them from `buffer` and the rest fresh.

    With `max_rounds` zero-variance groups are dropped, and further rounds make up for them until the window is full
    or so many rounds have been made (dynamic sampling). Groups that were carried over come first, then fresh ones in
    the order of their rounds, then replayed ones. A window that stays short is completed with more from `buffer`,
    then with its own zero-variance groups. Without `max_rounds` every fresh group is trained on. In either case the window
    has `batch_groups` groups, and no replayed prompt is fresh in it.

    Args:
        roll_out: `(n, round) -> at least n groups`, generated and scored.
        round_size: `(missing groups) -> n`, at least as many as are missing in the first round.
        batch_groups (`int`): B, groups trained on per window.
        max_rounds (`int`, *optional*): at least 1; `None`: nothing is dropped.
        carried: effective groups that the last window had too many.
        references: groups that this window rolled out for the sake of predictions. Where there is a `buffer`, the
            effective ones are left to it as surplus; else they open the window, up to half of it. The others are dropped.
        buffer ([`ReplayBuffer`], *optional*): where replayed groups come from.
        replay_groups (`int`, *optional*, defaults to `0`): below `batch_groups`; fewer are replayed where `buffer` has
            no more whose prompts are not fresh.
        rng (`torch.Generator`, *optional*): draws the replayed groups; needed with `buffer`.
    """
    taught = [group for group in references if group.effective]
    opening = taught[: batch_groups // 2] if buffer is None else []  # the rest of the window is chosen
    stored = taught if buffer is not None else []
    result = Collection(fresh=list(references), dropped=_without(references, opening + stored))
    kept = list(carried) + opening
    idle: list[RolloutGroup] = []
    while True:
        present = {group.prompt_id for group in [*kept, *idle, *references]}
        available = buffer.available(present) if buffer is not None else 0
        fresh_share = batch_groups - min(replay_groups, available)
        rounds_are_out = max_rounds is not None and result.rounds >= max_rounds
        if len(kept) >= fresh_share or (rounds_are_out and len(kept) + len(idle) + available >= batch_groups):
            break
        groups = roll_out(round_size(fresh_share - len(kept)), result.rounds)
        result.rounds += 1
        result.fresh.extend(groups)
        kept.extend(group for group in groups if group.effective or max_rounds is None)
        idle.extend(group for group in groups if not group.effective and max_rounds is not None)
    used = min(len(kept), fresh_share if max_rounds is not None else batch_groups)
    if buffer is not None and rng is not None:
        result.replayed = buffer.sample(min(batch_groups - used, available), rng, present)
    result.padded = batch_groups - used - len(result.replayed)
    result.trained = kept[:used] + result.replayed + idle[: result.padded]
    result.surplus = [group for group in kept[used:] if group.effective] + stored
    result.dropped += [group for group in kept[used:] if not group.effective] + idle[result.padded :]
    return result


@dataclass
class ZeroVarianceShare:
    """
    Running share of zero-variance groups among those rolled out: counts that fade by `decay` with every round, so that
    large rounds weigh more than small ones. 0 before the first round.
    """

    decay: float = 0.8
    zero: float = 0.0
    total: float = 0.0

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        self.zero = self.decay * self.zero + sum(not group.effective for group in groups)
        self.total = self.decay * self.total + len(groups)

    @property
    def value(self) -> float:
        return self.zero / self.total if self.total else 0.0


def round_size(
    missing: int,
    *,
    batch_groups: int,
    zero_share: float,
    margin: float,
    low: float,
    high: float,
    multiple: int,
    pool: int,
) -> int:
    """
    Groups to roll out in a round: `ceil(margin * missing / (1 - zero_share))`, within `[low, high]` times the window
    (GRESO, arXiv 2506.02177, section on adaptive batch size), never fewer than are missing while the bounds allow it.

    Args:
        missing (`int`): groups that the window lacks, from 1 to `batch_groups`.
        batch_groups (`int`): B, groups of a window.
        zero_share (`float`): expected share of zero-variance groups, in [0, 1]; at 1 the upper bound is taken.
        margin (`float`): oversampling, at least 1.
        low (`float`), high (`float`): bounds as shares of B; `low <= 1 <= high`.
        multiple (`int`): the size is rounded up to a multiple of this (processes).
        pool (`int`): prompts there are; the size is at most the largest multiple within it.
    """
    most = math.floor(high * batch_groups)
    wanted = most if zero_share >= 1 else math.ceil(margin * missing / (1 - zero_share))
    size = min(max(wanted, missing, math.ceil(low * batch_groups)), most)
    return min(math.ceil(size / multiple) * multiple, pool // multiple * multiple)


def split_rollouts(
    group_size: int,
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    tool_mask: Sequence[Sequence[int]] | None,
    completions: Sequence,
    logprobs: Sequence[Sequence[float | None]] | None,
    logged: dict[str, list],
) -> list[Rollouts]:
    """
    Cut the outputs of TRL's `_generate` (one entry per completion, G in a row per prompt) into groups. Raises a
    `ValueError` if the completions of a group do not answer one and the same prompt.
    """
    n = len(completion_ids)
    result = []
    for start in range(0, n, group_size):
        rows = range(start, start + group_size)
        if any(list(prompt_ids[i]) != list(prompt_ids[start]) for i in rows):
            raise ValueError(
                "The completions of a group have different `prompt_ids`, as a `rollout_func` may return them. Rollouts "
                "that are kept or replayed need one prompt per group: return the same for all completions of a prompt, "
                "or set `replay_fraction=0` and `dynamic_sampling=False`."
            )
        result.append(
            Rollouts(
                prompt_tokens=np.array(prompt_ids[start], dtype=np.int32),
                completion_tokens=[np.array(completion_ids[i], dtype=np.int32) for i in rows],
                completions=[completions[i] for i in rows],
                tool_masks=None if tool_mask is None else [np.array(tool_mask[i], dtype=np.int8) for i in rows],
                sampling_logps=None
                if logprobs is None
                else [np.array([np.nan if p is None else p for p in logprobs[i]], dtype=np.float32) for i in rows],
                # A column that was not logged once per completion cannot be told apart by completion
                logged={name: [values[i] for i in rows] for name, values in logged.items() if len(values) == n},
            )
        )
    return result


def row_value(values, i: int):
    """The value of row `i` of a field that a `rollout_func` returned: a list is by row, anything else is for all."""
    if isinstance(values, list):
        return values[i] if i < len(values) else None
    return values


@dataclass
class Recording:
    """
    What passed through TRL's `_generate` and `_calculate_rewards` in a round of rollouts.

    Attributes:
        lengths: tokens of the model in each of this process's completions.
        truncated: whether each was cut off.
        overlong: whether its prompt left no room in the model's context.
        rewards: of all processes, `(completions, functions)`.
        seconds: that the round took.
    """

    lengths: list[int] = field(default_factory=list)
    truncated: list[bool] = field(default_factory=list)
    overlong: list[bool] = field(default_factory=list)
    rewards: torch.Tensor | None = None
    seconds: float = 0.0

    def note(
        self, completion_ids: Sequence[Sequence[int]], tool_mask: Sequence[Sequence[int]] | None, ends: set
    ) -> None:
        """Enter completions; one that does not end with a token of `ends` was cut off."""
        self.lengths = [len(ids) for ids in completion_ids] if tool_mask is None else [sum(mask) for mask in tool_mask]
        self.truncated = [ids[-1] not in ends for ids in completion_ids]


def tool_dicts(tools: Sequence[Callable], n: int) -> tuple[list[dict], list[dict]]:
    """Sync and async tools by name, one dict for each of n completions, as TRL's tool loop takes them."""
    asynchronous = {tool.__name__: tool for tool in tools if inspect.iscoroutinefunction(tool)}
    synchronous = {tool.__name__: tool for tool in tools if not inspect.iscoroutinefunction(tool)}
    return [synchronous] * n, [asynchronous] * n


class Playback:
    """
    Groups that were rolled out and scored before, in the shape in which TRL asks for completions and rewards.

    Args:
        groups: the groups that this process trains on, with their rollouts.
        rewards (`np.ndarray` of shape `(all groups * G, F)`): rewards of all processes' groups, in the order of ranks.
    """

    def __init__(self, groups: Sequence[RolloutGroup], rewards: np.ndarray):
        self.rollouts = [group.rollouts for group in groups if group.rollouts is not None]
        self.rewards = rewards

    @property
    def completions(self) -> list:
        return [completion for rollouts in self.rollouts for completion in rollouts.completions]

    def rollout_func(self, prompts: list, trainer=None) -> dict:
        """What TRL's `rollout_func` returns: token ids, and the sampler's log-probs and tool masks, where there are any."""
        output: dict = {
            "prompt_ids": [r.prompt_tokens.tolist() for r in self.rollouts for _ in range(len(r))],
            "completion_ids": [tokens.tolist() for r in self.rollouts for tokens in r.completion_tokens],
            "logprobs": self._listed("sampling_logps"),
        }
        tool_mask = self._listed("tool_masks")
        return output if tool_mask is None else output | {"env_mask": tool_mask}

    def _listed(self, name: str) -> list[list] | None:
        """
        The arrays of one field as lists, one per completion; `None` if no group has it. A group that lacks it has only
        tokens of the model, and log-probs that are not known.
        """
        if all(getattr(r, name) is None for r in self.rollouts):
            return None
        missing = {"tool_masks": 1, "sampling_logps": float("nan")}[name]
        return [
            [missing] * len(tokens) if values is None else values.tolist()
            for r in self.rollouts
            for tokens, values in zip(r.completion_tokens, getattr(r, name) or [None] * len(r), strict=True)
        ]

    @property
    def logged(self) -> dict[str, list]:
        """The columns that reward functions logged, one entry per completion; `None` where a group lacks the column."""
        columns = dict.fromkeys(column for r in self.rollouts for column in r.logged)
        return {
            column: [v for r in self.rollouts for v in r.logged.get(column, [None] * len(r))] for column in columns
        }
