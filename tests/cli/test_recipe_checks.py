"""A recipe is read strictly: a mistake is said with file, line, what was given and what would do."""

import os
import re
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOConfig, GRPOTrainer

from tests.factories.tiny import run
from trl_dataeff.cli import grpo as launching
from trl_dataeff.cli.checks import problems_of_batches, problems_of_lists
from trl_dataeff.cli.grpo import checkpoint_of
from trl_dataeff.cli.main import main
from trl_dataeff.cli.options import grpo_parser
from trl_dataeff.cli.parser import read
from trl_dataeff.cli.recipes import validate
from trl_dataeff.cli.trl_fields import REMOVED, RENAMED
from trl_dataeff.config import DataEfficientGRPOConfig
from trl_dataeff.utils import UserError


#: What every recipe needs
NEEDED = {"model_name_or_path": "org/model", "dataset_name": "org/data", "reward_funcs": "[exact_answer_reward]"}


def complete(text: str) -> str:
    """A recipe with `text` at its top, and what is needed besides below."""
    return text.rstrip("\n") + "\n" + "".join(f"{k}: {v}\n" for k, v in NEEDED.items() if f"{k}:" not in text)


def problems(text: str, tmp_path: Path) -> list[str]:
    path = tmp_path / "recipe.yaml"
    path.write_text(complete(text) if text[:1].isalpha() and ":" in text else text, encoding="latin-1")
    return [problem.removeprefix(f"{path}:") for problem in validate(path).problems]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("seed: 1\nlearning_rat: 1.0e-6", "2: `learning_rat` is an unknown field. Did you mean `learning_rate`?"),
        ("seed: 1\nnum_generations: eight", "2: `--num_generations`: invalid int value: 'eight'"),
        ("learning_rate: [1, 2]", "1: `--learning_rate`: takes a single value, not [1, 2]"),
        ("max_steps:", "1: `--max_steps`: invalid int value: 'none'"),
        ("env: 3", "1: `env` is 3; it takes a mapping of environment variables"),
        ("selection: grso", "`selection` is 'grso'"),
        ("selection: nowhere.Mine", "1: The selector 'nowhere.Mine' cannot be imported"),
        ("selection: nowhere.Mine", "there is no module 'nowhere', neither installed nor in"),
        ("selection: greso\nselector_args: {p_start: 1}", "no argument `p_start`"),
        (
            "selector_args: \"{'p': 1}\"",
            "1: `selector_args` is \"{'p': 1}\", which is not JSON: Expecting property name",
        ),
        ("model_init_kwargs: '[1]'", "1: `model_init_kwargs` is '[1]'; it takes a JSON object"),
        ("accelerator_config: no.json", "1: `accelerator_config`: [Errno 2] No such file or directory: 'no.json'"),
        ("num_processes: 0", "1: `num_processes` is 0; it takes an integer in [1, inf)"),
        ("max_rollout_rounds: 0", "1: `max_rollout_rounds` is 0"),
        ("bf16: true\nfp16: true", "At most one of fp16 and bf16"),
        ("num_generations: 7", "num_generations"),
        (
            "reward_funcs: [exact_awnser_reward]",
            "1: `reward_funcs`: The reward function 'exact_awnser_reward' is",
        ),
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


def test_all_problems_of_a_file_are_named_at_once(tmp_path):
    text = (
        "learning_rat: 1\nnum_generations: eight\nseed: 1\nseed: 2\ntemperature: 0\nloss_type: nonsense\n"
        "max_rollout_rounds: 0\nselection: grso\nreward_funcs: [exact_awnser_reward]\nfp16: true\nbf16: true\n"
        "datasets: [{path: a, type: chat}]\n"
    )
    found = problems(text, tmp_path)
    assert [problem.partition(":")[0] for problem in found] == ["1", "2", "4", "5", "6", "7", "8", "9", "10", "12"]


