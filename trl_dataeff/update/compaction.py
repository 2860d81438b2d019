"""
Rows whose advantage is exactly 0 skip the forward and backward pass of TRL's micro-batches: they have the loss 0 and
no gradient, so that this changes rounding alone, once the loss is divided by the rows or tokens of the whole
micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from trl import GRPOTrainer

from trl_dataeff.rollouts.distributed import Processes


#: TRL's loss types, by what they average over: the rows or the tokens of a micro-batch, or `num_items_in_batch`
OVER_ROWS = ("grpo", "sapo", "dr_grpo", "luspo")
OVER_TOKENS = ("bnpo",)
OVER_BATCH = ("cispo", "dapo", "vespo")
FACTOR = "skip_factor"  # key of a micro-batch: factor on its loss


def can_skip_rows(trainer: GRPOTrainer) -> bool:
    """Whether rows with an advantage of 0 have no gradient in a trainer's loss, so that skipping them is exact."""
    known_loss = trainer.loss_type in OVER_ROWS + OVER_TOKENS + OVER_BATCH
    has_kl_term = trainer.beta != 0.0
    router_counts_rows = trainer.aux_loss_enabled  # of a mixture of experts
    selects_tokens = trainer.top_entropy_quantile != 1.0
    other_terms = has_kl_term or trainer._entropy_bonus_enabled or router_counts_rows or selects_tokens
    return known_loss and not other_terms


def has_gradient(batch: Mapping[str, Any]) -> torch.Tensor:
    """Rows of a batch whose advantage is not 0, bool `(rows,)`."""
    advantages: torch.Tensor = batch["advantages"]  # (rows,), or (rows, T) where a subclass gives them by token
    return (advantages != 0).view(len(advantages), -1).any(1)


def token_mask(batch: Mapping[str, Any]) -> torch.Tensor:
    """1 for the tokens of a batch that are trained on, `(rows, T)`."""
    mask: torch.Tensor = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


# The loss


