"""
Every command of README, pages and examples is one that works, and every Python block of a page runs on a tiny model.
"""

import importlib
import json
import re
import shlex
import shutil
import sys
import tomllib
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import ModelConfig, ScriptArguments, TrlParser

import trl_dataeff
from examples.quickstart.__main__ import _parser as quickstart_parser
from tests.cli.conftest import RECIPE, own_cache  # noqa: F401 (a fixture)
from tests.factories.tiny import SMALL, plain_dataset, tiny_model, tiny_tokenizer
from tests.factories.training import mixed_reward
from trl_dataeff.cli import grpo
from trl_dataeff.cli.help import DESCRIPTION
from trl_dataeff.cli.main import main
from trl_dataeff.cli.parser import read


ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TWO_STEPS = {
    **SMALL,
    "gradient_accumulation_steps": 1,
    "max_steps": 2,
    "eval_steps": 2,
    "per_device_eval_batch_size": 64,
}


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(encoding="utf-8"), re.S)


def commands_of(text: str) -> list[str]:
    """Commands, one a line or continued by a backslash, without comments."""
    lines = text.replace("\\\n", " ").splitlines()
    return [" ".join(line.split()) for line in lines if line.strip() and not line.strip().startswith("#")]


#: A page that is followed from its top to its end by a test of its own
ONE_GPU = ROOT / "docs" / "one_gpu.md"
BLOCKS = [block for page in PAGES if page != ONE_GPU for block in blocks(page, "bash")]
COMMANDS = {command: None for block in BLOCKS for command in commands_of(block)}
LAUNCH = re.compile(r"^ +((?:python examples/|trl-dataeff ).*)$", re.M)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_path) -> Path:
    """
    A folder with what the commands name: a recipe, its data, finished runs, completions of another trainer, a reward.
    """
    folder = tmp_path_factory.mktemp("folder")
    plain_dataset(16).to_json(folder / "train.jsonl")
    (reward,) = [block for block in blocks(ROOT / "docs" / "command.md", "python") if "my_rewards.py" in block]
    (folder / "my_rewards.py").write_text(reward)
    rows = '{{"question": "a", "score": {i}, "iteration": 1}}\n{{"question": "b", "score": 0, "iteration": 1}}\n'
    (folder / "rollouts.jsonl").write_text("".join(rows.format(i=i) for i in range(4)))
    recipe = RECIPE.format(model=tiny_path).replace("train.jsonl", str(folder / "train.jsonl"))
    (folder / "tiny.yaml").write_text(recipe.replace("output_dir: out", f"output_dir: {folder / 'output'}"))
    assert main(["grpo", "--config", str(folder / "tiny.yaml")]) == 0
    for name in ("out", "our-run", "plain-run"):
        shutil.copytree(folder / "output", folder / name)
    return folder


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))  # the command adds the current folder
    yield folder
    sys.modules.pop("my_rewards", None)


def check_grpo(arguments: list[str]) -> None:
    """Whether the command would start on a suitable machine, and without a warning about dropout."""
    made = read(arguments, portable=True).arguments
    assert list(grpo.problems_of(made)) == []
    assert not made.model.use_peft or made.model.lora_dropout == 0