def test_all_that_the_configuration_refuses_is_named_at_once(tmp_path):
    """TRL and Transformers name the first of them."""
    text = (
        "num_generations: 4\nper_device_train_batch_size: 6\nbf16: true\nfp16: true\nmodel_init_kwargs: '{a}'\n"
        "lr_scheduler_kwargs: '{b}'\neval_strategy: steps\nsave_strategy: steps\nload_best_model_at_end: true\n"
        "save_steps: 7\neval_steps: 5\nnum_generations_eval: 3\nlog_completions_hub_repo: a/b\n"
    )
    found = problems(text, tmp_path)
    lines = sorted(int(problem.partition(":")[0]) for problem in found)
    assert lines == [2, 4, 5, 6, 9, 12, 13]


def test_what_follows_from_a_problem_is_not_named(tmp_path):
    """A misspelled group size leaves the default, which does not divide the batch; no data is no second mistake."""
    text = "num_generation: 4\nper_device_train_batch_size: 4\ndataset_nam: org/data\nreward_func: a.b\n"
    path = tmp_path / "recipe.yaml"
    path.write_text(f"{text}model_name_or_path: org/model\n")
    assert [problem.removeprefix(f"{path}:")[0] for problem in validate(path).problems] == ["1", "3", "4"]


#: Values that end in an error of torch, generation, PEFT or the loss, and values at their bounds that do not
REFUSED = {
    "learning_rate": ([-0.01], [0.0]),
    "adam_beta1": ([1.0, -0.1], [0.0]),
    "adam_beta2": ([1.0], [0.0]),
    "adam_epsilon": ([-1e-8], [1e-30]),
    "temperature": ([0.0, -1.0], [1e-3]),
    "top_p": ([-0.1], [0.0, 1.0]),
    "top_k": ([-1], [0]),
    "min_p": ([-0.1, 1.5], [0.0, 1.0]),
    "repetition_penalty": ([0.0], [0.1]),
    "top_entropy_quantile": ([-0.5], [0.0, 1.0]),
    "num_generations": ([0, 1], [2]),
    "max_completion_length": ([0], [1]),
    "per_device_train_batch_size": ([0, -8], [16]),
    "gradient_accumulation_steps": ([0], [2]),
    "steps_per_generation": ([0], [2]),
    "generation_batch_size": ([0], [8]),
    "num_iterations": ([-1], [1]),
    "seed": ([-1, 2**32], [0, 2**32 - 1]),
    "dataloader_num_workers": ([-1], [0]),
    "loss_type": (["nonsense"], ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"]),
    "importance_sampling_level": (["tokens"], ["token", "sequence"]),
    "scale_rewards": (["std"], ["group", "batch", "none", True, False]),
    "multi_objective_aggregation": (["sum"], ["sum_then_normalize", "normalize_then_sum"]),
}


def _is_refused_by_trl(tmp_path, name, value) -> bool:
    try:
        run(tmp_path, GRPOTrainer, **{"max_steps": 1, name: value})
    except (ValueError, RuntimeError, ZeroDivisionError):
        return True
    return False


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_is_refused_exactly_if_trl_refuses_it(name, tmp_path):
    wrong, right = REFUSED[name]
    for value in wrong:
        (problem,) = problems(f"{name}: {value}", tmp_path)
        assert problem.startswith(f"1: `{name}` is {value!r}; it takes ")
        assert _is_refused_by_trl(tmp_path, name, value)
    for value in right:
        assert problems(f"{name}: {value}", tmp_path) == []
        assert not _is_refused_by_trl(tmp_path, name, value)


TOGETHER = [
    ("sync_ref_model", {"sync_ref_model": True}, True),
    ("sync_ref_model", {"sync_ref_model": True, "beta": 0.1}, False),
    ("save_strategy", {"save_strategy": "best"}, True),
    ("lr_scheduler_type", {"lr_scheduler_type": "cosine_with_min_lr"}, True),
    (
        "lr_scheduler_type",
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
        False,
    ),
    ("lr_scheduler_type", {"lr_scheduler_type": "warmup_stable_decay"}, True),
    ("lr_scheduler_type", {"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {"min_lr": 0.1}}, True),
]


@pytest.mark.parametrize(("name", "fields", "is_refused"), TOGETHER)
def test_fields_are_refused_together_exactly_if_trl_refuses_them(name, fields, is_refused, tmp_path):
    found = problems("\n".join(f"{key}: {value}" for key, value in fields.items()), tmp_path)
    assert [f"`{name}` is" in problem for problem in found] == [True] * is_refused
    try:
        run(tmp_path, GRPOTrainer, **{"max_steps": 1, **fields})
    except (ValueError, TypeError):
        assert is_refused
    else:
        assert not is_refused


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_steps: -5", "1: `max_steps` is -5; it takes an integer in [-1, inf)"),
        ("use_peft: true\nlora_r: 0", "2: `lora_r` is 0; it takes an integer in [1, inf)"),
        ("use_peft: true\nlora_dropout: 1.5", "2: `lora_dropout` is 1.5"),
        ("use_vllm: true\nvllm_mode: remote", "2: `vllm_mode` is 'remote'; it takes 'colocate' or 'server'"),
        ("lora_r: 0", None),
        ("vllm_mode: remote", None),
        ("use_vllm: true\ntop_k: -1", None),
    ],
)
def test_a_value_is_refused_where_it_has_an_effect(text, says, tmp_path):
    found = problems(text, tmp_path)
    if says is None:
        assert found == []
    else:
        (problem,) = found
        assert problem.startswith(says)


@pytest.mark.parametrize("command", [["recipes", "validate"], ["grpo", "--use_cpu=true", "--bf16=false", "--config"]])
def test_values_are_refused_by_both_commands_and_on_the_command_line(command, write, monkeypatch, capsys):
    monkeypatch.setattr(GRPOTrainer, "__init__", lambda *args, **kwargs: pytest.fail("a trainer is made"))
    write("r.yaml", complete("learning_rate: -1\ntemperature: 0\nreward_weights: [1, 2]\n"))
    assert main([*command, "r.yaml"]) in (1, 2)
    assert [line.split(":")[3] for line in capsys.readouterr().err.splitlines()] == ["1", "2", "3"]
    assert main(["grpo", "--config", "r.yaml", "--learning_rate=-2"]) == 2
    assert "error: `learning_rate` is -2.0" in capsys.readouterr().err


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
    arguments, launch_args, _ = read(["--seed", "6", "--config=r.yaml", *options], portable=True)
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
    arguments = read(["--resume_from_checkpoint", "~/checkpoint-4"], portable=True).arguments
    assert checkpoint_of(arguments.training) == str(tmp_path / "checkpoint-4")


def test_a_tracker_that_is_not_installed_is_said_before_anything_is_loaded(write, monkeypatch, capsys):
    trackers = "transformers.integrations.integration_utils.get_available_reporting_integrations"
    monkeypatch.setattr(trackers, lambda: [])
    write("r.yaml", complete("use_cpu: true\nbf16: false\nreport_to: wandb\noutput_dir: out\n"))
    assert main(["recipes", "validate", "r.yaml"]) == 0
    assert main(["grpo", "--config", "r.yaml"]) == 2
    message = capsys.readouterr().err
    assert "`report_to` is 'wandb'; no tracker is installed here" in message
    assert 'pip install ".[wandb]"' in message
    assert main(["grpo", "--config", "r.yaml", "--report_to", "wandbb"]) == 2
    assert "Did you mean `wandb`" in capsys.readouterr().err


def test_extras_that_messages_name_exist():
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert set(launching.TRACKER_EXTRAS) <= set(extras["optional-dependencies"])


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


@pytest.mark.parametrize("separated", ["q_proj;v_proj", "q_proj, v_proj", "q_proj v_proj", "q_proj ; v_proj"])
def test_a_list_that_was_written_as_one_text_is_named_with_the_way_to_write_it(separated, tmp_path):
    (problem,) = problems(f"use_peft: true\nlora_target_modules: {separated}\n", tmp_path)
    assert problem.startswith("2: `lora_target_modules`")
    advised = re.findall(r"`--(\w+ [\w ]+)`|`(\w+: \[[\w, ]+\])`", problem)
    assert [way for ways in advised for way in ways if way] == [
        "lora_target_modules q_proj v_proj",
        "lora_target_modules: [q_proj, v_proj]",
    ]
    (problem,) = problems("reward_weights: 1;2\n", tmp_path)
    assert "`reward_weights: [1, 2]`" in problem


@pytest.mark.parametrize("name", ["reward_funcs", "report_to", "lora_modules_to_save", "include_for_metrics"])
def test_every_list_of_names_is_looked_at(name, tmp_path):
    (problem,) = problems(f"{name}: a.b;c.d\n", tmp_path)
    assert problem.startswith(f"1: `{name}`")


@pytest.mark.parametrize("one", ["all-linear", r".*\.layers\.(1|2)\.(q|v)_proj", "model.layers.0.mlp", "h{1,2}"])
def test_a_single_name_or_regular_expression_is_no_list(one):
    values = vars(grpo_parser().parse_args([])) | {"lora_target_modules": [one]}
    assert list(problems_of_lists(values)) == []


def test_each_problem_of_several_recipes_names_its_file(write, capsys):
    write("a.yaml", complete("reward_funcs:\n"))
    write("b.yaml", complete("model_name_or_path:\n"))
    write("c.yaml", complete("seed: 1\n"))
    assert main(["recipes", "validate", "a.yaml", "b.yaml", "c.yaml"]) == 1
    assert [line.split(": ")[2] for line in capsys.readouterr().err.splitlines()] == ["a.yaml:1", "b.yaml:1"]


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


def aliases_of_aliases(levels: int = 30) -> str:
    """A list of lists of ... that has 9 ** levels values, in a few lines."""
    lines = ["a0: &a0 [x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels)]
    lines.append(f"report_to: *a{levels - 1}")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (aliases_of_aliases(), "more than 10,000 values, with aliases (`*name`) written out"),
        ("selector_args: &a {a: *a}", "more than 10,000 values"),
        ("seed: " + "[" * 5000, "is nested too deeply"),
        ("\n".join(["a0: &a0 [x]", *(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 3000))]), "more than 10,000 values"),
        ("seed: " + "7" * 5000, "1: `seed` has a value that cannot be read: Exceeds the limit"),
        ("seed: 0x" + "7" * 5000, "1: `seed` has a value that cannot be read: Exceeds the limit"),
        ("selector_args: {p_init: " + "7" * 5000 + "}", "1: `selector_args` has a value that cannot be read"),
        ("output_dir: 2024-13-45", "1: `output_dir` has a value that cannot be read: month must be in 1..12"),
        ("seed: " + "7" * 4000, "...7777777777777777777; it takes an integer in [0, 4294967295]."),
        ("output_dir: !!timestamp soon", "1: `output_dir` has a value that cannot be read"),
        ("seed: 1\n[output_dir, seed]: 1", "2: a list or a mapping is used as a field's name"),
        (
            "selector_args: {[a]: 1}",
            "1: `selector_args` has a value that cannot be read: while constructing a mapping",
        ),
        ("selector_args: '" + '{"a": ' * 5000 + "'", '1: `selector_args` is \'{"a": {"a":'),
        ("env: {A=B: 1}", "1: `env` has 'A=B': 1, which cannot be set (illegal environment variable name)"),
        ('env: {A: "\\0"}', "1: `env` has 'A': '\\x00', which cannot be set (embedded null byte)"),
        ("# " + "x" * 200_000, "a recipe has at most 200,000"),
        (
            "max_steps: [" + ", ".join(["1"] * 5000) + "]",
            "1: `--max_steps`: takes a single value, not [1, 1, 1, 1, 1, 1, ...]",
        ),
    ],
    ids=lambda text: text[:20],
)
def test_a_recipe_that_would_take_very_long_or_cannot_be_read_is_refused_at_once(text, says, tmp_path):
    started = time.monotonic()
    (problem,) = problems(text, tmp_path)
    assert says in problem
    assert len(problem) < 1000
    assert time.monotonic() - started < 20


