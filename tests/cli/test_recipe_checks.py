"""A mistake in a recipe or on the command line is a message, before anything is loaded. A recipe's has its line."""

import os
import sys
import time
import tomllib
from pathlib import Path

import pytest
from trl import GRPOConfig

from trl_dataeff.cli import grpo as launching
from trl_dataeff.cli.grpo import checkpoint_of
from trl_dataeff.cli.main import main
from trl_dataeff.cli.parser import read
from trl_dataeff.cli.recipes import validate
from trl_dataeff.config import DataEfficientGRPOConfig


#: What every recipe needs
NEEDED = {"model_name_or_path": "org/model", "dataset_name": "org/data", "reward_funcs": "[exact_answer_reward]"}


def complete(text: str) -> str:
    """A recipe with `text` at its top, and what is needed besides below."""
    return text.rstrip("\n") + "\n" + "".join(f"{k}: {v}\n" for k, v in NEEDED.items() if f"{k}:" not in text)


def problems(text: str, tmp_path: Path) -> list[str]:
    path = tmp_path / "recipe.yaml"
    path.write_text(complete(text) if text[:1].isalpha() and ":" in text else text, encoding="latin-1")
    return [problem.removeprefix(f"{path}:") for problem in validate(path).problems]


def lines_of(found: list[str]) -> list[str]:
    return [problem.partition(":")[0] for problem in found]


