"""Groups are packed into arrays and back."""

import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests.factories import make_group
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
        expected, unpacked = asdict(before), asdict(after)
        if before is rich:
            expected["rollouts"]["logged"] = {"a": [0.5, 2], "b": [[1, 2], "x"]}
        np.testing.assert_equal(unpacked, expected)
        for a, b in zip(tree_leaves(expected), tree_leaves(unpacked), strict=True):
            assert getattr(a, "dtype", None) == getattr(b, "dtype", None)


def test_packing_a_group_held_elsewhere_is_an_error():
    group = make_group()
    group.move(1, None)
    with pytest.raises(ValueError, match="held by process 1"):
        pack_groups([group])
