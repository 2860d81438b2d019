"""
What the update may leave out, because it does not change the gradient: by what is known of a trainer's loss and of its
model. Whether the gradient is the same is checked as well, see `check.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import partial
from typing import Any, cast

import torch
import trl.trainer.utils
from accelerate import Accelerator
from accelerate.utils import is_peft_model
from transformers import PreTrainedModel
from trl import GRPOConfig, GRPOTrainer

from trl_dataeff.compact.packing import can_pack, knows_attention


#: What is left of an advantage of 0 where TRL normalizes by the standard deviation of a whole batch: about 1e-7
_ROUNDED_ADVANTAGE = 1e-6
#: TRL's loss types, by what they average over: the rows or the tokens of a micro-batch, or `num_items_in_batch`
OVER_ROWS = ("grpo", "sapo", "dr_grpo", "luspo")
OVER_TOKENS = ("bnpo",)
OVER_BATCH = ("cispo", "dapo", "vespo")
#: Methods of the loss of a micro-batch, which may do with it what they like
_METHODS_OF_LOSS = (
    "training_step",
    "compute_loss",
    "_compute_loss",
    "get_high_entropy_mask",
    "get_off_policy_mask",
    "get_gamma_weights",
)
_METHODS_OF_GENERATION = (
    "_generate",
    "_generate_single_turn",
    "_tokenize_prompts",
    "_tool_call_loop",
    "_get_tool_suffix_ids",
)
#: Methods that get TRL's batch between its pass over it and the end of the loss
_METHODS_WITH_BATCH = (
    "_generate_and_score_completions",
    "_prepare_inputs",
    "_get_per_token_logps_and_entropies",
    *_METHODS_OF_LOSS,
)
_OUR_PACKAGES = ("accelerate", "transformers", "trl", "trl_dataeff", "torch", "peft")


@dataclass(frozen=True)
class Parts:
    """
    What the update may leave out, because it does not change the gradient.

    Attributes:
        zero_rows: rows whose advantage is 0.
        exchange: whether rows may change their micro-batch within an optimizer step.
        left_padding: padding of prompts.
        right_padding: padding of completions.
        shared_prompts: all but one computation of a prompt in a micro-batch, and the padding that is left in it.
        prompt_scores: scores of prompt tokens by the model's head, which the loss does not use.
    """

    zero_rows: bool
    exchange: bool
    left_padding: bool
    right_padding: bool
    shared_prompts: bool
    prompt_scores: bool

    @classmethod
    def all(cls) -> Parts:
        """Everything."""
        return cls(*[True] * len(fields(cls)))

    @classmethod
    def none(cls) -> Parts:
        """Nothing: TRL's update."""
        return cls(*[False] * len(fields(cls)))

    def without(self, names: Sequence[str]) -> Parts:
        """The parts but these."""
        return replace(self, **dict.fromkeys(names, False))

    def __and__(self, other: Parts) -> Parts:
        values = {field.name: getattr(self, field.name) and getattr(other, field.name) for field in fields(self)}
        return Parts(**values)


def exact_parts(trainer: GRPOTrainer) -> Parts:
    """What the update may leave out in a trainer's loss now; a callback may change the loss."""
    return Parts.all().without(list(obstacles(trainer)))


def agreed(parts: Parts, accelerator: Accelerator) -> Parts:
    """
    What all processes may leave out. A callback or a hook of a script may be on the main process alone, as those of
    Weights & Biases are. A collective.

    Args:
        parts ([`Parts`]): what this process may leave out.
        accelerator ([`~accelerate.Accelerator`]): of the trainer.
    """
    own = torch.tensor([astuple(parts)], device=accelerator.device)
    return Parts(*accelerator.gather(own).all(0).tolist())


