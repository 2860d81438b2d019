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
        inputs (`dict`): the micro-batch; reads `replayed`, `behavior_per_token_logps` and the masks.

    Returns:
        `torch.Tensor` of shape `(8,)`: count, sum and sum of squares of `ratio`, its maximum, sums of `capped` and `clipped`, and
        of 1 - pi_behavior, of all and of what is clipped.
    """
    chosen = inputs["replayed"].unsqueeze(1).expand_as(ratio)
    mask = inputs["completion_mask"]
    mask = (mask * inputs["tool_mask"] if "tool_mask" in inputs else mask).bool()
    open_mass = (1 - inputs["behavior_per_token_logps"].exp()).nan_to_num(0.0)
    if ratio.size(1) > 1:
        chosen = chosen & mask
    else:
        open_mass = (open_mass * mask).sum(1, keepdim=True)
    values = ratio[chosen].float()
    largest = values.max() if values.numel() else values.new_zeros(())
    count = values.new_tensor(float(values.numel()))
    shares = [flags.expand_as(ratio)[chosen].float().sum() for flags in (capped, clipped)]
    mass = open_mass[chosen].float()
    masses = [mass.sum(), (mass * clipped.expand_as(ratio)[chosen]).sum()]
    return torch.stack([count, values.sum(), (values**2).sum(), largest, *shares, *masses])


def summarize(gathered: torch.Tensor) -> dict[str, float]:
    r"""
    The metrics of a micro-batch from all processes' [`ratio_statistics`]. NaN, which TRL leaves out, if there are no tokens.

    - `replay/ratio_mean`, `replay/ratio_max`: of the ratio w;
    - `replay/ess`: effective sample size as a share, \((\sum w)^2 / (n \sum w^2)\): 1 where all ratios are equal, 1/n
      where one outweighs all others;
    - `replay/capped_share`: whose ratio was held at `replay_ratio_cap`;
    - `replay/clipped_share`: whose gradient the clip removes;
    - `replay/clipped_mass`: the same, with each token weighted by 1 - pi_behavior, since a token that the policy was certain of
      cannot move. NaN if it was certain of all.
    """
    gathered = gathered.view(-1, 8)
    count, total, squares, _, capped, clipped, mass, clipped_mass = gathered.double().sum(0).tolist()
    if not count:
        names = ("ratio_mean", "ratio_max", "ess", "capped_share", "clipped_share", "clipped_mass")
        return {f"replay/{name}": _NAN for name in names}
    return {
        "replay/ratio_mean": total / count,
        "replay/ratio_max": gathered[:, 3].max().item(),
        "replay/ess": total**2 / (count * squares) if squares else _NAN,
        "replay/capped_share": capped / count,
        "replay/clipped_share": clipped / count,
        "replay/clipped_mass": clipped_mass / mass if mass else _NAN,
    }
