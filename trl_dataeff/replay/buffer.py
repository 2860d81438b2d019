"""`ReplayBuffer`: a run's recent effective groups (arXiv 2506.05316, section on rollout replay)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from itertools import islice

import numpy as np
import torch

from trl_dataeff.rollouts.distributed import pack_distributed, unpack_distributed
from trl_dataeff.rollouts.group import RolloutGroup


def replay_groups(fraction: float, batch_groups: int, world_size: int) -> int:
    """
    Replayed groups per generation batch: `fraction` of it, as a multiple of the number of processes, so that each process
    generates at least one group.

    Args:
        fraction (`float`): in [0, 1).
        batch_groups (`int`): B, groups trained on per generation batch; a multiple of `world_size`.
        world_size (`int`): number of processes.
    """
    per_process = batch_groups // world_size
    return min(math.floor(fraction * per_process + 0.5), per_process - 1) * world_size


class ReplayBuffer:
    """
    First in, first out, by group; of each prompt the newest group, if it is effective. Another one removes the prompt's older group: what the policy does there has changed, and the older rewards
    no longer say how.

    With several processes, each holds the same groups in the same order, so that all sample alike; a group's rollouts
    are held by the process that owns it. Groups are compact arrays on the CPU (see [`Rollouts`]).

    Args:
        capacity (`int`): groups.
        max_age (`int`, *optional*): a group is removed once it is more than so many optimizer steps old; `None`: never.
        rank (`int`, *optional*, defaults to `0`), world_size (`int`, *optional*, defaults to `1`): this process, and how
            many there are.
        newest_first (`bool`, *optional*, defaults to `True`): whether [`sample`] gives the newest groups, which are the
            closest to the policy, or, as in the paper, any.
    """

    def __init__(
        self,
        capacity: int,
        max_age: int | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
        newest_first: bool = True,
    ):
        self.capacity = capacity
        self.max_age = max_age
        self.rank, self.world_size = rank, world_size
        self.newest_first = newest_first
        self._groups: dict[int, RolloutGroup] = {}  # by prompt, oldest first

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def groups(self) -> list[RolloutGroup]:
        """Oldest first."""
        return list(self._groups.values())

    def add(self, groups: Iterable[RolloutGroup]) -> None:
        """
        Enter groups in the order in which they were generated, zero-variance groups included. One that no reward function
        scored says nothing of its prompt, and is ignored.
        """
        for group in groups:
            if group.effective or not math.isnan(group.success_rate):
                self._groups.pop(group.prompt_id, None)
            if group.effective:
                self._groups[group.prompt_id] = group
        for prompt_id in list(islice(self._groups, max(0, len(self) - self.capacity))):
            del self._groups[prompt_id]

    def expire(self, step: int) -> None:
        """Remove groups that at optimizer step `step` are older than `max_age`."""
        if self.max_age is not None:
            self._groups = {i: g for i, g in self._groups.items() if step - g.step <= self.max_age}

    def available(self, exclude: Collection[int] = ()) -> int:
        """How many groups [`sample`] can give without the prompts in `exclude`."""
        return len(self) - sum(prompt_id in self._groups for prompt_id in set(exclude))

    def sample(self, n: int, rng: torch.Generator, exclude: Collection[int] = ()) -> list[RolloutGroup]:
        """
        `n` different groups of prompts that are not in `exclude`; they stay in the buffer. With `newest_first` those of
        the latest optimizer steps, uniformly among groups of the same step; else uniformly among all.

        Raises:
            `ValueError`: if there are fewer.
        """
        excluded = set(exclude)
        candidates = [group for prompt_id, group in self._groups.items() if prompt_id not in excluded]
        if n > len(candidates):
            raise ValueError(f"{n} groups were requested; the replay buffer has {len(candidates)} of other prompts.")
        if n == 0:
            return []
        order = torch.randperm(len(candidates), generator=rng)
        if self.newest_first:
            steps = torch.tensor([candidates[i].step for i in order.tolist()])
            order = order[steps.argsort(descending=True, stable=True)]
        return [candidates[i] for i in order[:n].tolist()]

    def state_dict(self) -> dict[str, np.ndarray]:
        """Its groups, with their rollouts, as arrays. A collective if there are several processes."""
        return pack_distributed(self.groups, self.rank, self.world_size)

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Replace the groups by those of `state_dict`; the oldest ones beyond `capacity` are dropped."""
        self._groups = {}
        self.add(unpack_distributed(state, self.rank, self.world_size))
