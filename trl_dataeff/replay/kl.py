r"""
What TRL's KL term lacks for rollouts of an earlier policy.

With `use_bias_correction_kl` TRL weighs it by \(\pi_\theta / \pi_{old}\), so that its gradient is that of the
reverse KL (DeepSeek-V3.2, arXiv 2512.02556). For a rollout of an earlier policy the weight has to be
\(\pi_\theta / \pi_b = \rho \, \pi_\theta / \pi_{old}\). TRL adds the term inside its loss, so [`missing_kl`], \(\rho - 1\)
times the term, is added to the loss afterwards. With the clip `"behavior"` nothing is missing; a ratio that is held at the cap
weighs the KL term too.
"""

from __future__ import annotations

from typing import Any

import torch


def missing_kl(
    inputs: dict[str, Any], per_token_logps: torch.Tensor, ratio: torch.Tensor, *, level: str, scale: torch.Tensor
) -> torch.Tensor:
    r"""
    \(\sum (\rho - 1) \, \pi_\theta / \pi_{old} \, k_3\) over tokens, with the weights `scale`; k3 is TRL's estimator of the KL.

    Args:
        inputs (`dict`): the micro-batch; reads `ref_per_token_logps` and `old_per_token_logps` (B, T).
        per_token_logps (`torch.Tensor` of shape `(B, T)`): the loss's own, with gradient.
        ratio (`torch.Tensor` of shape `(B, T)` or `(B, 1)`): rho.
        level (`str`): `"token"` or `"sequence"`, of the weight pi_theta / pi_old.
        scale (`torch.Tensor` of shape `(B, T)`): see [`token_scale`].
    """
    mask = (scale != 0).to(scale.dtype)
    old_logps = inputs.get("old_per_token_logps")
    log_weight = per_token_logps - (per_token_logps.detach() if old_logps is None else old_logps)
    if level == "sequence":
        log_weight = (log_weight * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1.0)
    difference: torch.Tensor = inputs["ref_per_token_logps"] - per_token_logps
    k3 = difference.exp() - difference - 1
    return ((ratio - 1) * log_weight.exp() * k3 * scale).sum()


def token_scale(
    mask: torch.Tensor,
    loss_type: str,
    *,
    num_items: torch.Tensor,
    num_processes: int,
    max_completion_length: int,
    accumulation_steps: int,
    steps_per_generation: int,
) -> torch.Tensor:
    """
    By how much the loss of each token counts in TRL's loss of a micro-batch, by loss type.

    Args:
        mask (`torch.Tensor` of shape `(B, T)`): 1 for tokens that are trained on.
        loss_type (`str`): TRL's loss type.
        num_items (`torch.Tensor`, scalar): tokens trained on in the generation batch, of all processes.
        num_processes (`int`), max_completion_length (`int`), accumulation_steps (`int`), steps_per_generation (`int`):
            of the run.

    Returns:
        `torch.Tensor` of shape `(B, T)`.
    """
    mask = mask.float()
    if loss_type in ("cispo", "dapo", "vespo"):
        return mask * num_processes * steps_per_generation / (num_items.clamp(min=1.0) * accumulation_steps)
    if loss_type == "bnpo":
        return mask / mask.sum().clamp(min=1.0) / accumulation_steps
    per_row = mask / len(mask) / accumulation_steps
    if loss_type in ("grpo", "sapo"):
        return per_row / mask.sum(-1, keepdim=True).clamp(min=1.0)
    if loss_type == "dr_grpo":
        return per_row / max_completion_length
    if loss_type == "luspo":
        return per_row
    raise ValueError(f"`loss_type={loss_type!r}` is not one whose KL term can be corrected for replayed rollouts.")
