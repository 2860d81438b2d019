"""Cutting TRL's rollouts into groups, playing groups back, packing them, and spreading them evenly over processes."""

import math
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

from tests.factories.groups import make_group
from trl_dataeff.rollouts.capture import Generated, Recording, split_rollouts, temporarily
from trl_dataeff.rollouts.distributed import Processes, assign, pack_distributed, redistribute, unpack_distributed
from trl_dataeff.rollouts.group import pack_groups, unpack_groups
from trl_dataeff.rollouts.playback import Playback


def test_a_group_with_different_prompts_is_refused():
    with pytest.raises(ValueError, match="different `prompt_ids`"):
        split_rollouts(Generated([[1], [2]], [[3], [4]], None, ["a", "b"], None, {}, None, []), 2, {})


def test_groups_with_and_without_a_tool_mask_are_played_back_together():
    plain = make_group()
    masked = make_group(
        tool_masks=[np.array([0], np.int8), np.array([1, 0], np.int8)],
        sampling_logps=[np.array([-1.0], np.float32), np.array([-1.0, -2.0], np.float32)],
    )
    output = Playback([plain, masked], np.zeros((4, 1))).rollout_func([])
    assert output["env_mask"] == [[1], [1, 1], [0], [1, 0]]
    assert np.isnan(output["logprobs"][0] + output["logprobs"][1]).all()
    assert output["logprobs"][2:] == [[-1.0], [-1.0, -2.0]]
    assert Playback([plain], np.zeros((2, 1))).rollout_func([])["logprobs"] is None


@pytest.mark.parametrize("tool_mask", [None, [[1], [1, 0], [1], [1]]])
def test_rollouts_are_cut_by_group_and_played_back_as_they_were(tool_mask):
    prompts, tokens, texts = [[1], [1], [2, 3], [2, 3]], [[4], [5, 6], [7], [8]], list("abcd")
    logprobs = [[-1.0], [np.nan, -2.0], [-3.0], [-4.0]]
    generated = Generated(prompts, tokens, tool_mask, texts, [[-1.0], [None, -2.0], [-3.0], [-4.0]], {}, None, [])
    rollouts = split_rollouts(generated, 2, {"whole": [9, 9, 9, 9, 1, 2, 3, 4], "partial": ["x"]})
    assert [(r.completions, r.logged) for r in rollouts] == [
        (["a", "b"], {"whole": [1, 2]}),
        (["c", "d"], {"whole": [3, 4]}),
    ]
    playback = Playback([make_group(**vars(r)) for r in rollouts], np.zeros((4, 1)))
    assert (playback.completions, playback.logged) == (texts, {"whole": [1, 2, 3, 4]})
    expected = {"prompt_ids": prompts, "completion_ids": tokens, "logprobs": logprobs}
    expected |= {} if tool_mask is None else {"env_mask": tool_mask}
    np.testing.assert_equal(playback.rollout_func([]), expected)


@pytest.mark.parametrize("rewards", [None, torch.zeros(1, 1)])
def test_a_subclass_that_generates_or_scores_without_super_is_an_error(rewards):
    with pytest.raises(RuntimeError, match=r"super\(\)"):
        Recording(set(), rewards=rewards).complete(Processes(), [Mock()])


@pytest.mark.parametrize("tool_mask", [None, [[1, 0, 1], [1]]])
def test_a_recording_of_two_processes_is_one_round(tool_mask):
    """What TRL's methods return passes through unchanged; lengths are tokens of the model."""
    other = torch.tensor([[5, 1], [6, 0]])  # of the other process: lengths, truncated
    processes = Processes(0, 2, gather=lambda own: torch.cat([own, other]))
    recording = Recording({9})
    generated = ([[1, 2], [1, 2, 3]], [torch.tensor([4, 5, 9]), [6]], tool_mask, ["a", "b"], None, {}, None, [])
    assert recording.generate(lambda prompts: generated, ["p", "q"]) == generated
    rewards = torch.tensor([[1.0], [0.0], [0.5], [float("nan")]])
    assert recording.score(lambda *args: rewards if args == (1, 2) else None, 1, 2) is rewards
    rollouts = [make_group().rollouts]
    done = recording.complete(processes, rollouts)
    assert done.lengths.tolist() == [3 if tool_mask is None else 2, 1, 5, 6]
    assert done.lengths.dtype == np.int32
    assert done.truncated.tolist() == [False, True, True, False]
    assert done.truncated.dtype == bool
    np.testing.assert_array_equal(done.rewards, rewards.numpy())
    assert done.rollouts is rollouts
    assert done.seconds == recording.seconds > 0


def test_attributes_are_restored_also_after_an_error():
    thing = SimpleNamespace(a=1, b=2)
    with temporarily(thing, a=3):
        assert (thing.a, thing.b) == (3, 2)
    assert (thing.a, thing.b) == (1, 2)
    with pytest.raises(KeyError), temporarily(thing, a=3, b=4):
        raise KeyError
    assert (thing.a, thing.b) == (1, 2)


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
