"""`ReplayBuffer`: a run's recent effective groups (arXiv 2506.05316, section on rollout replay)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import KW_ONLY, dataclass, field
from itertools import islice

import numpy as np
import torch

from trl_dataeff.rollouts.distributed import pack_distributed, unpack_distributed
from trl_dataeff.rollouts.group import RolloutGroup


def replay_groups(fraction: float, batch_groups: int, world_size: int) -> int:
    """
    Places of a generation batch that `replay="share"` reserves: the `fraction` in [0, 1) of its `batch_groups` places, as a
    multiple of the number of processes, so that each process generates at least one group.
    """
    per_process = batch_groups // world_size
    return min(math.floor(fraction * per_process + 0.5), per_process - 1) * world_size


@dataclass
class Stored:
    """A group in the buffer: the number of the generation batch that it came from, and how often it was replayed."""

    group: RolloutGroup
    batch: int
    uses: int = 0


@dataclass(eq=False, repr=False)
class ReplayBuffer:
    """
    First in, first out, by group; of each prompt the newest group, if it is effective. A newer group removes the prompt's
    older one, because the older rewards no longer say how the present policy answers. With several processes, each holds the same
    groups in the same order; a group's rollouts are held by the process that owns it.

    Args:
        capacity (`int`): groups.
        max_age (`int`, *optional*): a group is removed once it is more than so many generation batches old; `None`: never.
        rank (`int`, *optional*, defaults to `0`), world_size (`int`, *optional*, defaults to `1`): this process, and how
            many there are.
        newest_first (`bool`, *optional*, defaults to `True`): whether [`sample`] gives the groups that were replayed least,
            the newest of them first, or, as in the paper, any.
    """

    capacity: int
    max_age: int | None = None
    _: KW_ONLY
    rank: int = 0
    world_size: int = 1
    newest_first: bool = True
    _stored: dict[int, Stored] = field(default_factory=dict, init=False)  # by prompt, oldest first

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def groups(self) -> list[RolloutGroup]:
        """Oldest first."""
        return [stored.group for stored in self._stored.values()]

    def add(self, groups: Iterable[RolloutGroup], batch: int) -> None:
        """Enter all groups of generation batch number `batch`, in the order of their generation; those without any score are ignored."""
        for group in groups:
            if group.scored:
                self._stored.pop(group.prompt_id, None)
            if group.effective:
                self._stored[group.prompt_id] = Stored(group, batch)
        for prompt_id in list(islice(self._stored, max(0, len(self) - self.capacity))):
            del self._stored[prompt_id]

    def expire(self, batch: int) -> None:
        """Remove groups that are older than `max_age` at generation batch number `batch`."""
        if self.max_age is not None:
            self._stored = {i: s for i, s in self._stored.items() if batch - s.batch <= self.max_age}

    def available(self, exclude: Collection[int] = ()) -> int:
        """How many groups [`sample`] can give without the prompts in `exclude`."""
        return len(self) - sum(prompt_id in self._stored for prompt_id in set(exclude))

    def sample(self, n: int, rng: torch.Generator, exclude: Collection[int] = ()) -> list[RolloutGroup]:
        """
        At most `n` different groups of prompts that are not in `exclude`; they stay in the buffer. With `newest_first` those
        that were replayed least, the newest of them first, and uniformly among equals; else uniformly among all.
        """
        excluded = set(exclude)
        candidates = [stored for prompt_id, stored in self._stored.items() if prompt_id not in excluded]
        if n <= 0 or not candidates:
            return []
        order = torch.randperm(len(candidates), generator=rng).tolist()
        if self.newest_first:
            order.sort(key=lambda i: (candidates[i].uses, -candidates[i].batch))
        chosen = [candidates[i] for i in order[:n]]
        for stored in chosen:
            stored.uses += 1
        return [stored.group for stored in chosen]

    def clear(self) -> None:
        """Remove all groups."""
        self._stored = {}

    def state_dict(self) -> dict[str, np.ndarray]:
        """Its groups, with their rollouts, as arrays. A collective if there are several processes."""
        numbers = np.array([(stored.batch, stored.uses) for stored in self._stored.values()], dtype=np.int64)
        return {**pack_distributed(self.groups, self.rank, self.world_size), "numbers": numbers.reshape(-1, 2)}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Replace the groups by those of `state_dict`; the oldest ones beyond `capacity` are dropped."""
        groups = unpack_distributed(state, self.rank, self.world_size)
        pairs = list(zip(groups, state["numbers"].tolist(), strict=True))[-self.capacity :]
        self._stored = {group.prompt_id: Stored(group, batch, uses) for group, (batch, uses) in pairs}