def aliases_of_aliases(levels: int = 30) -> str:
    """A list of lists of ... that has 9 ** levels values, in a few lines."""
    lines = ["a0: &a0 [x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels)]
    lines.append(f"report_to: *a{levels - 1}")
    return "\n".join(lines)


TWO = (
    "Give several values with spaces between them (`--lora_target_modules q_proj v_proj`), or in a recipe as a list "
    "(`lora_target_modules: [q_proj, v_proj]`)."
)
#: Recipes with one mistake, and a part of the message. Where a line is known, the message begins with it
MESSAGES_OF_RECIPES = [
    # keys
    ("seed: 1\nlearning_rat: 1.0e-6", "2: `learning_rat` is an unknown field. Did you mean `learning_rate`?"),
    ("system promt: text", "1: `system promt` is an unknown field. Did you mean `system_prompt`"),
    ("help: true", "1: `help` is an unknown field."),
    ("config: recipe.yaml", "1: `config` is an unknown field."),
    (
        "warmup_ratio: 0.1",
        "1: `warmup_ratio` is an unknown field. Did you mean `warmup_steps`?",
    ),  # of an older release
    ("datasets: [{path: a, pth: b}]", "1: `pth` is an unknown key of `datasets`. Did you mean `path`?"),
    ("seed: 1\nseed: 2", "2: `seed` is given twice, here and on line 1"),
    (
        "selection: greso\nselector_args:\n  p_init: 0.4\n  p_init: 0.5\n",
        "4: `p_init` is given twice, here and on line 3",
    ),
    # types
    ("seed: 1\nnum_generations: eight", "2: `--num_generations`: invalid int value: 'eight'"),
    ("learning_rate: [1, 2]", "1: `--learning_rate`: takes a single value, not [1, 2]"),
    ("lora_target_modules: {a: b}", "1: `--lora_target_modules`: takes a list, not {'a': 'b'}."),
    ("selector_args: [p_init]", "1: `--selector_args`: takes a mapping, not ['p_init']."),
    ("max_steps:", "1: `--max_steps`: takes a value, not null"),
    ("num_generations:", "1: `--num_generations`: takes a value, not null"),  # None, but not in TRL's own arithmetic
    ("hub_strategy: off", "1: `--hub_strategy`: invalid choice: 'False'"),
    ("debug: [x]", "1: `--debug`: invalid DebugOption value: 'x'."),
    ("max_steps: [" + ", ".join(["1"] * 5000) + "]", "takes a single value, not [1, 1, 1, 1, 1, 1, ...]"),
    ("selector_args: \"{'p': 1}\"", "1: `selector_args` is \"{'p': 1}\", which is not JSON: Expecting property name"),
    ("selector_args: '" + '{"a": ' * 5000 + "'", '1: `selector_args` is \'{"a": {"a":'),
    ("selector_args: '[1]'", "1: `selector_args` is '[1]'; it takes a mapping"),
    ("model_init_kwargs: '[1]'", "1: `model_init_kwargs` is '[1]'; it takes a JSON object"),
    ("lora_target_modules: q_proj;v_proj", f"1: `lora_target_modules` has 'q_proj;v_proj' as one value. {TWO}"),
    ("report_to: a, b", "1: `report_to` has 'a, b' as one value. Give several values in a recipe as a list"),
    ("label_names: a b", "1: `label_names` has 'a b' as one value"),
    ("reward_weights: 1;2", "or in a recipe as a list (`reward_weights: [1, 2]`)"),
    # environment and `accelerate launch`
    ("env: 3", "1: `env` is 3; it takes a mapping of environment variables"),
    ("env: {A=B: 1}", "1: `env` has 'A=B': 1, which cannot be set (illegal environment variable name)"),
    ('env: {A: "\\0"}', "1: `env` has 'A': '\\x00', which cannot be set (embedded null byte)"),
    ("num_processes: four", "1: `--num_processes`: invalid int value: 'four'."),
    ("num_processes: 0\ngeneration_batch_size: 8", "1: `num_processes` is 0; it takes an integer in [1, inf)"),
    ("accelerate_config: zero9", "1: `--accelerate_config`: Accelerate config zero9 is neither a file nor"),
    ("multi_gpu: 1", "1: `--multi_gpu`: ignored explicit argument '1'"),
    # what this package needs
    ("reward_funcs:", "No reward: set `reward_funcs`"),
    ("reward_funcs: [exact_awnser_reward]", "1: `reward_funcs`: The reward function 'exact_awnser_reward' is"),
    ("reward_weights: [1, 2]", "1: `reward_weights` has 2 numbers for 1 rewards"),
    ("model_name_or_path:", "No model: set `model_name_or_path`"),
    ("dataset_name:", "No dataset: set `dataset_name`"),
    ("selection: grso", "1: `selection` is 'grso'"),
    ("selection: nowhere.Mine", "1: The selector 'nowhere.Mine' cannot be imported"),
    ("selection: greso\nselector_args: {p_start: 1}", "no argument `p_start`"),
    ("max_rollout_rounds: 0", "1: `max_rollout_rounds` is 0"),
    # what TRL, Transformers and PEFT say when they construct their configurations
    ("seed: 1\nfp16: true\nbf16: true", "2: At most one of fp16 and bf16"),
    ("warmup_steps: -1", "1: Got warmup_steps = -1.0, Expected value warmup_steps >= 0"),
    ("num_generations: 7", "1: generation_batch_size (8) must be divisible by num_generations (7)"),
    ("num_generations: 1", "GRPO requires at least 2 generations per prompt"),
    ("num_generations: 0", "TRL divides by a batch or group size that is 0"),
    ("load_in_4bit: true\nload_in_8bit: true", "You can't use 8 bit and 4 bit precision at the same time"),
    ("use_peft: true\nlora_task_type: CAUSAL", "Invalid task type: 'CAUSAL'"),
    ("accelerator_config: no.json", "No such file or directory: 'no.json'"),
    ("accelerator_config: {a: 1}", "AcceleratorConfig.__init__() got an unexpected keyword argument 'a'"),
    ("datasets: [{name: a}]", "DatasetConfig.__init__() missing 1 required positional argument: 'path'"),
    # files that cannot be read, or that would take very long
    ("a: [1\nb: 2", 'recipe.yaml", line 2, column 2. A recipe has one `key: value` a line.'),
    ("- a", "not a recipe"),
    ("output_dir: größe", "recipe.yaml cannot be read as YAML in UTF-8"),
    ("seed: 1\n[output_dir, seed]: 1", "2: a list or a mapping is used as a field's name"),
    ("selector_args: {[a]: 1}", "1: `selector_args` has a value that cannot be read: while constructing a mapping"),
    ("output_dir: 2024-13-45", "1: `output_dir` has a value that cannot be read: month must be in 1..12"),
    ("output_dir: !!timestamp soon", "1: `output_dir` has a value that cannot be read"),
    ("seed: " + "7" * 5000, "1: `seed` has a value that cannot be read: Exceeds the limit"),
    ("seed: 0x" + "7" * 5000, "1: `seed` has a value that cannot be read: Exceeds the limit"),
    ("selector_args: {p_init: " + "7" * 5000 + "}", "1: `selector_args` has a value that cannot be read"),
    ("seed: " + "[" * 5000, "is nested too deeply"),
    ("selector_args: &a {a: *a}", "more than 10,000 values"),
    (aliases_of_aliases(), "more than 10,000 values, with aliases (`*name`) written out"),
    ("\n".join(["a0: &a0 [x]", *(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 3000))]), "more than 10,000 values"),
    ("# " + "x" * 200_000, "a recipe has at most 200,000"),
]


