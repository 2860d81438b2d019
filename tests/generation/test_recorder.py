"""Cutting what TRL generates into groups, and handing groups to TRL as if it had made them."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.factories.groups import make_group
from trl_dataeff.generation.pregenerated import PregeneratedGroups
from trl_dataeff.generation.recorder import RoundRecorder, TrlGeneration, split_rollouts
from trl_dataeff.generation.trl_state import temporarily
from trl_dataeff.rollouts.distributed import Processes


def test_a_group_with_different_prompts_is_refused():
    with pytest.raises(ValueError, match="different `prompt_ids`"):
        split_rollouts(TrlGeneration([[1], [2]], [[3], [4]], None, ["a", "b"], None, {}, None, []), 2, {})


def test_groups_with_and_without_a_tool_mask_are_handed_over_together():
    plain = make_group()
    masked = make_group(
        tool_masks=[np.array([0], np.int8), np.array([1, 0], np.int8)],
        sampling_logps=[np.array([-1.0], np.float32), np.array([-1.0, -2.0], np.float32)],
    )
    output = PregeneratedGroups([plain, masked], np.zeros((4, 1))).rollout_func([])
    assert output["env_mask"] == [[1], [1, 1], [0], [1, 0]]
    assert np.isnan(output["logprobs"][0] + output["logprobs"][1]).all()
    assert output["logprobs"][2:] == [[-1.0], [-1.0, -2.0]]
    assert PregeneratedGroups([plain], np.zeros((2, 1))).rollout_func([])["logprobs"] is None


def test_a_group_whose_rollouts_another_process_holds_cannot_be_handed_over():
    with pytest.raises(AssertionError, match="does not hold"):
        PregeneratedGroups([make_group(), replace(make_group(), rollouts=None)], np.zeros((4, 1)))


@pytest.mark.parametrize("tool_mask", [None, [[1], [1, 0], [1], [1]]])
def test_rollouts_are_cut_by_group_and_handed_over_as_they_were(tool_mask):
    prompts = [[1], [1], [2, 3], [2, 3]]
    tokens = [[4], [5, 6], [7], [8]]
    texts = list("abcd")
    logprobs = [[-1.0], [np.nan, -2.0], [-3.0], [-4.0]]
    generated = TrlGeneration(prompts, tokens, tool_mask, texts, [[-1.0], [None, -2.0], [-3.0], [-4.0]], {}, None, [])
    rollouts = split_rollouts(generated, 2, {"whole": [9, 9, 9, 9, 1, 2, 3, 4], "partial": ["x"]})
    assert [(r.completions, r.logged) for r in rollouts] == [
        (["a", "b"], {"whole": [1, 2]}),
        (["c", "d"], {"whole": [3, 4]}),
    ]
    pregenerated = PregeneratedGroups([make_group(**vars(r)) for r in rollouts], np.zeros((4, 1)))
    assert (pregenerated.completions, pregenerated.logged) == (texts, {"whole": [1, 2, 3, 4]})
    expected = {"prompt_ids": prompts, "completion_ids": tokens, "logprobs": logprobs}
    expected |= {} if tool_mask is None else {"env_mask": tool_mask}
    np.testing.assert_equal(pregenerated.rollout_func([]), expected)


@pytest.mark.parametrize("rewards", [None, torch.zeros(1, 1)])
def test_what_was_not_generated_or_scored_is_no_round(rewards):
    recorder = RoundRecorder(end_tokens=set())
    recorder.rewards = rewards
    assert recorder.complete(Processes()) is None


@pytest.mark.parametrize("tool_mask", [None, [[1, 0, 1], [1]]])
def test_a_recording_of_two_processes_is_one_round(tool_mask):
    """What TRL's methods return passes through unchanged; lengths are tokens of the model."""
    other = torch.tensor([[5, 1], [6, 0]])  # of the other process: lengths, truncated
    processes = Processes(0, 2, gather=lambda own: torch.cat([own, other]))
    recorder = RoundRecorder(end_tokens={9})
    generated = ([[1, 2], [1, 2, 3]], [torch.tensor([4, 5, 9]), [6]], tool_mask, ["a", "b"], None, {}, None, [])
    rewards = torch.tensor([[1.0], [0.0], [0.5], [float("nan")]])
    trainer = SimpleNamespace(
        _generate=lambda prompts: generated if prompts == ["p", "q"] else None,
        _calculate_rewards=lambda *args: rewards if args == (1, 2) else None,
    )
    with recorder.recording(trainer):
        assert trainer._generate(["p", "q"]) is generated
        assert trainer._calculate_rewards(1, 2) is rewards
    rollouts = [make_group().rollouts]
    recorder.rollouts = rollouts
    done = recorder.complete(processes)
    assert done.lengths.tolist() == [3 if tool_mask is None else 2, 1, 5, 6]
    assert done.lengths.dtype == np.int32
    assert done.truncated.tolist() == [False, True, True, False]
    assert done.truncated.dtype == bool
    np.testing.assert_array_equal(done.rewards, rewards.numpy())
    assert done.rollouts is rollouts
    assert done.seconds == recorder.seconds > 0


def test_attributes_are_restored_also_after_an_error():
    thing = SimpleNamespace(a=1, b=2)
    with temporarily(thing, a=3):
        assert (thing.a, thing.b) == (3, 2)
    assert (thing.a, thing.b) == (1, 2)
    with pytest.raises(KeyError), temporarily(thing, a=3, b=4):
        raise KeyError
    assert (thing.a, thing.b) == (1, 2)
