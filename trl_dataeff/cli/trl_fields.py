"""What is known of fields of TRL and Transformers: values that end in an error after loading, and former names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import get_scheduler
from trl import GRPOConfig

from trl_dataeff.utils import choice_problem, number_problem


# Values. TRL and Transformers check some fields themselves when a configuration is made. The tables have those that
# people set and that are found wrong only later, by torch, generation, PEFT or the loss.

#: Intervals of integers
_INTEGERS = {
    "num_generations": "[2, inf)",
    "max_completion_length": "[1, inf)",
    "per_device_train_batch_size": "[1, inf)",
    "gradient_accumulation_steps": "[1, inf)",
    "steps_per_generation": "[1, inf)",
    "generation_batch_size": "[1, inf)",
    "num_iterations": "[1, inf)",  # with 0 a run ends without a step
    "max_steps": "[-1, inf)",  # -1 stands for `num_train_epochs`; less does too, which nobody means
    "seed": "[0, 4294967295]",
    "dataloader_num_workers": "[0, inf)",
}
#: Intervals of numbers
_NUMBERS = {
    "learning_rate": "[0, inf)",
    "adam_beta1": "[0, 1)",
    "adam_beta2": "[0, 1)",
    "adam_epsilon": "[0, inf)",
    "temperature": "(0, inf)",
    "top_p": "[0, 1]",
    "min_p": "[0, 1]",
    "repetition_penalty": "(0, inf)",
    "top_entropy_quantile": "[0, 1]",
}
#: The same for fields that have an effect only with `use_peft`
_INTEGERS_OF_PEFT = {"lora_r": "[1, inf)"}
_NUMBERS_OF_PEFT = {"lora_dropout": "[0, 1]"}
#: The same for fields that vLLM takes otherwise
_INTEGERS_WITHOUT_VLLM = {"top_k": "[0, inf)"}
#: Words that a field takes. A newer TRL may take more, which it names in its help
_CHOICES = {
    "loss_type": ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("group", "batch", "none"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
}
_CHOICES_OF_VLLM = {
    "vllm_mode": ("colocate", "server"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}


def refused_values(values: Mapping[str, Any]) -> Iterator[str]:
    """
    Find values that TRL, PEFT, Transformers or torch refuse after the model is loaded.

    Args:
        values (`Mapping[str, Any]`):
            All fields and their values. `None` stands for what is not set.

    Yields:
        `str`: One message per problem.
    """
    integers = dict(_INTEGERS)
    numbers = dict(_NUMBERS)
    choices = dict(_CHOICES)
    if values["use_peft"]:
        integers |= _INTEGERS_OF_PEFT
        numbers |= _NUMBERS_OF_PEFT
    if values["use_vllm"]:
        choices |= _CHOICES_OF_VLLM
    else:
        integers |= _INTEGERS_WITHOUT_VLLM
    problems = []
    for name, value in values.items():
        if value is None:
            continue
        if name in integers:
            problems.append(number_problem(name, value, integers[name], integer=True))
        elif name in numbers:
            problems.append(number_problem(name, value, numbers[name]))
        elif name in choices and not _is_in_help(name, value):
            problems.append(choice_problem(name, value, choices[name]))
    yield from filter(None, problems)
    yield from _refused_together(values)


def _refused_together(values: Mapping[str, Any]) -> Iterator[str]:
    """Find fields of which each is right, and which TRL or the Trainer refuse together after the model is loaded."""
    if values["sync_ref_model"] and values["beta"] == 0.0:
        yield "`sync_ref_model` is set, but with `beta` at 0 there is no reference model. Set `beta` above 0."
    if values["sync_ref_model"] and values["use_peft"]:
        yield "`sync_ref_model` is set, but TRL does not support it with `use_peft`. Unset it."
    if values["save_strategy"] == "best" and values["metric_for_best_model"] is None:
        yield "`save_strategy` is 'best', but `metric_for_best_model` is not set. Set it, to 'eval_reward' for one."
    options = values["lr_scheduler_kwargs"]
    if options is None or isinstance(options, dict):  # JSON text is parsed later
        yield from _problem_of_schedule(values["lr_scheduler_type"], options or {})


def _problem_of_schedule(schedule: Any, options: dict[str, Any]) -> Iterator[str]:
    """Find a schedule of the learning rate that Transformers does not make with its options, by making it."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    try:
        get_scheduler(schedule, optimizer, num_warmup_steps=0, num_training_steps=1, scheduler_specific_kwargs=options)
    except (TypeError, ValueError) as error:
        name = getattr(schedule, "value", schedule)  # of a member of an enumeration
        yield (
            f"`lr_scheduler_type` is {name!r}, which cannot be made with `lr_scheduler_kwargs` "
            f"{options or 'not set'}: {error}."
        )