def test_a_null_character_in_a_path_is_a_message(write, capsys):
    write("r.yaml", complete('use_cpu: true\nbf16: false\noutput_dir: "a\\0b"\n'))
    assert main(["grpo", "--config", "r.yaml"]) == 2
    assert "where nothing can be saved: embedded null byte" in capsys.readouterr().err


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
    monkeypatch.setattr("trl_dataeff.cli.grpo.checkpoint_of", lambda training: None)
    write("r.yaml", complete(f"{HALF_GROUPS}{more}use_cpu: true\nbf16: false\noutput_dir: out\nreport_to: none\n"))
    assert main(["grpo", "--config", "r.yaml", *options]) == 0
    assert len(launched) == 1
    training = read(["--config", "r.yaml", *options], portable=True).arguments.training
    assert (training.generation_batch_size, type(training)) == (batch, DataEfficientGRPOConfig)
    if not options:
        assert main(["recipes", "validate", "r.yaml"]) == 0


@pytest.mark.parametrize(("more", "processes"), [("", "1 process"), ("num_processes: 3\n", "3 processes")])
def test_a_batch_that_no_number_of_processes_was_given_for_is_that_of_one(more, processes, write, capsys):
    write("r.yaml", complete(HALF_GROUPS + more))
    assert main(["recipes", "validate", "r.yaml"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"x {processes}" in line


@pytest.mark.parametrize("options", [["--per_device_train_batch_size=2"], ["--num_generations", "6"]])
def test_the_flag_that_breaks_a_batch_is_named_and_no_line_of_the_recipe(options, write):
    write("r.yaml", complete("num_generations: 4\nper_device_train_batch_size: 4\n"))
    with pytest.raises(UserError) as error:
        read(["--config", "r.yaml", *options], portable=True)
    (message,) = error.value.messages
    assert "r.yaml" not in message
    flag, _, _ = options[0].removeprefix("--").partition("=")
    assert f"`{flag}`" in message


def _is_a_batch_of_trl(values: dict[str, Any], num_processes: int) -> bool:
    class Launched(GRPOConfig):
        world_size = num_processes

    try:
        Launched("out", use_cpu=True, bf16=False, report_to="none", **values)
    except ValueError:
        return False
    return True


EVALUATES = {"eval_strategy": "steps", "eval_steps": 1}


def _batch(rows, steps, group, **others):
    values = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": steps, "num_generations": group}
    return values | others


@pytest.mark.parametrize(
    ("values", "num_processes"),
    [(_batch(rows, steps, group), n) for rows in (1, 2, 6) for steps in (1, 3) for group in (2, 4, 6) for n in (1, 3)]
    + [(_batch(4, 8, group, steps_per_generation=3), 2) for group in (2, 5, 16)]
    + [(_batch(4, 1, group, generation_batch_size=size), 2) for group in (2, 3) for size in (6, 8, 24)]
    + [
        (_batch(4, 1, 4, num_generations_eval=n, per_device_eval_batch_size=3, eval_strategy="steps"), 2)
        for n in (3, 4)
    ]
    + [(_batch(4, 1, 4, per_device_eval_batch_size=n, eval_strategy="steps"), 2) for n in (3, 6)],
)
def test_a_batch_is_refused_exactly_if_trl_refuses_it_and_the_advice_helps(values, num_processes):
    defaults = vars(grpo_parser().parse_args([]))
    found = list(problems_of_batches(defaults | values, num_processes))
    assert (found == []) is _is_a_batch_of_trl(values, num_processes)
    for message in found:
        advice = re.findall(r"`(\w+)` to a multiple of (\d+)|`(\w+)` is \d+; it takes a multiple of (\d+)", message)
        assert advice
        for names_and_numbers in advice:
            name, number = filter(None, names_and_numbers)
            assert _is_a_batch_of_trl(values | {name: int(number)}, num_processes)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("max_prompt_length", "It was removed in TRL 0.28. Leave prompts that are too long out of the dataset."),
        ("torch_dtype", "It was renamed to `dtype` in TRL 0.27."),
        ("vllm_guided_decoding_regex", "It was renamed to `vllm_structured_outputs_regex` in TRL 0.28."),
        ("vllm_max_model_len", "It was removed in TRL 0.18. Set `vllm_max_model_length`"),
        ("evaluation_strategy", "It was renamed to `eval_strategy` in Transformers 4.51."),
        ("warmup_ratio", "It was removed in Transformers 5.15. Set `warmup_steps`"),
    ],
)
def test_a_key_of_an_older_trl_is_told_what_became_of_it(name, says, tmp_path):
    (problem,) = problems(f"{name}: 1", tmp_path)
    assert problem.startswith(f"1: `{name}` is an unknown field. {says}")
    with pytest.raises(UserError, match=says.replace(".", r"\.")):
        read([f"--{name}=1"], portable=True)


