"""A recipe is read strictly: a mistake is said with file, line, what was given and what would do."""

import os
import sys
from pathlib import Path

import pytest

from trl_dataeff.cli.grpo import checkpoint_of
from trl_dataeff.cli.main import main
from trl_dataeff.cli.parser import read
from trl_dataeff.cli.recipes import problems_of
from trl_dataeff.utils import UserError


#: What every recipe needs
NEEDED = {"model_name_or_path": "org/model", "dataset_name": "org/data", "reward_funcs": "[exact_answer_reward]"}


def complete(text: str) -> str:
    """A recipe with `text` at its top, and what is needed besides below."""
    return text.rstrip("\n") + "\n" + "".join(f"{k}: {v}\n" for k, v in NEEDED.items() if f"{k}:" not in text)


def problems(text: str, tmp_path: Path) -> list[str]:
    path = tmp_path / "recipe.yaml"
    path.write_text(complete(text) if text[:1].isalpha() and ":" in text else text, encoding="latin-1")
    return [problem.removeprefix(f"{path}:") for problem in problems_of(path)]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("seed: 1\nlearning_rat: 1.0e-6", "2: `learning_rat` is an unknown field. Did you mean `learning_rate`?"),
        ("seed: 1\nnum_generations: eight", "2: `--num_generations`: invalid int value: 'eight'"),
        ("learning_rate: [1, 2]", "1: `--learning_rate`: takes a single value, not [1, 2]"),
        ("max_steps:", "1: `--max_steps`: invalid int value: 'none'"),
        ("env: 3", "1: `env` is 3; it takes a mapping of environment variables"),
        ("selection: grso", "`selection` is 'grso'"),
        ("selection: greso\nselector_args: {p_start: 1}", "no argument `p_start`"),
        ("selector_args: \"{'p': 1}\"", "\"{'p': 1}\" is not JSON: Expecting property name enclosed in double quotes"),
        ("max_rollout_rounds: 0", "1: `max_rollout_rounds` is 0"),
        ("bf16: true\nfp16: true", "At most one of fp16 and bf16"),
        ("num_generations: 7", "num_generations"),
        ("reward_funcs: [exact_awnser_reward]", "'exact_awnser_reward' is unknown. Did you mean"),
        ("reward_weights: [1, 2]", "`reward_weights` has 2 numbers for 1 rewards"),
        ("reward_funcs:", "No reward: set `reward_funcs`"),
        ("model_name_or_path:", "No model: set `model_name_or_path`"),
        ("dataset_name:", "No dataset: set `dataset_name`"),
        ("accelerate_config: zero9", "1: `--accelerate_config`: Accelerate config zero9 is neither a file nor"),
        ("a: [1\nb: 2", 'recipe.yaml", line 2, column 2. A recipe has one `key: value` a line.'),
        ("seed: 1\nseed: 2", "2: `seed` is given twice, here and on line 1"),
        ("- a", "not a recipe"),
        ("output_dir: größe", "recipe.yaml cannot be read as YAML in UTF-8"),
        ("multi_gpu: 1", "1: `--multi_gpu`: ignored explicit argument '1'"),
    ],
)
def test_a_mistake_is_one_message(text, part, tmp_path):
    (problem,) = problems(text, tmp_path)
    assert part in problem


@pytest.mark.parametrize(
    ("unknown", "message"),
    [
        ("system_promt: Think step by step.", "`system_promt` is an unknown field. Did you mean `system_prompt`?"),
        ("trl: {beta: 0.04}", "`trl` is an unknown field."),
        ("reward_func: [a b, c d]", "`reward_func` is an unknown field. Did you mean `reward_funcs`"),
        ("reward_func: -1", "`reward_func` is an unknown field. Did you mean `reward_funcs`"),
        ("system promt: text", "`system promt` is an unknown field. Did you mean `system_prompt`"),
        ("yes: 1", "`yes` is an unknown field."),
        ("help: true", "`help` is an unknown field."),
        ("config: recipe.yaml", "`config` is an unknown field."),
    ],
)
@pytest.mark.parametrize("before", ["lora_target_modules: [q_proj, v_proj]", "seed: 1", "multi_gpu: true"])
def test_an_unknown_key_is_named_whatever_its_value_and_whatever_precedes_it(before, unknown, message, tmp_path):
    (problem,) = problems(f"{before}\n{unknown}\n", tmp_path)
    assert problem.startswith(f"2: {message}")


def test_all_unknown_keys_are_named_at_once_and_before_wrong_values(tmp_path):
    text = "learning_rat: 1\nnum_generations: eight\nmax_completion_len: a b\nbta: {a: 1}\n"
    assert [problem.partition(" is")[0] for problem in problems(text, tmp_path)] == [
        "1: `learning_rat`",
        "3: `max_completion_len`",
        "4: `bta`",
    ]


