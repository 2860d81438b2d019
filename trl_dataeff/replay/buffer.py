"""`ReplayBuffer`: a run's recent effective groups (arXiv 2506.05316, section on rollout replay)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from itertools import islice

import numpy as np
import torch

from trl_dataeff.replay.staleness import Staleness
from trl_dataeff.rollouts.distributed import all_gather, pack_distributed, unpack_distributed
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
    First in, first out, by group; of each prompt the newest group, if it is informative: effective or, with a tracked baseline, not what
    was predicted. Another one removes the prompt's older group: what the policy does there has changed, and the older rewards
    no longer say how.

    With several processes, each holds the same groups in the same order, so that all sample alike; a group's rollouts
    are held by the process that owns it. Groups are compact arrays on the CPU (see [`Rollouts`]).

    Args:
        capacity (`int`): groups.
        max_age (`int`, *optional*): a group is removed once it is more than so many optimizer steps old; `None`: never.
        max_uses (`int`, *optional*): a group is removed after so many generation batches have replayed it; `None`: never.
        staleness ([`Staleness`], *optional*): removes groups that the policy has moved away from.
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
        max_uses: int | None = None,
        staleness: Staleness | None = None,
        rank: int = 0,
        world_size: int = 1,
        newest_first: bool = True,
    ):
        self.capacity = capacity
        self.max_age, self.max_uses, self.staleness = max_age, max_uses, staleness
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
            if group.informative or not math.isnan(group.success_rate):
                self._groups.pop(group.prompt_id, None)
            if group.informative:
                self._groups[group.prompt_id] = group
        for prompt_id in list(islice(self._groups, max(0, len(self) - self.capacity))):
            del self._groups[prompt_id]

    def expire(self, step: int) -> int:
        """
        Remove groups that at optimizer step `step` are older than `max_age`, were replayed `max_uses` times, or are stale. A
        collective if there are several processes and `staleness`.

        Returns:
            `int`: how many groups were removed.
        """
        before = len(self)
        age = math.inf if self.max_age is None else self.max_age
        uses = math.inf if self.max_uses is None else self.max_uses
        if self.staleness is not None:
            self._share_measures()
            self.staleness.observe([group for group in self._groups.values() if group.ratio_sums], step)
            self._groups = {i: g for i, g in self._groups.items() if not self.staleness.is_stale(g, step)}
            for group in self._groups.values():
                group.ratio_sums = None
        self._groups = {i: g for i, g in self._groups.items() if step - g.step <= age and g.uses < uses}
        return before - len(self)

    def measure(self, prompt_ids: torch.Tensor, sums: torch.Tensor) -> None:
        """
        Add what a forward pass of the loss shows of replayed rows, to the groups of this process.

        Args:
            prompt_ids (`torch.Tensor` of shape `(R,)`): the rows' prompts; other ones than those stored are passed over.
            sums (`torch.Tensor` of shape `(R, 5)`): from [`row_sums`].
        """
        for prompt_id, row in zip(prompt_ids.tolist(), sums.tolist(), strict=True):
            group = self._groups.get(prompt_id)
            if group is not None:
                group.ratio_sums = [a + b for a, b in zip(group.ratio_sums or [0.0] * len(row), row, strict=True)]

    def _share_measures(self) -> None:
        """Give all processes what the owner of each group has measured."""
        if self.world_size > 1:
            own = {i: g.ratio_sums for i, g in self._groups.items() if g.owner == self.rank}
            for part in all_gather(own):
                for prompt_id, sums in part.items():
                    self._groups[prompt_id].ratio_sums = sums

    def available(self, exclude: Collection[int] = ()) -> int:
        """How many groups [`sample`] can give without the prompts in `exclude`."""
        return len(self) - sum(prompt_id in self._groups for prompt_id in set(exclude))

    def sample(self, n: int, rng: torch.Generator, exclude: Collection[int] = ()) -> list[RolloutGroup]:
        """
        `n` different groups of prompts that are not in `exclude`; they stay in the buffer, and count a use. With `newest_first` those of
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
        sampled = [candidates[i] for i in order[:n].tolist()]
        for group in sampled:
            group.uses += 1
        return sampled

    def state_dict(self) -> dict[str, np.ndarray]:
        """Its groups, with their rollouts, as arrays. A collective if there are several processes."""
        if self.staleness is not None:
            self._share_measures()
        return pack_distributed(self.groups, self.rank, self.world_size)

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Replace the groups by those of `state_dict`; the oldest ones beyond `capacity` are dropped."""
        self._groups = {}
        self.add(unpack_distributed(state, self.rank, self.world_size))