def test_former_names_are_unknown_and_present_ones_are_known():
    parser = grpo_parser()
    known = {action.dest for action in parser._actions}
    assert known.isdisjoint([*RENAMED, *REMOVED])
    advised = [name for _, advice in REMOVED.values() for name in re.findall(r"`(\w+)", advice)]
    assert known.issuperset([*(present for present, _ in RENAMED.values()), *set(advised) - {"env"}])


def test_a_key_twice_with_one_value_is_a_warning(write, capsys):
    text = "seed: 1\nselection: greso\nselector_args: {p_init: 0.4, p_init: 0.4}\nseed: 1\n"
    write("r.yaml", complete(text))
    assert main(["recipes", "validate", "r.yaml"]) == 0
    warned = capsys.readouterr().err.splitlines()
    assert warned == [
        "trl-dataeff: warning: r.yaml:3: `p_init` is given twice, here and on line 3, with one value.",
        "trl-dataeff: warning: r.yaml:4: `seed` is given twice, here and on line 1, with one value.",
    ]
    write("r.yaml", complete("selection: greso\nselector_args:\n  p_init: 0.4\n  p_init: 0.5\n"))
    assert main(["recipes", "validate", "r.yaml"]) == 1
    assert "r.yaml:4: `p_init` is given twice, here and on line 3." in capsys.readouterr().err


