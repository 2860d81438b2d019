"""A reward function that does not return numbers is named, with what it returned. TRL's error stays as it is."""

import asyncio
import re

import numpy as np
import pytest
import torch

from tests.factories import even_length_reward, train_briefly
from trl_dataeff.rollouts.scoring import problem_with


RETURNED = {
    "texts": (lambda n: ["yes"] * n, r"'yes' \(str\) for completion 0"),
    "one text": (lambda n: [0.5] * (n - 1) + ["no"], r"'no' \(str\) for completion 7"),
    "a text": (lambda n: "abcdefgh", r"'a' \(str\) for completion 0"),  # TRL reads a list of letters
    "nothing": (lambda n: None, r"None \(NoneType\)"),
    "a number": (lambda n: 0.5, r"0.5 \(float\)"),
    "lists": (lambda n: [[0.5, 0.5]] * n, r"\[0.5, 0.5\] \(list\) for completion 0"),
    "mappings": (lambda n: [{"score": 1.0}] * n, r"{'score': 1.0} \(dict\) for completion 0"),
    "an array of texts": (lambda n: np.array(["1"] * n), r"np.str_\('1'\) \(str_\) for completion 0"),
}


def note_of(tmp_path, rewards, dynamic="off") -> str:
    with pytest.raises((TypeError, ValueError, RuntimeError)) as raised:
        train_briefly(tmp_path, dynamic, rewards=rewards)
    return "\n".join(note for note in raised.value.__notes__ if "reward function" in note)


@pytest.mark.parametrize("kind", RETURNED)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_function_and_what_it_returned_are_named(tmp_path, kind, asynchronous):
    make, expected = RETURNED[kind]

    def judge(completions, **kwargs):
        return make(len(completions))

    async def async_judge(completions, **kwargs):
        await asyncio.sleep(0)
        return make(len(completions))

    wrong = async_judge if asynchronous else judge
    note = note_of(tmp_path, [even_length_reward, wrong, even_length_reward])
    pattern = f"The reward function '{wrong.__name__}' returned {expected}; it must return a list of numbers, one per"
    assert re.match(pattern, note)


def test_it_is_named_also_in_a_round_of_its_own(tmp_path):
    def judge(completions, **kwargs):
        return ["yes"] * len(completions)

    assert "'judge' returned 'yes' (str) for completion 0" in note_of(tmp_path, judge, "dynamic")


def test_an_error_of_the_function_itself_is_not_explained(tmp_path):
    def judge(completions, **kwargs):
        return float("yes")

    assert note_of(tmp_path, [even_length_reward, judge]) == ""


@pytest.mark.parametrize(
    "rewards",
    [[], [1, 0.5, None, True], (1.0,), np.ones(3, np.float32), torch.ones(2), [torch.tensor(1.0)], [np.float64(1)]],
)
def test_numbers_of_any_kind_are_fine(rewards):
    assert problem_with(rewards) is None
