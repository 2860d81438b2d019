"""Groups as data: packing them, and spreading them evenly over processes."""

import math
from dataclasses import FrozenInstanceError, asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

from tests.factories.groups import make_group
from trl_dataeff.rollouts.distributed import assign, pack_distributed, redistribute, unpack_distributed
from trl_dataeff.rollouts.group import pack_groups, unpack_groups


def test_groups_survive_packing():
    """With everything they can carry; logged numbers of NumPy and torch as numbers."""
    rich = make_group(
        prompt_id=9,
        completions=[[{"role": "assistant", "content": "x"}], [{"role": "assistant", "content": "y"}]],
        tool_masks=[np.array([1], np.int8), np.array([1, 0], np.int8)],
        sampling_logps=[np.array([-0.5], np.float32), np.array([math.nan, -2], np.float32)],
        behavior_logps=[np.array([-0.25], np.float32), np.array([-1, -2], np.float32)],
        excluded=[True, False],
        logged={"a": [np.float32(0.5), torch.tensor(2)], "b": [np.array([1, 2]), Path("x")]},
    )
    groups = [make_group(), rich]
    for before, after in zip(groups, unpack_groups(pack_groups(groups)), strict=True):
        expected = asdict(before)
        unpacked = asdict(after)
        if before is rich:
            expected["rollouts"]["logged"] = {"a": [0.5, 2], "b": [[1, 2], "x"]}
        np.testing.assert_equal(unpacked, expected)
        for a, b in zip(tree_leaves(expected), tree_leaves(unpacked), strict=True):
            assert getattr(a, "dtype", None) == getattr(b, "dtype", None)


@given(world_size=st.integers(1, 5), quota=st.integers(1, 6), data=st.data())
def test_assign_is_even_and_moves_as_few_as_possible(world_size, quota, data):
    n = world_size * quota
    owners = data.draw(st.lists(st.integers(0, world_size - 1), min_size=n, max_size=n))
    destinations = assign(owners, world_size, [True] * n)
    assert np.bincount(destinations, minlength=world_size).tolist() == [quota] * world_size
    moved = (destinations != np.array(owners)).sum()
    assert moved == sum(max(0, owners.count(r) - quota) for r in range(world_size))


def test_only_groups_that_move_are_sent(monkeypatch):
    """As process 1 of 2 sees it: of three groups of process 0 one comes here, and one of ours goes there."""
    held_there = [make_group(prompt_id=i, owner=0) for i in range(3)]
    ours = [make_group(prompt_id=i, owner=1) for i in (3, 4)]
    groups = [*(replace(group, rollouts=None) for group in held_there), *ours]
    sent = []

    def all_gather(value):
        sent.append(value)
        return [{2: held_there[2].rollouts}, value]

    monkeypatch.setattr("trl_dataeff.rollouts.distributed.all_gather", all_gather)
    moved = redistribute(groups, np.array([0, 0, 1, 1, 0]), rank=1)
    assert sent == [{4: ours[1].rollouts}]
    assert [group.owner for group in moved] == [0, 0, 1, 1, 0]
    assert [moved[i] is groups[i] for i in range(5)] == [True, True, False, True, False]
    assert moved[2].rollouts is held_there[2].rollouts
    assert moved[4].rollouts is None
    assert [group.owner for group in groups] == [0, 0, 0, 1, 1], "groups never change"
    with pytest.raises(FrozenInstanceError):
        groups[0].owner = 1


def test_groups_are_packed_with_rollouts_of_all_processes_and_unpacked_for_any_number(monkeypatch):
    whole = [make_group(prompt_id=i, owner=i % 2) for i in range(4)]
    held = [unpack_distributed(pack_distributed(whole, 0, 1), rank, 2) for rank in range(2)]
    others = [{i: g.rollouts for i, g in enumerate(groups) if g.rollouts is not None} for groups in held]
    monkeypatch.setattr("trl_dataeff.rollouts.distributed.all_gather", lambda value: others)
    packed = [pack_distributed(groups, rank, 2) for rank, groups in enumerate(held)]
    alone = pack_distributed(whole, 0, 1)
    for arrays in packed:
        assert arrays.keys() == alone.keys()
        for name, values in arrays.items():
            np.testing.assert_array_equal(values, alone[name])
    for world_size in (1, 2, 3):
        for rank in range(world_size):
            for group, owner in zip(unpack_distributed(alone, rank, world_size), (0, 1, 0, 1), strict=True):
                assert group.owner == owner % world_size
                assert (group.rollouts is not None) == (group.owner == rank)
