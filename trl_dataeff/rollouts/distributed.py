"""Every process trains on whole groups: who takes which, and handing them over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from accelerate.utils import broadcast_object_list, gather_object

from trl_dataeff.rollouts.group import RolloutGroup


T = TypeVar("T")


def assign(owners: Sequence[int], world_size: int) -> np.ndarray:
    """
    Spread groups evenly over processes, moving as few as possible: each process keeps its own, in their order, up to
    its share; the rest go to those that have room.

    Args:
        owners (`Sequence[int]` of length n): process that holds each group; n is divisible by `world_size`.
        world_size (`int`): number of processes.

    Returns:
        `np.ndarray` of shape `(n,)`: process that is to have each group.
    """
    quota, remainder = divmod(len(owners), world_size)
    if remainder:
        raise ValueError(f"{len(owners)} groups cannot be spread evenly over {world_size} processes.")
    destinations = np.asarray(owners, dtype=np.int64).copy()
    room = np.full(world_size, quota)
    homeless = []
    for i, owner in enumerate(owners):
        if room[owner]:
            room[owner] -= 1
        else:
            homeless.append(i)
    destinations[homeless] = np.repeat(np.arange(world_size), room)
    return destinations


def hand_over(groups: Sequence[RolloutGroup], destinations: np.ndarray, rank: int) -> None:
    """
    Bring the rollouts of each group to its destination, in place. Only groups that move are sent, and if none moves
    anywhere there is no communication.
    """
    moves = [i for i, group in enumerate(groups) if group.owner != destinations[i]]
    if not moves:
        return
    sent = all_gather({i: groups[i].rollouts for i in moves if groups[i].owner == rank})
    for i in moves:
        group = groups[i]
        group.rollouts = sent[group.owner][i] if destinations[i] == rank else None
        group.owner = int(destinations[i])


def all_gather(value: T) -> list[T]:
    """`value` of every process, in the order of ranks, on every process. A collective: all processes must call it."""
    return gather_object([value])


def from_main(ids: np.ndarray) -> np.ndarray:
    """`ids` of the main process, on every process. A collective: all processes must call it."""
    return broadcast_object_list([ids])[0]
