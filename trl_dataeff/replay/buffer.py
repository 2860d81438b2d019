"""`ReplayBuffer`: the effective groups that a run rolled out lately (arXiv 2506.05316, section on rollout replay)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from itertools import islice

import torch

from trl_dataeff.rollouts.group import RolloutGroup


def replay_groups(fraction: float, batch_groups: int, world_size: int) -> int:
    """
    How many groups of a window are replayed: `fraction` of it, as a multiple of the number of processes, each of which
    rolls out at least one group.

    Args:
        fraction (`float`): in [0, 1).
        batch_groups (`int`): B, groups trained on per window; a multiple of `world_size`.
        world_size (`int`): number of processes.
    """
    per_process = batch_groups // world_size
    return min(math.floor(fraction * per_process + 0.5), per_process - 1) * world_size


class ReplayBuffer:
    """
    First in, first out, by group; of each prompt only the newest effective group.

    Every process holds the same groups in the same order, so that all of them sample alike; the rollouts of a group
    are there only on the process that owns it. Groups are compact arrays on the CPU (see [`Rollouts`]).

    Args:
        capacity (`int`): groups.
        max_age (`int`, *optional*): a group is dropped once it is more than so many optimizer steps old; `None`: never.
    """

    def __init__(self, capacity: int, max_age: int | None = None):
        self.capacity = capacity
        self.max_age = max_age
        self._groups: dict[int, RolloutGroup] = {}  # by prompt, oldest first

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def groups(self) -> list[RolloutGroup]:
        """Oldest first."""
        return list(self._groups.values())

    def add(self, groups: Iterable[RolloutGroup]) -> None:
        """Enter groups in the order in which they were rolled out; those of zero variance are passed over."""
        for group in groups:
            if group.effective:
                self._groups.pop(group.prompt_id, None)
                self._groups[group.prompt_id] = group
        for prompt_id in list(islice(self._groups, max(0, len(self) - self.capacity))):
            del self._groups[prompt_id]

    def expire(self, step: int) -> None:
        """Drop what is older than `max_age` at optimizer step `step`."""
        if self.max_age is not None:
            self._groups = {i: group for i, group in self._groups.items() if step - group.step <= self.max_age}

    def available(self, exclude: Collection[int] = ()) -> int:
        """How many groups [`sample`] can give without the prompts in `exclude`."""
        return len(self) - sum(prompt_id in self._groups for prompt_id in set(exclude))

    def sample(self, n: int, rng: torch.Generator, exclude: Collection[int] = ()) -> list[RolloutGroup]:
        """
        `n` different groups, uniformly among those of prompts that are not in `exclude`; they stay in the buffer.

        Raises:
            `ValueError`: if there are fewer.
        """
        excluded = set(exclude)
        candidates = [group for prompt_id, group in self._groups.items() if prompt_id not in excluded]
        if n > len(candidates):
            raise ValueError(f"{n} groups were asked for; the replay buffer can give {len(candidates)}.")
        if n == 0:
            return []
        return [candidates[i] for i in torch.randperm(len(candidates), generator=rng)[:n].tolist()]
