"""Every example trains for two steps on a tiny model, as it stands, with its model and dataset given by path."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from transformers.trainer_utils import get_last_checkpoint

import trl_dataeff.difficulty.embedding
from tests.cli.conftest import RECIPE, own_cache  # noqa: F401 (a fixture)
from tests.factories.groups import difficulty_problem, generator
from tests.factories.tiny import plain_dataset, save_tiny, tiny_model
from tests.factories.tools import tool_tokenizer
from tests.factories.vision import save_tiny_vision
from trl_dataeff import DataEfficientGRPOTrainer, SelectorContext
from trl_dataeff.cli.main import main
from trl_dataeff.difficulty import load_predictor
from trl_dataeff.rollouts.columns import read_success_rates
from trl_dataeff.testing import check_selector, make_groups
from trl_dataeff.tracking.files import SCHEMA


EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = """
    --use_cpu --bf16 false --gradient_checkpointing false --report_to none --disable_tqdm true --max_steps 2
    --per_device_train_batch_size 16 --gradient_accumulation_steps 1 --num_generations 4 --logging_steps 1
    --use_peft --lora_target_modules q_proj v_proj --dtype float32 --learning_rate 1e-2
    --attn_implementation eager --max_completion_length 8
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Tiny models, and a dataset with the columns of GSM8K."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder / "text")
    save_tiny_vision(folder / "vision")
    tiny_model(tool_tokenizer()).save_pretrained(folder / "tools")
    tool_tokenizer().save_pretrained(folder / "tools")
    steps = [f"{i} + 2 = {i + 2}\n" * (1 + i % 3) + f"#### {i + 2}" for i in range(24)]
    rows = Dataset.from_dict({"question": [f"What is {i} + 2?" for i in range(24)], "answer": steps})
    for split in ("train", "test"):
        rows.to_json(folder / "data" / f"{split}.jsonl")
    return folder


SCRIPTS = {
    "gsm8k.py": ("text", "--eval_strategy steps --eval_steps 2 --per_device_eval_batch_size 16"),
    "custom_reward.py": ("text", ""),
    "custom_selector.py": ("text", ""),
    "tools.py": ("tools", "--max_completion_length 12"),
    "environment.py": ("tools", "--max_completion_length 12"),
    "vision_language.py": ("vision", ""),
    "preemption/train.py": ("text", "--save_steps 1"),
}


def test_every_script_is_run():
    scripts = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.py")}
    assert {name for name in scripts if not name.startswith("quickstart/")} == {
        *SCRIPTS,
        "fit_predictor.py",
        "success_rates.py",
    }


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_trains_two_steps(name, folder, tmp_path, monkeypatch):
    """In this process, where everything is imported already."""
    model, further = SCRIPTS[name]
    arguments = [*SMALL.split(), "--output_dir", "out", *further.split(), "--model_name_or_path", str(folder / model)]
    if "ScriptArguments" in (EXAMPLES / name).read_text():
        arguments += ["--dataset_name", str(folder / "data")]
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.chdir(tmp_path)
    trainer = runpy.run_path(str(EXAMPLES / name), run_name="__main__")["trainer"]
    assert isinstance(trainer, DataEfficientGRPOTrainer)
    assert trainer.state.global_step == 2
    assert trainer.model.config._attn_implementation == "eager"
    assert next(trainer.model.parameters()).dtype is torch.float32
    logs = [log for log in trainer.state.log_history if "dataeff/rollouts_trained" in log]
    assert logs[-1]["dataeff/rollouts_trained"] == 32
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    evaluated = [log["eval_reward"] for log in trainer.state.log_history if "eval_reward" in log]
    assert len(evaluated) == ("--eval_strategy" in further)


def test_success_rates_become_a_column_that_a_run_selects_by(folder, tmp_path, monkeypatch, capsys):
    arguments = ["--model_name_or_path", str(folder / "text"), "--dtype", "float32", "--samples", "3"]
    arguments += ["--dataset_name", str(folder / "data"), "--max_completion_length", "4", "--output", "rates"]
    monkeypatch.setattr(sys, "argv", ["success_rates.py", *arguments])
    monkeypatch.chdir(tmp_path)
    example = runpy.run_path(str(EXAMPLES / "success_rates.py"), run_name="__main__")
    assert "success rates of 24 prompts" in capsys.readouterr().out
    written = Dataset.from_parquet("rates/train.parquet", cache_dir=str(tmp_path / "cache"))
    assert {round(3 * rate) for rate in written["success_rate"]} <= {0, 1, 2, 3}
    assert len(read_success_rates(written, "success_rate")) == 24
    answers = [[rf"\boxed{{{i + 2}}}", "no", r"\boxed{-1}"] for i in range(24)]
    rates = example["success_rates"](written, answers, example["numeric_answer_reward"])
    assert rates == [pytest.approx(1 / 3)] * 24


