"""
Padding: micro-batches are cut to their own longest prompt and completion, and passes without gradient run over rows of
similar length. TRL pads every row to the longest prompt and the longest completion of the generation batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator


#: Keys of TRL's batch: by prompt token, `(rows, P)`
_OF_PROMPTS = ("prompt_ids", "prompt_mask")
#: By completion token, `(rows, T)`, like those that end in `_per_token_logps`
_OF_COMPLETIONS = ("completion_ids", "completion_mask", "tool_mask", "importance_sampling_ratio", "advantages")


def _is_of_completions(key: str) -> bool:
    return key in _OF_COMPLETIONS or key.endswith("_per_token_logps")


def other_tensors(batch: Mapping[str, Any]) -> list[str]:
    """Keys of tensors that a subclass has added to a batch, and that may be by token: who knows how to cut them?"""
    width = batch["completion_ids"].size(1)
    others = []
    for key, value in batch.items():
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or key in _OF_PROMPTS:
            continue
        is_known = _is_of_completions(key) and value.dim() == 2 and value.size(1) in (1, width)
        if not is_known:
            others.append(key)
    return others


@dataclass(frozen=True)
class RowLengths:
    """
    Lengths of the rows of a batch, without padding, and which of them have the same prompt.

    Attributes:
        prompt: tokens of each prompt, one number per row.
        completion: tokens of each completion up to the last that is attended to, one number per row.
        prompt_number: equal for rows with equal prompts, one number per row.
        prompt_width: columns of the padded prompts, P.
        completion_width: columns of the padded completions, T.
    """

    prompt: list[int]
    completion: list[int]
    prompt_number: list[int]
    prompt_width: int
    completion_width: int

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> RowLengths:
        """The lengths in a batch of TRL: prompts are padded on the left, completions on the right."""
        prompt_mask = batch["prompt_mask"].cpu()
        completion_mask = batch["completion_mask"].cpu()
        return cls(
            prompt=_width_to_the_first(prompt_mask).tolist(),
            completion=_width_to_the_first(completion_mask.flip(1)).tolist(),
            prompt_number=prompt_numbers(batch["prompt_ids"], prompt_mask),
            prompt_width=prompt_mask.size(1),
            completion_width=completion_mask.size(1),
        )


def prompt_numbers(prompt_ids: torch.Tensor, prompt_mask: torch.Tensor) -> list[int]:
    """
    Number prompts: equal numbers for rows with equal ones.

    Args:
        prompt_ids (`torch.Tensor` of shape `(rows, P)`): token ids.
        prompt_mask (`torch.Tensor` of shape `(rows, P)`): 0 for padding.
    """
    mask = prompt_mask.cpu()
    # Also the mask, because a prompt may begin with the token 0
    prompts = torch.cat([prompt_ids.cpu() * mask, mask], dim=1).numpy()
    numbers: dict[bytes, int] = {}
    return [numbers.setdefault(row.tobytes(), len(numbers)) for row in prompts]


def _width_to_the_first(mask: torch.Tensor) -> torch.Tensor:
    """Columns from the first 1 of each row to the end, `(rows,)`; 0 for a row without."""
    width = mask.size(1)
    positions = torch.arange(width, 0, -1)  # columns that are left, from each column on
    return ((mask != 0) * positions).amax(dim=1) if width else torch.zeros(len(mask), dtype=torch.int64)


def rounded_up(length: int, multiple: int | None, width: int) -> int:
    """A length of at least 1, rounded up to TRL's `pad_to_multiple_of`, and at most the width that there is."""
    length = max(length, 1)
    if multiple is not None:
        length = -(-length // multiple) * multiple
    return min(length, width)


def rows_of(
    batch: Mapping[str, Any],
    rows: torch.Tensor,
    *,
    prompt_width: int,
    completion_width: int,
) -> dict[str, Any]:
    """
    Some rows of a batch, cut to fewer columns. What is not by row stays.

    Args:
        batch (`Mapping`): TRL's batch, or one of its micro-batches.
        rows (`torch.Tensor` of shape `(n,)`): which rows, in their new order.
        prompt_width (`int`): columns of the prompts, the last ones.
        completion_width (`int`): columns of what is by completion token, the first ones.

    Returns:
        `dict`: its tensors have memory of their own, so that none keeps the full width.
    """
    full_completion_width = batch["completion_ids"].size(1)
    result: dict[str, Any] = {}
    for key, value in batch.items():
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            result[key] = value
            continue
        if key in _OF_PROMPTS:
            value = value[:, value.size(1) - prompt_width :]
        is_by_token = _is_of_completions(key) and value.dim() == 2 and value.size(1) == full_completion_width
        if is_by_token:
            value = value[:, :completion_width]
        result[key] = value[rows]
    return result


def rows_with_gradient(have_gradient: torch.Tensor, accelerator: Accelerator) -> torch.Tensor:
    """
    Rows of this process's batch that have a gradient. Sharded models run their passes in lockstep, so each process
    gets as many as the one with most. A collective.

    Args:
        have_gradient (`torch.Tensor` of shape `(B,)`): which rows have one, bool.
        accelerator ([`~accelerate.Accelerator`]): of the trainer.

    Returns:
        `torch.Tensor` of shape `(rows,)`, int64, in ascending order: at least one.
    """
    size = max(int(accelerator.gather(have_gradient.sum().view(1)).max()), 1)
    gradient_first = torch.argsort((~have_gradient).int(), stable=True)
    return torch.sort(gradient_first[:size]).values


def forward_by_length(
    forward: Callable[..., tuple[Any, ...]],
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    *,
    batch_size: int,
    rows: torch.Tensor | None,
    cuts_left: bool,
    cuts_right: bool,
    keeps_groups: bool = False,
    multiple: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None, None]:
    """Log-probs of a batch by TRL's forward pass without gradient, over chunks of rows of similar length at their own
    width.

    Args:
        forward (`Callable`): TRL's `_get_per_token_logps_and_entropies` of a model.
        input_ids (`torch.Tensor` of shape `(B, P + T)`): prompts, padded on the left, and completions, on the right.
        attention_mask (`torch.Tensor` of shape `(B, P + T)`): 0 for padding.
        logits_to_keep (`int`): T.
        batch_size (`int`): rows of a chunk.
        rows (`torch.Tensor`, *optional*): rows that are computed; `None`: all.
        cuts_left (`bool`): whether padding of prompts is cut.
        cuts_right (`bool`): whether padding of completions is cut.
        keeps_groups (`bool`, *optional*, defaults to `False`): whether rows with equal prompts stay together.
        multiple (`int`, *optional*): TRL's `pad_to_multiple_of`, a multiple of which each width is.
        **kwargs: further arguments of `forward`.

    Returns:
        What `forward` returns: log-probs `(B, T)`, 0 for padding as in TRL, and NaN in rows that were not computed.
    """
    prompt_width = input_ids.size(1) - logits_to_keep
    if rows is None:
        rows = torch.arange(len(input_ids), device=input_ids.device)
    mask = attention_mask[rows]
    prompt_lengths = _width_to_the_first(mask[:, :prompt_width].cpu())
    completion_lengths = _width_to_the_first(mask[:, prompt_width:].flip(1).cpu())
    by_length = torch.argsort(prompt_lengths + completion_lengths, descending=True, stable=True)
    order = by_length
    if keeps_groups:
        numbers = torch.tensor(prompt_numbers(input_ids[rows, :prompt_width], mask[:, :prompt_width]))
        # The group of the longest row first
        place = torch.empty_like(by_length)
        place[by_length] = torch.arange(len(by_length))
        first_place = torch.full((len(rows),), len(rows)).scatter_reduce(0, numbers, place, "amin")
        order = by_length[torch.argsort(first_place[numbers[by_length]], stable=True)]
    result: torch.Tensor | None = None
    for chunk in order.split(batch_size):
        first = 0
        if cuts_left:
            first = prompt_width - rounded_up(int(prompt_lengths[chunk].max()), multiple, prompt_width)
        kept = logits_to_keep
        if cuts_right:
            kept = rounded_up(int(completion_lengths[chunk].max()), multiple, logits_to_keep)
        columns = slice(first, prompt_width + kept)
        chunk_rows = rows[chunk.to(rows.device)]
        logps = forward(input_ids[chunk_rows, columns], attention_mask[chunk_rows, columns], kept, **kwargs)[0]
        if result is None:
            result = logps.new_full((len(input_ids), logits_to_keep), torch.nan)
        result[chunk_rows] = torch.nn.functional.pad(logps, (0, logits_to_keep - kept))
    assert result is not None, "a batch has rows"
    return result, None, None
