"""A recipe is read strictly: every mistake is said with file, line, what was given and what would do."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import yaml

from trl_dataeff.cli.arguments import PORTABLE_TYPES, TYPES
from trl_dataeff.cli.errors import UserError
from trl_dataeff.cli.main import main
from trl_dataeff.cli.parser import GRPOParser
from trl_dataeff.cli.recipe import check_recipe, find_recipe, read_recipe
from trl_dataeff.cli.recipes import problems_of


def problems(text: str, tmp_path: Path) -> list[str]:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return [problem.removeprefix(f"{path}:") for problem in problems_of(path)]


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("learning_rat: 1.0e-6", ["`learning_rat`", "Did you mean `learning_rate`"]),
        ("dynamic_samplng: true", ["Did you mean `dynamic_sampling`"]),
        ("num_proceses: 2", ["Did you mean `num_processes`"]),
        ("zzzzzz: 1", ["`zzzzzz` is no field"]),
        ("num_generations: eight", ["`num_generations`", "'eight'", "an integer"]),
        ("num_generations: 8.0", ["8.0", "an integer"]),
        ("max_steps: true", ["true", "an integer"]),
        ("learning_rate: fast", ["'fast'", "a number"]),
        ("learning_rate: true", ["a number"]),
        ("learning_rate:", ["nothing", "a number"]),
        ("bf16: maybe", ["'maybe'", "true or false"]),
        ("use_vllm: 1", ["1 (an integer)", "true or false"]),
        ("output_dir: 3", ["3 (an integer)", "text"]),
        ("reward_funcs: exact_answer_reward", ["a list of texts"]),
        ("reward_funcs: [1]", ["a list of texts"]),
        ("reward_weights: [1.0, high]", ["a list of numbers"]),
        ("eval_strategy: no", ["without quotes", "'no', 'steps', 'epoch'"]),
        ("lr_scheduler_type: fast", ["'fast'", "'linear'", "'cosine'"]),
        ("dtype: bf16", ["'bf16'", "'bfloat16'"]),
        ("model_init_kwargs: [1]", ["a mapping"]),
        ("env: 3", ["`env`", "environment variables"]),
        ("datasets: x.jsonl", ["a list of mappings"]),
        ("datasets: [x.jsonl]", ["`datasets` has the entry 'x.jsonl'", "`path`"]),
        ("datasets: [{name: a}]", ["without `path`"]),
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
        ("selection: dots+gresso", "`selection` is 'dots+gresso'"),
        ("max_rollout_rounds: 0", "`max_rollout_rounds` is 0; it takes an integer >= 1"),
        ("num_generations: 1\nper_device_train_batch_size: 1", "at least 2 generations"),
        ("load_in_4bit: true\nload_in_8bit: true", "8 bit and 4 bit"),
        ("bf16: true\nfp16: true", "fp16 and bf16"),
        ("num_generations: 7", "divisible"),
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


def test_every_problem_is_said_in_the_order_of_the_file(tmp_path):
    found = problems("seed: x\nlearning_rat: 1\nmax_steps: 1\nnum_generations: y\n", tmp_path)
    assert [problem.partition(":")[0] for problem in found] == ["1", "2", "4"]


def test_valid_recipe_and_what_becomes_of_it(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "learning_rate: 1e-6\n"  # YAML 1.1 reads this as text
        "epsilon: 1\n"
        "lora_target_modules: all-linear\nscale_rewards: false\nreport_to: none\nreward_weights: [1, 5e-1]\n"
        "max_completion_length:\ndeepspeed: ds.json\ntf32: true\nuse_cpu: false\n"
        "datasets:\n  - path: a.jsonl\n    fraction: 1\n  - path: b\n    fraction: 1\n"
        "env: {ONE: 1}\nnum_processes: 4\nmulti_gpu: true\nuse_fsdp: false\naccelerate_config: fsdp2\n"
    )
    assert problems_of(path) == []
    recipe = read_recipe(path)
    assert check_recipe(recipe, TYPES) == []
    assert recipe.values["learning_rate"] == 1e-6
    assert recipe.values["reward_weights"] == [1, 0.5]
    assert recipe.env == {"ONE": "1"}
    assert recipe.launch == ["--num_processes", "4", "--multi_gpu", "--accelerate_config", "fsdp2"]


def test_recipe_for_a_gpu_is_valid_without_one(tmp_path):
    text = "bf16: true\ntf32: true\nuse_vllm: true\nattn_implementation: flash_attention_2\nload_in_4bit: true\n"
    assert problems(text, tmp_path) == []


def test_checking_without_the_machine_has_the_same_fields():
    for portable, real in zip(PORTABLE_TYPES, TYPES, strict=True):
        assert issubclass(portable, real)
        assert [f.name for f in dataclasses.fields(portable)] == [f.name for f in dataclasses.fields(real)]


def test_every_default_is_valid_in_a_recipe(tmp_path):
    """Whoever writes a default out does not change anything."""
    values = {}
    for dataclass_type in TYPES:
        for f in dataclasses.fields(dataclass_type):
            if f.init and f.default is not dataclasses.MISSING:
                values[f.name] = getattr(f.default, "value", f.default)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    assert check_recipe(read_recipe(path), TYPES) == []


def test_recipe_is_overridden_by_the_command_line(write, monkeypatch):
    monkeypatch.setenv("FROM_RECIPE", "before")
    write("r.yaml", "max_steps: 3\nseed: 5\nuse_cpu: true\nreward_funcs: [a.b]\nenv: {FROM_RECIPE: 7}\n")
    parsed = GRPOParser().parse(["--seed", "6", "--config=r.yaml", "--reward_funcs", "c.d", "e.f"])
    arguments = parsed.arguments
    assert (arguments.training.max_steps, arguments.training.seed) == (3, 6)
    assert arguments.script.reward_funcs == ["c.d", "e.f"]
    assert parsed.launch_args == []
    assert parsed.training_args == ["--config", "r.yaml", "--seed", "6", "--reward_funcs", "c.d", "e.f"]
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
    parsed = GRPOParser(portable=True).parse(args)
    assert parsed.launch_args == ["--num_processes", "4", "--num_machines", "2", "--mixed_precision", "bf16"]
    assert parsed.training_args == ["--config", "r.yaml", "--reward_funcs", "a.b", "--use_cpu"]


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
        (["--learning_rat", "1"], "Did you mean `learning_rate`"),
        (["--seed", "one"], "invalid int value: 'one'"),
        (["--dtype", "bf16"], "invalid choice: 'bf16'"),
        (["--see", "1"], "`--see` is no option"),  # no abbreviations: a new field must not change what they mean
    ],
)
def test_wrong_command_lines(args, part, write):
    write("r.yaml", "use_cpu: true\n")
    with pytest.raises(UserError) as error:
        GRPOParser(portable=True).parse(args)
    assert part in str(error.value)


def test_recipes_that_come_with_the_package_have_names():
    path = find_recipe("Qwen2.5-0.5B-Instruct/gsm8k/uniform")
    assert path == find_recipe("Qwen2.5-0.5B-Instruct/gsm8k/uniform.yaml")
    assert path.parts[-3:] == ("Qwen2.5-0.5B-Instruct", "gsm8k", "uniform.yaml")


def test_grpo_says_the_same_about_a_bad_recipe_as_validate(write, capsys):
    write("bad.yaml", "learning_rat: 1\nseed: x\n")
    assert main(["recipes", "validate", "bad.yaml"]) == 1
    validated = capsys.readouterr().err
    assert main(["grpo", "--config", "bad.yaml"]) == 2
    assert capsys.readouterr().err == validated
    assert len(validated.splitlines()) == 2