@pytest.fixture(scope="module")
def curriculum():
    return runpy.run_path(str(EXAMPLES / "custom_selector.py"), run_name="example")["CurriculumSelector"]


def test_the_example_of_a_selector_passes_the_conformance_suite(curriculum):
    class OfAnyPool(curriculum):
        """The suite binds selectors to pools of several sizes."""

        def __init__(self):
            super().__init__(None)

        def bind(self, context):
            self.levels = np.arange(context.num_prompts) % 4
            super().bind(context)

    check_selector(OfAnyPool)


def test_the_curriculum_opens_a_level_when_the_present_one_is_solved(curriculum):
    levels, rng = np.repeat([0, 1, 2], 10), generator()
    selector = curriculum(levels)
    selector.bind(SelectorContext(num_prompts=30, batch_groups=4, group_size=4))
    assert set(levels[selector.propose(10, rng)]) == {0}
    for _ in range(20):
        selector.observe(make_groups([0], [0.5]))
    assert set(levels[selector.propose(10, rng)]) == {0}
    for _ in range(5):
        selector.observe(make_groups([0], [1.0]))
    assert set(levels[selector.propose(20, rng)]) == {0, 1}
    with pytest.raises(ValueError, match="levels of 30 prompts, and the dataset has 31"):
        selector.bind(SelectorContext(num_prompts=31, batch_groups=4, group_size=4))


def test_the_custom_reward_gives_a_bonus_to_right_answers_alone():
    example = runpy.run_path(str(EXAMPLES / "custom_reward.py"), run_name="example")
    completions = [[{"role": "assistant", "content": text}] for text in ("It is 7.", "It is 7.", "It is 17.")]
    columns = {"answer": ["...\n#### 7"] * 3, "completion_ids": [[0] * 5, [0] * 200, [0] * 5]}
    assert example["accuracy"](completions, **columns) == [1.0, 1.0, 0.0]
    assert example["brevity"](completions, **columns) == [0.5, 0.0, 0.0]


