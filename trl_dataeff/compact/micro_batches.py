"""
Micro-batches as the update computes them: rows without a gradient are left out, the others are dealt to micro-batches
and cut to their own width. This changes rounding alone, once the loss is divided by the rows or tokens of TRL's
micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from accelerate import Accelerator

from trl_dataeff.compact.dealing import Deal, Limits, deal_rows
from trl_dataeff.compact.exact import OVER_ROWS, OVER_TOKENS, Parts, has_gradient, token_mask
from trl_dataeff.compact.metrics import MetricWeights, weights_of
from trl_dataeff.compact.padding import RowLengths, rows_of
from trl_dataeff.compact.prompts import SharedPrompts


@dataclass(frozen=True)
class MicroBatch:
    """
    A micro-batch as the update computes it.

    Attributes:
        inputs: what TRL's loss gets.
        factor: factor on the loss, so that it is divided by the rows or tokens of TRL's micro-batch. A scalar.
        weights: of its metrics; `None`: they are TRL's.
        scores_completions: whether prompt tokens get no scores.
        shared: which rows have the same prompt, if all tokens are computed in one sequence.
        positions: positions of its tokens, `(1, P + T)`; `None`: the model counts them.
        in_full: the same rows as TRL has them, for a loss of a subclass that is tried.
    """

    inputs: dict[str, Any]
    factor: torch.Tensor
    weights: MetricWeights | None = None
    scores_completions: bool = False
    shared: SharedPrompts | None = None
    positions: torch.Tensor | None = None
    in_full: dict[str, Any] | None = None


class Rows:
    """
    The rows of TRL's micro-batches that follow one another in an optimizer step.

    Args:
        batches (`Sequence[dict]`): the micro-batches, equally many rows each.
        loss_type (`str`): TRL's loss type.
        least_advantage (`float`): advantages up to this size are 0, but for rounding.

    Attributes:
        joined (`dict`): the micro-batches joined along their rows.
        lengths ([`RowLengths`]): of all rows.
        have_gradient (`torch.Tensor`): rows whose advantage is not 0, bool `(rows,)`, on the CPU.
    """

    def __init__(self, batches: Sequence[dict[str, Any]], loss_type: str, least_advantage: float = 0.0):
        self.batches = batches
        self.loss_type = loss_type
        self.joined = join(batches)
        self.lengths = RowLengths.of(self.joined)
        self.have_gradient = has_gradient(self.joined, least_advantage).cpu()

    @property
    def per_batch(self) -> int:
        """Rows of each of TRL's micro-batches."""
        return len(self.batches[0]["advantages"])

    @property
    def width(self) -> int:
        """Columns of prompt and completion, P + T."""
        return self.lengths.prompt_width + self.lengths.completion_width

    def micro_batch(
        self,
        deal: Deal,
        factor: torch.Tensor,
        *,
        weights: MetricWeights | None = None,
        scores_completions: bool = False,
    ) -> MicroBatch:
        """The micro-batch of a deal."""
        rows = torch.tensor(deal.rows, dtype=torch.int64, device=self.joined["advantages"].device)
        inputs = rows_of(self.joined, rows, prompt_width=deal.prompt_width, completion_width=deal.completion_width)
        shared = None
        if deal.packs:
            numbers = [self.lengths.prompt_number[row] for row in deal.rows]
            shared = SharedPrompts.of(numbers, rows.device, deal.multiple)
        return MicroBatch(inputs, factor, weights, scores_completions, shared)

    def factor(self, rows: Sequence[int]) -> torch.Tensor:
        """What the mean over these rows, or their tokens, is multiplied by, to be a mean over TRL's micro-batch."""
        if self.loss_type in OVER_TOKENS:
            # Rows keep their micro-batch
            start = min(rows) // self.per_batch * self.per_batch
            return self.share(rows, range(start, start + self.per_batch))
        return self.share(rows, range(self.per_batch))

    def share(self, rows: Sequence[int], of_rows: Sequence[int]) -> torch.Tensor:
        """What the mean over some rows is multiplied by to be their part of the mean over `of_rows`. A scalar."""
        device = self.joined["advantages"].device
        if self.loss_type in OVER_TOKENS:
            mask = token_mask(self.joined)
            return mask[list(rows)].sum().float() / mask[list(of_rows)].sum().clamp(min=1)
        if self.loss_type in OVER_ROWS:
            return torch.tensor(len(rows) / len(of_rows), dtype=torch.float32, device=device)
        return torch.tensor(1.0, dtype=torch.float32, device=device)