def test_all_wrong_values_are_named_at_once(tmp_path):
    text = (
        "num_generations: eight\nlearning_rate: [1, 2]\nbeta: {a: 1}\nlora_target_modules: {a: b}\n"
        "selector_args: [p_init]\nhub_strategy: off\nreward_weights: [1, b]\nnum_processes: four\nenv: 3\n"
        "debug: [x]\n"
    )
    found = problems(text, tmp_path)
    expected = [
        "1: `--num_generations`: invalid int value: 'eight'.",
        "2: `--learning_rate`: takes a single value, not [1, 2].",
        "3: `--beta`: takes a single value, not {'a': 1}.",
        "4: `--lora_target_modules`: takes a list, not {'a': 'b'}.",
        "5: `--selector_args`: takes a mapping, not ['p_init'].",
        "6: `--hub_strategy`: invalid choice: 'False'",
        "7: `--reward_weights`: invalid float value: 'b'.",
        "8: `--num_processes`: invalid int value: 'four'.",
        "9: `env` is 3; it takes a mapping of environment variables.",
        "10: `--debug`: invalid DebugOption value: 'x'.",
    ]
    assert len(found) == len(expected)
    for problem, start in zip(found, expected, strict=True):
        assert problem.startswith(start)


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
    assert problems_of(path) == []
    monkeypatch.setenv("ONE", "before")
    arguments, launch_args = read(["--config", str(path)], portable=True)
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


def test_a_recipe_for_a_gpu_is_valid_without_one(tmp_path):
    text = "bf16: true\ntf32: true\nuse_vllm: true\nattn_implementation: flash_attention_2\nload_in_4bit: true\n"
    text += "use_peft: true\nreward_funcs: [math_verify_reward]\nreport_to: wandb\n"
    assert problems(text, tmp_path) == []
    training = read(["--config", str(tmp_path / "recipe.yaml")], portable=True)[0].training
    assert (training.bf16, training.use_vllm, training.use_cpu) == (True, True, False), "checking changes no field"


def test_a_recipe_is_overridden_by_the_command_line_and_launch_options_are_told_from_fields(write):
    write("r.yaml", "max_steps: 3\nseed: 5\nreward_funcs: [a.b]\nnum_processes: 4\n")
    options = ["--reward_funcs", "c.d", "e.f", "--num_machines=2", "--use-cpu", "--mixed_precision", "bf16"]
    options += ["--system_prompt", "--x-- is a mark", "--no_shuffle_dataset"]
    arguments, launch_args = read(["--seed", "6", "--config=r.yaml", *options], portable=True)
    assert launch_args == ["--num_processes=4", "--num_machines=2", "--mixed_precision", "bf16"]
    assert (arguments.training.max_steps, arguments.training.seed, arguments.training.use_cpu) == (3, 6, True)
    assert arguments.script.reward_funcs == ["c.d", "e.f"]
    assert (arguments.script.system_prompt, arguments.training.shuffle_dataset) == ("--x-- is a mark", False)


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["--config"], "`--config`: expected one argument"),
        (["--config", "r.yml"], "Did you mean `r.yaml`"),
        (["r.yaml"], "'r.yaml' stands alone"),
        (["--seed", "1", "2"], "'2' stands alone"),
        (["--config=r.yaml", "--use_cpuu"], "`use_cpuu` is an unknown field"),
        (["--seed", "one"], "`--seed`: invalid int value: 'one'"),
        (["--lora_target_modules", "a", "--system_promt=Think step by step."], "`system_promt` is an unknown field."),
        (["--num_processes", "2", "--sed=1 2", "--bta", "x"], "`sed` is an unknown field"),
        (["-seed", "1"], "'-seed' stands alone"),
        (["--config=r.yaml", "--use_cpu", "ja"], "`--use_cpu`: Truthy value expected: got ja"),
        (["--see", "1"], "`see` is an unknown field"),  # no abbreviations: a new field must not change what they mean
    ],
)
def test_wrong_command_lines(args, part, write):
    write("r.yaml", "use_cpu: true\n")
    with pytest.raises(UserError) as error:
        read(args, portable=True)
    assert part in str(error.value)
    assert "r.yaml:" not in str(error.value)


def test_a_checkpoint_in_the_home_directory(tmp_path, monkeypatch):
    (tmp_path / "checkpoint-4").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    arguments, _ = read(["--resume_from_checkpoint", "~/checkpoint-4"], portable=True)
    assert checkpoint_of(arguments.training) == str(tmp_path / "checkpoint-4")


def test_a_tracker_that_is_not_installed_is_said_before_anything_is_loaded(write, monkeypatch, capsys):
    trackers = "transformers.integrations.integration_utils.get_available_reporting_integrations"
    monkeypatch.setattr(trackers, lambda: [])
    write("r.yaml", complete("use_cpu: true\nbf16: false\nreport_to: wandb\noutput_dir: out\n"))
    assert main(["recipes", "validate", "r.yaml"]) == 0
    assert main(["grpo", "--config", "r.yaml"]) == 2
    assert "`report_to` is 'wandb'; no tracker is installed here" in capsys.readouterr().err


def test_each_problem_of_several_recipes_names_its_file(write, capsys):
    write("a.yaml", complete("reward_funcs:\n"))
    write("b.yaml", complete("model_name_or_path:\n"))
    write("c.yaml", complete("seed: 1\n"))
    assert main(["recipes", "validate", "a.yaml", "b.yaml", "c.yaml"]) == 1
    assert [line.split(": ")[2] for line in capsys.readouterr().err.splitlines()] == ["a.yaml", "b.yaml"]


def test_grpo_says_the_same_about_a_bad_recipe_as_validate(write, capsys):
    write("bad.yaml", complete("learning_rat: 1\nseeed: x\n"))
    assert main(["recipes", "validate", "bad.yaml"]) == 1
    validated = capsys.readouterr().err
    assert main(["grpo", "--config", "bad.yaml"]) == 2
    assert capsys.readouterr().err == validated
    assert [line.partition(": `")[0].rpartition(":")[2] for line in validated.splitlines()] == ["1", "2"]


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
