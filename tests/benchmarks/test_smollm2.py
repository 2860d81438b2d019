"""The benchmark on a pretrained model: its questions, its passes, and the runs of its study."""

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.lab.store import read_runs
from benchmarks.smollm2 import RUNS
from benchmarks.smollm2.__main__ import parser, study_specs
from benchmarks.smollm2.gym import HELD_OUT_OF_A_TASK, OF_A_TASK, TASKS, Gym, score
from benchmarks.smollm2.pools import HELD_OUT_OF_A_KIND, POOLS, held_out, training_questions
from benchmarks.smollm2.prefix import share_prompts
from benchmarks.smollm2.questions import LEARNABLE, UNSOLVABLE
from benchmarks.smollm2.train import planned


pytest.importorskip("reasoning_gym")


@pytest.mark.parametrize(("name", "unsolvable"), [("mixed", 128), ("unsolvable", 269), ("learnable", 0)])
def test_pools_have_their_shares_and_nothing_of_what_is_measured_with(name, unsolvable):
    asked = training_questions(POOLS[name], 3)
    prompts = {q.prompt for q in asked}
    assert len(prompts) == len(asked) == 384
    assert sum(q.kind in UNSOLVABLE for q in asked) == unsolvable
    counts = [sum(q.kind == kind for q in asked) for kind in LEARNABLE]
    assert max(counts) - min(counts) <= 1
    assert not prompts & {q.prompt for q in held_out()}
    assert training_questions(POOLS[name], 3) == asked
    assert len(prompts & {q.prompt for q in training_questions(POOLS[name], 4)}) < 0.5 * len(prompts)


#: The answer to a question on numbers
ANSWERS = {
    "products": math.prod,
    "large_products": math.prod,
    "largest": max,
    "smallest": min,
    "second": lambda numbers: numbers[1],
    "gcd": lambda numbers: math.gcd(*numbers),
}


def test_answers_are_right():
    assert len(held_out()) == HELD_OUT_OF_A_KIND * len(LEARNABLE)
    for question in [*held_out(), *training_questions(POOLS["mixed"], 0)]:
        asked = question.prompt.splitlines()[-1]
        answer = question.answer.strip()
        words = [word.strip("?") for word in asked.split()]
        numbers = [int(word) for word in words if word.isdigit()]
        quoted = asked.split('"')[1::2]
        if question.kind in ANSWERS:
            assert ANSWERS[question.kind](numbers) == int(answer)
        if question.kind == "letters":
            letter, word = quoted
            assert word.count(letter) == int(answer)
        if question.kind == "backwards":
            (word,) = quoted
            assert word[::-1] == answer


def test_the_tasks_of_reasoning_gym_are_scored_by_their_own_answers():
    gym = Gym()
    asked = gym.training(3)
    prompts = {q.prompt for q in [*asked, *gym.held_out]}
    assert len(prompts) == len(TASKS) * (OF_A_TASK + HELD_OUT_OF_A_TASK), "all of them are different"
    assert all(score(f" {q.entry['answer']}\n", q) == 1 for q in asked)
    backwards = next(q for q in asked if q.kind == "spell_backward")
    assert 0 < score(f" {backwards.entry['answer'][:-1]}\n", backwards) < 1, "partial credit"
    texts = [f" {q.entry['answer']}" for q in asked]
    gym.rows(3, None)
    assert gym.reward(texts, list(range(len(asked)))) == [1] * len(asked)


def test_prompts_are_computed_once_with_the_same_results():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    model = LlamaForCausalLM(config).eval()
    # Six rows of three different prompts of 6 tokens, and completions of 3. Two prompts and a completion have padding
    prompts = torch.randint(1, 50, (4, 9))[[0, 1, 0, 3, 1, 0], :6]
    ids = torch.cat([prompts, torch.randint(1, 50, (6, 3))], dim=1)
    mask = torch.ones_like(ids)
    mask[[1, 4], :2] = 0
    mask[2, -1] = 0
    computed_tokens = []

    def count_tokens(layer, inputs, output):
        rows, tokens, _ = inputs[0].shape
        computed_tokens.append(rows * tokens)

    def results():
        """Hidden states, gradients, generated ids, and the number of tokens that a layer computed for them."""
        computed_tokens.clear()
        model.zero_grad()
        hidden = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        hidden = hidden[mask.bool()]
        (hidden**3).sum().backward()
        gradients = torch.cat([parameter.grad.flatten() for parameter in model.base_model.parameters()])
        generated = model.generate(
            ids[:, :6],
            attention_mask=mask[:, :6],
            max_new_tokens=4,
            do_sample=False,
            pad_token_id=0,
        )
        return hidden.detach(), gradients, generated, sum(computed_tokens)

    model.base_model.layers[0].mlp.register_forward_hook(count_tokens)
    hidden, gradients, generated, computed = results()
    share_prompts(model, own=3)
    shared_hidden, shared_gradients, shared_generated, shared_computed = results()
    torch.testing.assert_close(shared_hidden, hidden)
    torch.testing.assert_close(shared_gradients, gradients, rtol=1e-3, atol=1e-3)  # of up to 100
    assert torch.equal(shared_generated, generated)
    # The loss; then in generation the prompts, and three further tokens
    assert computed == 6 * 9 + 6 * (6 + 3)
    assert shared_computed == (3 * 6 + 6 * 3) + (3 * 6 + 6 * 3)


def test_the_study_has_each_run_once_and_its_filters_choose():
    specs = study_specs()
    names = {spec.name for spec in specs}
    assert len(names) == len(specs) == 358
    assert read_runs(RUNS).keys() <= names, "a committed run that the study would not repeat"
    assert parser().parse_args(["run"]).runs != RUNS, "runs of your own would enter the tables"
    chosen = parser().parse_args(["study", "--pools", "mixed", "--seeds", "31", "--rollouts", "4800"])
    assert [(s.method, s.max_rollouts, s.steps) for s in study_specs(chosen)] == [("default", 4800, 75)]


def test_steps_are_those_that_the_rollouts_take():
    for method in ("uniform", "default", "uniform_half"):
        assert planned(method, 0, "mixed").steps == 16
    assert planned("share", 0, "mixed").steps == 32, "half of each batch is replayed"
    assert planned("default", 0, "mixed", prompts=32).steps == 4
    assert planned("dynamic", 0, "mixed").steps == 3, "a round of 8 groups and three of 12"
