"""
How much rounding alone changes a model's log-probs. In bfloat16 that differs between models by an order of magnitude,
because it grows with their depth and their logits: a fixed tolerance would be too strict for one and too lenient for
another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from trl import GRPOTrainer


#: How many times the measured effect of rounding counts as rounding. Exact parts change log-probs by about
#: as much as that
TOLERATED_EFFECTS = 2.0
#: Mean difference of log-probs that counts as rounding in any model, and the largest that does
LEAST_TOLERANCE = 1e-4
LARGEST_TOLERANCE = 0.5
#: Where the effect cannot be measured
TOLERANCE_BY_TYPE = {torch.bfloat16: 0.05, torch.float16: 0.01}


def tolerance_of(effect: float, dtype: torch.dtype) -> float:
    """The mean difference of log-probs that counts as rounding.

    Args:
        effect (`float`): the mean difference that other rounding makes. 0 or not finite: it could not be measured.
        dtype (`torch.dtype`): see [`computing_type`].
    """
    if effect == 0 or not math.isfinite(effect):
        return TOLERANCE_BY_TYPE.get(dtype, LEAST_TOLERANCE)
    return min(max(TOLERATED_EFFECTS * effect, LEAST_TOLERANCE), LARGEST_TOLERANCE)


def computing_type(trainer: GRPOTrainer, model: torch.nn.Module) -> torch.dtype:
    """The type in which a trainer's policy is computed; float16 for TF32, which has as many digits."""
    weights = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    own_type = weights[0].dtype
    mixed_precision = trainer.accelerator.mixed_precision
    if mixed_precision == "bf16" or own_type == torch.bfloat16:
        return torch.bfloat16
    is_tf32 = weights[0].is_cuda and torch.get_float32_matmul_precision() != "highest"
    if mixed_precision == "fp16" or own_type == torch.float16 or (own_type == torch.float32 and is_tf32):
        return torch.float16
    return own_type


@contextmanager
def embeddings_rounded_otherwise(model: Any, dtype: torch.dtype) -> Iterator[None]:
    """
    Within this context, a model computes from other embeddings: every other number is larger by a relative
    `torch.finfo(dtype).eps`, which is one or two units in its last place, and the others are smaller by it. All later
    results are then rounded otherwise, too. So the log-probs change about as much as they do where the same is
    computed in another order. They do not change where the model does not say which module embeds its tokens.

    Args:
        model (`torch.nn.Module`): the model.
        dtype (`torch.dtype`): see [`computing_type`].
    """
    unit = torch.finfo(dtype).eps

    def round_otherwise(module: torch.nn.Module, inputs: Any, embeddings: torch.Tensor) -> torch.Tensor:
        # In a type in which the unit is not lost
        exact = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
        places = torch.arange(exact.size(-1), device=exact.device, dtype=exact.dtype)
        signs = 1 - 2 * (places % 2)
        return (exact * (1 + unit * signs)).to(embeddings.dtype)

    try:
        module = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        yield
        return
    hook = module.register_forward_hook(round_otherwise)
    try:
        yield
    finally:
        hook.remove()
