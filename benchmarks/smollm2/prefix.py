"""Equal prompts of a batch are computed once, as inference engines do: they would be most of a step here."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel


def share_prompts(model: PreTrainedModel, own: int) -> None:
    """
    Have the backbone of `model` compute a prompt once for all rows of a batch that begin with it, in generation and in the loss.
    Results and gradients are the same up to rounding; there must be no dropout.

    Args:
        own (`int`): how many tokens at the end of a row of the loss are always computed for that row.
    """
    backbone: Any = model.base_model
    forward = backbone.forward
    # Transformers renames the argument
    name = "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"

    @functools.wraps(forward)
    def shared(input_ids=None, attention_mask=None, **options):
        cache = options.get(name)
        if attention_mask is None or (cache is not None and cache.get_seq_length()):
            return forward(input_ids, attention_mask, **options)
        generating = cache is not None
        begins = input_ids.shape[1] - (0 if generating else own)
        first, rows = _equal_rows(input_ids[:, : max(begins, 0)], attention_mask)
        if begins < 1 or len(first) == len(rows):
            return forward(input_ids, attention_mask, **options)
        if not generating:
            cache = DynamicCache(config=model.config)
            options |= {"use_cache": True, name: cache}
        once = {key: _of_rows(value, first, len(rows)) for key, value in options.items()}
        prompts = forward(input_ids[first, :begins], attention_mask[first, :begins], **once)
        cache.batch_select_indices(rows)
        hidden = prompts.last_hidden_state[rows]
        if generating:
            prompts.last_hidden_state = hidden
            return prompts
        output = forward(input_ids[:, begins:], attention_mask, **options)
        output.last_hidden_state = torch.cat([hidden, output.last_hidden_state], dim=1)
        output[name] = None
        return output

    backbone.forward = shared


def _equal_rows(prompts: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of `prompts` (N, P): an index for each different row, (M,), and for each row its place among those, (N,)."""
    both = torch.cat([prompts, attention_mask[:, : prompts.shape[1]]], dim=1)
    _, rows = torch.unique(both, dim=0, return_inverse=True)
    numbers = torch.arange(len(rows), device=rows.device)
    first = numbers.new_empty(int(rows.max()) + 1).scatter_reduce(0, rows, numbers, "amin", include_self=False)
    return first, rows


def _of_rows(value: Any, rows: torch.Tensor, batch: int) -> Any:
    """`rows` of a tensor that has one for each of the batch (position ids); anything else as it is."""
    return value[rows] if isinstance(value, torch.Tensor) and value.dim() > 1 and len(value) == batch else value