def obstacles(trainer: GRPOTrainer) -> dict[str, str]:
    """
    Why the update does not leave out some parts in a trainer's loss now: the reason of each of these.

    Args:
        trainer ([`~trl.GRPOTrainer`]): whose loss it is.
    """
    if trainer.loss_type not in OVER_ROWS + OVER_TOKENS + OVER_BATCH:
        # It may depend on widths, too
        return {field.name: f"loss_type={trainer.loss_type!r} is not known" for field in fields(Parts)}
    model = policy_of(trainer, trainer.model)
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    splits_sequences = parallelism is not None and (parallelism.cp_enabled or parallelism.sp_enabled)
    of_rows = ("zero_rows", "exchange")
    of_columns = ("left_padding", "right_padding", "prompt_scores", "shared_prompts")
    of_head = ("prompt_scores", "shared_prompts")
    of_transformers = isinstance(model, PreTrainedModel)
    rules: list[tuple[bool, str, Sequence[str]]] = [
        # It may read log-probs of the loss, by token
        (handles_losses(trainer), "a loss of a subclass", (*of_rows, "right_padding")),
        (changes_micro_batches(trainer), "what happens between micro-batches", ["exchange"]),
        (trainer._entropy_bonus_enabled, "an entropy bonus", of_rows),
        (trainer.top_entropy_quantile != 1.0, "`top_entropy_quantile`", of_rows),
        # Of a mixture of experts; it counts the rows and the tokens of a single pass
        (trainer.aux_loss_enabled, "the loss of a router", (*of_rows, "shared_prompts")),
        (trainer.beta != 0.0, "`beta`", ["zero_rows"]),
        (trainer.loss_type in OVER_TOKENS, f"`loss_type={trainer.loss_type!r}`", ["exchange"]),
        (is_compiled(trainer, model), "compilation", of_columns),  # new shapes compile again
        (splits_sequences, "sequence parallelism", of_columns),  # which needs equal widths on all processes
        (trainer._is_vlm, "a vision-language model", of_columns),
        (not knows_attention(model), "an attention implementation of a script", of_columns),
        (trainer.neftune_noise_alpha is not None, "NEFTune", of_columns),  # whose noise depends on the width
        (trainer.is_deepspeed_enabled, "DeepSpeed", of_head),
        (trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2, "FSDP of version 1", of_head),
        (not of_transformers, "a model that is not of Transformers", of_head),
        (not has_fused_head(), "TRL below 1.15", of_head),
        (of_transformers and not can_pack(model), "layers that mix tokens not by attention alone", ["shared_prompts"]),
    ]
    found: dict[str, str] = {}
    for holds, reason, parts in rules:
        if holds:
            found = {**dict.fromkeys(parts, reason), **found}
    return found


# The loss


def handles_losses(trainer: GRPOTrainer) -> bool:
    """
    Whether a subclass has a method of its own that gets the loss of a micro-batch. It may add a term over all rows, or
    weigh the loss of a micro-batch by its rows.
    """
    return any(has_own_method(trainer, name) for name in _METHODS_OF_LOSS)


def changes_micro_batches(trainer: GRPOTrainer) -> bool:
    """
    Whether something of a script acts between the micro-batches of an optimizer step: on what each of them has, or on
    the gradient of each. Then rows keep their micro-batch.
    """
    callbacks = trainer.callback_handler.callbacks
    acts_between = any(_is_own(type(callback).on_substep_end) for callback in callbacks)
    changes_backward = _is_own(trainer.accelerator.backward)
    return (
        has_own_method(trainer, "_prepare_inputs")
        or acts_between
        or changes_backward
        or any(map(has_hooks, cast(torch.nn.Module, trainer.model).parameters()))
    )


def has_hooks(parameter: torch.nn.Parameter) -> bool:
    """Whether something acts on a parameter's gradient within the backward pass."""
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def least_advantage(trainer: GRPOTrainer) -> float:
    """
    Advantages up to this size are 0, but for rounding. With `multi_objective_aggregation="normalize_then_sum"`, TRL
    subtracts a mean of the batch that is 0 but for rounding, and equal rewards get advantages of about 1e-9.
    """
    return _ROUNDED_ADVANTAGE if trainer.multi_objective_aggregation == "normalize_then_sum" else 0.0


def has_gradient(batch: Mapping[str, Any], least_advantage: float = 0.0) -> torch.Tensor:
    """Rows of a batch whose advantage is not 0, bool `(rows,)`."""
    advantages: torch.Tensor = batch["advantages"]  # (rows,), or (rows, T) where a subclass gives them by token
    # What is not a number has one, as in TRL
    return ~(advantages.abs() <= least_advantage).view(len(advantages), -1).all(1)


