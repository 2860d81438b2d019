"""Every process trains on whole groups: which process gets which group, and sending the groups that move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, gather_object

from trl_dataeff.rollouts.group import RolloutGroup, pack_groups, unpack_groups


T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """
    The `world_size` processes of a run, as number `rank` sees them; by default it is the only one. `gather` joins a tensor on
    `device` with those of all processes along the first dimension, and `wait` waits for them. Both are collectives.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (immutable)
    gather: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
    wait: Callable[[], None] = lambda: None

    @classmethod
    def of(cls, accelerator: Any) -> Processes:
        """Those of an [`~accelerate.Accelerator`]."""
        a = accelerator
        return cls(a.process_index, a.num_processes, a.device, a.gather, a.wait_for_everyone)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def share(self, ids: np.ndarray) -> np.ndarray:
        """The part of a round's prompts that this process generates for, of n ids divisible by `world_size`."""
        count = len(ids) // self.world_size
        return ids[self.rank * count :][:count]


def assign(owners: Sequence[int], world_size: int, effective: Sequence[bool]) -> np.ndarray:
    """
    The process that is to have each of n groups, int64 `(n,)`: evenly spread, also the `effective` ones (bool, `(n,)`) among
    themselves, up to one. Few move: each process keeps its own, in their order, up to its share.
    """
    quota, remainder = divmod(len(owners), world_size)
    if remainder:
        raise ValueError(f"{len(owners)} groups cannot be spread evenly over {world_size} processes.")
    holders, first = np.asarray(owners, dtype=np.int64), np.asarray(effective, dtype=bool)
    room = np.full(world_size, first.sum() // world_size)
    most = np.argsort(-np.bincount(holders[first], minlength=world_size), kind="stable")
    room[most[: first.sum() % world_size]] += 1
    destinations = holders.copy()
    for chosen, places in ((first, room), (~first, quota - room)):
        left, overflow = places.copy(), []
        for i in np.flatnonzero(chosen):
            if left[holders[i]]:
                left[holders[i]] -= 1
            else:
                overflow.append(i)
        destinations[overflow] = np.repeat(np.arange(world_size), left)
    return destinations


def redistribute(groups: Sequence[RolloutGroup], destinations: np.ndarray, rank: int) -> None:
    """Send the rollouts of groups, the same on every process, to their destinations `(n,)`, in place. A collective if some move."""
    moves = [i for i, group in enumerate(groups) if group.owner != destinations[i]]
    if not moves:
        return
    sent = all_gather({i: groups[i].rollouts for i in moves if groups[i].owner == rank})
    for i in moves:
        group = groups[i]
        group.rollouts = sent[group.owner][i] if destinations[i] == rank else None
        group.owner = int(destinations[i])


def pack_distributed(groups: Sequence[RolloutGroup], rank: int, world_size: int) -> dict[str, np.ndarray]:
    """[`pack_groups`] of the same groups on every process, with all rollouts. A collective if there are several processes."""
    if world_size == 1:
        return pack_groups(groups)
    own = {i: group.rollouts for i, group in enumerate(groups) if group.owner == rank}
    rollouts = {i: value for part in all_gather(own) for i, value in part.items()}
    return pack_groups([replace(group, rollouts=rollouts[i]) for i, group in enumerate(groups)])


def unpack_distributed(arrays: dict[str, np.ndarray], rank: int, world_size: int) -> list[RolloutGroup]:
    """The inverse of [`pack_distributed`], for any number of processes: each keeps the rollouts that it owns."""
    groups = unpack_groups(arrays)
    for group in groups:
        group.owner %= world_size
        group.rollouts = group.rollouts if group.owner == rank else None
    return groups


def all_gather(value: T) -> list[T]:
    """`value` of every process, in the order of ranks, on every process. A collective: all processes must call it."""
    return gather_object([value])


def broadcast_from_main(ids: np.ndarray) -> np.ndarray:
    """`ids` of the main process, on every process. A collective: all processes must call it."""
    shared: list[np.ndarray] = broadcast_object_list([ids])
    return shared[0]
