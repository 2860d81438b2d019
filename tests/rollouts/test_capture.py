"""Cutting TRL's rollouts into groups, and playing groups back."""

import numpy as np
import pytest

from tests.factories import make_group
from trl_dataeff.rollouts.capture import Playback, row_value, split_rollouts


def test_a_group_with_different_prompts_is_refused():
    with pytest.raises(ValueError, match="different `prompt_ids`"):
        split_rollouts(2, [[1], [2]], [[3], [4]], None, ["a", "b"], None, {})


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


def test_rollouts_are_cut_by_group():
    logged = {"whole": list("abcd"), "partial": ["x"]}
    first, second = split_rollouts(
        2,
        prompt_ids=[[1], [1], [2, 3], [2, 3]],
        completion_ids=[[4], [5, 6], [7], [8]],
        tool_mask=[[1], [1, 0], [1], [1]],
        completions=["a", "b", "c", "d"],
        logprobs=[[-1.0], [None, -2.0], [-3.0], [-4.0]],
        logged=logged,
    )
    assert first.completions == ["a", "b"]
    assert second.prompt_tokens.tolist() == [2, 3]
    assert [t.tolist() for t in first.completion_tokens] == [[4], [5, 6]]
    assert np.isnan(first.sampling_logps[1][0])
    assert first.sampling_logps[1][1] == -2.0
    assert [m.tolist() for m in first.tool_masks] == [[1], [1, 0]]
    assert second.logged == {"whole": ["c", "d"]}


def test_fields_of_a_rollout_func_are_by_row_or_for_all():
    assert [row_value([10, 11], i) for i in range(3)] == [10, 11, None]
    assert row_value("same", 1) == "same"