class RowSkipper:
    """
    Leaves rows without a gradient out of the micro-batches of a generation batch. Every process trains on the same
    number of rows in a micro-batch, at least one, because TRL gathers values by row.

    Rows are exchanged among the micro-batches of an optimizer step, so that as many as possible have a single row; not
    for the `loss_type` `"bnpo"`, whose loss depends on which rows share a micro-batch.

    Args:
        loss_type (`str`): TRL's loss type.
        accumulated (`int`): micro-batches of an optimizer step.
        processes ([`Processes`]): of the run.
    """

    def __init__(self, loss_type: str, accumulated: int, processes: Processes):
        self.loss_type = loss_type
        self.accumulated = accumulated
        self.processes = processes

    def apply(self, batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """
        Leave out rows. A collective if there are several processes.

        Args: batches (`Sequence[dict]`): the micro-batches of a generation batch. If those of one process hold a list,
            as
                with images, all processes keep all of their rows.

        Returns:
            `list[dict]`: micro-batches with fewer rows, each with the factor on its loss under `skip_factor`.
        """
        holds_list = any(isinstance(value, list) for value in batches[0].values())
        if holds_list or self.loss_type in OVER_TOKENS:
            exchanged = list(batches)
        else:
            exchanged = self._exchange_rows(batches)
        counts = torch.stack([(has_gradient(batch) | holds_list).sum() for batch in exchanged])
        most = self.processes.gather(counts).view(-1, len(exchanged)).amax(0)
        sizes = most.clamp(min=1).tolist()
        return [self._with_rows(batch, size) for batch, size in zip(exchanged, sizes, strict=True)]

    def _exchange_rows(self, batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The micro-batches with the rows that have a gradient first, among those of each optimizer step."""
        length = min(self.accumulated, len(batches))
        # A generation batch lies within one optimizer step, or holds whole ones; else none are exchanged
        if len(batches) % length != 0 or self.accumulated % length != 0:
            return list(batches)
        result: list[dict[str, Any]] = []
        for start in range(0, len(batches), length):
            result += gradient_first(batches[start : start + length])
        return result

    def _with_rows(self, batch: dict[str, Any], size: int) -> dict[str, Any]:
        """The micro-batch with so many rows: those with a gradient and, if there are fewer, others."""
        device = batch["advantages"].device
        num_rows = len(batch["advantages"])
        if size == num_rows:
            return {**batch, FACTOR: torch.ones(())}
        gradient_first_order = torch.argsort(~has_gradient(batch), stable=True)
        rows = torch.sort(gradient_first_order[:size]).values
        result = rows_of(batch, rows)
        if self.loss_type in OVER_TOKENS:
            all_tokens = token_mask(batch).sum().clamp(min=1)
            result[FACTOR] = token_mask(result).sum() / all_tokens
        elif self.loss_type in OVER_ROWS:
            result[FACTOR] = torch.tensor(size / num_rows, device=device)
        else:
            result[FACTOR] = torch.tensor(1.0, device=device)
        return result


def gradient_first(batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same rows in micro-batches of the same size, those with a gradient first, else in their order."""
    size = len(batches[0]["advantages"])
    joined = {}
    for key, value in batches[0].items():
        joined[key] = torch.cat([batch[key] for batch in batches]) if _is_by_row(value) else value
    order = torch.argsort(~has_gradient(joined), stable=True)
    return [rows_of(joined, rows) for rows in order.split(size)]


def rows_of(batch: dict[str, Any], rows: torch.Tensor) -> dict[str, Any]:
    """These rows of a micro-batch; what is not by row stays."""
    return {key: value[rows] if _is_by_row(value) else value for key, value in batch.items()}


def _is_by_row(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


# The pass for old log-probs


def rows_for_old_logps(
    rewards: np.ndarray, weights: torch.Tensor, group_size: int, processes: Processes
) -> torch.Tensor:
    """
    Rows of this process whose old log-probs count: all but those whose advantage will be 0. Each process makes the
    pass over as many rows.

    Args:
        rewards (`np.ndarray` of shape `(n, F)`): of all processes' completions, in the order of ranks, NaN where a
            function gave no score.
        weights (`torch.Tensor` of shape `(F,)`): weights of the reward functions, whose weighted sum is the reward.
        group_size (`int`): G, completions per group.
        processes ([`Processes`]): of the run.

    Returns:
        `torch.Tensor` of shape `(rows,)`, int64, in ascending order: at least one.
    """
    all_rewards = torch.from_numpy(rewards).to(processes.device)
    is_zero = zero_advantage(all_rewards, weights, group_size).view(processes.world_size, -1)
    size = max(int((~is_zero).sum(1).max()), 1)
    gradient_first_order = torch.argsort(is_zero[processes.rank], stable=True)
    return torch.sort(gradient_first_order[:size]).values


def zero_advantage(rewards: torch.Tensor, weights: torch.Tensor, group_size: int) -> torch.Tensor:
    """
    Completions whose advantage will be exactly 0 in TRL: those whose total reward is the mean of their group's, by the
    same operations.

    Args:
        rewards (`torch.Tensor` of shape `(n, F)`): NaN where a function gave no score.
        weights (`torch.Tensor` of shape `(F,)`): weights of the reward functions.
        group_size (`int`): G, which divides n.

    Returns:
        `torch.Tensor` of shape `(n,)`, bool: true also for completions that no function scored.
    """
    totals = (rewards * weights.to(rewards).unsqueeze(0)).nansum(dim=1)
    totals[rewards.isnan().all(dim=1)] = torch.nan
    means = totals.view(-1, group_size).nanmean(dim=1).repeat_interleave(group_size)
    has_advantage = (totals - means).abs() > 0  # false for NaN
    return ~has_advantage


def forward_of_rows(
    forward: Callable[..., tuple[Any, ...]],
    rows: torch.Tensor,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any, Any]:
    """
    TRL's forward pass over some rows alone.

    Args:
        forward (`Callable`): TRL's `_get_per_token_logps_and_entropies` of a model.
        rows (`torch.Tensor` of shape `(rows,)`): which rows.
        input_ids, attention_mask (`torch.Tensor` of shape `(B, P + T)`): of all rows.
        *args, **kwargs: further arguments of `forward`.

    Returns:
        What `forward` returns, with log-probs `(B, T)` that are NaN for the other rows.
    """
    logps, *others = forward(input_ids[rows], attention_mask[rows], *args, **kwargs)
    every = logps.new_full((len(input_ids), logps.size(1)), torch.nan)
    return every.index_copy(0, rows, logps), *others
