"""The table of values against the installed TRL and Transformers: nothing that they take by default or document is refused."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import typing

import pytest
from trl import GRPOConfig, GRPOTrainer, ModelConfig
from trl.trainer import grpo_trainer

from tests.factories import plain_dataset, run
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer
from trl_dataeff.fields import (
    OUR_TYPES,
    RANGES,
    TRL_CHOICES,
    evaluation_problems,
    field_problems,
    group_problems,
)


INF, NAN = float("inf"), float("nan")
BASE = {"use_cpu": True, "bf16": False, "report_to": "none"}
TRL_NUMBERS = set(RANGES) - set(OUR_TYPES)
#: For each number: values at its bounds, and values beyond them
NUMBERS = {
    "learning_rate": ([0, 1e-6], [-1e-6, NAN]),
    "weight_decay": ([0], [-0.1]),
    "adam_beta1": ([0], [1, -0.1]),
    "adam_beta2": ([0], [1, -0.1]),
    "adam_epsilon": ([0], [-1e-8]),
    "num_train_epochs": ([0, 0.5], [-1]),
    "warmup_steps": ([0, 0.1], [-1]),
    "per_device_train_batch_size": ([1], [0]),
    "per_device_eval_batch_size": ([1], [0]),
    "gradient_accumulation_steps": ([1], [0]),
    "steps_per_generation": ([1, None], [0]),
    "generation_batch_size": ([1, None], [0]),
    "dataloader_num_workers": ([0], [-1]),
    "seed": ([0, 2**32 - 1], [-1, 2**32]),
    "num_generations": ([2], [1, 0, -4]),
    "max_completion_length": ([1, None], [0, -5]),
    "num_iterations": ([1], [0]),
    "temperature": ([0.1, 2], [0, -1, INF]),
    "top_p": ([0.1, 1], [0, 1.1]),
    "top_k": ([0, 1, None], [-2]),
    "min_p": ([0, 1, None], [-0.1, 1.1]),
    "repetition_penalty": ([0.5], [0]),
    "top_entropy_quantile": ([0, 1], [-0.1, 1.1]),
    "sapo_temperature_neg": ([0.1], [0]),
    "sapo_temperature_pos": ([0.1], [0]),
    "off_policy_mask_threshold": ([0.5, None], [-0.5]),
    "ref_model_sync_steps": ([1], [0]),
    "vllm_server_port": ([1, 65535], [0, 65536]),
    "vllm_group_port": ([51216], [-1]),
    "vllm_server_timeout": ([0], [-1]),
    "vllm_gpu_memory_utilization": ([1], [0, 1.1]),
    "vllm_tensor_parallel_size": ([1], [0]),
    "lora_r": ([1], [0]),
    "lora_dropout": ([0, 1], [-0.1, 1.1]),
}


def compared_with(module, name: str) -> set[str]:
    """The texts that `module` compares the attribute `name` with."""
    texts = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute) and node.left.attr == name:
            constants = [n.value for c in node.comparators for n in ast.walk(c) if isinstance(n, ast.Constant)]
            texts |= {value for value in constants if isinstance(value, str)}
    return texts


@pytest.mark.parametrize("name", sorted(set(TRL_CHOICES) - {"vllm_model_impl"}))
def test_the_choices_are_those_that_trls_trainer_compares_with(name):
    assert compared_with(grpo_trainer, name) | {getattr(GRPOConfig, name)} == set(TRL_CHOICES[name])


@pytest.mark.parametrize("name", TRL_CHOICES)
def test_the_choices_are_those_that_trl_documents(name):
    text = next(f.metadata["help"] for f in dataclasses.fields(GRPOConfig) if f.name == name)
    assert all(re.search(rf"['`\"]{choice}['`\"]", text) for choice in TRL_CHOICES[name])
    (takes,) = field_problems({name: "nonsense"})
    assert takes.fields == (name,)
    assert all(repr(choice) in takes.message for choice in TRL_CHOICES[name])


def test_trl_finds_a_wrong_loss_type_in_the_middle_of_a_run_and_we_before_the_model_is_loaded(tmp_path):
    with pytest.raises(ValueError, match="Unknown loss type: nonsense"):
        run(GRPOTrainer, GRPOConfig, tmp_path, loss_type="nonsense", max_steps=1)
    args = GRPOConfig(str(tmp_path), **BASE, loss_type="nonsense", temperature=0, vllm_mode="colo")
    with pytest.raises(ValueError, match="`loss_type` is 'nonsense'; it takes 'grpo'") as error:
        DataEfficientGRPOTrainer("no/such-model", lambda **kwargs: [], args, plain_dataset())
    assert "`temperature` is 0; it takes a number > 0." in str(error.value)
    assert "`vllm_mode` is 'colo'; it takes 'colocate' or 'server'." in str(error.value)
    args = DataEfficientGRPOConfig(str(tmp_path), **BASE)
    args.loss_type = "nonsense"
    with pytest.raises(ValueError, match="`loss_type` is 'nonsense'"):
        DataEfficientGRPOTrainer("no/such-model", lambda **kwargs: [], args, plain_dataset())


def test_every_field_of_the_tables_exists_and_takes_its_default():
    defaults = {}
    for config in (ModelConfig, DataEfficientGRPOConfig):
        defaults |= {f.name: f.default for f in dataclasses.fields(config)}
    assert not set(OUR_TYPES) & (set(TRL_CHOICES) | set(TRL_NUMBERS))
    assert {*OUR_TYPES, *TRL_CHOICES, *RANGES} <= set(defaults)
    assert field_problems(defaults) == []
    hints = {**typing.get_type_hints(ModelConfig), **typing.get_type_hints(GRPOConfig)}
    for name in TRL_NUMBERS:
        assert {int, float} & {hints[name], *typing.get_args(hints[name])}, name


def test_every_number_is_tried_at_its_bounds_and_beyond():
    assert set(NUMBERS) == TRL_NUMBERS


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_trl_and_transformers(name):
    good, bad = NUMBERS[name]
    for value in good:
        assert field_problems({name: value}) == []
    for value in bad:
        (problem,) = field_problems({name: value})
        assert problem.message.startswith(f"`{name}` is {value!r}; it takes ")


def test_what_trl_takes_beside_the_tables():
    """Short forms, and what is left to TRL: text that it converts, and nothing."""
    assert field_problems({"scale_rewards": True, "learning_rate": None, "max_completion_length": "auto"}) == []


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"sync_ref_model": True, "beta": 0.0}, "sync_ref_model"),
        (
            {
                "loss_type": "vespo",
                "use_vllm": True,
                "vllm_importance_sampling_correction": True,
                "vllm_importance_sampling_mode": "sequence_mask",
            },
            "vllm_importance_sampling_mode",
        ),
        ({"top_k": -1, "use_vllm": False}, "top_k"),
        ({"save_on_signal": True, "enable_jit_checkpoint": True}, "save_on_signal"),
        ({"rollout_round_min": 1.0, "rollout_round_max": 0.5}, None),  # the second alone is wrong
        ({"greso_p_min": 0.5, "greso_p_init": 0.25, "greso_p_max": 1.0}, "greso_p_init"),
    ],
)
def test_fields_that_exclude_one_another(values, field):
    (problem,) = field_problems(values)
    if field is None:
        assert problem.message.startswith("`rollout_round_max` is 0.5")
    else:
        assert problem.fields[0] == field
        assert field in problem.message
    first = next(iter(values))
    assert field_problems({name: value for name, value in values.items() if name != first}) == [] or field is None


def test_all_mistakes_of_a_configuration_are_in_one_message():
    wrong = {"replay_fraction": 2, "loss_type": "nonsense", "learning_rate": -1.0, "dots_reference": "none"}
    with pytest.raises(ValueError, match="`replay_fraction` is 2") as error:
        DataEfficientGRPOConfig("out", **BASE, **wrong, greso_p_min=0.9, num_generations=0)
    lines = str(error.value).splitlines()
    assert len(lines) == 6
    for name in [*wrong, "greso_p_min", "num_generations"]:
        assert any(f"`{name}" in line for line in lines), name


@pytest.mark.parametrize(
    ("batch", "steps", "generations", "would_do", "batch_unit", "step_unit"),
    [
        (8, 1, 7, "2, 4, 8", 7, 7),
        (2, 3, 4, "2, 3, 6", 4, 2),
        (6, 4, 16, "2, 3, 4, 6, 8, 12, 24", 4, 8),
        (1, 1, 2, "", 2, 2),
    ],
)
def test_numbers_that_would_do_are_named_and_do(batch, steps, generations, would_do, batch_unit, step_unit):
    (problem,) = group_problems(batch, steps, generations)
    assert f"({batch}) x `steps_per_generation` ({steps}) = {batch * steps} is not divisible" in problem.message
    named = re.search(r"`num_generations` one of ([\d, ]+), or", problem.message)
    assert (named[1] if named else "") == would_do
    assert f"`per_device_train_batch_size` a multiple of {batch_unit}, or" in problem.message
    assert f"a multiple of {step_unit}." in problem.message
    for n in map(int, would_do.split(", ") if would_do else []):
        assert group_problems(batch, steps, n) == []
    assert group_problems(batch_unit, steps, generations) == group_problems(batch, step_unit, generations) == []


@pytest.mark.parametrize("fields", [{}, {"gradient_accumulation_steps": 3}, {"steps_per_generation": 2}])
def test_a_group_size_that_does_not_fit_is_refused_with_the_numbers_that_would_do(fields):
    """TRL refuses it too, without them."""
    with pytest.raises(ValueError, match="must be divisible by num_generations"):
        GRPOConfig("out", **BASE, num_generations=7, **fields)
    with pytest.raises(ValueError, match=r"Make `num_generations` one of 2, .*8.*a multiple of 7"):
        DataEfficientGRPOConfig("out", **BASE, num_generations=7, **fields)


@pytest.mark.parametrize(
    ("batch", "processes", "generations", "would_do", "unit"),
    [(8, 1, 3, "`num_generations_eval` one of 2, 4, 8, or ", 3), (3, 2, 4, "`num_generations_eval` one of 2, 3, 6, or ", 2), (1, 1, 2, "", 2)],
)  # fmt: skip
def test_a_group_size_of_evaluation_that_does_not_fit(batch, processes, generations, would_do, unit):
    (problem,) = evaluation_problems(batch, processes, generations)
    assert problem.message.endswith(f"Make {would_do}`per_device_eval_batch_size` a multiple of {unit}.")
    assert evaluation_problems(unit, processes, generations) == []
    fields = {
        "num_generations": generations,
        "per_device_eval_batch_size": batch * processes,
        "eval_strategy": "epoch",
    }
    with pytest.raises(ValueError, match=r"Make .*`per_device_eval_batch_size` a multiple of"):
        DataEfficientGRPOConfig("out", **BASE, **fields, per_device_train_batch_size=generations)
