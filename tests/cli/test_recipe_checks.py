"""A recipe is read strictly: every mistake is said with file, line, what was given and what would do."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import pytest
import yaml

from trl_dataeff.cli.checks import checkpoint_of, problems_on_this_machine
from trl_dataeff.cli.main import main
from trl_dataeff.cli.parser import PORTABLE_TYPES, TYPES, GRPOParser
from trl_dataeff.cli.recipe import find_recipe
from trl_dataeff.cli.recipes import problems_of
from trl_dataeff.utils import UserError


#: What every recipe needs
NEEDED = {"model_name_or_path": "org/model", "dataset_name": "org/data", "reward_funcs": "[exact_answer_reward]"}


def complete(text: str) -> str:
    """A recipe with `text` at its top, and what is needed besides below."""
    return text.rstrip("\n") + "\n" + "".join(f"{k}: {v}\n" for k, v in NEEDED.items() if f"{k}:" not in text)


def problems(text: str, tmp_path: Path) -> list[str]:
    path = tmp_path / "recipe.yaml"
    path.write_text(complete(text) if text[:1].isalpha() and ":" in text else text)
    return [problem.removeprefix(f"{path}:") for problem in problems_of(path)]


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("learning_rat: 1.0e-6", ["`learning_rat`", "Did you mean `learning_rate`"]),
        ("dynamic_samplng: true", ["Did you mean `dynamic_sampling`"]),
        ("num_proceses: 2", ["Did you mean `num_processes`"]),
        ("zzzzzz: 1", ["`zzzzzz` is not a field"]),
        ("num_generations: eight", ["`num_generations`", "'eight'", "an integer"]),
        ("num_generations: 8.0", ["8.0", "an integer"]),
        ("max_steps: true", ["true", "an integer"]),
        ("datasets: abc", ["'abc'", "a list of mappings with `path`"]),
        ("learning_rate: fast", ["'fast'", "a number"]),
        ("learning_rate: true", ["a number"]),
        ("learning_rate:", ["nothing", "a number"]),
        ("bf16: maybe", ["'maybe'", "true or false"]),
        ("use_vllm: 1", ["1 (an integer)", "true or false"]),
        ("output_dir: 3", ["3 (an integer)", "text"]),
        ("reward_funcs: exact_answer_reward", ["a list of texts"]),
        ("reward_funcs: [1]", ["a list of texts"]),
        ("reward_weights: [1.0, high]", ["a list of numbers"]),
        ("eval_strategy: no", ["without quotes", "'no', 'steps' or 'epoch'"]),
        ("lr_scheduler_type: fast", ["'fast'", "'linear'", "'cosine'"]),
        ("dtype: bf16", ["'bf16'", "'bfloat16'"]),
        ("model_init_kwargs: [1]", ["a mapping"]),
        ("env: 3", ["`env`", "environment variables"]),
        ("datasets: x.jsonl", ["a list of mappings"]),
        ("datasets: [x.jsonl]", ["`datasets` has the entry 'x.jsonl'", "`path`"]),
        ("datasets: [{name: a}]", ["{'name': 'a'} (a mapping)", "`path`"]),
        ("datasets: [{path: a, spilt: train}]", ["unknown key `spilt`", "Did you mean `split`"]),
        ("datasets: [{path: a, fraction: half}]", ["`fraction`", "'half'", "a number"]),
    ],
)
def test_wrong_line(line, parts, tmp_path):
    found = problems(f"max_completion_length: 16\n{line}\n", tmp_path)
    assert len(found) == 1
    assert found[0].startswith("2: ")
    for part in parts:
        assert part in found[0]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("selection: dots+gresso", "1: `selection` is 'dots+gresso'"),
        ("selection: greso\nselector_args: {p_start: 1}", "p_start"),
        ("dots_predictor_args: {depth: 3}", "1: "),
        ("max_rollout_rounds: 0", "1: `max_rollout_rounds` is 0; it takes an integer >= 1"),
        ("num_generations: 1\nper_device_train_batch_size: 1", "1: `num_generations` is 1; it takes an integer >= 2"),
        ("use_peft: true\nload_in_4bit: true\nload_in_8bit: true", "8 bit and 4 bit"),
        ("bf16: true\nfp16: true", "2: At most one of fp16 and bf16"),
        ("seed: 1\nnum_generations: 7", "2: The completions of a prompt would be split"),
        ("generation_batch_size: 12", "1: generation_batch_size (12) must be divisible by the global batch size (8)"),
        ("loss_type: nonsense", "1: `loss_type` is 'nonsense'; it takes 'grpo', 'dr_grpo'"),
        ("vllm_mode: colo", "1: `vllm_mode` is 'colo'; it takes 'colocate' or 'server'"),
        ("learning_rate: -1e-6", "1: `learning_rate` is -1e-06; it takes a number >= 0"),
        ("temperature: 0", "1: `temperature` is 0; it takes a number > 0"),
        ("max_completion_length: -5", "1: `max_completion_length` is -5; it takes an integer >= 1"),
        ("use_peft: true\nlora_r: 0", "2: `lora_r` is 0"),
        ("use_peft: true\nlora_task_type: nonsense", "2: "),
        ("load_in_4bit: true", "1: `load_in_4bit` needs `use_peft`"),
        ("load_in_8bit: true", "1: `load_in_8bit` needs `use_peft`"),
        ("use_peft: true\nbeta: 0.1\nsync_ref_model: true", "3: `sync_ref_model` is not possible with `use_peft`"),
        ("sync_ref_model: true", "1: `sync_ref_model` is True and `beta` is 0"),
        (
            "reward_funcs: [exact_awnser_reward]",
            "1: The reward function 'exact_awnser_reward' is unknown. Did you mean",
        ),
        ("reward_funcs: [nowhere_to_be.found]", "1: The reward function 'nowhere_to_be.found' cannot be imported"),
        ("reward_weights: [1, 2]", "1: `reward_weights` has 2 numbers for 1 rewards"),
        ("reward_funcs: []", "1: No reward: set `reward_funcs`"),
        ("model_name_or_path:", "1: No model: set `model_name_or_path`"),
        ("dataset_name:", "1: No dataset: set `dataset_name`"),
        ("report_to: nowhere", "1: `report_to` is 'nowhere'; it takes 'none' or"),
        ("dataset_streaming: true", "1: `dataset_streaming` needs `max_steps`"),
        ("max_steps: 1\ndataset_streaming: true\nselection: dots", "2: `dataset_streaming` and `selection` exclude"),
        (
            "max_steps: 1\ndataset_streaming: true\nsequential_rollouts: true",
            "2: `dataset_streaming` and `sequential_rollouts` exclude",
        ),
        ("num_processes: four", "1: `num_processes` is an option of `accelerate launch`, which says: invalid int"),
        ("eval_strategy: steps\nnum_generations_eval: 3", "2: `per_device_eval_batch_size` (8) x 1"),
        ("warmup_steps: -1", "1: `warmup_steps` is -1"),
    ],
)
def test_values_that_the_configuration_refuses(text, part, tmp_path):
    (problem,) = problems(text, tmp_path)
    assert part in problem


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: [1\nb: 2", "2: not YAML"),
        ("\tmax_steps: 1", "1: not YAML"),
        ('model_name_or_path: "a\0b"', "position 22"),
        ("- a\n- b", "must be a mapping"),
        ("just text", "must be a mapping"),
        ("", "is empty"),
        ("# nothing but a comment", "is empty"),
        ("max_steps: 1\nseed: 2\nmax_steps: 3", "3: `max_steps` is given twice, here and on line 1"),
    ],
)
def test_files_that_are_no_recipe(text, part, tmp_path):
    (problem,) = problems(text, tmp_path)
    assert part in problem


EIGHT = """\
loss_type: nonsense
vllm_mode: colo
learning_rate: -1e-6
temperature: 0
max_completion_length: -5
load_in_4bit: true
reward_funcs: [numeric_awnser_reward, nowhere_to_be.found]
replay_fraction: 2
"""
MORE = "num_generations: 7\nvllm_mode: colo\nseed: x\nlearning_rat: 1\nfp16: true\nbf16: true\nselection: dost\ngreso_p_min: 0.9\n"


def test_a_recipe_with_many_mistakes_gets_them_all_at_once_from_both_commands(write, capsys):
    """Keys given twice or unknown, types, choices, ranges, fields that exclude one another, rewards, selection: each at its line."""
    write("bad.yaml", complete(EIGHT + MORE))
    assert main(["recipes", "validate", "bad.yaml"]) == 1
    validated = capsys.readouterr().err.splitlines()
    lines = [int(re.match(r"trl-dataeff: error: bad.yaml:(\d+): ", line)[1]) for line in validated]
    assert lines == [1, 3, 4, 5, 6, 7, 7, 8, 9, 10, 10, 11, 12, 13, 15, 16]  # fp16 and bf16 are one
    assert main(["grpo", "--config", "bad.yaml"]) == 2
    started = capsys.readouterr().err.splitlines()
    assert [line for line in started if "bitsandbytes" not in line] == validated


def test_mistakes_of_the_command_line_and_the_recipe_are_said_together(write, capsys):
    write("bad.yaml", complete("loss_type: nonsense\ntemperature: 0\nseed: 5\n"))
    options = ["--temperature", "-1", "--seed", "one", "--learning_rat", "1", "--num_generations", "7"]
    assert main(["grpo", "--config", "bad.yaml", *options]) == 2
    errors = [line.removeprefix("trl-dataeff: error: ") for line in capsys.readouterr().err.splitlines()]
    starts = [
        "`--seed` is 'one'; it takes an integer.",
        "`--learning_rat` is not an option",
        "`temperature` is -1.0; it takes a number > 0.",  # which the command line says, not line 2
        "The completions of a prompt would be split",
        "bad.yaml:1: `loss_type` is 'nonsense'",
    ]
    assert len(errors) == len(starts)
    for error, start in zip(errors, starts, strict=True):
        assert error.startswith(start)


def test_what_follows_from_a_mistake_is_not_said(tmp_path):
    """A reward of the wrong type is not missing, a misspelt key either, and 7 x 8 completions are about the same numbers."""
    assert len(problems("reward_funcs: exact_answer_reward\n", tmp_path)) == 1
    (problem,) = problems("reward_func: [exact_answer_reward]\nreward_funcs_: 1", tmp_path)[:1]
    assert "Did you mean `reward_funcs`" in problem
    assert (
        len(problems("num_generations: 7\nper_device_train_batch_size: 6\ngradient_accumulation_steps: 2", tmp_path))
        == 1
    )


def test_every_problem_is_said_in_the_order_of_the_file(tmp_path):
    found = problems("seed: x\nlearning_rat: 1\nmax_steps: 1\nnum_generations: y\n", tmp_path)
    assert [problem.partition(":")[0] for problem in found] == ["1", "2", "4"]


def test_valid_recipe_and_what_becomes_of_it(tmp_path, monkeypatch):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "model_name_or_path: org/model\nreward_funcs: [exact_answer_reward, think_format_reward]\n"
        "learning_rate: 1e-6\n"  # YAML 1.1 reads this as text
        "epsilon: 1\n"
        "lora_target_modules: all-linear\nscale_rewards: false\nreport_to: none\nreward_weights: [1, 5e-1]\n"
        "max_completion_length:\ndeepspeed: ds.json\ntf32: true\nuse_cpu: false\n"
        "datasets:\n  - path: a.jsonl\n    fraction: 1\n  - path: b\n    fraction: 1\n"
        "env: {ONE: 1}\nnum_processes: 4\nmulti_gpu: true\nuse_fsdp: false\naccelerate_config: fsdp2\n"
    )
    assert problems_of(path) == []
    monkeypatch.setenv("ONE", "before")
    arguments, launch_args = GRPOParser(portable=True).parse(["--config", str(path)])
    assert arguments.training.learning_rate == 1e-6
    assert arguments.training.reward_weights == [1, 0.5]
    assert os.environ["ONE"] == "1"
    assert launch_args == ["--num_processes", "4", "--multi_gpu", "--accelerate_config", "fsdp2"]


def test_recipe_for_a_gpu_is_valid_without_one(tmp_path):
    text = "bf16: true\ntf32: true\nuse_vllm: true\nattn_implementation: flash_attention_2\nload_in_4bit: true\n"
    text += "use_peft: true\nreward_funcs: [math_verify_reward]\nreport_to: wandb\ndots_predictor: org/predictor\n"
    assert problems(text, tmp_path) == []


def test_checking_without_the_machine_has_the_same_fields():
    for portable, real in zip(PORTABLE_TYPES, TYPES, strict=True):
        assert issubclass(portable, real)
        assert [f.name for f in dataclasses.fields(portable)] == [f.name for f in dataclasses.fields(real)]


def test_every_default_is_valid_in_a_recipe():
    """Whoever writes a default out does not change anything."""
    parser = GRPOParser()
    values = {name: getattr(default, "value", default) for name, default in parser.defaults.items()}
    for name, value in yaml.safe_load(yaml.safe_dump(values)).items():
        assert parser.convert(name, value) == value, name


def test_recipe_is_overridden_by_the_command_line(write, monkeypatch):
    monkeypatch.setenv("FROM_RECIPE", "before")
    write("r.yaml", "max_steps: 3\nseed: 5\nuse_cpu: true\nreward_funcs: [a.b]\nenv: {FROM_RECIPE: 7}\n")
    arguments, launch_args = GRPOParser().parse(["--seed", "6", "--config=r.yaml", "--reward_funcs", "c.d", "e.f"])
    assert (arguments.training.max_steps, arguments.training.seed) == (3, 6)
    assert arguments.script.reward_funcs == ["c.d", "e.f"]
    assert launch_args == []
    assert os.environ["FROM_RECIPE"] == "7"


def test_launch_options_are_told_from_fields(write):
    write("r.yaml", "num_processes: 4\nmax_steps: 1\n")
    args = [
        "--config",
        "r.yaml",
        "--reward_funcs",
        "a.b",
        "--num_machines=2",
        "--use_cpu",
        "--mixed_precision",
        "bf16",
    ]
    arguments, launch_args = GRPOParser(portable=True).parse(args)
    assert launch_args == ["--num_processes", "4", "--num_machines", "2", "--mixed_precision", "bf16"]
    assert arguments.script.reward_funcs == ["a.b"]
    assert arguments.training.use_cpu is True


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["--config"], "`--config` needs"),
        (["--config", "--seed", "1"], "`--config` needs"),
        (["--config", "r.yaml", "--config", "r.yaml"], "given twice"),
        (["--config", "r.yml"], "Did you mean `r.yaml`"),
        (["--config", "Qwen2.5-0.5B-Instruct/gsm8k/unifrom"], "Did you mean `Qwen2.5-0.5B-Instruct/gsm8k/uniform`"),
        (["r.yaml"], "`--config r.yaml`"),
        (["--seed", "1", "2"], "'2' stands alone"),
        (["--learning_rat", "1"], "Did you mean `--learning_rate`"),
        (["--seed", "one"], "`--seed` is 'one'; it takes an integer"),
        (["--dtype", "bf16"], "`--dtype` is 'bf16'; it takes 'auto'"),
        (["--see", "1"], "`--see` is not an option"),  # no abbreviations: a new field must not change what they mean
    ],
)
def test_wrong_command_lines(args, part, write):
    write("r.yaml", "use_cpu: true\n")
    with pytest.raises(UserError) as error:
        GRPOParser(portable=True).parse(args)
    assert part in str(error.value)


def test_where_the_model_would_be_saved_is_checked_before_it_is_trained(write, tmp_path, monkeypatch):
    write("file", "")
    for output in ("file", "file/out", "~/file"):
        monkeypatch.setenv("HOME", str(tmp_path))
        arguments, _ = GRPOParser(portable=True).parse(["--reward_funcs", "a.b", "--output_dir", output])
        (problem,) = (p for p in problems_on_this_machine(arguments) if p.fields == ("output_dir",))
        assert "is a file, not a folder" in problem.message
    arguments, _ = GRPOParser(portable=True).parse(["--reward_funcs", "a.b", "--output_dir", "a/b/c"])
    assert not [p for p in problems_on_this_machine(arguments) if p.fields == ("output_dir",)]


def test_a_checkpoint_in_the_home_directory(tmp_path, monkeypatch):
    (tmp_path / "checkpoint-4").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    args = ["--reward_funcs", "a.b", "--resume_from_checkpoint", "~/checkpoint-4"]
    arguments, _ = GRPOParser(portable=True).parse(args)
    assert checkpoint_of(arguments.training) == str(tmp_path / "checkpoint-4")


def test_recipes_that_come_with_the_package_have_names():
    path = find_recipe("Qwen2.5-0.5B-Instruct/gsm8k/uniform")
    assert path == find_recipe("Qwen2.5-0.5B-Instruct/gsm8k/uniform.yaml")
    assert path.parts[-3:] == ("Qwen2.5-0.5B-Instruct", "gsm8k", "uniform.yaml")


def test_grpo_says_the_same_about_a_bad_recipe_as_validate(write, capsys):
    write("bad.yaml", complete("learning_rat: 1\nseed: x\n"))
    assert main(["recipes", "validate", "bad.yaml"]) == 1
    validated = capsys.readouterr().err
    assert main(["grpo", "--config", "bad.yaml"]) == 2
    assert capsys.readouterr().err == validated
    assert len(validated.splitlines()) == 2
