"""Every recipe under `recipes/` is found, parsed strictly, and trained for two steps on a tiny model, as the command does."""

from __future__ import annotations

import re
from pathlib import Path

import datasets.config
import pytest
import torch
import yaml
from datasets import Dataset

from tests.factories import save_tiny
from trl_dataeff import DataEfficientGRPOTrainer
from trl_dataeff.cli.grpo import COLUMNS as READS
from trl_dataeff.cli.grpo import REWARDS, load_reward, parse, train
from trl_dataeff.cli.parser import read
from trl_dataeff.cli.recipes import description_of, problems_of


ROOT = Path(__file__).resolve().parents[1] / "recipes"
RECIPES = sorted(ROOT.glob("**/*.yaml"))
NAMES = [path.relative_to(ROOT).with_suffix("").as_posix() for path in RECIPES]
each_recipe = pytest.mark.parametrize("path", RECIPES, ids=NAMES)

#: Columns of the published datasets. Every other task has its data made by the package, as
#: conversations in `prompt`, and `answer`.
COLUMNS = {
    "gsm8k": {"question": "Tom has {i} eggs and buys 2.", "answer": "He has {i} + 2 = {j} eggs.\n#### {j}"},
    "math": {"problem": "Find x, if x = {i} + 2.", "answer": "{j}"},
    "own_dataset": {"question": "What is {i} + 2?", "answer": "{j}"},
    "dapo_math": {"prompt": "Find x, if x - 2 = {i}.", "solution": "{j}"},
}
MADE = {"prompt": "{i}+2=", "answer": "{j}"}
#: Two steps of any recipe in two seconds on a CPU: 8 completions are two whole groups. A random model never ends in time, so
#: that what is cut off must count, and has other layers than the recipe's model.
SMALL = """
    --use_cpu --bf16 false --fp16 false --dtype float32 --use_vllm false --report_to none --max_steps 2
    --per_device_train_batch_size 8 --gradient_accumulation_steps 1 --steps_per_generation 1 --num_generations 4 --max_completion_length 6
    --mask_truncated_completions false --save_strategy no --logging_steps 1 --eval_strategy no
    --prompt_embedding policy --load_in_4bit false --gradient_checkpointing false --disable_tqdm true --learning_rate 1e-2 --lora_target_modules all-linear
"""


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Nothing is left in the user's cache."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def stub(task: str, path: Path) -> str:
    texts = COLUMNS.get(task, MADE)
    rows: list[dict] = [{name: text.format(i=i, j=i + 2) for name, text in texts.items()} for i in range(8)]
    if task not in COLUMNS:
        rows = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    Dataset.from_list(rows).to_json(path / "train.jsonl")
    return str(path / "train.jsonl")


@each_recipe
def test_memory_is_the_sum_of_its_parts_and_fits_the_card(path):
    """Where the comment has a sum: it adds up, its logits are those of the batch, and a tenth of the card is left."""
    text = path.read_text()
    found = re.search(r"and (\d+) GB.*?computed and not measured: ([\d.]+) GB =\n(.+?)\n#   Out of memory", text, re.S)
    if found is None:
        assert "computed, not measured" in text or "CPU" in text
        return
    card, total, parts = float(found[1]), float(found[2]), found[3]
    sizes = [float(size) for size in re.findall(r"([\d.]+) (?:of|for) (?!the card)", parts)]
    assert sum(sizes) == pytest.approx(total, abs=0.15)
    assert total < 0.92 * card
    recipe = yaml.safe_load(text)
    copies, rows, length, vocabulary = (
        int(n.replace(",", "")) for n in re.search(r"\((\d) x (\d+) x ([\d,]+) x ([\d,]+) x 4 bytes", parts).groups()
    )
    assert (rows, length) == (recipe["per_device_train_batch_size"], recipe["max_completion_length"])
    assert f"{copies * rows * length * vocabulary * 4 / 1e9:.1f} of logits" in parts


@each_recipe
def test_recipe_is_valid_and_named_by_model_task_and_method(path):
    assert problems_of(path) == []
    assert 20 < len(description_of(path)) < 100
    model, _, _ = path.relative_to(ROOT).with_suffix("").parts
    assert yaml.safe_load(path.read_text())["model_name_or_path"].rstrip("/").endswith(model)


def test_no_two_recipes_write_to_the_same_folder():
    folders = [yaml.safe_load(path.read_text())["output_dir"] for path in RECIPES]
    assert len(set(folders)) == len(folders)


