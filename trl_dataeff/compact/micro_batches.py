"""
The micro-batches of a generation batch as the update computes them: rows without a gradient are left out, the others
are dealt to micro-batches and cut to their own width. This changes rounding alone, once the loss is divided by the
rows or tokens of TRL's micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from transformers.utils import logging

from trl_dataeff.compact.check import Check, LogprobsOf
from trl_dataeff.compact.dealing import Deal, Limits, deal_rows
from trl_dataeff.compact.exact import OVER_ROWS, OVER_TOKENS, Parts, has_gradient, token_mask
from trl_dataeff.compact.padding import RowLengths, rows_of
from trl_dataeff.compact.prompts import SharedPrompts


logger = logging.get_logger(__name__)
WORTH_MENTIONING = 0.1  # share of the update's tokens
#: TRL's metrics of the loss that are means over the tokens of a micro-batch
TOKEN_MEANS = ("entropy", "kl")
#: TRL's metrics that are means over tokens with `importance_sampling_level="token"` only
TOKEN_MEANS_OF_RATIOS = (
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/region_mean",
    "cispo_clip_ratio",
)


@dataclass(frozen=True)
class MicroBatch:
    """
    A micro-batch as the update computes it.

    Attributes:
        inputs: what TRL's loss gets.
        factor: factor on the loss, so that it is divided by the rows or tokens of TRL's micro-batch. A scalar.
        metric_weight: weight of its means over tokens, among the micro-batches of an optimizer step. A scalar.
        scores_completions: whether prompt tokens get no scores.
        shared: which rows have the same prompt, if that is computed once.
    """

    inputs: dict[str, Any]
    factor: torch.Tensor
    metric_weight: torch.Tensor
    scores_completions: bool
    shared: SharedPrompts | None = None


@dataclass(frozen=True)
class Compacted:
    """
    A generation batch as the update computes it.

    Attributes:
        micro_batches: one in the place of each of TRL's.
        deals: which rows each of them has.
        parts: what they leave out.
        tokens: tokens that a pass over them computes, of all processes.
        tokens_of_trl: tokens that TRL's pass would compute.
    """

    micro_batches: list[MicroBatch]
    deals: list[Deal]
    parts: Parts
    tokens: int
    tokens_of_trl: int


class MicroBatchCompactor:
    """
    Leaves out of the micro-batches of a generation batch what does not change the gradient. Each micro-batch has at
    least one row. On several processes it has the same number of rows on each, because TRL gathers values by row;
    their widths may differ.

    Args:
        accelerator ([`~accelerate.Accelerator`]): of the trainer.
        check ([`Check`]): compares the model's log-probs.
        multiple (`int`, *optional*): TRL's `pad_to_multiple_of`.
    """

    def __init__(self, accelerator: Accelerator, check: Check, multiple: int | None = None):
        self.accelerator = accelerator
        self.check = check
        self.multiple = multiple

    def compact(
        self,
        batches: Sequence[dict[str, Any]],
        parts: Parts,
        loss_type: str,
        accumulated: int,
        logps_of: LogprobsOf | None = None,
        dealt: tuple[list[Deal], Parts] | None = None,
    ) -> Compacted:
        """
        The micro-batches without what may be left out. A collective if there are several processes.

        Args:
            batches (`Sequence[dict]`): the micro-batches of a generation batch. If those of one process hold a list,
                as with images, all processes keep all of their rows, and nothing is cut.
            parts ([`Parts`]): what may be left out.
            loss_type (`str`): TRL's loss type.
            accumulated (`int`): micro-batches of an optimizer step.
            logps_of (`LogprobsOf`, *optional*): the policy's log-probs. Without it nothing is checked.
            dealt (`tuple`, *optional*): the deals of a checkpoint that was written within this generation batch, and
                what they leave out. By default rows are dealt now.
        """
        holds_list = any(isinstance(value, list) for value in batches[0].values())
        keeps_all = holds_list or "token_type_ids" in batches[0] or "mm_token_type_ids" in batches[0]
        on_processes = self.accelerator.gather(torch.tensor([[keeps_all]], device=self.accelerator.device))
        allowed = Parts.none() if on_processes.any() else _consistent(self.check.kept & parts)
        joined = batches[0] if holds_list else join(batches)
        lengths = None if holds_list else RowLengths.of(joined)
        if dealt is not None:
            deals, allowed = dealt
        else:
            deals = self._deal(batches, joined, lengths, allowed, accumulated)
            if logps_of is not None and self.check.is_due:
                failed = self.check.failed(joined, lengths, deals, allowed, logps_of)
                if failed:
                    allowed = _consistent(allowed.without(failed))
                    deals = self._deal(batches, joined, lengths, allowed, accumulated)
        if lengths is None:
            results = [dict(batch) for batch in batches]
            factors = [torch.ones(()) for _ in batches]
        else:
            results = [_rows_of_deal(joined, deal) for deal in deals]
            factors = [_factor(joined, deal, len(batches), loss_type) for deal in deals]
        width = batches[0]["prompt_ids"].size(1) + batches[0]["completion_ids"].size(1)
        tokens_of_trl = sum(len(batch["advantages"]) for batch in batches) * width
        tokens = tokens_of_trl if lengths is None else sum(deal.tokens for deal in deals)
        trained_tokens = [int(token_mask(batch).sum()) for batch in results]
        own = [tokens, tokens_of_trl, *trained_tokens]
        counted = torch.tensor([own], dtype=torch.int64, device=self.accelerator.device)
        tokens, tokens_of_trl, *trained_tokens = self.accelerator.gather(counted).sum(0).tolist()
        micro_batches = []
        for i, weight in enumerate(_metric_weights(trained_tokens, accumulated)):
            shared = None
            if lengths is not None and deals[i].shares:
                numbers = [lengths.prompt_number[row] for row in deals[i].rows]
                shared = SharedPrompts.of(numbers, joined["advantages"].device)
            micro_batches.append(
                MicroBatch(
                    results[i], factors[i], torch.tensor(weight, dtype=torch.float32), allowed.prompt_scores, shared
                )
            )
        return Compacted(micro_batches, deals, allowed, tokens, tokens_of_trl)

    def advise_on_checkpointing(
        self, batches: Sequence[dict[str, Any]], parts: Parts, accumulated: int, compacted: Compacted
    ) -> bool:
        """
        Say how much more would be left out without gradient checkpointing, if that is much. A collective.

        Args:
            batches (`Sequence[dict]`): TRL's micro-batches of a generation batch.
            parts ([`Parts`]): what could be left out then.
            accumulated (`int`): micro-batches of an optimizer step.
            compacted ([`Compacted`]): what is computed of these micro-batches with it.

        Returns:
            `bool`: whether these micro-batches tell. They do not where no rows with a gradient have the same prompt.
        """
        if not parts.shared_prompts:
            return True
        joined = join(batches)
        deals = self._deal(batches, joined, RowLengths.of(joined), self.check.kept & parts, accumulated)
        own = sum(deal.tokens for deal in deals)
        counted = torch.tensor([own], dtype=torch.int64, device=self.accelerator.device)
        tokens = int(self.accelerator.gather(counted).sum())
        share = 1 - tokens / compacted.tokens
        if share >= WORTH_MENTIONING and self.accelerator.is_main_process:
            logger.warning(
                f"`gradient_checkpointing=False` would save a further {share:.0%} of the update's tokens: the prompt "
                "of a group could be computed once. It needs more memory for activations."
            )
        return tokens < compacted.tokens

    def _deal(
        self,
        batches: Sequence[dict[str, Any]],
        joined: dict[str, Any],
        lengths: RowLengths | None,
        parts: Parts,
        accumulated: int,
    ) -> list[Deal]:
        """The rows and the width of each micro-batch. A collective."""
        num_batches = len(batches)
        rows_per_batch = len(batches[0]["advantages"])
        length = segment_length(num_batches, parts, accumulated)
        if not _holds_steps(num_batches, accumulated):
            parts = parts.without(["exchange"])
        if lengths is None:
            needed = torch.ones(num_batches * rows_per_batch, dtype=torch.bool)
        elif parts.zero_rows:
            needed = has_gradient(joined).cpu()
        else:
            needed = torch.ones(len(joined["advantages"]), dtype=torch.bool)
        needed_by_segment = needed.view(-1, length * rows_per_batch)  # a segment: micro-batches that exchange rows
        counts = needed_by_segment.sum(1).to(self.accelerator.device)
        most = self.accelerator.gather(counts).view(-1, len(counts)).amax(0).clamp(min=length).tolist()
        if lengths is None:
            return []
        deals = []
        for segment, (is_needed, total) in enumerate(zip(needed_by_segment, most, strict=True)):
            start = segment * length * rows_per_batch
            rows = [start + row for row in torch.argsort(~is_needed, stable=True).tolist()]
            num_needed = int(is_needed.sum())
            # Other processes may need more rows: the shortest of those without a gradient complete them
            others = sorted(rows[num_needed:], key=lambda row: lengths.prompt[row] + lengths.completion[row])
            chosen = sorted([*rows[:num_needed], *others[: total - num_needed]])
            limits = None
            if self.accelerator.num_processes == 1:
                starts = range(start, start + length * rows_per_batch, rows_per_batch)
                limits = Limits.of_trl(lengths, [range(first, first + rows_per_batch) for first in starts])
            deals += deal_rows(chosen, length, lengths, parts, multiple=self.multiple, limits=limits)
        return deals


def _consistent(parts: Parts) -> Parts:
    """The parts without those that need another: prompts are shared where completions alone are scored."""
    return parts if parts.prompt_scores else parts.without(["shared_prompts"])


def segment_length(num_batches: int, parts: Parts, accumulated: int) -> int:
    """
    How many micro-batches of a generation batch may exchange their rows, because they belong to one optimizer step.

    Args:
        num_batches (`int`): micro-batches of the generation batch.
        parts ([`Parts`]): what may be left out; without `exchange`, rows keep their micro-batch.
        accumulated (`int`): micro-batches of an optimizer step.
    """
    if not (parts.exchange and _holds_steps(num_batches, accumulated)):
        return 1
    return min(accumulated, num_batches)


def _holds_steps(num_batches: int, accumulated: int) -> bool:
    """Whether a generation batch lies within one optimizer step, or holds whole ones; else no rows are exchanged."""
    length = min(accumulated, num_batches)
    return num_batches % length == 0 and accumulated % length == 0


def join(batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Micro-batches joined along their rows."""
    joined = {}
    for key, value in batches[0].items():
        is_by_row = isinstance(value, torch.Tensor) and value.dim() > 0
        joined[key] = torch.cat([batch[key] for batch in batches]) if is_by_row else value
    return joined


