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

from trl_dataeff.group import RolloutGroup, Rollouts


@dataclass
class Collection:
    """
    What the rounds of a window gave. `trained + surplus + dropped` is `carried + fresh`, each group once.

    Attributes:
        trained: the groups to train on, as many as a window holds.
        surplus: effective groups beyond them, for the next window.
        dropped: zero-variance groups that are not trained on.
        fresh: all groups rolled out in this window, in their order.
        rounds: rounds taken.
        padded: how many of `trained` are zero-variance groups that complete a short window.
    """

    trained: list[RolloutGroup] = field(default_factory=list)
    surplus: list[RolloutGroup] = field(default_factory=list)
    dropped: list[RolloutGroup] = field(default_factory=list)
    fresh: list[RolloutGroup] = field(default_factory=list)
    rounds: int = 0
    padded: int = 0

    @property
    def fresh_surplus(self) -> list[RolloutGroup]:
        """The surplus that this window rolled out: fresh groups come after those carried over."""
        fresh = {id(group) for group in self.fresh}
        return [group for group in self.surplus if id(group) in fresh]


def collect(
    roll_out: Callable[[int, int], Sequence[RolloutGroup]],
    round_size: Callable[[int], int],
    *,
    batch_groups: int,
    carried: Sequence[RolloutGroup] = (),
    max_rounds: int,
) -> Collection:
    """
    Roll out until a window has `batch_groups` effective groups, or `max_rounds` rounds have been made.

    Effective groups that were carried over come first, then fresh ones in the order of their rounds. A window that
    stays short is completed with its own zero-variance groups, so that it always has `batch_groups` groups.

    Args:
        roll_out: `(n, round) -> n groups`, generated and scored.
        round_size: `(missing groups) -> n`, at least as many as are missing in the first round.
        batch_groups (`int`): B, groups trained on per window.
        carried: effective groups that the last window had too many.
        max_rounds (`int`): at least 1.
    """
    result = Collection()
    effective = list(carried)
    idle: list[RolloutGroup] = []
    while len(effective) < batch_groups and result.rounds < max_rounds:
        groups = roll_out(round_size(batch_groups - len(effective)), result.rounds)
        result.rounds += 1
        result.fresh.extend(groups)
        effective.extend(group for group in groups if group.effective)
        idle.extend(group for group in groups if not group.effective)
    result.padded = max(0, batch_groups - len(effective))
    if result.padded > len(idle):
        raise RuntimeError(
            f"A window of {batch_groups} groups got {len(effective)} effective and {len(idle)} other groups in "
            f"{result.rounds} rounds: the first round must be at least as large as what is missing."
        )
    result.trained = effective[:batch_groups] + idle[: result.padded]
    result.surplus = effective[batch_groups:]
    result.dropped = idle[result.padded :]
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
    """Cut the outputs of TRL's `_generate` (one entry per completion, G in a row per prompt) into groups."""
    n = len(completion_ids)
    result = []
    for start in range(0, n, group_size):
        rows = range(start, start + group_size)
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
        """The arrays of one field as lists, one per completion; `None` if the groups do not have it."""
        if any(getattr(r, name) is None for r in self.rollouts):
            return None
        return [values.tolist() for r in self.rollouts for values in getattr(r, name)]

    @property
    def logged(self) -> dict[str, list]:
        """The columns that reward functions logged, one entry per completion; `None` where a group lacks the column."""
        columns = dict.fromkeys(column for r in self.rollouts for column in r.logged)
        return {
            column: [v for r in self.rollouts for v in r.logged.get(column, [None] * len(r))] for column in columns
        }
