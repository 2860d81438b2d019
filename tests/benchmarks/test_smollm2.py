"""The benchmark on a pretrained model: its questions, and that a study goes on where it stopped."""

import json
import math

import pytest

from benchmarks.lab.runs import run_all
from benchmarks.lab.store import RunFile
from benchmarks.smollm2.__main__ import parser, study_specs
from benchmarks.smollm2.pools import HELD_OUT_OF_A_KIND, POOLS, held_out, training_questions
from benchmarks.smollm2.questions import LEARNABLE, UNSOLVABLE
from benchmarks.smollm2.train import planned


@pytest.fixture(autouse=True)
def _questions_can_be_made():
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


ANSWERS = {"products": math.prod, "large_products": math.prod, "largest": max, "smallest": min}
ANSWERS |= {"second": lambda numbers: numbers[1], "gcd": lambda numbers: math.gcd(*numbers)}


def test_answers_are_right():
    assert len(held_out()) == HELD_OUT_OF_A_KIND * len(LEARNABLE)
    for question in [*held_out(), *training_questions(POOLS["mixed"], 0)]:
        asked, answer = question.prompt.splitlines()[-1], question.answer.strip()
        numbers = [int(word.strip("?")) for word in asked.split() if word.strip("?").isdigit()]
        if question.kind in ANSWERS:
            assert ANSWERS[question.kind](numbers) == int(answer)
        if question.kind == "letters":
            letter, word = asked.split('"')[1::2]
            assert word.count(letter) == int(answer)
        if question.kind == "backwards":
            assert asked.split('"')[1][::-1] == answer


def fake_run(spec, weights, sink):
    sink({"method": spec.method, "seed": spec.seed, "step": 0, "rollouts": 0, "accuracy_sampled": 0})


def test_a_study_goes_on_where_it_stopped(tmp_path):
    specs = [planned("uniform", seed, "mixed") for seed in range(3)]
    unfinished, finished = (RunFile(tmp_path, specs[i].name) for i in (1, 0))
    for file, rollouts in ((unfinished, 7), (finished, 5)):
        file.begin()
        file.append({"rollouts": rollouts})
    finished.end()
    made = run_all(specs, tmp_path, tmp_path, workers=1, train=fake_run)
    assert [row["rollouts"] for row in made] == [5, 0, 0]
    assert json.loads(unfinished.path.read_text().splitlines()[-1]) == {"done": True}


def test_the_study_has_each_run_once_and_its_filters_choose():
    specs = study_specs()
    assert len({spec.name for spec in specs}) == len(specs) == 5 * (3 + 1 + 2 + 2) + 2 * 2 * 3
    chosen = parser().parse_args(["study", "--pools", "mixed", "--seeds", "31", "--rollouts", "512"])
    assert [(s.method, s.max_rollouts, s.steps) for s in study_specs(chosen)] == [("default", 512, 8)]


def test_steps_are_those_that_the_rollouts_take():
    assert planned("uniform", 0, "mixed").steps == planned("default", 0, "mixed").steps == 16
    assert planned("share", 0, "mixed").steps == 32, "half of each batch is replayed"
    assert planned("uniform_half", 0, "mixed").steps == 16  # of 64 completions, half of the synthetic benchmark's
    assert planned("default", 0, "mixed", prompts=32).steps == 4