def test_the_notebook_runs_from_top_to_bottom_and_draws(tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("Agg")
    pyplot.close("all")
    monkeypatch.chdir(tmp_path)
    cells = json.loads((EXAMPLES / "first_run.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names = {"__name__": "__main__"}
    for cell in code:
        exec(compile(re.sub(r"^STEPS = \d+", "STEPS = 2", cell, flags=re.M), "first_run.ipynb", "exec"), names)
    assert len(names["plain_success"]) == len(names["our_success"]) == 2
    assert type(names["ours"]) is DataEfficientGRPOTrainer
    assert len(pyplot.get_fignums()) == sum("plt.show()" in cell for cell in code) == 3
    pyplot.close("all")
    text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    command = re.search(r"`trl-dataeff (report .+?)`", text)[1]
    assert main(command.split()) == 0


def test_the_stored_outputs_of_the_notebook_are_those_of_its_settings():
    cells = json.loads((EXAMPLES / "first_run.ipynb").read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    steps = int(re.search(r"^STEPS = (\d+)", code, re.M)[1])
    batch_size = int(re.search(r'"per_device_train_batch_size": (\d+)', code)[1])
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    printed = "".join("".join(output.get("text", "")) for output in outputs)
    rollouts = [int(count.replace(",", "")) for count in re.findall(r"([\d,]+) rollouts", printed)]
    assert rollouts == [steps * batch_size] * 2


@pytest.mark.slow
def test_the_job_script_continues_after_sigterm_until_the_run_is_done(folder, tmp_path):
    plain_dataset().to_json(tmp_path / "train.jsonl")
    recipe = RECIPE.format(model=folder / "text").replace("max_steps: 2", "max_steps: 100")
    (tmp_path / "recipe.yaml").write_text(recipe + "save_steps: 100\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{environment['PATH']}", "PYTHONPATH": str(EXAMPLES.parent)}
    job = subprocess.Popen(
        ["bash", str(EXAMPLES / "preemption" / "job.sh"), str(tmp_path / "recipe.yaml")],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path,
    )  # fmt: skip
    metrics = tmp_path / "out" / "dataeff" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while not (metrics.is_file() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.2)
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(job.pid)], capture_output=True, text=True).stdout
    os.kill(int(children.split()[0]), signal.SIGTERM)
    output, _ = job.communicate(timeout=400)
    assert job.returncode == 0, output
    assert "attempt 2" in output
    assert re.search(r"Stopped by SIGTERM after step \d+ of 100", output)
    assert get_last_checkpoint(tmp_path / "out").endswith("checkpoint-100")
    steps = pq.read_table(tmp_path / "out" / "dataeff" / "groups.parquet", columns=["step"])["step"].to_pylist()
    assert set(range(100)) <= set(steps)


def test_the_job_script_does_not_repeat_a_mistake(tmp_path):
    (tmp_path / "trl-dataeff").write_text("#!/bin/bash\necho called\nexit 2\n")
    (tmp_path / "trl-dataeff").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": ""}
    job = ["bash", str(EXAMPLES / "preemption" / "job.sh")]
    done = subprocess.run([*job, "recipe.yaml"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout.count("called")) == (2, 1)
    assert subprocess.run(job, env=environment, capture_output=True).returncode != 0
    restarted = {**environment, "SLURM_RESTART_COUNT": "20"}
    done = subprocess.run([*job, "recipe.yaml"], env=restarted, capture_output=True, text=True)
    assert (done.returncode, done.stdout.count("called")) == (1, 0)


SCRIPT = str(EXAMPLES / "fit_predictor.py")
N = 200
E, P = difficulty_problem(N)


def save_groups(path: Path, steps: int = 40, seed: int = 0, invert: bool = False) -> str:
    """A run's groups, 16 a step; some have no success rate, and some no prompt id."""
    rng = np.random.default_rng(seed)
    ids = np.concatenate([rng.choice(N, 16, replace=False) for _ in range(steps)])
    rates = rng.binomial(8, np.clip(P.numpy()[ids], 0.02, 0.98)) / 8
    table: dict = {name: [None] * len(ids) for name in SCHEMA.names}
    table["step"] = np.repeat(np.arange(steps), 16)
    table["success_rate"] = [None if i % 50 == 3 else float(1 - r if invert else r) for i, r in enumerate(rates)]
    table["prompt_id"] = np.where(np.arange(len(ids)) % 50 == 7, -1, ids)
    pq.write_table(pa.table(table, schema=SCHEMA), path)
    return str(path)


@pytest.mark.parametrize(("kind", "column"), [("logistic", "question"), ("attention", "prompt")])
def test_from_groups_to_a_predictor(kind, column, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trl_dataeff.difficulty.embedding, "embed_dataset", lambda dataset, model: E.half().numpy())
    Dataset.from_dict({column: [f"q{i}" for i in range(N)]}).to_json("data.jsonl")
    options = ["--dataset", "data.jsonl", "--prompt_column", column, "--embedding", "some/model", "--output", "out"]
    options += ["--groups", save_groups(tmp_path / "a.parquet"), "--kind", kind]
    monkeypatch.setattr(sys, "argv", ["fit_predictor.py", *options])
    runpy.run_path(SCRIPT, run_name="__main__")
    assert kind in capsys.readouterr().out
    predictor = load_predictor("out")
    assert '"embedding": "some/model"' in Path("out", "config.json").read_text()
    assert np.corrcoef(predictor.predict(E), P)[0, 1] > 0.7


def test_too_few_groups_are_one_line(tmp_path, monkeypatch):
    Dataset.from_dict({"prompt": [f"q{i}" for i in range(N)]}).to_json(tmp_path / "data.jsonl")
    groups = save_groups(tmp_path / "a.parquet", steps=1)
    options = ["--dataset", str(tmp_path / "data.jsonl"), "--embedding", "some/model", "--output", "out"]
    monkeypatch.setattr(sys, "argv", ["fit_predictor.py", *options, "--groups", groups])
    with pytest.raises(SystemExit, match="At least 20 are needed"):
        runpy.run_path(SCRIPT, run_name="__main__")


def test_every_example_is_in_the_index():
    index = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([^)]+)\)", index))
    files = {
        path.relative_to(EXAMPLES).as_posix() for pattern in ("*.py", "*.ipynb") for path in EXAMPLES.glob(pattern)
    }
    assert files <= linked
    assert all((EXAMPLES / name).exists() for name in linked)


def test_groups_are_predicted_from_their_own_run(tmp_path):
    """Two runs in which the same prompts have opposite success rates: together they would say nothing."""
    script = runpy.run_path(SCRIPT, run_name="example")
    runs = [save_groups(tmp_path / "a.parquet", 60), save_groups(tmp_path / "b.parquet", 60, seed=1, invert=True)]
    slices = script["read_slices"](runs, N)
    assert all(len(np.unique(piece.prompt_ids)) == len(piece.prompt_ids) for piece in slices)
    _, quality = script["fit_offline"]("logistic", E, slices, seed=0)
    fitted, mean, nearest = quality
    assert fitted.pearson > 0.7
    assert fitted.mean_absolute_error < mean.mean_absolute_error
    assert nearest.pearson > 0.3
