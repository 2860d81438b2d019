"""`ReplayBuffer`: a run's recent effective groups (arXiv 2506.05316, section on rollout replay)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from trl_dataeff.rollouts.distributed import pack_distributed, unpack_distributed
from trl_dataeff.rollouts.group import RolloutGroup


@dataclass
class Stored:
    """
    A group in the buffer.

    Attributes:
        group: the group.
        batch_number: number of the generation batch that it came from.
        uses: how often it was replayed.
    """

    group: RolloutGroup
    batch_number: int
    uses: int = 0


class ReplayBuffer:
    """
    First in, first out, by group; of each prompt the newest group, if it is effective. A newer group removes the
    prompt's older one, because the older rewards no longer say how the present policy answers. With several processes,
    each holds the same groups in the same order; a group's rollouts are held by the process that owns it.

    Args:
        capacity (`int`): groups at most.
        max_age (`int`, *optional*): a group is removed once it is more than so many generation batches old; `None`:
            never.
        rank (`int`, *optional*, defaults to `0`): number of this process.
        world_size (`int`, *optional*, defaults to `1`): number of processes.
        newest_first (`bool`, *optional*, defaults to `True`): whether [`sample`] gives the groups that were replayed
            least, the newest of them first, or, as in the paper, any.
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
        self.rank = rank
        self.world_size = world_size
        self.newest_first = newest_first
        self._stored: dict[int, Stored] = {}  # by prompt, oldest first

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def groups(self) -> list[RolloutGroup]:
        """Oldest first."""
        return [stored.group for stored in self._stored.values()]

    def add(self, groups: Iterable[RolloutGroup], batch_number: int) -> None:
        """
        Enter all groups of a generation batch; those without any score are ignored.

        Args:
            groups (`Iterable[RolloutGroup]`): in the order of their generation.
            batch_number (`int`): number of the generation batch.
        """
        for group in groups:
            if group.num_scored > 0:
                self._stored.pop(group.prompt_id, None)
            if group.effective:
                self._stored[group.prompt_id] = Stored(group, batch_number)
        num_excess = max(0, len(self) - self.capacity)
        for prompt_id in list(self._stored)[:num_excess]:
            del self._stored[prompt_id]

    def replace(self, moved: Mapping[RolloutGroup, RolloutGroup]) -> None:
        """Put groups that have moved to another process in the place of what they were there."""
        for stored in self._stored.values():
            stored.group = moved.get(stored.group, stored.group)

    def expire(self, batch_number: int) -> None:
        """Remove groups that are older than `max_age` at the generation batch with this number."""
        if self.max_age is None:
            return
        oldest = batch_number - self.max_age
        kept = {}
        for prompt_id, stored in self._stored.items():
            if stored.batch_number >= oldest:
                kept[prompt_id] = stored
        self._stored = kept

    def available(self, exclude: Collection[int] = ()) -> int:
        """How many groups [`sample`] can give without the prompts in `exclude`."""
        num_excluded = sum(prompt_id in self._stored for prompt_id in set(exclude))
        return len(self) - num_excluded

    def sample(self, n: int, rng: torch.Generator, exclude: Collection[int] = ()) -> list[RolloutGroup]:
        """
        Choose groups to replay; they stay in the buffer.

        Args:
            n (`int`): how many, at most.
            rng (`torch.Generator`): of replay. It is not used if no group is chosen.
            exclude (`Collection[int]`, *optional*): prompts whose groups are not chosen.

        Returns:
            `list[RolloutGroup]`: different groups. With `newest_first` those that were replayed least, the newest of
            them first, and uniformly among equals; else uniformly among all.
        """
        excluded = set(exclude)
        candidates = [stored for prompt_id, stored in self._stored.items() if prompt_id not in excluded]
        if n <= 0 or not candidates:
            return []
        shuffled = [candidates[i] for i in torch.randperm(len(candidates), generator=rng).tolist()]
        if self.newest_first:
            shuffled.sort(key=lambda stored: (stored.uses, -stored.batch_number))
        chosen = shuffled[:n]
        for stored in chosen:
            stored.uses += 1
        return [stored.group for stored in chosen]

    def clear(self) -> None:
        """Remove all groups."""
        self._stored = {}

    def state_dict(self) -> dict[str, np.ndarray]:
        """Its groups, with their rollouts, as arrays. A collective if there are several processes."""
        state = pack_distributed(self.groups, self.rank, self.world_size)
        numbers = [(stored.batch_number, stored.uses) for stored in self._stored.values()]
        state["numbers"] = np.array(numbers, dtype=np.int64).reshape(-1, 2)
        return state

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Replace the groups by those of `state_dict`; the oldest ones beyond `capacity` are dropped."""
        groups = unpack_distributed(state, self.rank, self.world_size)
        rows = list(zip(groups, state["numbers"].tolist(), strict=True))
        self._stored = {}
        for group, (batch_number, uses) in rows[-self.capacity :]:
            self._stored[group.prompt_id] = Stored(group, batch_number, uses)
