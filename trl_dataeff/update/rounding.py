"""
How much rounding alone changes a model's log-probs. In bfloat16 that differs between models by an order of magnitude,
because it grows with their logits: a fixed tolerance would be too strict for one and too lenient for another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from trl import GRPOTrainer


#: Mean difference of log-probs that counts as rounding in any model: TF32 multiplies float32 numbers less exactly
LEAST_TOLERANCE = 1e-4
#: How many times the measured effect of rounding counts as rounding: both are means over the tokens of a micro-batch
TOLERATED_EFFECTS = 2.5


def computing_type(trainer: GRPOTrainer, model: torch.nn.Module) -> torch.dtype:
    """The type in which a trainer's policy is computed."""
    own_type = next(model.parameters()).dtype
    if trainer.args.bf16 or own_type == torch.bfloat16:
        return torch.bfloat16
    if trainer.args.fp16 or own_type == torch.float16:
        return torch.float16
    return own_type


@contextmanager
def embeddings_rounded_otherwise(model: Any, dtype: torch.dtype) -> Iterator[None]:
    """
    Within this context, a model computes from embeddings that are off by a rounding unit: every other number is larger
    by it, the others are smaller. All later results are then rounded otherwise, too. So the log-probs change about as
    much as they do where the same is computed in another order.

    Args:
        model (`PreTrainedModel`): the model, with its input embeddings.
        dtype (`torch.dtype`): the type of which the unit is taken.
    """
    unit = torch.finfo(dtype).eps

    def round_otherwise(module: torch.nn.Module, inputs: Any, embeddings: torch.Tensor) -> torch.Tensor:
        places = torch.arange(embeddings.size(-1), device=embeddings.device)
        signs = 1.0 - 2.0 * (places % 2)
        # In float32, where the unit of float16 and bfloat16 is not lost
        return (embeddings.float() * (1.0 + unit * signs)).to(embeddings.dtype)

    hook = model.get_input_embeddings().register_forward_hook(round_otherwise)
    try:
        yield
    finally:
        hook.remove()