@pytest.mark.parametrize(("text", "part"), MESSAGES_OF_RECIPES, ids=lambda text: text[:30])
def test_a_mistake_in_a_recipe_is_one_message(text, part, tmp_path):
    started = time.monotonic()
    (problem,) = problems(text, tmp_path)
    assert problem.startswith(part) if part[:1].isdigit() else part in problem
    assert len(problem) < 1000
    assert time.monotonic() - started < 20


#: Command lines with one mistake, and a part of the message. `r.yaml` is a recipe whose model and data are there
MESSAGES_OF_COMMANDS = [
    # options
    (["grpo"], "--config RECIPE"),
    (["grpo", "--config"], "`--config`: expected one argument"),
    (["grpo", "--config", "r.yml"], "Did you mean `r.yaml`"),
    (["grpo", "r.yaml"], "'r.yaml' stands alone"),
    (["grpo", "--seed", "1", "2"], "'2' stands alone"),
    (["grpo", "-seed", "1"], "'-seed' stands alone"),
    (["grpo", "--config=r.yaml", "--use_cpuu"], "`use_cpuu` is an unknown field"),
    (["grpo", "--see", "1"], "`see` is an unknown field"),  # no abbreviations: a new field must not change them
    (["grpo", "--lora_target_modules", "a", "--system_promt=Think step by step."], "`system_promt` is an unknown"),
    (["grpo", "--config=r.yaml", "--use_cpu", "ja"], "`--use_cpu`: Truthy value expected: got ja"),
    (["grpo", "--seed", "one"], "`--seed`: invalid int value: 'one'"),
    (["grpo", "--config=r.yaml", "--accelerate_config", "nowhere"], "nowhere"),
    # values
    (["grpo", "--config=r.yaml", "--fp16=true", "--bf16=true"], "At most one of fp16 and bf16"),
    (["grpo", "--config=r.yaml", "--replay_fraction=2"], "`replay_fraction` is 2.0"),
    (["grpo", "--config=r.yaml", "--selection", "DOTS"], "Did you mean `dots`"),
    # files and packages
    (["grpo", "--config=r.yaml", "--dataset_name", "nowhere.jsonl"], "The dataset 'nowhere.jsonl' does not exist"),
    (["grpo", "--config=r.yaml", "--per_device_train_batch_size", "128"], "16 prompts"),
    (["grpo", "--config=r.yaml", "--resume_from_checkpoint", "nowhere"], "The checkpoint 'nowhere' does not exist"),
    (["grpo", "--config=r.yaml", "--model_name_or_path", "./nowhere"], "is './nowhere', which is not a folder"),
    (["grpo", "--config=r.yaml", "--output_dir", "train.jsonl/out"], "nothing can be saved: [Errno 20] Not a directo"),
    (["grpo", "--config=r.yaml", "--output_dir", "a\0b"], "embedded null "),
    (["grpo", "--config=r.yaml", "--report_to", "wandb"], 'pip install ".[wandb]"'),
    (["grpo", "--config=r.yaml", "--report_to", "wandbb"], "Did you mean `wandb`"),
    (["grpo", "--config", "SmolLM2-135M-Instruct/short_answers/dots"], "trl-dataeff recipes show SmolLM2-135M-In"),
    (["grpo", "--config=r.yaml", "--num_processes", "1", "--multi_gpu"], "at least 2 processes"),
    (["grpo", "--config=r.yaml", "--num_processes=2", "--accelerate_config=zero2"], "pip3 install deepspeed"),
    # recipes
    (["recipes", "show", "greso"], "Give the full name: `"),
    (["recipes", "show", "Qwen2.5-0.5B-Instruct/gsm8k/unifrom"], "Did you mean `Qwen2.5-0.5B-Instruct/gsm8k/uniform`"),
    (["recipes", "copy", "Qwen2.5-0.5B-Instruct/gsm8k/uniform", "r.yaml"], "exists already"),
    (["recipes", "copy", "Qwen2.5-0.5B-Instruct/gsm8k/uniform", "r.yaml/a.yaml"], "'r.yaml/a.yaml' cannot be written"),
]


