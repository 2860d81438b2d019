"""Every recipe under `recipes/` is found, read strictly, and trained for two steps on a tiny model, by the command."""

import re
from pathlib import Path

import pytest
import yaml
from datasets import Dataset

from tests.cli.conftest import own_cache  # noqa: F401 (a fixture)
from trl_dataeff import DataEfficientGRPOTrainer
from trl_dataeff.cli.data import load_data, load_reward
from trl_dataeff.cli.grpo import parse, problems_of, train
from trl_dataeff.cli.parser import read
from trl_dataeff.cli.recipes import description_of


ROOT = Path(__file__).resolve().parents[1] / "recipes"
RECIPES = sorted(ROOT.glob("**/*.yaml"))
NAMES = [path.relative_to(ROOT).with_suffix("").as_posix() for path in RECIPES]
ADDED = re.compile(r"^#   .*, add: +(--.*?)(?: \(.*)?$", re.M)
#: `4 x 32 on 16 GB`: rows of a micro-batch, steps of accumulation, memory of the card
MICRO_BATCH = re.compile(r"(\d+) x (\d+) on (\d+) GB")
each_recipe = pytest.mark.parametrize("path", RECIPES, ids=NAMES)

#: Columns of the published datasets. Every other task has its data made by the package, as
#: conversations in `prompt`, and `answer`.
COLUMNS = {
    "gsm8k": {"question": "Tom has {i} eggs and buys 2.", "answer": "He has {i} + 2 = {j} eggs.\n#### {j}"},
    "math": {"problem": "Find x, if x = {i} + 2.", "answer": "{j}"},
    "own_dataset": {"question": "What is {i} + 2?", "answer": "{j}"},
    "big_math": {"prompt": "Find x, if x - 2 = {i}.", "solution": "{j}", "llama8b_solve_rate": "0.{i}"},
    "dapo_math": {"prompt": "Find x, if x - 2 = {i}.", "solution": "{j}"},
}
MADE = {"prompt": "{i}+2=", "answer": "{j}"}
#: Two steps of any recipe in two seconds on a CPU: 8 completions are two whole groups. A random model never ends in
#: time, so that what is cut off must count, and has other layers than the recipe's model.
SMALL = """
    --use_cpu --bf16 false --fp16 false --dtype float32 --use_vllm false --report_to none --max_steps 2
    --per_device_train_batch_size 8 --gradient_accumulation_steps 1 --steps_per_generation 1 --num_generations 4
    --max_completion_length 6 --mask_truncated_completions false --save_strategy no --logging_steps 1
    --eval_strategy no --prompt_embedding policy --load_in_4bit false --gradient_checkpointing false
    --disable_tqdm true --learning_rate 1e-2 --lora_target_modules all-linear
"""


def stub(task: str, path: Path) -> str:
    texts = COLUMNS.get(task, MADE)
    rows: list[dict] = [{name: text.format(i=i, j=i + 2) for name, text in texts.items()} for i in range(8)]
    if "llama8b_solve_rate" in texts:
        rows = [{**row, "llama8b_solve_rate": float(row["llama8b_solve_rate"])} for row in rows]
    if task not in COLUMNS:
        rows = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    Dataset.from_list(rows).to_json(path / "train.jsonl")
    return str(path / "train.jsonl")


@each_recipe
def test_recipe_is_valid_and_named_by_model_task_and_method(path):
    text = path.read_text()
    for added in ("", *ADDED.findall(text)):  # on the command line, as the head of the file says
        arguments = read(["--config", str(path), *added.split()], portable=True).arguments
        assert list(problems_of(arguments)) == []
    assert 20 < len(description_of(path)) < 100
    model, _, _ = path.relative_to(ROOT).with_suffix("").parts
    assert model in ("any_model", Path(yaml.safe_load(text)["model_name_or_path"]).name)


def test_no_two_recipes_write_to_the_same_folder():
    folders = [yaml.safe_load(path.read_text())["output_dir"] for path in RECIPES]
    assert len(set(folders)) == len(folders)


@each_recipe
def test_the_learning_rate_decays_except_where_a_paper_is_followed(path):
    follows_a_paper = path.stem.endswith("_paper")
    scheduler = yaml.safe_load(path.read_text())["lr_scheduler_type"]
    assert scheduler == ("constant" if follows_a_paper else "linear")


