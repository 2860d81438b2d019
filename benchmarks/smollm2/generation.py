"""
Generation on a CPU for completions of tens of tokens, in the place of Transformers' `generate`: each different prompt
is read once, rows that have ended are left out, and sampling is by cumulative sums. An engine such as vLLM leaves this
out, too. Every method of a suite uses the same.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel


#: Rows that have ended are left out once they are this share: it copies the cache
SHARE_OF_ENDED = 1 / 8


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    generation_config: GenerationConfig,
    **ignored: Any,
) -> torch.Tensor:
    """
    Complete prompts.

    Args:
        model (`PreTrainedModel`): A causal language model.
        input_ids (`torch.Tensor` of shape `(R, P)`): The prompts, padded on the left.
        attention_mask (`torch.Tensor` of shape `(R, P)`): 0 for padding.
        generation_config (`GenerationConfig`): `max_new_tokens`, `do_sample`, `temperature`, `eos_token_id` and
            `pad_token_id` count.
        ignored: What else `generate` takes.

    Returns:
        `torch.Tensor` of shape `(R, P + T)`: Prompts and completions, with padding behind the token that ends one.

    Raises:
        ValueError: If tokens are to be left out of sampling, which is not done here.
    """
    if generation_config.do_sample and (generation_config.top_k or (generation_config.top_p or 1.0) < 1):
        raise ValueError("All tokens are sampled: set `top_k=0` and `top_p=1.0`.")
    ends = torch.tensor(generation_config.eos_token_id).reshape(-1)
    _, prompt_of_row = torch.unique(torch.cat([input_ids, attention_mask], 1), dim=0, return_inverse=True)
    first_rows = torch.stack([(prompt_of_row == prompt).nonzero()[0, 0] for prompt in range(prompt_of_row.max() + 1)])
    masks = attention_mask[first_rows]
    output = model(
        input_ids[first_rows],
        attention_mask=masks,
        position_ids=(masks.cumsum(1) - 1).clamp(min=0),
        use_cache=True,  # the trainer turns it off
        logits_to_keep=1,
    )
    cache = output.past_key_values
    cache.batch_select_indices(prompt_of_row)
    logits = output.logits[prompt_of_row, -1]
    rows = torch.arange(len(input_ids))  # that are computed
    has_ended = torch.zeros(len(input_ids), dtype=torch.bool)
    mask = attention_mask
    shape = (len(input_ids), generation_config.max_new_tokens)
    completions = torch.full(shape, generation_config.pad_token_id, dtype=torch.int64)
    for column in range(shape[1]):
        tokens = _next(logits.float(), generation_config)
        completions[rows[~has_ended], column] = tokens[~has_ended]
        has_ended |= torch.isin(tokens, ends)
        if has_ended.all() or column == shape[1] - 1:
            break
        if has_ended.float().mean() >= SHARE_OF_ENDED:
            goes_on = (~has_ended).nonzero().squeeze(1)
            cache.batch_select_indices(goes_on)
            rows, tokens, mask, has_ended = (each[goes_on] for each in (rows, tokens, mask, has_ended))
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        output = model(
            tokens[:, None],
            attention_mask=mask,
            position_ids=mask.sum(1, keepdim=True) - 1,
            past_key_values=cache,
            use_cache=True,
        )
        logits = output.logits[:, -1]
    return torch.cat([input_ids, completions], 1)


def _next(logits: torch.Tensor, generation_config: GenerationConfig) -> torch.Tensor:
    """The next token of each row, `(R,)`, by logits `(R, V)`."""
    if not generation_config.do_sample:
        return logits.argmax(1)
    sums = (logits / generation_config.temperature).softmax(1).cumsum(1)
    # `torch.multinomial` is slow on a CPU with this many tokens
    places = torch.searchsorted(sums, torch.rand(len(sums), 1) * sums[:, -1:])
    return places.squeeze(1).clamp(max=logits.size(1) - 1)