def check_make(arguments: list[str]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    names = [argument for argument in arguments if "=" not in argument]
    assert set(names) <= targets
    for value in (argument[5:] for argument in arguments if argument.startswith("ARGS=")):
        own, others = quickstart_parser().parse_known_args(shlex.split(value))
        check_grpo(["--config", f"SmolLM2-135M-Instruct/short_answers/{own.recipe}", *others])


def check_pip(arguments: list[str]) -> None:
    assert arguments[0] == "install"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.fullmatch(r"\.\[([\w,]+)\]", arguments[1])
    assert named is not None
    assert set(named[1].split(",")) <= set(extras)


def check_python(arguments: list[str]) -> None:
    """Programs that run for hours, or that other tests call: whether they take these arguments."""
    if arguments[0] != "-m":
        assert (ROOT / arguments[0]).is_file()
        return
    benchmarks = {
        "benchmarks.lab": "benchmarks.lab.cli",
        "benchmarks.smollm2": "benchmarks.smollm2.__main__",
        "benchmarks.real_log": "benchmarks.real_log.__main__",
    }
    module = importlib.import_module(benchmarks.get(arguments[1], arguments[1]))
    assert hasattr(module, "main")
    if arguments[1] in benchmarks:
        module.parser().parse_args(arguments[2:])


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_pages(command, here, capsys):
    words = shlex.split(command, comments=True)
    while "=" in words[0]:  # environment variables
        words.pop(0)
    program, *arguments = words
    if program == "trl-dataeff" and arguments[0] == "grpo":
        (here / "recipe.yaml").unlink(missing_ok=True)
        assert main(["recipes", "copy", "Qwen2.5-0.5B-Instruct/gsm8k/dots", "recipe.yaml"]) == 0
        check_grpo(arguments[1:])
    elif program == "trl-dataeff":
        if "copy" in arguments:
            (here / "recipe.yaml").unlink(missing_ok=True)
        elif "validate" in arguments and not Path("recipe.yaml").exists():
            main(["recipes", "copy", "Qwen2.5-0.5B-Instruct/gsm8k/dots", "recipe.yaml"])
        assert main(arguments) == 0, capsys.readouterr().err
        assert capsys.readouterr().out
    elif program == "bash":
        assert (ROOT / arguments[0]).is_file()  # run by tests/examples
    else:
        {"make": check_make, "pip": check_pip, "python": check_python}[program](arguments)


def launch_lines() -> list[str]:
    """Commands in the docstrings of the examples and in the help of the command."""
    scripts = [
        path
        for path in sorted(ROOT.glob("examples/**/*.py"))
        if path.name not in ("fit_predictor.py", "success_rates.py")
    ]
    texts = [*(path.read_text(encoding="utf-8") for path in scripts), DESCRIPTION]
    return [found.strip() for text in texts for found in LAUNCH.findall(text.replace("\\\n", " "))]


@pytest.mark.parametrize("line", launch_lines())
def test_a_launch_line_of_an_example_is_read_and_sets_off_no_warning(line, here):
    program, *arguments = shlex.split(line)
    if program == "trl-dataeff":
        if "recipe.yaml" in arguments:
            arguments[arguments.index("recipe.yaml")] = "Qwen2.5-0.5B-Instruct/gsm8k/dots"
        return check_grpo(arguments[1:])
    assert (ROOT / arguments[0]).is_file()
    kinds = (ScriptArguments, trl_dataeff.DataEfficientGRPOConfig, ModelConfig)
    takes_data = "ScriptArguments" in (ROOT / arguments[0]).read_text()
    on_cpu = [*arguments[1:], "--use_cpu", "--bf16", "false"]
    parsed = TrlParser(kinds if takes_data else kinds[1:]).parse_args_and_config(on_cpu)
    assert not parsed[-1].use_peft or parsed[-1].lora_dropout == 0


@pytest.fixture
def tiny(here, tiny_path, monkeypatch):
    """The names of a page, with tiny models, few steps, and a trainer that exists already."""
    for library, prefix in ((trl_dataeff, "DataEfficient"), (trl, "")):
        config, trainer = (getattr(library, f"{prefix}GRPO{kind}") for kind in ("Config", "Trainer"))

        class Config(config):
            def __init__(self, *args, **fields):
                super().__init__(*args, **{**fields, **TWO_STEPS})

        def make(*args, trainer=trainer, **options):
            return trainer(**{**options, "model": tiny_model(), "processing_class": tiny_tokenizer()})

        monkeypatch.setattr(library, f"{prefix}GRPOConfig", Config, raising=False)
        monkeypatch.setattr(library, f"{prefix}GRPOTrainer", make, raising=False)
    shutil.copy("tiny.yaml", "recipe.yaml")
    return {
        "__name__": "page",
        "trainer": MagicMock(stopped_by=None),
        "DataEfficientGRPOConfig": trl_dataeff.DataEfficientGRPOConfig,
        "DotsSelector": trl_dataeff.DotsSelector,
    }


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "selectors.md" and page != ONE_GPU], ids=lambda page: page.name
)
def test_the_python_blocks_of_a_page_run(page, tiny):
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), tiny)
        trainer = tiny["trainer"]
        if not isinstance(trainer, MagicMock):
            assert trainer.state.global_step == trainer.state.max_steps