@each_recipe
def test_micro_batches_for_other_cards_make_the_same_batch(path):
    recipe = yaml.safe_load(path.read_text())
    here = recipe["per_device_train_batch_size"], recipe["gradient_accumulation_steps"]
    on_cards = [tuple(map(int, found)) for found in MICRO_BATCH.findall(path.read_text())]
    assert on_cards or recipe.get("use_cpu") or not recipe["use_peft"]
    for rows, accumulation, _ in on_cards:
        assert rows * accumulation == here[0] * here[1]
    assert not on_cards or here in [(rows, accumulation) for rows, accumulation, _ in on_cards]
    by_memory = [rows for rows, _, _ in sorted(on_cards, key=lambda card: card[2])]
    assert by_memory == sorted(by_memory)


@pytest.mark.parametrize(
    "path",
    [path for path in RECIPES if yaml.safe_load(path.read_text()).get("eval_strategy") == "steps"],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_an_evaluation_has_two_hundred_prompts(path, tmp_path):
    row = {name: text.format(i=5, j=7) for name, text in COLUMNS[path.parent.name].items()}
    for split, count in (("train", 8), ("test", 1319)):
        Dataset.from_list([row] * count).to_json(tmp_path / f"{split}.jsonl")
    script, _, _, mixture = parse(["--config", str(path), *SMALL.split(), "--dataset_name", str(tmp_path)])
    script.dataset_config = None
    _, held_out = load_data(script, mixture, evaluates=True)
    assert len(held_out) == 200


@pytest.mark.parametrize(("name", "prompts", "batches"), [("dots_rr_paper", 512, 60), ("greso_paper", 256, 1000)])
def test_a_papers_recipe_has_the_papers_numbers(name, prompts, batches):
    recipe = yaml.safe_load((ROOT / "Qwen2.5-1.5B-Instruct" / "dapo_math" / f"{name}.yaml").read_text())
    rows = recipe["per_device_train_batch_size"] * recipe["steps_per_generation"]
    mini_batch = recipe["per_device_train_batch_size"] * recipe["gradient_accumulation_steps"]
    assert (rows / recipe["num_generations"], mini_batch / recipe["num_generations"]) == (prompts, 64)
    assert recipe["max_steps"] * mini_batch == batches * rows
    assert recipe.get("replay_capacity") in (256, 512, None)
    assert (recipe.get("max_rollout_rounds", 1) > 1) is (name == "greso_paper")
    assert recipe["vllm_importance_sampling_correction"] is False, "in neither paper"


@each_recipe
def test_recipe_trains_two_steps(path, tiny_path, tmp_path, monkeypatch):
    task = path.parent.name
    data = stub(task, tmp_path)
    paths = ["--model_name_or_path", tiny_path, "--dataset_name", data, "--output_dir", str(tmp_path / "out")]
    arguments = parse(["--config", str(path), *SMALL.split(), *paths])
    seen = []

    def reward(completions, prompts, **columns):
        """Stands beside the recipe's, which a random model never gets; notes what it is given."""
        seen.append((prompts[0], columns))
        return [float(i % 2) for i in range(len(completions))]

    assert arguments.script.reward_funcs, "a recipe names its rewards"
    monkeypatch.setattr("tests.factories.tiny.letter_share_reward", reward)
    arguments.script.reward_funcs.append("tests.factories.tiny.letter_share_reward")
    if arguments.training.reward_weights:
        arguments.training.reward_weights.append(1.0)
    trainer = train(arguments)
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


@each_recipe
def test_gold_answers_of_the_dataset_are_understood(path):
    """The right answer, as a model would write it, gets the highest reward, and a wrong one does not."""
    names = yaml.safe_load(path.read_text())["reward_funcs"]
    row = {name: [text.format(i=5, j=7)] * 2 for name, text in COLUMNS.get(path.parent.name, MADE).items()}
    gold = {name: row[name] for name in ("answer", "solution") if name in row}
    completions = [[{"role": "assistant", "content": text}] for text in (r"\boxed{7}", r"\boxed{8}")]
    for name in names:
        assert load_reward(name)(completions=completions, **gold) == [1.0, 0.0]
