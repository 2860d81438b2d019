"""The prompt of a group is computed once for all of its rows in a micro-batch, by the model's own cache, instead of
once for each of them (Prefix Grouper, arXiv 2506.05433, computes it once by a mask of its own). Only the hidden states
that completion tokens are predicted from reach the head.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel


@dataclass(frozen=True)
class SharedPrompts:
    """
    Which rows of a micro-batch have the same prompt.

    Attributes:
        first_rows: a row with each of the m different prompts, int64 of shape `(m,)`.
        prompt_of_row: which of these prompts each row has, int64 of shape `(rows,)`.
    """

    first_rows: torch.Tensor
    prompt_of_row: torch.Tensor

    @classmethod
    def of(cls, prompt_numbers: list[int], device: torch.device) -> SharedPrompts | None:
        """The shared prompts of rows whose prompts have these numbers; `None` if all prompts differ."""
        first_rows: list[int] = []
        place: dict[int, int] = {}
        for row, number in enumerate(prompt_numbers):
            if number not in place:
                place[number] = len(first_rows)
                first_rows.append(row)
        if len(first_rows) == len(prompt_numbers):
            return None
        prompt_of_row = [place[number] for number in prompt_numbers]
        return cls(
            first_rows=torch.tensor(first_rows, dtype=torch.int64, device=device),
            prompt_of_row=torch.tensor(prompt_of_row, dtype=torch.int64, device=device),
        )


def can_share_prompts(model: torch.nn.Module) -> bool:
    """
    Whether a model's cache holds keys and values of attention alone, so that a completion can continue from a prompt.
    """
    if not isinstance(model, PreTrainedModel) or model.config.is_encoder_decoder:
        return False
    if getattr(model, "_is_stateful", False):  # a state-space model
        return False
    parameters = inspect.signature(type(model.base_model).forward).parameters
    layers = DynamicCache(config=model.config).layers
    holds_attention = all(hasattr(layer, "batch_select_indices") for layer in layers)
    return holds_attention and _cache_name(parameters) is not None


def _cache_name(parameters: Any) -> str | None:
    """The argument of a model's forward pass that takes a cache; Transformers renames it."""
    for name in ("past_key_values", "cache"):
        if name in parameters:
            return name
    return None


@contextmanager
def completions_alone(
    model: PreTrainedModel, completion_width: int, shared: SharedPrompts | None = None
) -> Iterator[None]:
    """Within this context, a model with TRL's fused head scores completions alone: its log-probs are `(rows, T)`
    instead of `(rows, P + T - 1)`.

    Args:
        model ([`~transformers.PreTrainedModel`]): the policy, without PEFT's or accelerate's wrapping.
        completion_width (`int`): T, columns of the completions; those before are the prompts'.
        shared ([`SharedPrompts`], *optional*): rows with equal prompts, which are computed once. There must be neither
            dropout nor gradient checkpointing. By default each row has its own prompt computed.
    """
    backbone: Any = model.base_model
    forward = backbone.forward
    forward_with_head = model.forward
    # A replaced `forward` is an attribute of the instance, in the place of the one of the class
    own_attributes = [(backbone, vars(backbone).get("forward")), (model, vars(model).get("forward"))]

    def completions_of_labels(*args: Any, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if labels is not None:
            labels = labels[:, -(completion_width + 1) :]
        return forward_with_head(*args, labels=labels, **kwargs)

    def states_of_completions(*args: Any, **kwargs: Any) -> Any:
        if shared is None:
            outputs = forward(*args, **kwargs)
            outputs.last_hidden_state = outputs.last_hidden_state[:, -(completion_width + 1) :]
            return outputs
        return _forward_shared(forward, model.config, completion_width, shared, *args, **kwargs)

    backbone.forward = states_of_completions
    model.forward = completions_of_labels
    try:
        yield
    finally:
        for module, attribute in own_attributes:
            if attribute is None:
                del module.forward
            else:
                module.forward = attribute


def _forward_shared(
    forward: Any,
    config: Any,
    completion_width: int,
    shared: SharedPrompts,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    **options: Any,
) -> Any:
    """
    The backbone's outputs for the last T + 1 tokens of each row, `(rows, T + 1, h)`, with each prompt computed once.
    """
    prompt_width = input_ids.size(1) - completion_width
    cache = DynamicCache(config=config)
    cache_name = _cache_name(inspect.signature(forward).parameters) or "past_key_values"
    options = {**options, "use_cache": True, cache_name: cache}
    prompts = forward(
        input_ids=input_ids[shared.first_rows, :prompt_width],
        attention_mask=attention_mask[shared.first_rows, :prompt_width],
        **options,
    )
    cache.batch_select_indices(shared.prompt_of_row)
    outputs = forward(input_ids=input_ids[:, prompt_width:], attention_mask=attention_mask, **options)
    last_of_prompts = prompts.last_hidden_state[shared.prompt_of_row, -1:]
    outputs.last_hidden_state = torch.cat([last_of_prompts, outputs.last_hidden_state], dim=1)
    outputs[cache_name] = None
    return outputs
