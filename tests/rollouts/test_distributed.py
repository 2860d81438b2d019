"""Spreading groups evenly over processes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.factories import make_group
from trl_dataeff.rollouts.distributed import assign, hand_over


@given(world_size=st.integers(1, 5), quota=st.integers(1, 6), data=st.data())
def test_assign_is_even_and_moves_as_few_as_possible(world_size, quota, data):
    n = world_size * quota
    owners = data.draw(st.lists(st.integers(0, world_size - 1), min_size=n, max_size=n))
    destinations = assign(owners, world_size)
    assert np.bincount(destinations, minlength=world_size).tolist() == [quota] * world_size
    moved = (destinations != np.array(owners)).sum()
    assert moved == sum(max(0, owners.count(r) - quota) for r in range(world_size))


def test_an_uneven_number_is_refused():
    with pytest.raises(ValueError, match="3 groups cannot be spread evenly over 2"):
        assign([0, 0, 1], 2)


def test_nothing_is_sent_if_nothing_moves(monkeypatch):
    monkeypatch.setattr(
        "trl_dataeff.rollouts.distributed.all_gather", lambda value: pytest.fail("a needless collective")
    )
    hand_over([make_group(owner=0), make_group(owner=1)], np.array([0, 1]), rank=0)