def test_keys_of_a_mixture_name_their_lines(tmp_path):
    text = "datasets:\n  - path: a\n    type: chat\n  - pth: b\n  - name: c\n"
    found = problems(text, tmp_path)
    assert [problem.partition(".")[0] for problem in found] == [
        "1: `datasets` has an entry without `path` (number 3)",
        "3: `type` is an unknown key of `datasets`",
        "4: `pth` is an unknown key of `datasets`",
    ]
    assert "Did you mean `path`?" in found[2]


def test_a_configuration_of_accelerate_is_not_taken_for_a_recipe(tmp_path):
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    _, path = resolve_accelerate_config_argument(["--accelerate_config", "fsdp2"])
    (problem,) = validate(Path(path)).problems
    assert f"`--accelerate_config {path}`" in problem


@pytest.mark.parametrize(
    ("text", "way_out"),
    [
        ("distributed_type: MULTI_GPU\nnum_processes: 8\nmixed_precision: bf16\n", "--accelerate_config"),
        ('{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"}', "deepspeed:"),
    ],
)
def test_another_configuration_is_one_problem_with_its_way_out(text, way_out, write, capsys):
    write("other.yaml", text)
    assert main(["recipes", "validate", "other.yaml"]) == 1
    (problem,) = capsys.readouterr().err.splitlines()
    assert f"`{way_out} other.yaml`" in problem
    assert problem.count("other.yaml") == 2
