"""
The processes of a run: which of them generates for which prompts, and trains on which groups; sending the groups that
move, and packing all of them for a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, gather_object

from trl_dataeff.rollouts.group import RolloutGroup, pack_groups, unpack_groups


T = TypeVar("T")


def _return_unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _do_nothing() -> None:
    pass


@dataclass(frozen=True)
class Processes:
    """
    The processes of a run, as one of them sees them; by default it is the only one.

    Attributes:
        rank: number of this process, from 0.
        world_size: how many processes there are.
        device: device of this process.
        gather: joins a tensor on `device` with those of all processes along the first dimension. A collective.
        wait: waits for all processes. A collective.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (immutable)
    gather: Callable[[torch.Tensor], torch.Tensor] = _return_unchanged
    wait: Callable[[], None] = _do_nothing

    @classmethod
    def of(cls, accelerator: Any) -> Processes:
        """Those of an [`~accelerate.Accelerator`]."""
        return cls(
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
            device=accelerator.device,
            gather=accelerator.gather,
            wait=accelerator.wait_for_everyone,
        )

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def share(self, ids: np.ndarray) -> np.ndarray:
        """
        The prompts of a round for which this process generates: an equal, contiguous part (see [`owners_of`]).

        Args:
            ids (`np.ndarray` of shape `(n,)`): prompts of the round; n is a multiple of `world_size`.
        """
        count = len(ids) // self.world_size
        start = self.rank * count
        return ids[start : start + count]

    def owners_of(self, n: int) -> list[int]:
        """The process that generates for each of the n prompts of a round, as [`share`] gives them out."""
        return [i * self.world_size // n for i in range(n)]


def assign(owners: Sequence[int], world_size: int, effective: Sequence[bool]) -> np.ndarray:
    """
    Decide which process is to have each of n groups. Each process gets equally many groups; their numbers of effective
    groups differ by one at most. Few groups move: a process keeps its own groups, in their order, up to its share.

    Args:
        owners (`Sequence[int]` of length n): the process that has each group now.
        world_size (`int`): number of processes, which divides n.
        effective (`Sequence[bool]` of length n): whether each group is effective.

    Returns:
        `np.ndarray` of shape `(n,)`, int64: the process that is to have each group.

    Raises:
        `ValueError`: n is not a multiple of `world_size`.
    """
    quota, remainder = divmod(len(owners), world_size)
    if remainder:
        raise ValueError(f"{len(owners)} groups cannot be spread evenly over {world_size} processes.")
    holders = np.asarray(owners, dtype=np.int64)
    is_effective = np.asarray(effective, dtype=bool)

    # The processes that have most effective groups keep one more, where their number does not divide evenly
    effective_quotas = np.full(world_size, is_effective.sum() // world_size)
    effective_counts = np.bincount(holders[is_effective], minlength=world_size)
    by_count = np.argsort(-effective_counts, kind="stable")
    effective_quotas[by_count[: is_effective.sum() % world_size]] += 1

    destinations = holders.copy()
    for chosen, quotas in ((is_effective, effective_quotas), (~is_effective, quota - effective_quotas)):
        room = quotas.copy()
        overflow = []
        for i in np.flatnonzero(chosen):
            if room[holders[i]]:
                room[holders[i]] -= 1
            else:
                overflow.append(i)
        destinations[overflow] = np.repeat(np.arange(world_size), room)
    return destinations


def redistribute(groups: Sequence[RolloutGroup], destinations: np.ndarray, rank: int) -> list[RolloutGroup]:
    """
    Send the rollouts of groups to their destinations. A collective if some move.

    Args:
        groups (`Sequence[RolloutGroup]` of length n): the same on every process.
        destinations (`np.ndarray` of shape `(n,)`): the process that is to have each of them.
        rank (`int`): this process.

    Returns:
        `list[RolloutGroup]`: the groups in their order. One that moves is a new object, with its new owner.
    """
    moves = [i for i, group in enumerate(groups) if group.owner != destinations[i]]
    if not moves:
        return list(groups)
    sent = all_gather({i: groups[i].rollouts for i in moves if groups[i].owner == rank})
    result = list(groups)
    for i in moves:
        group = groups[i]
        owner = int(destinations[i])
        rollouts = sent[group.owner][i] if owner == rank else None
        result[i] = replace(group, owner=owner, rollouts=rollouts)
    return result


def pack_distributed(groups: Sequence[RolloutGroup], rank: int, world_size: int) -> dict[str, np.ndarray]:
    """
    [`pack_groups`] of the same groups on every process, with all rollouts. A collective if there are several
    processes.
    """
    if world_size == 1:
        return pack_groups(groups)
    own = {i: group.rollouts for i, group in enumerate(groups) if group.owner == rank}
    rollouts = {}
    for part in all_gather(own):
        rollouts.update(part)
    return pack_groups([replace(group, rollouts=rollouts[i]) for i, group in enumerate(groups)])


def unpack_distributed(arrays: dict[str, np.ndarray], rank: int, world_size: int) -> list[RolloutGroup]:
    """The inverse of [`pack_distributed`], for any number of processes: each keeps the rollouts that it owns."""
    groups = []
    for group in unpack_groups(arrays):
        owner = group.owner % world_size
        rollouts = group.rollouts if owner == rank else None
        groups.append(replace(group, owner=owner, rollouts=rollouts))
    return groups


def all_gather(value: T) -> list[T]:
    """`value` of every process, in the order of ranks, on every process. A collective: all processes must call it."""
    return gather_object([value])


def broadcast_from_main(ids: np.ndarray) -> np.ndarray:
    """`ids` of the main process, on every process. A collective: all processes must call it."""
    shared: list[np.ndarray] = broadcast_object_list([ids])
    return shared[0]