@pytest.mark.parametrize(("command", "part"), MESSAGES_OF_COMMANDS, ids=lambda value: str(value)[-60:])
def test_a_mistake_on_the_command_line_is_one_message(command, part, recipe, monkeypatch, capsys):
    loader = "trl.trainer.grpo_trainer.create_model_from_path"
    monkeypatch.setattr(loader, lambda *args, **kwargs: pytest.fail("a model is loaded"))
    monkeypatch.setattr("accelerate.commands.launch.is_deepspeed_available", lambda: False)
    trackers = "transformers.integrations.integration_utils.get_available_reporting_integrations"
    monkeypatch.setattr(trackers, lambda: [])
    assert main(command) == 2
    printed = capsys.readouterr()
    (error,) = [line for line in printed.err.splitlines() if line.startswith("trl-dataeff: error: ")]
    assert part in error
    assert "r.yaml:" not in error, "no line of the recipe is to blame"
    assert printed.out == ""


@pytest.mark.parametrize("value", ["Think step by step.", "[a b, c d]", "-1", "{beta: 0.04}", ""])
@pytest.mark.parametrize("before", ["lora_target_modules: [q_proj, v_proj]", "seed: 1", "multi_gpu: true"])
def test_an_unknown_key_is_named_whatever_its_value_and_whatever_precedes_it(before, value, tmp_path):
    (problem,) = problems(f"{before}\nreward_func: {value}\n", tmp_path)
    assert problem.startswith("2: `reward_func` is an unknown field. Did you mean `reward_funcs`")


def test_what_is_known_at_once_is_named_at_once_in_the_order_of_lines(tmp_path):
    text = (
        "learning_rat: 1\nnum_generations: eight\nseed: 1\nseed: 2\nnum_processes: four\nmax_rollout_rounds: 0\n"
        "replay_fraction: 2\nselection: grso\nreward_funcs: [exact_awnser_reward]\nlr_scheduler_kwargs: '{b}'\n"
        "lora_target_modules: a;b\ndatasets: [{path: a, type: chat}]\n"
    )
    found = problems(text, tmp_path)
    assert lines_of(found) == ["1", "2", "4", "5", "6", "7", "8", "9", "10", "11", "12"]


def test_each_configuration_says_what_it_refuses(tmp_path):
    text = "use_peft: true\nlora_task_type: A\nbf16: true\nfp16: true\ndatasets: [{name: a}]\nreward_weights: [1, 2]\n"
    found = problems(text, tmp_path)
    assert len(found) == 4
    for part in ("bf16", "task type", "DatasetConfig", "reward_weights"):
        assert part in " ".join(found)


def test_what_follows_from_a_problem_is_not_named(tmp_path):
    """A misspelled group size leaves the default, which does not divide the batch; no data is no second mistake."""
    text = "num_generation: 4\nper_device_train_batch_size: 4\ndataset_nam: org/data\nreward_func: a.b\n"
    path = tmp_path / "recipe.yaml"
    path.write_text(f"{text}model_name_or_path: org/model\n")
    assert [problem.removeprefix(f"{path}:")[0] for problem in validate(path).problems] == ["1", "3", "4"]


def test_valid_recipe_and_what_becomes_of_it(tmp_path, monkeypatch):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "model_name_or_path: org/model\nreward_funcs: [exact_answer_reward, think_format_reward]\n"
        "learning_rate: 1e-6\n"  # YAML 1.1 reads this as text
        "epsilon: 1\nlora_target_modules: all-linear\nscale_rewards: false\neval_strategy: no\nreplay: off\n"
        "report_to: [wandb, none]\nreward_weights: [1, -5.0e-5]\nliger_kernel_config: {rope: true}\n"
        "deepspeed: ds.json\ntf32: true\nuse_cpu: false\nselection: greso\nselector_args: {p_init: 0.4}\n"
        "datasets:\n  - path: a.jsonl\n    fraction: 1\n  - path: b\n    fraction: 1\n"
        "replay_max_age:\nreplay_ratio_cap: none\n"
        "env: {ONE: 1}\nnum_processes: 4\nmulti_gpu: true\nuse_fsdp: false\naccelerate_config: fsdp2\n"
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").touch()
    assert validate(path) == ([], [])
    monkeypatch.setenv("ONE", "before")
    arguments, launch_args, _ = read(["--config", str(path)], portable=True)
    assert arguments.training.learning_rate == 1e-6
    assert arguments.training.reward_weights == [1, -5e-5]
    assert arguments.training.selector_args == {"p_init": 0.4}
    assert (arguments.training.scale_rewards, arguments.training.eval_strategy) == ("none", "no")
    assert arguments.training.replay == "off"  # which YAML reads as false, like `no`
    assert (arguments.training.replay_max_age, arguments.training.replay_ratio_cap) == (None, None)
    assert arguments.training.liger_kernel_config == {"rope": True}
    assert arguments.model.lora_target_modules == "all-linear"
    assert arguments.training.report_to == ["wandb", "none"]
    assert [dataset.path for dataset in arguments.dataset.datasets] == ["a.jsonl", "b"]
    assert os.environ["ONE"] == "1"
    assert launch_args == ["--num_processes=4", "--multi_gpu", "--accelerate_config=fsdp2"]


