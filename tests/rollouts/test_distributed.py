"""Spreading groups evenly over processes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.factories.groups import make_group
from trl_dataeff.rollouts.distributed import (
    assign,
    pack_distributed,
    redistribute,
    unpack_distributed,
)


@given(world_size=st.integers(1, 5), quota=st.integers(1, 6), data=st.data())
def test_assign_is_even_and_moves_as_few_as_possible(world_size, quota, data):
    n = world_size * quota
    owners = data.draw(st.lists(st.integers(0, world_size - 1), min_size=n, max_size=n))
    destinations = assign(owners, world_size)
    assert np.bincount(destinations, minlength=world_size).tolist() == [quota] * world_size
    moved = (destinations != np.array(owners)).sum()
    assert moved == sum(max(0, owners.count(r) - quota) for r in range(world_size))


def test_only_groups_that_move_are_sent(monkeypatch):
    """As process 1 of 2 sees it: of three groups of process 0 one comes here, and one of ours goes there."""
    groups = [make_group(prompt_id=i, owner=owner) for i, owner in enumerate([0, 0, 0, 1, 1])]
    there, ours = groups[2].rollouts, groups[4].rollouts
    for group in groups[:3]:
        group.owner, group.rollouts = 0, None  # held by process 0
    sent = []

    def all_gather(value):
        sent.append(value)
        return [{2: there}, value]

    monkeypatch.setattr("trl_dataeff.rollouts.distributed.all_gather", all_gather)
    redistribute(groups, np.array([0, 0, 1, 1, 0]), rank=1)
    assert sent == [{4: ours}]
    assert [group.owner for group in groups] == [0, 0, 1, 1, 0]
    assert groups[2].rollouts is there
    assert groups[4].rollouts is None
    with pytest.raises(AttributeError, match="never changes"):
        groups[0].kind = 0


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
