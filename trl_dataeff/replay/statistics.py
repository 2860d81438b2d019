"""What is logged of pi_old / pi_behavior over replayed rows, and of pi_old / pi_sampler (vLLM) over fresh rows."""

from __future__ import annotations

import math
from typing import Any

import torch

from trl_dataeff.rollouts.distributed import Processes


def ratio_statistics(ratio: torch.Tensor, clipped: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
    """
    Sums over the tokens (or sequences) of replayed rows, to be gathered from all processes.

    Args:
        ratio (`torch.Tensor` of shape `(B, T)` or `(B, 1)`): not truncated.
        clipped (`torch.Tensor` of shape `(B, T)` or `(B, 1)`): whose gradient the clip removes; bool.
        inputs (`dict`): the micro-batch; reads `replayed` and the masks.

    Returns:
        `torch.Tensor` of shape `(4,)`: count, sum and sum of squares of `ratio`, sum of `clipped`.
    """
    chosen = inputs["replayed"].unsqueeze(1).expand_as(ratio)
    if ratio.size(1) > 1:
        mask = inputs["completion_mask"]
        chosen = chosen & (mask * inputs["tool_mask"] if "tool_mask" in inputs else mask).bool()
    values = ratio[chosen].float()
    count = values.new_tensor(float(values.numel()))
    return torch.stack([count, values.sum(), (values**2).sum(), clipped.expand_as(ratio)[chosen].float().sum()])


def summarize(gathered: torch.Tensor) -> dict[str, float]:
    r"""
    The metrics of a micro-batch from all processes' [`ratio_statistics`]. NaN, which TRL leaves out, if there are no tokens.

    - `replay/ess`: effective sample size of the ratios w as a share, \((\sum w)^2 / (n \sum w^2)\): 1 where all are equal,
      1/n where one outweighs all others;
    - `replay/clipped_share`: whose gradient the clip removes.
    """
    count, total, squares, clipped = gathered.reshape(-1, 4).double().sum(0).tolist()
    return {
        "replay/ess": total**2 / (count * squares) if squares else math.nan,
        "replay/clipped_share": clipped / count if count else math.nan,
    }


def sampling_statistics(batch: dict[str, Any]) -> torch.Tensor:
    """
    What TRL logs of vLLM's log-probs, over the tokens (or sequences) of fresh rows, to be gathered from all processes.

    Args:
        batch (`dict`): TRL's batch; reads `old_per_token_logps`, `sampling_per_token_logps`, `importance_sampling_ratio`,
            `replayed` and the masks.

    Returns:
        `torch.Tensor` of shape `(7,)`: of the absolute difference of log-probs count, sum and maximum; of the ratio count,
        sum, minimum and maximum.
    """
    mask, fresh = batch["completion_mask"], ~batch["replayed"].unsqueeze(1)
    chosen = (mask * batch["tool_mask"] if "tool_mask" in batch else mask).bool() & fresh
    difference = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]).abs()
    difference = difference[chosen & ~difference.isnan()]  # NaN: vLLM could not score the token
    ratio = batch["importance_sampling_ratio"]
    ratio = ratio[fresh if ratio.size(1) == 1 else chosen]
    nothing = ratio.new_tensor([math.inf, -math.inf])
    return torch.stack(
        [
            *(
                ratio.new_tensor(float(difference.numel())),
                difference.sum(),
                torch.cat([difference, -nothing[:1]]).max(),
            ),
            *(ratio.new_tensor(float(ratio.numel())), ratio.sum()),
            *(torch.cat([ratio, nothing[:1]]).min(), torch.cat([ratio, nothing[1:]]).max()),
        ]
    )


def sampling_metrics(batch: dict[str, Any], processes: Processes) -> dict[str, float]:
    """TRL's `sampling/*` metrics over fresh rows; empty if TRL has not logged them. A collective if it has."""
    if "importance_sampling_ratio" not in batch:
        return {}
    return summarize_sampling(processes.gather(sampling_statistics(batch)))


def summarize_sampling(gathered: torch.Tensor) -> dict[str, float]:
    """TRL's `sampling/*` metrics from all processes' [`sampling_statistics`]. NaN, which TRL leaves out, without fresh rows."""
    gathered = gathered.view(-1, 7)
    tokens, difference, _, ratios, total = gathered[:, :5].double().sum(0).tolist()
    largest, low, high = gathered[:, 2].max().item(), gathered[:, 5].min().item(), gathered[:, 6].max().item()
    return {
        "sampling/sampling_logp_difference/mean": difference / tokens if tokens else math.nan,
        "sampling/sampling_logp_difference/max": largest if tokens else math.nan,
        "sampling/importance_sampling_ratio/min": low if ratios else math.nan,
        "sampling/importance_sampling_ratio/mean": total / ratios if ratios else math.nan,
        "sampling/importance_sampling_ratio/max": high if ratios else math.nan,
    }