def token_mask(batch: Mapping[str, Any]) -> torch.Tensor:
    """1 for the tokens of a batch that are trained on, `(rows, T)`."""
    mask: torch.Tensor = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


# The model


def policy_of(trainer: GRPOTrainer, model: Any) -> torch.nn.Module:
    """A model of a trainer without the wrapping of accelerate and PEFT."""
    unwrapped: torch.nn.Module = trainer.accelerator.unwrap_model(model)
    return cast(Any, unwrapped).get_base_model() if is_peft_model(unwrapped) else unwrapped


def has_fused_head() -> bool:
    """Whether TRL's loss takes log-probs from the fused head that it adds to a model: from TRL 1.15 on."""
    return hasattr(trl.trainer.utils, "add_fused_lm_head")


def hash_of_modules(model: torch.nn.Module) -> int:
    """
    A number that changes when modules are replaced, or get a hook of a script, another forward pass, or another rate
    of dropout.
    """
    seen = []
    for module in model.modules():
        attributes = vars(module)
        numbers = [value for value in attributes.values() if isinstance(value, float)]
        hooks = [*attributes["_forward_hooks"].values(), *attributes["_forward_pre_hooks"].values()]
        number_of_hooks = sum(map(_is_own, hooks)) if hooks else 0
        seen.append((id(module), id(attributes.get("forward")), number_of_hooks, *numbers))
    return hash(tuple(seen))


def is_compiled(trainer: GRPOTrainer, model: torch.nn.Module) -> bool:
    """Whether a policy, or a module of it, is compiled, by TRL's option or by hand."""
    return trainer.args.torch_compile or any(map(_is_compiled, model.modules()))


def _is_compiled(module: torch.nn.Module) -> bool:
    forward = vars(module).get("forward")
    return (
        getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(module, "_orig_mod")
        or hasattr(forward, "_torchdynamo_orig_callable")
    )


# TRL's passes without gradient


def computes_old_logps(trainer: GRPOTrainer) -> bool:
    """Whether TRL's pass over a generation batch begins with one for old log-probs."""
    return not is_aligned(trainer) or corrects_sampler(trainer)


def corrects_sampler(trainer: GRPOTrainer) -> bool:
    """Whether TRL's loss is corrected by the ratio of the policy to vLLM's sampler."""
    return trainer.use_vllm and trainer.vllm_importance_sampling_correction


def is_aligned(trainer: GRPOTrainer) -> bool:
    """Whether the policy of a generation batch's loss is the one that sampled it: a step trains on whole batches."""
    config = cast(GRPOConfig, trainer.args)
    passes = cast(int, config.steps_per_generation) * trainer.num_iterations  # the config fills it in
    return config.gradient_accumulation_steps % passes == 0


def is_batch_private(trainer: GRPOTrainer) -> bool:
    """
    Whether nobody else gets a batch between TRL's pass over it and the end of the loss: no subclass has a method of
    its own on the way. Nor while it generates, where it may ask for log-probs. Then what TRL alone reads may be filled
    in later.
    """
    if trainer.rollout_func is not None:
        return False
    return not any(has_own_method(trainer, name) for name in (*_METHODS_OF_GENERATION, *_METHODS_WITH_BATCH))


def has_own_method(trainer: GRPOTrainer, name: str) -> bool:
    """Whether a subclass, above or below ours, or a script, has put a method in the place of a library's or ours."""
    of_classes = [vars(each)[name] for each in type(trainer).__mro__ if name in vars(each)]
    of_instance = [vars(trainer)[name]] if name in vars(trainer) else []
    return any(map(_is_own, [*of_instance, *of_classes]))


def _is_own(method: Any) -> bool:
    """Whether a function was defined in a script; one that wraps another takes over its module."""
    if isinstance(method, partial):  # as our own ones that watch another, and get it as an argument
        return any(_is_own(each) for each in (method.func, *method.args) if callable(each))
    function = getattr(method, "__func__", method)
    globals_of_function = getattr(function, "__globals__", None)
    module = getattr(function, "__module__", "") if globals_of_function is None else globals_of_function["__name__"]
    return str(module).partition(".")[0] not in _OUR_PACKAGES
