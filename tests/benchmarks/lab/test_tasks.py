"""The tasks' answers by other means than those that made them."""

from __future__ import annotations

import re
from collections import deque
from itertools import chain, zip_longest

import numpy as np
import pytest

from benchmarks.lab.model import make_tokenizer
from benchmarks.lab.tasks import CELLS, LEARNABLE_FAMILIES, MAX_ANSWER, make_task


def solve(prompt: str) -> str:
    """The answer, read from the prompt alone."""
    kind, text = re.fullmatch(r"(\w)\d?:(.+)=", prompt).groups()
    if kind == "R":
        turned = deque(text)
        turned.rotate(-int(prompt[1]))
        return "".join(turned)
    if kind == "V":
        return re.sub("[aeiou]", "", text)
    if kind == "I":
        return "".join(chain.from_iterable(zip_longest(*text.split(","), fillvalue="")))
    if kind == "S":
        return "".join(c for i, c in enumerate(text) if i % 2 == 0)
    if kind == "M":
        a, b = text.split("*")
        return str(sum(int(a) * int(digit) * 10**i for i, digit in enumerate(reversed(b))))
    total = 0
    for number in text.split("+"):
        total += int(number)
    return str(total)


@pytest.mark.parametrize(("family", "length"), CELLS)
def test_answers_are_right(family, length):
    rng = np.random.default_rng(length)
    for _ in range(50):
        task = make_task(rng, family, length)
        assert task.answer == solve(task.prompt)
        assert 1 <= len(task.answer) <= MAX_ANSWER
        if family in LEARNABLE_FAMILIES:
            assert sum(c.islower() for c in task.prompt) == length


def test_the_tokenizer_has_a_token_for_every_character():
    tokenizer = make_tokenizer()
    rng = np.random.default_rng(0)
    for cell in CELLS:
        task = make_task(rng, *cell)
        for text in (task.prompt, task.answer):
            ids = tokenizer(text)["input_ids"]
            assert len(ids) == len(text)
            assert tokenizer.pad_token_id not in ids
            assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
