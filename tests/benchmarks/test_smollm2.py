"""The benchmark on a pretrained model: its questions, its passes, and the runs of its study."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig

from benchmarks.lab.store import read_runs
from benchmarks.smollm2 import RUNS, train
from benchmarks.smollm2.__main__ import POOL_NAMES, chosen_specs, main, parser, study_specs
from benchmarks.smollm2.generation import generate
from benchmarks.smollm2.gym import HELD_OUT_OF_A_TASK, OF_A_TASK, TASKS, Asked, Gym, score
from benchmarks.smollm2.pools import HELD_OUT_OF_A_KIND, POOLS, held_out, training_questions
from benchmarks.smollm2.questions import LEARNABLE, UNSOLVABLE
from benchmarks.smollm2.train import PretrainedEvaluations, Spec, config_options
from benchmarks.smollm2.worked import Worked, last_number
from tests.factories.tiny import tiny_model, tiny_tokenizer


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


class ChatTokenizer:
    """Stand-in for a tokenizer with a chat template."""

    def apply_chat_template(self, conversation, tokenize, add_generation_prompt):
        assert not tokenize
        assert add_generation_prompt
        return "".join(f"<{message['role']}>{message['content']}" for message in conversation) + "<assistant>"


def test_a_worked_solution_is_right_if_its_last_number_is():
    pool = Worked()
    assert pool.tasks.keys() == pool.examples.keys()
    rows = pool.rows(3, ChatTokenizer())
    prompts = {row["prompt"] for row in rows}
    assert len(prompts) == len(rows) == len(pool.tasks) * pool.of_a_task
    assert not {q.prompt for q in pool.asked} & {q.prompt for q in pool.held_out}
    first = rows[0]
    example = pool.examples[first["kind"]]
    asked = pool.asked[0].prompt
    assert first["prompt"] == (f"<user>{example.question}<assistant>{example.solution}<user>{asked}<assistant>")
    places = [row["place"] for row in rows]
    answers = [q.entry["answer"] for q in pool.asked]
    assert pool.reward([f"1 + 1 = 2.\nAnswer: {answer}." for answer in answers], places) == [1] * len(rows)
    assert pool.reward([f"Answer: {answer}\n{answer}1" for answer in answers], places) == [0] * len(rows)
    assert pool.reward(["I do not know."], [0]) == [0]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("It is $1,234.50.", 1234.5),
        ("12 - 15 = -3", -3),
        ("12-5", 5),
        ("x = 5.", 5),
        ("1, 2, 3", 3),
        ("", None),
        ("none", None),
    ],
)
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == number


def test_the_study_has_each_run_once_and_its_filters_choose():
    specs = study_specs()
    names = {spec.name for spec in specs}
    assert len(names) == len(specs)
    pools = {spec.pool for spec in specs}
    committed = {name for name, rows in read_runs(RUNS).items() if rows[0]["pool"] in pools}
    assert committed <= names, "a committed run is no run of the study"
    assert parser().parse_args(["run"]).runs != RUNS, "runs of your own would enter the tables"
    chosen = parser().parse_args(
        ["study", "--pools", "several", "--seeds", "20", "--learning-rate", "3e-4", "--methods", "compact"]
    )
    assert [(s.pool, s.method, s.learning_rate, s.steps) for s in study_specs(chosen)] == [
        ("several", "compact", 3e-4, 100)
    ]


def test_runs_of_your_own_choice():
    options = parser().parse_args(
        ["run", "--pools", "worked", "gym", "--methods", "compact", "--steps", "3", "--prompts", "5"]
    )
    specs = chosen_specs(options)
    assert [(spec.pool, spec.method, spec.steps, spec.prompts) for spec in specs] == [
        ("worked", "compact", 3, 5),
        ("gym", "compact", 3, 5),
    ]


def test_a_name_tells_runs_apart_and_ignores_defaults_of_the_package():
    first = Spec("compact", 0, "several")
    others = [replace(first, seed=1), replace(first, steps=5), replace(first, learning_rate=1e-3)]
    others += [Spec("fill", 0, "several"), Spec("fill,replay_max_age=3", 0, "several")]
    assert len({spec.name for spec in (first, *others)}) == 1 + len(others)


def test_an_unknown_pool_is_an_error_that_names_the_pools(capsys):
    for command in ("run", "study"):
        with pytest.raises(SystemExit):
            main([command, "--pools", "mixde"])
        message = capsys.readouterr().err
        assert "mixde" in message
        assert "several" in message


def test_micro_batches_add_up_to_a_step(tmp_path):
    for pool, prompts, micro_batch in (("mixed", 8, 64), ("several", 5, 40), ("gym", 8, 32), ("worked", 8, 8)):
        options = config_options(Spec("uniform", 0, pool, prompts=prompts), str(tmp_path))
        assert options["per_device_train_batch_size"] == micro_batch
        assert micro_batch * options["gradient_accumulation_steps"] == prompts * 8


def test_completions_whose_prompt_is_computed_once_are_those_of_generate():
    model = tiny_model().eval()
    model.config.use_cache = False  # as the trainer leaves it
    tokenizer = tiny_tokenizer()
    gym = Gym()
    texts = ["1+1=", "12+3+4=", "2="]
    asked = [Asked(text, "sums", {}) for text in texts]
    with torch.no_grad():
        computed = gym.compute_prompts(model, tokenizer, asked)
        found = gym.completions(model, tokenizer, computed, 2, do_sample=False)
        found_again = gym.completions(model, tokenizer, computed, 1, do_sample=False)
        expected = []
        for text in texts:
            inputs = tokenizer(text, return_tensors="pt")
            ids = model.generate(**inputs, max_new_tokens=Gym.max_completion, do_sample=False, use_cache=True)
            completion = tokenizer.decode(ids[0, inputs["input_ids"].size(1) :], skip_special_tokens=True)
            expected += [completion, completion]
    assert len(set(expected)) > 1
    assert found == expected
    assert found_again == expected[::2], "they do not change what is computed"


def padded(texts, tokenizer):
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}


def test_our_generation_continues_as_that_of_transformers():
    """With prompts that are equal, rows that end early, and rows that do not end."""
    model = tiny_model().eval()
    tokenizer = tiny_tokenizer()
    inputs = padded(["1+1=", "12+3+4=", "1+1=", "2=", "7+5=", "2="], tokenizer)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    free = model.generate(**inputs, **options, eos_token_id=None, use_cache=True)[:, inputs["input_ids"].size(1) :]
    # Tokens that some rows have early, and some have not
    ends = [int(free[0, 2]), int(free[1, 5])]
    assert not all(torch.isin(row, torch.tensor(ends)).any() for row in free)
    config = GenerationConfig(**options, eos_token_id=ends)
    expected = model.generate(**inputs, generation_config=config, use_cache=True)
    model.config.use_cache = False  # as the trainer leaves it
    found = generate(model, **inputs, generation_config=config)
    assert len(set(map(str, found.tolist()))) > 2
    assert torch.equal(found[:, : expected.size(1)], expected)
    assert (found[:, expected.size(1) :] == tokenizer.pad_token_id).all()


def test_our_generation_samples_by_the_probabilities():
    torch.manual_seed(0)
    model = tiny_model().eval()
    tokenizer = tiny_tokenizer()
    rows = 4000
    inputs = padded(["12+3+4=", "2="] * (rows // 2), tokenizer)
    config = GenerationConfig(
        max_new_tokens=1, do_sample=True, temperature=0.3, top_k=0, eos_token_id=0, pad_token_id=0
    )
    tokens = generate(model, **inputs, generation_config=config)[:, -1]
    with torch.no_grad():
        positions = (inputs["attention_mask"][:2].cumsum(1) - 1).clamp(min=0)
        short = {name: values[:2] for name, values in inputs.items()}
        expected = (model(**short, position_ids=positions).logits[:, -1] / 0.3).softmax(1)
    for prompt in (0, 1):
        found = torch.bincount(tokens[prompt::2], minlength=expected.size(1)) / (rows // 2)
        assert expected[prompt].max() > 0.05, "nearly uniform probabilities show little"
        error = (expected[prompt] * (1 - expected[prompt]) / (rows // 2)).sqrt()
        assert ((found - expected[prompt]).abs() <= 5 * error + 1e-3).all()
    with pytest.raises(ValueError, match="top_k=0"):
        generate(model, **inputs, generation_config=GenerationConfig(do_sample=True, top_k=50, eos_token_id=0))


def test_the_initial_model_is_measured_once_for_all_runs_of_a_process(monkeypatch):
    spec = Spec("uniform", 0, "mixed")
    measured = []

    class Counted:
        def quality(self, model, tokenizer):
            measured.append(model)
            return {"accuracy_sampled": len(measured)}

    monkeypatch.setitem(POOLS, "mixed", Counted())
    monkeypatch.setattr(train, "AT_START", {})
    found = []
    for run in ("first", "second"):
        evaluations = PretrainedEvaluations(spec, None, None, None)
        for step in (0, 64):
            evaluations.trainer = SimpleNamespace(state=SimpleNamespace(global_step=step))
            found.append(evaluations.quality(f"{run} after {step}")["accuracy_sampled"])
    assert measured == ["first after 0", "first after 64", "second after 64"]
    assert found == [1, 2, 1, 3]


def test_the_pools_of_the_command_are_those_that_there_are():
    assert set(POOL_NAMES) == POOLS.keys()