@pytest.mark.parametrize("one", ["all-linear", r".*\.layers\.(1|2)\.(q|v)_proj", "model.layers.0.mlp", "h{1,2}"])
def test_a_single_name_or_regular_expression_is_no_list(one, tmp_path):
    assert problems(f"lora_target_modules: '{one}'", tmp_path) == []


def test_a_recipe_for_a_gpu_is_valid_without_one(tmp_path):
    text = "bf16: true\ntf32: true\nuse_vllm: true\nattn_implementation: flash_attention_2\nload_in_4bit: true\n"
    text += "use_peft: true\nreward_funcs: [math_verify_reward]\nreport_to: wandb\n"
    assert problems(text, tmp_path) == []
    training = read(["--config", str(tmp_path / "recipe.yaml")], portable=True)[0].training
    assert (training.bf16, training.use_vllm, training.use_cpu) == (True, True, False), "checking changes no field"
    assert type(training) is DataEfficientGRPOConfig


def test_a_recipe_for_a_gpu_on_a_machine_without_one(write, monkeypatch, capsys):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setattr(launching, "train", lambda arguments: None)
    write("r.yaml", complete("bf16: true\ndtype: bfloat16\nuse_vllm: true\noutput_dir: out\nreport_to: none\n"))
    assert main(["grpo", "--config", "r.yaml"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "`bf16`, `use_vllm`" in line
    flags = line.partition(" add ")[2].split()
    assert len(flags) == 2 * 4
    assert main(["grpo", "--config", "r.yaml", *flags]) == 0
    assert main(["grpo", "--config", "r.yaml", "--bf16=false", "--fp16=true"]) == 2
    flags = capsys.readouterr().err.partition(" add ")[2].split()
    assert main(["grpo", "--config", "r.yaml", "--fp16=true", *flags]) == 0


def test_a_recipe_is_overridden_by_the_command_line_and_launch_options_are_told_from_fields(write):
    write("r.yaml", "max_steps: 3\nseed: 5\nreward_funcs: [a.b]\nnum_processes: 4\n")
    options = ["--reward_funcs", "c.d", "e.f", "--num_machines=2", "--use-cpu", "--mixed_precision", "bf16"]
    options += ["--system_prompt", "--x-- is a mark", "--no_shuffle_dataset"]
    arguments, launch_args, _ = read(["--seed", "6", "--config=r.yaml", *options], portable=True)
    assert launch_args == ["--num_processes=4", "--num_machines=2", "--mixed_precision", "bf16"]
    assert (arguments.training.max_steps, arguments.training.seed, arguments.training.use_cpu) == (3, 6, True)
    assert arguments.script.reward_funcs == ["c.d", "e.f"]
    assert (arguments.script.system_prompt, arguments.training.shuffle_dataset) == ("--x-- is a mark", False)


def test_a_checkpoint_in_the_home_directory(tmp_path, monkeypatch):
    (tmp_path / "checkpoint-4").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    arguments = read(["--resume_from_checkpoint", "~/checkpoint-4"], portable=True).arguments
    assert checkpoint_of(arguments.training) == str(tmp_path / "checkpoint-4")


def test_extras_that_messages_name_exist():
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert set(launching.TRACKER_EXTRAS) <= set(extras["optional-dependencies"])


def test_each_problem_of_several_recipes_names_its_file(write, capsys):
    write("a.yaml", complete("reward_funcs:\n"))
    write("b.yaml", complete("num_generations: 1\n"))  # a message of TRL without a field, and so without a line
    write("c.yaml", complete("seed: 1\n"))
    assert main(["recipes", "validate", "a.yaml", "b.yaml", "c.yaml"]) == 1
    assert [line.split(": ")[2] for line in capsys.readouterr().err.splitlines()] == ["a.yaml:1", "b.yaml"]


def test_grpo_says_the_same_about_a_bad_recipe_as_validate(write, capsys):
    write("bad.yaml", complete("learning_rat: 1\nseeed: x\nfp16: true\nbf16: true\n"))
    assert main(["recipes", "validate", "bad.yaml"]) == 1
    validated = capsys.readouterr().err
    assert main(["grpo", "--config", "bad.yaml"]) == 2
    assert capsys.readouterr().err == validated
    assert [line.partition("bad.yaml:")[2][0] for line in validated.splitlines()] == ["1", "2", "3"]


def test_a_selector_is_found_in_the_current_folder_without_a_reward_function(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_parts.py").write_text("from trl_dataeff import UniformSelector as Mine\n")
    text = "reward_funcs: []\nreward_model_name_or_path: a/b\nmodel_name_or_path: a/c\nselection: my_parts.Mine"
    assert problems(text, tmp_path) == []


def test_a_launched_process_makes_no_process_group_before_it_trains(tmp_path, monkeypatch):
    """It would be one for CPUs, which training then takes."""
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "2" if name == "WORLD_SIZE" else "0")
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *args, **kwargs: pytest.fail("one was made"))
    assert problems("seed: 1", tmp_path) == []


OFF = "selection: uniform\nreplay: off\ncompact_update: false\n"
HALF_GROUPS = f"{OFF}num_generations: 4\nper_device_train_batch_size: 2\ngradient_accumulation_steps: 1\n"


@pytest.mark.parametrize(
    ("more", "options", "batch"),
    [
        ("", ["--num_processes", "2"], 4),
        ("", ["--num-processes=4"], 8),
        ("num_processes: 2\n", [], 4),
        ("num_processes: 2\n", ["--num_processes", "6"], 12),
        ("accelerate_config: zero2\n", [], 16),  # which has eight processes
        ("accelerate_config: zero2\n", ["--num_processes", "2"], 4),
    ],
)
def test_the_batch_is_that_of_the_processes_that_will_be_started(more, options, batch, write, monkeypatch):
    launched = []
    monkeypatch.setattr("accelerate.commands.launch.launch_command", launched.append)
    write("r.yaml", complete(f"{HALF_GROUPS}{more}use_cpu: true\nbf16: false\noutput_dir: out\nreport_to: none\n"))
    assert main(["grpo", "--config", "r.yaml", *options]) == 0
    assert len(launched) == 1
    training = read(["--config", "r.yaml", *options], portable=True).arguments.training
    assert training.generation_batch_size == batch
    if not options:
        assert main(["recipes", "validate", "r.yaml"]) == 0


@pytest.mark.parametrize(("more", "batch"), [("", 2), ("num_processes: 3\n", 6), ("accelerate_config: zero2\n", None)])
def test_a_batch_is_checked_for_the_processes_that_will_train(more, batch, tmp_path):
    found = problems(HALF_GROUPS + more, tmp_path)
    expected = [f"4: generation_batch_size ({batch}) must be divisible by num_generations (4)."]
    assert found == ([] if batch is None else expected)


def test_a_refusal_that_names_an_option_of_the_command_line_names_no_line(write, capsys):
    write("r.yaml", complete("num_generations: 4\nper_device_train_batch_size: 4\n"))
    assert main(["grpo", "--config", "r.yaml", "--num_generations", "6"]) == 2
    assert "error: generation_batch_size (4) must be divisible" in capsys.readouterr().err


def test_configurations_are_constructed_before_data_rewards_and_model(write, monkeypatch, capsys):
    monkeypatch.setattr(launching, "make_trainer", lambda arguments: pytest.fail("a trainer is made"))

    def refuse(self):
        raise ValueError("seed is refused by a later TRL.")

    monkeypatch.setattr(GRPOConfig, "__post_init__", refuse)
    write("r.yaml", complete("beta: 0.1\nseed: 3\n"))
    assert main(["grpo", "--config", "r.yaml"]) == 2
    assert capsys.readouterr().err == "trl-dataeff: error: r.yaml:2: seed is refused by a later TRL.\n"


def test_a_key_twice_with_one_value_is_a_warning(write, capsys):
    text = "seed: 1\nselection: greso\nselector_args: {p_init: 0.4, p_init: 0.4}\nseed: 1\n"
    write("r.yaml", complete(text))
    assert main(["recipes", "validate", "r.yaml"]) == 0
    warned = capsys.readouterr().err.splitlines()
    assert warned == [
        "trl-dataeff: warning: r.yaml:3: `p_init` is given twice, here and on line 3, with one value.",
        "trl-dataeff: warning: r.yaml:4: `seed` is given twice, here and on line 1, with one value.",
    ]


def test_unknown_keys_of_a_mixture_have_their_own_lines(tmp_path):
    found = problems("datasets:\n  - path: a\n    type: chat\n  - pth: b\n  - name: c\n", tmp_path)
    assert lines_of(found) == ["3", "4"]


@pytest.mark.parametrize(
    ("name", "value"), [("prompt_embedding", "policy"), ("replay_max_age", 3), ("replay_ratio_cap", 1.5)]
)
@pytest.mark.parametrize("word", ["null", "None", "~"])
def test_null_is_none_in_a_recipe_and_on_the_command_line(name, value, word, tmp_path):
    path = tmp_path / "recipe.yaml"
    given = f"use_cpu: true\nbf16: false\nselection: dots\nreplay: fill\n{name}: "

    def found(in_recipe, *options: str):
        path.write_text(complete(f"{given}{in_recipe}\n"))
        return getattr(read(["--config", str(path), *options]).arguments.training, name)

    assert found(value) == value
    if word != "None":  # which is a text in YAML
        assert found(word) is None
    if word != "~":
        assert found(value, f"--{name}", word) is None
        assert found("null", f"--{name}={value}") == value


@pytest.mark.parametrize(
    ("part", "name"),
    [("model", "dtype"), ("training", "vllm_importance_sampling_clip_max"), ("training", "max_completion_length")],
)
def test_a_recipe_gives_none_where_trl_takes_it(part, name, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(complete(f"use_cpu: true\nbf16: false\n{name}: null\n"))
    assert getattr(getattr(read(["--config", str(path)]).arguments, part), name) is None


def test_the_command_line_takes_back_a_dataset_config_of_a_recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(complete("use_cpu: true\nbf16: false\ndataset_config: main\n"))
    command = ["--config", str(path), "--dataset_config", "null"]
    assert read(command).arguments.script.dataset_config is None


def test_null_of_a_list_on_the_command_line(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(complete("use_cpu: true\nbf16: false\nlora_target_modules: [q_proj]\n"))
    command = ["--config", str(path), "--lora_target_modules", "null"]
    assert read(command).arguments.model.lora_target_modules is None


def test_a_model_that_is_not_here_is_a_warning(write, capsys):
    recipe = write("recipe.yaml", complete("use_cpu: true\nbf16: false\nmodel_name_or_path: ./smoll\n"))
    assert main(["recipes", "validate", recipe]) == 0
    assert f"{recipe}:3: `model_name_or_path` is './smoll'" in capsys.readouterr().err


def test_data_that_is_not_here_is_a_warning_and_a_recipe_that_is_not_does_not_hide_others(write, capsys):
    here = write("here.yaml", complete("use_cpu: true\nbf16: false\ndataset_name: ./no.jsonl\n"))
    mixture = write("mixture.yaml", complete("datasets:\n- path: org/data\n- path: ./none.jsonl\nuse_cpu: true\n"))
    assert main(["recipes", "validate", mixture]) == 0
    assert f"{mixture}:3: The dataset './none.jsonl' does not exist" in capsys.readouterr().err
    wrong = write("wrong.yaml", complete("sed: 1\n"))
    assert main(["recipes", "validate", here]) == 0
    printed = capsys.readouterr()
    assert f"{here}:3: The dataset './no.jsonl' does not exist" in printed.err
    assert "valid" in printed.out
    assert main(["recipes", "validate", "nowhere.yaml", here, wrong]) == 1
    printed = capsys.readouterr()
    assert "'nowhere.yaml' does not exist" in printed.err
    assert f"{wrong}:1: `sed` is an unknown field" in printed.err