@dataclass(frozen=True)
class Compacted:
    """
    Micro-batches as the update computes them.

    Attributes:
        micro_batches: one in the place of each of TRL's.
        tokens: tokens that a pass over them computes, of all processes.
        tokens_of_trl: tokens that TRL's pass would compute.
    """

    micro_batches: list[MicroBatch]
    tokens: int
    tokens_of_trl: int


def compact(rows: Rows, parts: Parts, accelerator: Accelerator, multiple: int | None = None) -> Compacted:
    """
    The micro-batches without what may be left out. Each has at least one row. On several processes it has the same
    number of rows on each, because TRL gathers values by row; their widths may differ. A collective.

    Args:
        rows ([`Rows`]): of TRL's micro-batches.
        parts ([`Parts`]): what is left out.
        accelerator ([`~accelerate.Accelerator`]): of the trainer.
        multiple (`int`, *optional*): TRL's `pad_to_multiple_of`.
    """
    deals = deals_of(rows, parts, accelerator, multiple)
    trained_tokens = token_mask(rows.joined).sum(1).cpu()
    leaves_out = (~rows.have_gradient).view(-1, rows.per_batch).any(1) & parts.zero_rows
    counts = {
        "tokens": [sum(deal.tokens for deal in deals)],
        "tokens_of_trl": [len(trained_tokens) * rows.width],
        "all_trained": [int(trained_tokens.sum())],
        "trained": [int(trained_tokens[deal.rows].sum()) for deal in deals],
        "leaves_out": leaves_out.long().tolist(),
    }
    own = torch.tensor([[*chain(*counts.values())]], dtype=torch.int64, device=accelerator.device)
    values = iter(accelerator.gather(own).sum(0).tolist())
    total = {name: [next(values) for _ in own_values] for name, own_values in counts.items()}
    weights = weights_of(
        total["trained"],
        total["all_trained"][0],
        [len(deal.rows) for deal in deals],
        rows.per_batch,
        [bool(number) for number in total["leaves_out"]],
    )
    micro_batches = [
        rows.micro_batch(deal, rows.factor(deal.rows), weights=own_weights, scores_completions=parts.prompt_scores)
        for deal, own_weights in zip(deals, weights, strict=True)
    ]
    return Compacted(micro_batches, total["tokens"][0], total["tokens_of_trl"][0])


def deals_of(rows: Rows, parts: Parts, accelerator: Accelerator, multiple: int | None = None) -> list[Deal]:
    """The rows and the width of each micro-batch. A collective. For the arguments, see [`compact`]."""
    length = len(rows.batches) if parts.exchange else 1  # micro-batches that exchange rows
    needed = rows.have_gradient if parts.zero_rows else torch.ones_like(rows.have_gradient)
    needed_together = needed.view(-1, length * rows.per_batch)
    counts = needed_together.sum(1).to(accelerator.device)
    most = accelerator.gather(counts).view(-1, len(counts)).amax(0).clamp(min=length).tolist()
    lengths = rows.lengths
    deals: list[Deal] = []
    for number, (is_needed, total) in enumerate(zip(needed_together, most, strict=True)):
        start = number * length * rows.per_batch
        order = [start + row for row in torch.argsort(~is_needed, stable=True).tolist()]
        num_needed = int(is_needed.sum())
        # Other processes may need more rows: the shortest of those without a gradient complete them
        others = sorted(order[num_needed:], key=lambda row: lengths.prompt[row] + lengths.completion[row])
        chosen = sorted([*order[:num_needed], *others[: total - num_needed]])
        limits = None
        if accelerator.num_processes == 1:
            starts = range(start, start + length * rows.per_batch, rows.per_batch)
            limits = Limits.of_trl(lengths, [range(first, first + rows.per_batch) for first in starts])
        deals += deal_rows(chosen, length, lengths, parts, multiple=multiple, limits=limits)
    return deals


def join(batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Micro-batches joined along their rows."""
    joined = {}
    for key, value in batches[0].items():
        is_by_row = isinstance(value, torch.Tensor) and value.dim() > 0
        joined[key] = torch.cat([batch[key] for batch in batches]) if is_by_row else value
    return joined
