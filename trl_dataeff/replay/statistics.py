"""What is logged of the ratio pi_old / pi_behavior, over the tokens or sequences of replayed rows."""

from __future__ import annotations

from typing import Any

import torch


_NAN = float("nan")


def ratio_statistics(
    ratio: torch.Tensor, capped: torch.Tensor, clipped: torch.Tensor, inputs: dict[str, Any]
) -> torch.Tensor:
    """
    Sums over the tokens (or sequences) of replayed rows, to be gathered from all processes.

    Args:
        ratio (`torch.Tensor` of shape `(B, T)` or `(B, 1)`): not truncated.
        capped (`torch.Tensor` of the shape of `ratio`), clipped (`torch.Tensor` of shape `(B, T)` or `(B, 1)`): see
            [`summarize`]; bool.
        inputs (`dict`): the micro-batch; reads `replayed` and the masks.

    Returns:
        `torch.Tensor` of shape `(6,)`: count, sum and sum of squares of `ratio`, its maximum, sums of `capped` and `clipped`.
    """
    chosen = inputs["replayed"].unsqueeze(1).expand_as(ratio)
    if ratio.size(1) > 1:
        mask = inputs["completion_mask"]
        chosen = chosen & (mask * inputs["tool_mask"] if "tool_mask" in inputs else mask).bool()
    values = ratio[chosen].float()
    largest = values.max() if values.numel() else values.new_zeros(())
    count = values.new_tensor(float(values.numel()))
    shares = [flags.expand_as(ratio)[chosen].float().sum() for flags in (capped, clipped)]
    return torch.stack([count, values.sum(), (values**2).sum(), largest, *shares])


def summarize(gathered: torch.Tensor) -> dict[str, float]:
    r"""
    The metrics of a micro-batch from all processes' [`ratio_statistics`]. NaN, which TRL leaves out, if there are no tokens.

    - `replay/ratio_mean`, `replay/ratio_max`: of the ratio w;
    - `replay/ess`: effective sample size as a share, \((\sum w)^2 / (n \sum w^2)\): 1 where all ratios are equal, 1/n
      where one outweighs all others;
    - `replay/capped_share`: whose ratio was held at `replay_ratio_cap`;
    - `replay/clipped_share`: whose gradient the clip removes.
    """
    gathered = gathered.view(-1, 6)
    count, total, squares, _, capped, clipped = gathered.double().sum(0).tolist()
    if not count:
        names = ("ratio_mean", "ratio_max", "ess", "capped_share", "clipped_share")
        return {f"replay/{name}": _NAN for name in names}
    return {
        "replay/ratio_mean": total / count,
        "replay/ratio_max": gathered[:, 3].max().item(),
        "replay/ess": total**2 / (count * squares) if squares else _NAN,
        "replay/capped_share": capped / count,
        "replay/clipped_share": clipped / count,
    }
