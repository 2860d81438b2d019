"""Equal prompts of a batch are computed once, as inference engines do: they would be most of a step here."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel


def share_prompts(model: PreTrainedModel, own: int) -> None:
    """Have a model compute a prompt once for all rows of a batch that begin with it, in generation and in the loss.

    Results and gradients are the same up to rounding; there must be no dropout.

    Args:
        model (`PreTrainedModel`): Its backbone (`base_model`) gets another `forward`.
        own (`int`): How many tokens at the end of a row of the loss are always computed for that row.
    """
    backbone: Any = model.base_model
    forward = backbone.forward
    # Transformers renames the argument
    cache_name = "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"

    @functools.wraps(forward)
    def shared(input_ids=None, attention_mask=None, **options):
        cache = options.get(cache_name)
        continues_generation = cache is not None and cache.get_seq_length() > 0
        if attention_mask is None or continues_generation:
            return forward(input_ids, attention_mask, **options)

        # Generation begins with the prompts alone; the loss has completions after them
        generating = cache is not None
        prompt_length = input_ids.shape[1] if generating else input_ids.shape[1] - own
        if prompt_length < 1:
            return forward(input_ids, attention_mask, **options)
        prompt_ids = input_ids[:, :prompt_length]
        prompt_mask = attention_mask[:, :prompt_length]
        first, prompt_of_row = _different_rows(prompt_ids, prompt_mask)
        if len(first) == len(prompt_of_row):
            return forward(input_ids, attention_mask, **options)

        if not generating:
            cache = DynamicCache(config=model.config)
            options = {**options, "use_cache": True, cache_name: cache}
        batch = len(prompt_of_row)
        options_of_prompts = {name: _of_rows(value, first, batch) for name, value in options.items()}
        output_of_prompts = forward(prompt_ids[first], prompt_mask[first], **options_of_prompts)
        cache.batch_select_indices(prompt_of_row)
        hidden = output_of_prompts.last_hidden_state[prompt_of_row]
        if generating:
            output_of_prompts.last_hidden_state = hidden
            return output_of_prompts

        output = forward(input_ids[:, prompt_length:], attention_mask, **options)
        output.last_hidden_state = torch.cat([hidden, output.last_hidden_state], dim=1)
        output[cache_name] = None
        return output

    backbone.forward = shared


def _different_rows(prompt_ids: torch.Tensor, prompt_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Find equal prompts.

    Args:
        prompt_ids (`torch.Tensor`): Token ids, `(N, P)`.
        prompt_mask (`torch.Tensor`): Their attention mask, `(N, P)`.

    Returns:
        The first row of each different prompt, `(M,)`; and for each row the place of its prompt among those, `(N,)`.
    """
    both = torch.cat([prompt_ids, prompt_mask], dim=1)
    _, prompt_of_row = torch.unique(both, dim=0, return_inverse=True)
    rows = torch.arange(len(prompt_of_row), device=prompt_of_row.device)
    different = int(prompt_of_row.max()) + 1
    first = rows.new_empty(different).scatter_reduce(0, prompt_of_row, rows, "amin", include_self=False)
    return first, prompt_of_row


def _of_rows(value: Any, rows: torch.Tensor, batch: int) -> Any:
    """`rows` of a tensor that has one for each of the batch (position ids); anything else as it is."""
    if isinstance(value, torch.Tensor) and value.dim() > 1 and len(value) == batch:
        return value[rows]
    return value