def _is_in_help(name: str, value: Any) -> bool:
    """Return whether TRL's help of a field names a word, in quotes, or `True` or `False`."""
    help_text = GRPOConfig.__dataclass_fields__[name].metadata["help"]
    return f"'{value}'" in help_text or (isinstance(value, bool) and f"`{value}`" in help_text)


# Former names, and the first release that does not know them: from the configurations in the releases of TRL and
# Transformers on PyPI

#: Present name, and the first release that does not know the former one
RENAMED = {
    "wandb_log_unique_prompts": ("log_unique_prompts", "TRL 0.27"),
    "torch_dtype": ("dtype", "TRL 0.27"),
    "use_liger_loss": ("use_liger_kernel", "TRL 0.28"),
    "vllm_guided_decoding_regex": ("vllm_structured_outputs_regex", "TRL 0.28"),
    "evaluation_strategy": ("eval_strategy", "Transformers 4.51"),
    "no_cuda": ("use_cpu", "Transformers 5"),
    "include_tokens_per_second": ("include_num_input_tokens_seen", "Transformers 5"),
    "include_inputs_for_metrics": ("include_for_metrics", "Transformers 5"),
    "per_gpu_train_batch_size": ("per_device_train_batch_size", "Transformers 5"),
    "per_gpu_eval_batch_size": ("per_device_eval_batch_size", "Transformers 5"),
    "push_to_hub_token": ("hub_token", "Transformers 5"),
    "push_to_hub_model_id": ("hub_model_id", "Transformers 5"),
    "push_to_hub_organization": ("hub_model_id", "Transformers 5"),
    "tpu_metrics_debug": ("debug", "Transformers 5"),
    "torchdynamo": ("torch_compile_backend", "Transformers 5"),
}
#: The first release that does not know a field, and what to do instead
REMOVED = {
    "max_prompt_length": ("TRL 0.28", "Leave prompts that are too long out of the dataset."),
    "vllm_device": ("TRL 0.18", "vLLM shares the GPU of the training (`vllm_mode: colocate`), or is a server."),
    "vllm_max_model_len": ("TRL 0.18", "Set `vllm_max_model_length`, which TRL has since 0.26."),
    "vllm_dtype": ("TRL 0.18", "It is an option of the vLLM server."),
    "vllm_enable_prefix_caching": ("TRL 0.18", "It is an option of the vLLM server."),
    "gradient_checkpointing_use_reentrant": (
        "TRL 0.27",
        "Set `gradient_checkpointing_kwargs` to {use_reentrant: true} or {use_reentrant: false}.",
    ),
    "warmup_ratio": ("Transformers 5.15", "Set `warmup_steps`, which takes a share of the steps too, such as 0.1."),
    "overwrite_output_dir": ("Transformers 5", "Leave it out; `resume_from_checkpoint` continues a run."),
    "logging_dir": ("Transformers 5.15", "Set the environment variable TENSORBOARD_LOGGING_DIR (key `env`)."),
    "save_safetensors": ("Transformers 5", "Leave it out: models are always saved so."),
    "group_by_length": ("Transformers 5.2", "Leave it out: it has no effect on GRPO, which orders prompts itself."),
    "use_mps_device": ("Transformers 5", "Leave it out: the device is found by itself."),
    "fp16_backend": ("Transformers 5", "Leave it out."),
    "half_precision_backend": ("Transformers 5", "Leave it out."),
    "fp16_opt_level": ("Transformers 5", "Leave it out."),
    "past_index": ("Transformers 5", "Leave it out."),
    "mp_parameters": ("Transformers 5", "Leave it out."),
    "use_legacy_prediction_loop": ("Transformers 5", "Leave it out."),
    "jit_mode_eval": ("Transformers 5", "Set `torch_compile`."),
    "adafactor": ("Transformers 5", "Set `optim` to 'adafactor'."),
    "fsdp_min_num_params": ("Transformers 5", "Set it in `fsdp_config`."),
    "fsdp_transformer_layer_cls_to_wrap": ("Transformers 5", "Set it in `fsdp_config`."),
    "dispatch_batches": ("Transformers 4.51", "Set it in `accelerator_config`."),
    "split_batches": ("Transformers 4.51", "Set it in `accelerator_config`."),
    "tpu_num_cores": ("Transformers 5", "Set the environment variable TPU_NUM_CORES (key `env`)."),
    "ray_scope": ("Transformers 5", "Set the environment variable RAY_SCOPE (key `env`)."),
}


def what_became_of(name: str) -> str:
    """
    Say what became of a field of an older TRL or Transformers.

    Args:
        name (`str`):
            An unknown field.

    Returns:
        `str`: A sentence with the present name or another way, or an empty string if the field was never one.
    """
    if name in RENAMED:
        present, release = RENAMED[name]
        return f" It was renamed to `{present}` in {release}."
    if name in REMOVED:
        release, advice = REMOVED[name]
        return f" It was removed in {release}. {advice}"
    return ""
