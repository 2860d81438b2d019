"""
Rows whose advantage is exactly 0 skip the forward and backward pass of TRL's micro-batches: they have the loss 0 and no gradient, so
that this changes rounding alone, once the loss is divided by the rows or tokens of the whole micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trl_dataeff.rollouts.distributed import Processes


#: TRL's loss types, by what they average over: the rows or the tokens of a micro-batch, or `num_items_in_batch`
OVER_ROWS = ("grpo", "sapo", "dr_grpo", "luspo")
OVER_TOKENS = ("bnpo",)
OVER_BATCH = ("cispo", "dapo", "vespo")
FACTOR = "skip_factor"  # key of a micro-batch: factor on its loss


class RowSkipper:
    """
    Leaves rows without a gradient out of the micro-batches of a generation batch. Every process trains on the same number of rows
    in a micro-batch, at least one, because TRL gathers values by row.

    Rows are exchanged among the `accumulated` micro-batches of an optimizer step, so that as many as possible have a single row;
    not for the `loss_type` `"bnpo"`, whose loss depends on which rows share a micro-batch.
    """

    def __init__(self, loss_type: str, accumulated: int, processes: Processes):
        self.loss_type, self.accumulated, self.processes = loss_type, accumulated, processes

    def apply(self, batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """
        The micro-batches with fewer rows, each with the factor on its loss under `skip_factor`. A collective if there are
        several processes. If those of one process hold a list, as with images, all processes keep all of their rows.
        """
        holds_list = any(isinstance(value, list) for value in batches[0].values())
        if not holds_list and self.loss_type not in OVER_TOKENS:
            step = min(self.accumulated, len(batches))
            # A generation batch lies within one optimizer step, or holds whole ones; else none are exchanged
            if len(batches) % step == 0 and self.accumulated % step == 0:
                batches = [new for i in range(0, len(batches), step) for new in gather_active(batches[i : i + step])]
        counts = torch.stack([(is_active(batch) | holds_list).sum() for batch in batches])
        kept = self.processes.gather(counts).view(-1, len(batches)).amax(0).clamp(min=1).tolist()
        return [self._without_rest(batch, n) for batch, n in zip(batches, kept, strict=True)]

    def _without_rest(self, batch: dict[str, Any], n: int) -> dict[str, Any]:
        """The micro-batch with `n` rows: those with a gradient and, if there are fewer, others."""
        if n == len(batch["advantages"]):
            return {**batch, FACTOR: torch.ones(())}
        rows = torch.sort(torch.argsort(~is_active(batch), stable=True)[:n]).values
        result = rows_of(batch, rows)
        if self.loss_type in OVER_TOKENS:
            factor = token_mask(result).sum() / token_mask(batch).sum().clamp(min=1)
        else:
            factor = torch.tensor(n / len(batch["advantages"]) if self.loss_type in OVER_ROWS else 1.0)
        result[FACTOR] = factor.to(batch["advantages"].device)
        return result


def is_active(batch: dict[str, Any]) -> torch.Tensor:
    """Rows of a micro-batch whose advantage is not 0, bool `(rows,)`."""
    advantages: torch.Tensor = batch["advantages"]  # (rows,), or (rows, T) where a subclass gives them by token
    return (advantages != 0).view(len(advantages), -1).any(1)


def token_mask(batch: dict[str, Any]) -> torch.Tensor:
    """1 for the tokens of a batch that are trained on, `(rows, T)`."""
    mask: torch.Tensor = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


def gather_active(batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same rows in micro-batches of the same size, those with a gradient first, else in their order."""
    order = torch.argsort(~torch.cat([is_active(batch) for batch in batches]), stable=True)
    size = len(batches[0]["advantages"])
    joined = {
        key: torch.cat([batch[key] for batch in batches]) if _by_row(value) else value
        for key, value in batches[0].items()
    }
    return [rows_of(joined, rows) for rows in order.split(size)]


def rows_of(batch: dict[str, Any], rows: torch.Tensor) -> dict[str, Any]:
    """These rows of a micro-batch; what is not by row stays."""
    return {key: value[rows] if _by_row(value) else value for key, value in batch.items()}


def _by_row(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def zero_advantage(rewards: torch.Tensor, weights: torch.Tensor, group_size: int) -> torch.Tensor:
    """
    Completions whose advantage will be exactly 0 in TRL, bool `(n,)`: those whose total reward is the mean of their group's, by the
    same operations, from `rewards` `(n, F)`, NaN where a function gave no score, and `weights` `(F,)`.
    """
    totals = (rewards * weights.to(rewards).unsqueeze(0)).nansum(dim=1)
    totals[rewards.isnan().all(dim=1)] = torch.nan
    means = totals.view(-1, group_size).nanmean(dim=1).repeat_interleave(group_size)
    return ~((totals - means).abs() > 0)  # unscored ones, too