def _rows_of_deal(joined: dict[str, Any], deal: Deal) -> dict[str, Any]:
    rows = torch.tensor(deal.rows, dtype=torch.int64, device=joined["advantages"].device)
    return rows_of(joined, rows, prompt_width=deal.prompt_width, completion_width=deal.completion_width)


def _factor(joined: dict[str, Any], deal: Deal, num_batches: int, loss_type: str) -> torch.Tensor:
    """What the mean over a micro-batch's rows or tokens is multiplied by, to be a mean over TRL's micro-batch."""
    device = joined["advantages"].device
    rows_per_batch = len(joined["advantages"]) // num_batches
    if loss_type in OVER_TOKENS:
        # Rows keep their micro-batch
        start = min(deal.rows) // rows_per_batch * rows_per_batch
        mask = token_mask(joined)
        tokens_of_batch = mask[start : start + rows_per_batch].sum().clamp(min=1)
        return mask[deal.rows].sum().float() / tokens_of_batch
    if loss_type in OVER_ROWS:
        return torch.tensor(len(deal.rows) / rows_per_batch, dtype=torch.float32, device=device)
    return torch.tensor(1.0, dtype=torch.float32, device=device)


# Metrics


def _metric_weights(trained_tokens: Sequence[int], accumulated: int) -> list[float]:
    """
    Weights of the metrics of micro-batches, by the tokens of each that all processes train on. TRL logs the plain
    mean of the micro-batches' means over tokens. With these weights it is the mean over all tokens of an
    optimizer step, whichever micro-batch a row is in.
    """
    length = min(accumulated, len(trained_tokens))
    weights = []
    for start in range(0, len(trained_tokens), length):
        of_step = trained_tokens[start : start + length]
        mean = sum(of_step) / len(of_step)
        weights += [tokens / mean if mean else 1.0 for tokens in of_step]
    return weights


def scale_token_means(store: dict[str, list[float]], weight: float, importance_sampling_level: str) -> None:
    """
    Weigh the means over tokens that TRL's loss has entered last.

    Args:
        store (`dict`): TRL's lists of values, by metric.
        weight (`float`): see [`MicroBatch`].
        importance_sampling_level (`str`): TRL's option; with `"token"`, means of ratios are over tokens, too.
    """
    names = [*TOKEN_MEANS]
    if importance_sampling_level == "token":
        names += TOKEN_MEANS_OF_RATIOS
    for name in names:
        if store.get(name):
            store[name][-1] *= weight