def test_the_whole_script_asks_an_instruct_model_and_reads_its_answers(tiny, caplog_transformers):
    (script,) = [block for block in blocks(ROOT / "README.md", "python") if "def reward" in block]
    exec(compile(script, "README.md", "exec"), tiny)
    assert "chat template" not in caplog_transformers.text
    gold = tiny["trainer"].train_dataset[40]["answer"]
    answers = [f"That is **{int(gold):,}**.", gold, f"{gold}1", "I cannot say.", ""]
    completions = [[{"role": "assistant", "content": answer}] for answer in answers]
    assert tiny["reward"](completions, answer=[gold] * len(answers)) == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_the_page_on_selectors_runs_with_its_steps_and_its_own_test_passes(tmp_path, monkeypatch):
    names = {"__name__": "page", "model": tiny_model(), "reward": mixed_reward, "dataset": plain_dataset()}
    trainer = partial(trl_dataeff.DataEfficientGRPOTrainer, processing_class=tiny_tokenizer())
    config = partial(trl_dataeff.DataEfficientGRPOConfig, **{**SMALL, "save_strategy": "steps"})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trl_dataeff.DataEfficientGRPOConfig", config, raising=False)
    monkeypatch.setattr("trl_dataeff.DataEfficientGRPOTrainer", trainer, raising=False)
    trainers, path = {}, ROOT / "docs" / "selectors.md"
    for block in blocks(path, "python"):
        exec(compile(block, str(path), "exec"), names)
        if trainer := names.get("trainer"):
            trainers[id(trainer)] = trainer
    selector_class = names["LastRateSelector"]
    assert [trainer.state.global_step for trainer in trainers.values()] == [4, 6]  # by instance, and resumed by name
    for trainer in trainers.values():
        assert type(trainer.selector) is selector_class
        assert trainer.selector.floor == 0.05
        assert any("dataeff/selector/mean_rate" in log for log in trainer.state.log_history)
    (mark,) = [mark for mark in names["test_last_rate_selector"].pytestmark if mark.name == "parametrize"]
    for make, check in mark.args[1]:
        check(make)


#: What makes the recipe of the page a run on a CPU in seconds
ON_A_CPU = """
    --use_cpu --bf16 false --dtype float32 --use_vllm false --max_steps 2 --per_device_train_batch_size 8
    --gradient_accumulation_steps 1 --num_generations 4 --max_completion_length 6 --gradient_checkpointing false
    --eval_steps 2 --disable_tqdm true --lora_target_modules all-linear --dataset_config default
"""


def check_served(arguments: list[str], served: set[str]) -> None:
    """Whether vLLM is given models that are there: the merged one, or a base model with the adapter."""
    assert arguments[0] == "serve"
    adapters = [argument.partition("=")[2] for argument in arguments if "=" in argument]
    for adapter in adapters:
        assert (Path(adapter) / "adapter_config.json").is_file()
    if not adapters:
        AutoModelForCausalLM.from_pretrained(arguments[1])
        AutoTokenizer.from_pretrained(arguments[1])
    served.add(arguments[1])


def test_the_page_on_one_gpu_leads_to_a_model_that_can_be_served(tmp_path, tiny_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    row = {"question": "Tom has 5 eggs and buys 2.", "answer": "5 + 2 = 7\n#### 7"}
    for split, count in (("train", 8), ("test", 300)):
        Dataset.from_list([row] * count).to_json(tmp_path / "data" / f"{split}.jsonl")
    stand_ins = ["--model_name_or_path", tiny_path, "--dataset_name", str(tmp_path / "data"), *ON_A_CPU.split()]
    names = {"__name__": "page"}
    served: set[str] = set()
    for language, block in re.findall(r"```(bash|python)\n(.*?)```", ONE_GPU.read_text(encoding="utf-8"), re.S):
        if language == "python":
            exec(compile(block, str(ONE_GPU), "exec"), names)
            continue
        for command in commands_of(block):
            program, *arguments = shlex.split(command)
            if program == "trl-dataeff":
                added = stand_ins if arguments[0] == "grpo" else []
                assert main([*arguments, *added]) == 0, capsys.readouterr().err
            elif program == "vllm":
                check_served(arguments, served)
            elif program == "curl":
                assert json.loads(arguments[-1])["model"] in served
            else:
                check_pip(arguments)
    assert (tmp_path / "run.png").is_file()
    assert not (tmp_path / "outputs" / "merged" / "adapter_config.json").exists()
