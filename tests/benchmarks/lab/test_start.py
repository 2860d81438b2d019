"""The trained start, its exact accuracy, and the pools that follow from it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from benchmarks.lab import pools
from benchmarks.lab.evaluate import encode, success
from benchmarks.lab.model import make_model
from benchmarks.lab.pretrain import (
    backward,
    corrupt,
    demonstration,
    learning_rate_at,
    partners,
    start_folder,
    train_start,
)
from benchmarks.lab.rewards import Tally, answer_and_length, exact_match, right_characters
from benchmarks.lab.tasks import ARITHMETIC, Task, make_task
from tests.benchmarks.lab.tiny import TINY


def test_noise_replaces_confusable_characters_by_their_partners():
    rng = np.random.default_rng(0)
    text = "abc" * 4000
    noisy = corrupt(rng, text, {"a": "x", "c": "y"}, 0.3)
    assert np.mean([c == "x" for c in noisy[::3]]) == pytest.approx(0.3, abs=0.02)
    assert set(noisy[::3]) == {"a", "x"}
    assert set(noisy[1::3]) == {"b"}
    assert set(noisy[2::3]) == {"c", "y"}
    assert corrupt(rng, text, {"a": "x"}, 0.0) == text


def test_partners_are_other_characters_of_the_same_kind():
    tables = partners(TINY)
    assert len({tuple(sorted(table)) for table in tables.values()}) == len(tables)  # each family has its own
    for family, table in tables.items():
        assert len(table) == (4 if family in ARITHMETIC else 10)
        assert all(a != b and a.isdigit() == b.isdigit() for a, b in table.items())


def test_short_tasks_are_demonstrated_without_noise():
    rng = np.random.default_rng(0)
    recipe = dataclasses.replace(TINY, confusable=1.0, confusion=1.0)
    tables = partners(recipe)
    for _ in range(300):
        task, answer = demonstration(rng, recipe, tables, noisy=True)
        clean = task.family not in ARITHMETIC and task.length <= recipe.clean_up_to
        assert (answer == task.answer) == clean
        assert len(answer) == len(task.answer)
        task, answer = demonstration(rng, recipe, tables, noisy=False)
        assert answer == task.answer


def test_parts_do_not_change_the_gradient(tokenizer):
    rng = np.random.default_rng(0)
    batch = [demonstration(rng, TINY, partners(TINY), noisy=True) for _ in range(20)]
    gradients = []
    for parts in (1, 3):
        model = make_model(tokenizer, 0, hidden=32, layers=2)
        loss = backward(model, tokenizer, batch, parts)
        gradients.append((loss, [p.grad for p in model.parameters()]))
    assert gradients[0][0] == pytest.approx(gradients[1][0], rel=1e-5)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(gradients[0][1], gradients[1][1], strict=True))


def test_the_start_is_cached_under_its_recipe(start):
    def fail(step, loss):
        raise AssertionError("trained again")

    assert start_folder(TINY, start.parent, fail) == start
    assert dataclasses.replace(TINY, confusion=0.1).key != TINY.key


def test_equal_recipes_give_equal_starts(tokenizer):
    short = dataclasses.replace(TINY, steps=3)
    torch.manual_seed(1)
    one = train_start(short, tokenizer).state_dict()
    torch.manual_seed(2)
    two = train_start(short, tokenizer).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_learning_rate_rises_and_falls():
    rates = [learning_rate_at(step, TINY) for step in range(TINY.steps)]
    assert max(rates) == pytest.approx(TINY.learning_rate)
    assert rates[0] < max(rates)
    assert rates[-1] < 0.05 * max(rates)


def test_answers_are_where_encode_says(tokenizer):
    tasks = [Task("second", 3, "S:abc=", "ac"), Task("second", 6, "S:abcdef=", "ace")]
    ids, is_answer = encode(tokenizer, tasks)
    assert tokenizer.decode(ids[0][is_answer[0]]) == "ac<eos>"
    assert tokenizer.decode(ids[1][is_answer[1]]) == "ace<eos>"
    assert is_answer.sum(-1).tolist() == [3, 4]


def test_exact_success_is_what_sampling_gives(model, tokenizer):
    """The chance of a right completion against 4,000 sampled ones; greedy against greedy decoding."""
    rng = np.random.default_rng(0)
    tasks = [make_task(rng, "second", 2) for _ in range(40)]
    chance, greedy, _ = success(model, tokenizer, tasks)
    assert 0.05 < chance.mean() < 0.95  # else the comparison says little
    prompts = tokenizer([t.prompt for t in tasks], return_tensors="pt")
    torch.manual_seed(0)
    sampled = model.generate(**prompts, do_sample=True, top_k=0, max_new_tokens=6, num_return_sequences=100)
    texts = tokenizer.batch_decode(sampled[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    rewards = exact_match(texts, [t.answer for t in tasks for _ in range(100)])
    assert np.mean(rewards) == pytest.approx(chance.mean().item(), abs=0.03)
    decoded = model.generate(**prompts, do_sample=False, max_new_tokens=6)
    texts = tokenizer.batch_decode(decoded[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    assert exact_match(texts, [t.answer for t in tasks]) == greedy.float().tolist()


def test_batches_do_not_change_success(model, tokenizer):
    rng = np.random.default_rng(0)
    tasks = [make_task(rng, "second", 2 + i % 5) for i in range(20)]
    whole, parts = success(model, tokenizer, tasks), success(model, tokenizer, tasks, batch_size=3)
    assert torch.allclose(whole[0], parts[0], atol=1e-6)
    assert torch.equal(whole[1], parts[1])
    assert torch.allclose(whole[2], parts[2], atol=1e-5)


def test_entropy_is_that_of_the_tokens_along_the_right_answer(model, tokenizer):
    task = Task("second", 3, "S:abc=", "ac")
    ids = torch.tensor([tokenizer(task.prompt + task.answer)["input_ids"]])
    p = model(input_ids=ids).logits[0, -3:].softmax(-1)  # what comes at a, at c and at the end
    by_hand = [torch.distributions.Categorical(row).entropy().item() for row in p]
    assert success(model, tokenizer, [task]).entropy.item() == pytest.approx(np.mean(by_hand), abs=1e-5)


def test_kinds_follow_from_success():
    cells = {
        ("second", 2): 0.99,
        ("second", 5): 0.4,
        ("second", 3): 0.9,
        ("rotate", 14): 0.005,
        ("rotate", 3): 0.8,
        ("sum", 3): 0.0,
    }
    assert pools.classify(cells) == {
        "easy": [("second", 2)],
        "learnable": [("second", 5)],
        "dead": [("sum", 3)],
    }


@pytest.mark.parametrize("name", pools.POOLS)
def test_a_pool_has_its_shares_and_no_held_out_prompt(name, start, model, tokenizer, tiny_bounds):
    pool = pools.POOLS[name]
    kinds = pool.kinds(pools.cached_cell_success(start, model, tokenizer))
    data = pools.pool_dataset(pool, kinds, seed=0)
    assert len(data) == pool.size == len(set(data["prompt"]))
    for kind, share in (("easy", pool.easy), ("learnable", pool.learnable), ("dead", pool.dead)):
        assert list(data["kind"]).count(kind) / len(data) == pytest.approx(share, abs=0.002)
    assert not set(data["prompt"]) & {t.prompt for t in pools.held_out_tasks(kinds)}
    learnable = pools.pool_dataset(pool, kinds, seed=0, only=["learnable"])
    assert list(learnable["prompt"]) == [row["prompt"] for row in data if row["kind"] == "learnable"]
    assert list(pools.pool_dataset(pool, kinds, seed=0)["prompt"]) == list(data["prompt"])
    assert set(pools.pool_dataset(pool, kinds, seed=1)["prompt"]) != set(data["prompt"])


def test_a_pool_without_a_kind_says_so():
    with pytest.raises(ValueError, match="no cell of a kind"):
        pools.draw(np.random.default_rng(0), [], 3, set())
    with pytest.raises(ValueError, match="do not hold 30 different prompts"):
        pools.draw(np.random.default_rng(0), [("second", 1)], 30, set())


def test_rewards_by_hand():
    answer = ["abcd", "abcd", "abcd", "abcd", "abcd"]
    completions = ["abcd", "abcx", "abcde", "abxx", ""]
    assert exact_match(completions, answer) == [1, 0, 0, 0, 0]
    assert right_characters(completions, answer) == [1, 0.75, 0.8, 0, 0]
    assert answer_and_length(completions, answer) == [1, 0.5, 0, 0.5, 0]


def test_the_tally_counts_groups_with_unequal_rewards():
    tally = Tally(exact_match, group_size=2)
    prompts = ["a", "a", "b", "b", "a", "a"]
    rewards = tally(prompts=prompts, completions=["1", "0", "1", "1", "1", "1"], answer=["1"] * 6)
    assert rewards == [1, 0, 1, 1, 1, 1]
    assert (tally.groups, tally.effective) == (3, 1)


def test_a_group_that_is_scored_in_two_parts_counts_once():
    tally = Tally(exact_match, group_size=4)

    def score(*parts):
        prompts, completions = zip(*((prompt, c) for prompt, answers in parts for c in answers), strict=True)
        tally(prompts=prompts, completions=completions, answer=["1"] * len(prompts))

    score(("a", "11"), ("b", "10"), ("c", "00"))
    assert (tally.groups, tally.effective) == (3, 1)
    score(("b", "11"), ("c", "01"))  # a is stopped; c is effective only as a whole
    assert (tally.groups, tally.effective) == (3, 2)
    score(("a", "00"), ("d", "11"))  # of the next batch
    score(("a", "11"))
    assert (tally.groups, tally.effective) == (5, 3)
    score(("a", "0011"))
    assert (tally.groups, tally.effective) == (6, 4)
