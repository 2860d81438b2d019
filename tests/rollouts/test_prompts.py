"""Rows without a prompt are found before training."""

import re

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset

from tests.factories.tiny import chat_dataset, plain_dataset
from trl_dataeff import DataEfficientGRPOConfig
from trl_dataeff.rollouts.checks import check_prompts, without_prompt
from trl_dataeff.validation import check_dataset


def turns(*contents, **last) -> list[dict]:
    """A conversation: system, user, system, ..."""
    conversation = [{"role": ["system", "user"][i % 2], "content": text} for i, text in enumerate(contents)]
    return [*conversation[:-1], {**conversation[-1], **last}]


@pytest.mark.parametrize(
    "rows",
    [[*plain_dataset(8)["prompt"], None], [*chat_dataset(8)["prompt"], []], [*chat_dataset(8)["prompt"], turns("")]],
)
def test_rows_without_a_prompt_are_named_with_what_removes_them(rows):
    dataset = Dataset.from_dict({"prompt": rows})
    with pytest.raises(ValueError, match=r"has 1 rows without a prompt .*: 8\. Remove them: `(.*)`") as raised:
        check_prompts(dataset)
    advice = re.search("Remove them: `(.*)`", str(raised.value))[1]
    check_prompts(eval(advice, {"dataset": dataset}))
    check_prompts(dataset.select(range(8)))
    check_prompts(dataset.add_column("image", range(9)))


@pytest.mark.parametrize(
    ("prompts", "empty"),
    [
        ([" ", "a", "", None], [2, 3]),
        ([turns("Be brief.", "1+1="), turns("", "1+1="), turns("Be brief.")], []),
        ([turns("", ""), turns("Be brief.", ""), turns("Be brief.", None), turns("")], [0, 1, 2, 3]),
        ([turns("a", "", role="assistant"), turns("a", "", role="tool"), turns("a", "", role=None)], [2]),
        ([[{"role": "user", "content": [{"text": "1+1="}]}], [{"role": "user", "content": []}], []], [1, 2]),
        ([[{"content": ""}], [{"content": "a"}]], [0]),
        ([[{"text": "a"}], []], [1]),
        ([], []),
        ([[1, 2], [], None], [1, 2]),
        ([None, None], [0, 1]),
    ],
)
def test_which_prompts_are_empty(prompts, empty):
    """Of columns of one chunk and of several, of which each may be a slice."""
    table, n = pa.table({"prompt": pa.array([*prompts, *prompts])}), len(prompts)
    assert np.flatnonzero(without_prompt(table["prompt"][n:])).tolist() == empty
    twice = pa.concat_tables([table[n:], table[:n]]).column("prompt")
    assert np.flatnonzero(without_prompt(twice)).tolist() == [*empty, *(n + i for i in empty)]


def test_good_prompts_are_checked_without_reading_rows(monkeypatch):
    dataset = Dataset.from_dict({"prompt": [turns("Be brief.", "1+1=")] * 9})
    every_second = dataset.select(range(0, 9, 2))
    for name in ("__getitem__", "__iter__"):
        monkeypatch.setattr(Dataset, name, lambda *args: pytest.fail("a row was read"))
    check_prompts(dataset)
    check_prompts(every_second)


def test_empty_prompts_are_for_an_environment_to_fill(tmp_path):
    args = DataEfficientGRPOConfig(str(tmp_path), use_cpu=True, bf16=False)
    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": ""}]] * 24})
    check_dataset(args, dataset, object)
    with pytest.raises(ValueError, match="has 24 rows without a prompt"):
        check_dataset(args, dataset, None)