def test_the_papers_recipe_has_the_papers_numbers():
    """arXiv 2506.05316: 512 prompts a batch, 256 references every two batches, a buffer of up to 512, half replayed."""
    recipe = yaml.safe_load((ROOT / "Qwen2.5-1.5B-Instruct" / "dapo_math" / "dots_rr_paper.yaml").read_text())
    rows = recipe["per_device_train_batch_size"] * recipe["steps_per_generation"]
    mini_batch = recipe["per_device_train_batch_size"] * recipe["gradient_accumulation_steps"]
    assert (rows / recipe["num_generations"], mini_batch / recipe["num_generations"]) == (512, 64)
    assert recipe["max_steps"] * mini_batch == 60 * rows
    dots = recipe["selector_args"]
    assert recipe["selection"] == "dots_paper"
    assert (dots["reference_size"], dots["refresh_batches"]) == (256, 2)
    assert (dots["target"], dots["temperature"]) == (0.5, 1e-3)
    assert (recipe["replay"], recipe["replay_fraction"]) == ("share", 0.5)
    assert (recipe["replay_order"], recipe["replay_max_age"]) == ("random", None)
    assert recipe["replay_capacity"] in (256, 512)
    assert recipe["beta"] == 0
    assert (recipe["learning_rate"], recipe["epsilon"], recipe["temperature"]) == (1e-6, 0.2, 0.6)
    assert recipe["replay_ratio_cap"] is None
    assert recipe["vllm_importance_sampling_correction"] is False


def test_the_recipe_of_greso_has_the_batch_of_the_published_code():
    """arXiv 2506.02177: 256 prompts a batch, in four optimizer steps of 64; 1000 batches."""
    path = ROOT / "Qwen2.5-1.5B-Instruct" / "dapo_math" / "greso_paper.yaml"
    recipe = yaml.safe_load(path.read_text())
    rows = recipe["per_device_train_batch_size"] * recipe["steps_per_generation"]
    mini_batch = recipe["per_device_train_batch_size"] * recipe["gradient_accumulation_steps"]
    assert (rows / recipe["num_generations"], mini_batch / recipe["num_generations"]) == (256, 64)
    assert recipe["max_steps"] * mini_batch == 1000 * rows
    assert recipe["replay"] == "off"
    assert recipe["max_rollout_rounds"] > 1
    assert recipe["selector_args"]["hold"] is False


@pytest.mark.parametrize("path", sorted(ROOT.glob("**/*_paper.yaml")), ids=lambda path: path.stem)
def test_four_gpus_keep_the_batch_of_a_papers_recipe(path):
    recipe = yaml.safe_load(path.read_text())
    line = re.search(r"on four GPUs, add: +--num_processes 4 (.+)", path.read_text())
    assert line is not None
    values = line[1].split()
    for name, value in zip(values[::2], values[1::2], strict=True):
        assert int(value) * 4 == recipe[name.removeprefix("--")]
    assert values[::2] == ["--gradient_accumulation_steps", "--steps_per_generation"]


@each_recipe
def test_recipe_trains_two_steps(path, tiny_path, tmp_path):
    task = path.parent.name
    data = stub(task, tmp_path)
    paths = ["--model_name_or_path", tiny_path, "--dataset_name", data, "--output_dir", str(tmp_path / "out")]
    arguments = parse(["--config", str(path), *SMALL.split(), *paths])
    seen = []

    def reward(completions, prompts, **columns):
        """Takes the place of the recipe's, which a random model never gets; notes what it is given."""
        seen.append((prompts[0], columns))
        return [float(i % 2) for i in range(len(completions))]

    names = arguments.script.reward_funcs
    assert names, "a recipe names its rewards"
    trainer = train_with(arguments, reward)
    assert isinstance(trainer, DataEfficientGRPOTrainer)
    assert trainer.state.global_step == 2
    logs = [entry for entry in trainer.state.log_history if "dataeff/rollouts_trained" in entry]
    assert [log["dataeff/rollouts_trained"] for log in logs] == [8, 16]
    assert logs[0]["grad_norm"] > 0
    prompt, columns = seen[0]
    assert isinstance(prompt, list), "instruct models get conversations"
    assert any(text.split("{")[0] in prompt[-1]["content"] for text in COLUMNS.get(task, MADE).values())
    assert {"answer", "solution"} & set(columns)
    assert (tmp_path / "out" / "training_args.bin").is_file()


def train_with(arguments, reward):
    """Train as the command does, with `reward` beside the recipe's own rewards."""
    REWARDS["test_reward"] = reward
    try:
        arguments.script.reward_funcs.append("test_reward")
        if arguments.training.reward_weights:
            arguments.training.reward_weights.append(1.0)
        return train(arguments)
    finally:
        del REWARDS["test_reward"]


@each_recipe
def test_gold_answers_of_the_dataset_are_understood(path):
    """The right answer, as a model would write it, gets the highest reward, and a wrong one does not."""
    names = [n for n in yaml.safe_load(path.read_text())["reward_funcs"] if n in READS]
    row = {name: [text.format(i=5, j=7)] * 2 for name, text in COLUMNS.get(path.parent.name, MADE).items()}
    gold = {name: row[name] for name in ("answer", "solution") if name in row}
    completions = [[{"role": "assistant", "content": text}] for text in (r"\boxed{7}", r"\boxed{8}")]
    for name in names:
        assert load_reward(name)(completions=completions, **gold) == [1.0, 0.0]


def test_gpu_recipe_stays_what_it_says_when_it_is_checked_without_a_gpu():
    """Checking leaves the machine out of it; it does not change the fields."""
    path = ROOT / "Qwen2.5-0.5B-Instruct" / "gsm8k" / "uniform.yaml"
    training = read(["--config", str(path)], portable=True)[0].training
    assert training.bf16 is True
    assert training.use_vllm is True
    assert training.use_cpu is False
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="bf16"):
            parse(["--config", str(path)])
