"""Groups are packed into arrays and back."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.factories import make_group
from trl_dataeff.rollouts.group import (
    pack_groups,
    unpack_groups,
)


def test_groups_survive_packing():
    plain = make_group()
    rich = make_group(
        prompt_id=9,
        tool_masks=[np.array([1], np.int8), np.array([1, 0], np.int8)],
        sampling_logps=[np.array([-0.5], np.float32), np.array([math.nan, -2], np.float32)],
        behavior_logps=[np.array([-0.25], np.float32), np.array([-1, -2], np.float32)],
        logged={"column": ["a", "b"]},
    )
    rich.rollouts.completions = [[{"role": "assistant", "content": "x"}], [{"role": "assistant", "content": "y"}]]
    for before, after in zip([plain, rich], unpack_groups(pack_groups([plain, rich])), strict=True):
        for name in ("prompt_id", "step", "round", "success_rate", "kind", "seconds", "owner"):
            assert getattr(before, name) == getattr(after, name)
        for name in ("rewards", "lengths", "truncated"):
            np.testing.assert_array_equal(getattr(before, name), getattr(after, name))
            assert getattr(before, name).dtype == getattr(after, name).dtype
        for name in ("completion_tokens", "tool_masks", "sampling_logps", "behavior_logps"):
            a, b = getattr(before.rollouts, name), getattr(after.rollouts, name)
            assert (a is None) == (b is None)
            for x, y in zip(a or [], b or [], strict=True):
                np.testing.assert_array_equal(x, y)
                assert x.dtype == y.dtype
        for name in ("completions", "logged"):
            assert getattr(before.rollouts, name) == getattr(after.rollouts, name)


def test_logged_numbers_of_numpy_and_torch_survive_as_numbers():
    group = make_group(logged={"a": [np.float32(0.5), torch.tensor(2)], "b": [np.array([1, 2]), Path("x")]})
    (after,) = unpack_groups(pack_groups([group]))
    assert after.rollouts.logged == {"a": [0.5, 2], "b": [[1, 2], "x"]}


def test_packing_a_group_held_elsewhere_is_an_error():
    group = make_group()
    group.rollouts = None
    with pytest.raises(ValueError, match="held by process 1"):
        pack_groups([group])
