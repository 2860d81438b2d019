"""
The trained start, its exact accuracy, the pools that follow from it, and the answers of its tasks by other means.
"""

import dataclasses
import re
from collections import deque
from itertools import chain, zip_longest

import numpy as np
import pytest
import torch

from benchmarks.lab import pools
from benchmarks.lab.evaluate import success
from benchmarks.lab.pretrain import start_folder
from benchmarks.lab.rewards import Tally, exact_match
from benchmarks.lab.tasks import CELLS, LEARNABLE_FAMILIES, MAX_ANSWER, make_task
from tests.benchmarks.lab.conftest import TINY


def test_the_start_is_cached_under_its_recipe(start):
    def fail(step, loss):
        raise AssertionError("trained again")

    assert start_folder(TINY, start.parent, fail) == start
    assert dataclasses.replace(TINY, confusion=0.1).key != TINY.key


def test_exact_success_is_what_sampling_gives(model, tokenizer):
    """The chance of a right completion against 4,000 sampled ones; greedy against greedy decoding."""
    rng = np.random.default_rng(0)
    tasks = [make_task(rng, "second", 2) for _ in range(40)]
    chance, greedy, _ = success(model, tokenizer, tasks)
    assert 0.05 < chance.mean() < 0.95  # else the comparison says little
    prompts = tokenizer([task.prompt for task in tasks], return_tensors="pt")
    answers = [task.answer for task in tasks]

    def completions(**sampling):
        ids = model.generate(**prompts, max_new_tokens=6, **sampling)
        width = prompts["input_ids"].shape[1]
        return tokenizer.batch_decode(ids[:, width:], skip_special_tokens=True)

    torch.manual_seed(0)
    sampled = completions(do_sample=True, top_k=0, num_return_sequences=100)
    rewards = exact_match(sampled, np.repeat(answers, 100))
    assert np.mean(rewards) == pytest.approx(chance.mean().item(), abs=0.03)
    decoded = completions(do_sample=False)
    assert exact_match(decoded, answers) == greedy.float().tolist()


def test_kinds_follow_from_success():
    cells = {"a": 0.99, "b": 0.4, "c": 0.9, "d": 0.005, "e": 0.8, "f": 0.0}
    assert pools.classify(cells) == {"easy": ["a"], "learnable": ["b"], "unsolvable": ["f"]}


@pytest.mark.parametrize("name", pools.POOLS)
def test_a_pool_has_its_shares_and_no_held_out_prompt(name, start, model, tokenizer, tiny_bounds):
    pool = pools.POOLS[name]
    kinds = pools.classify(pools.cached_cell_success(start, model, tokenizer))
    data = pools.pool_dataset(pool, kinds, seed=0)
    assert len(data) == pool.size == len(set(data["prompt"]))
    shares = {"easy": pool.easy, "learnable": pool.learnable, "unsolvable": pool.unsolvable}
    for kind, share in shares.items():
        count = list(data["kind"]).count(kind)
        assert count / len(data) == pytest.approx(share, abs=1 / pool.size)
    assert not set(data["prompt"]) & {t.prompt for t in pools.held_out_tasks(kinds)}
    learnable = pools.pool_dataset(pool, kinds, seed=0, only=["learnable"])
    assert list(learnable["prompt"]) == [row["prompt"] for row in data if row["kind"] == "learnable"]
    assert list(pools.pool_dataset(pool, kinds, seed=0)["prompt"]) == list(data["prompt"])
    assert set(pools.pool_dataset(pool, kinds, seed=1)["prompt"]) != set(data["prompt"])


def test_groups_are_counted_where_they_are_scored():
    tally = Tally(exact_match, group_size=2)
    rewards = tally(prompts=list("aabbbb"), completions=list("101100"), answer=["1"] * 6)  # b is generated twice
    assert rewards == [1, 0, 1, 1, 0, 0]
    assert (tally.groups, tally.effective) == (3, 1)


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
        # In writing: a product for each digit of the second factor
        first, second = text.split("*")
        products = [int(first) * int(digit) * 10**place for place, digit in enumerate(reversed(second))]
        return str(sum(products))
    return str(sum(map(int, text.split("+"))))


@pytest.mark.parametrize(("family", "length"), CELLS)
def test_answers_are_right(family, length):
    rng = np.random.default_rng(length)
    for _ in range(50):
        task = make_task(rng, family, length)
        assert task.answer == solve(task.prompt)
        assert 1 <= len(task.answer) <= MAX_ANSWER
        if family in LEARNABLE_FAMILIES:
            assert sum(c.islower() for c in task.prompt) == length
