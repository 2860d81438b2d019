r"""
The correction for rollouts of an earlier policy.

With \(\pi_\theta\) the policy, \(\pi_{old}\) the policy at the start of the window and \(\pi_b\) the one that sampled
the rollout, \(w = \pi_\theta / \pi_{old}\) and \(\rho = \pi_{old} / \pi_b > 0\):

    rho min(w A, clip(w, 1 - eps, 1 + eps) A) = min(rho w A, clip(rho w, rho (1 - eps), rho (1 + eps)) A)

so the objective with the clip centred on \(\pi_{old}\) (`"proximal"`) is TRL's own loss with advantages multiplied by
\(\rho\), whatever the loss type. The objective as printed in arXiv 2506.05316, clip(pi_theta / pi_b, 1 - eps, 1 + eps)
(`"behavior"`), is TRL's own loss with \(\pi_b\) in the place of \(\pi_{old}\).

A log-probability that is not known is NaN, and its ratio is 1: a row that was sampled in this window is all NaN.
"""

from __future__ import annotations

import torch


def behavior_ratio(
    old_logps: torch.Tensor, behavior_logps: torch.Tensor, mask: torch.Tensor, *, level: str
) -> torch.Tensor:
    r"""
    \(\pi_{old} / \pi_b\), not truncated.

    Args:
        old_logps (`torch.Tensor` of shape `(B, T)`): log-probs under the policy at the start of the window.
        behavior_logps (`torch.Tensor` of shape `(B, T)`): log-probs under the policy that sampled; NaN: ratio 1.
        mask (`torch.Tensor` of shape `(B, T)`): 1 for the tokens that are trained on.
        level (`str`): `"token"`, or `"sequence"` for the geometric mean over a completion's tokens (GSPO).

    Returns:
        `torch.Tensor` of shape `(B, T)` for tokens, 1 where `mask` is 0, or `(B, 1)` for sequences.
    """
    log_ratio = torch.nan_to_num(old_logps - behavior_logps, nan=0.0) * mask
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return log_ratio.exp()


def correct_inputs(
    inputs: dict, per_token_logps: torch.Tensor, *, clip: str, cap: float, level: str, loss_type: str
) -> torch.Tensor:
    """
    Put the correction into a micro-batch of TRL's loss, in place, once the loss has its log-probs. What is read here
    is `advantages` (B,), `behavior_per_token_logps` (B, T), and `old_per_token_logps` (B, T) where TRL has it.

    Args:
        inputs (`dict`): the micro-batch; its tensors are replaced, not changed.
        per_token_logps (`torch.Tensor` of shape `(B, T)`): the loss's own log-probs, detached. Where generation and
            optimization are aligned they are those of the policy at the start of the window.
        clip (`str`): `"proximal"` or `"behavior"`.
        cap (`float`): truncation of the ratio, for `"proximal"`.
        level (`str`): see [`behavior_ratio`].
        loss_type (`str`): TRL's loss type.

    Returns:
        `torch.Tensor`: pi_old / pi_behavior, `(B, T)` or `(B, 1)`, not truncated. The one that was put in, truncated for
        `"proximal"`, is in `inputs["replay_ratio"]`.
    """
    behavior_logps = inputs["behavior_per_token_logps"]
    mask = inputs["completion_mask"]
    if "tool_mask" in inputs:
        mask = mask * inputs["tool_mask"]
    old_logps = inputs.get("old_per_token_logps")
    old_logps = per_token_logps if old_logps is None else old_logps
    if loss_type == "vespo":
        level = "token"  # it sums the log ratios over the sequence itself
    full_ratio = behavior_ratio(old_logps, behavior_logps, mask, level=level)
    ratio = full_ratio.clamp(max=cap) if clip == "proximal" else full_ratio
    inputs["replay_ratio"] = ratio
    known = ~torch.isnan(behavior_logps)
    # The off-policy sequence mask measures the divergence from the policy that sampled
    sampled_logps = inputs.get("sampling_per_token_logps", old_logps)
    inputs["sampling_per_token_logps"] = torch.where(known, behavior_logps, sampled_logps)
    if "importance_sampling_ratio" in inputs:  # vLLM: TRL's pi_old / sampler, over which replayed rows have their own
        replayed = inputs["replayed"].unsqueeze(1)
        inputs["importance_sampling_ratio"] = inputs["importance_sampling_ratio"].masked_fill(replayed, 1.0)
    if clip == "behavior":
        inputs["old_per_token_logps"] = torch.where(known, behavior_logps, old_logps)
    elif loss_type == "vespo":
        # VESPO reshapes the sequence's ratio; this is its slot for rho
        inputs["importance_sampling_ratio"] = ratio * inputs.get("importance_sampling_ratio", 1.0)
    else:
        inputs["advantages"] = inputs["advantages"].unsqueeze(1) * ratio
    return full_ratio


def ratio_statistics(ratio: torch.Tensor, inputs: dict) -> torch.Tensor:
    """Sum, count and maximum of `ratio` over the tokens (or sequences) of replayed rows, `(3,)`, to be gathered."""
    chosen = inputs["replayed"].unsqueeze(1).expand_as(ratio)
    if ratio.size(1) > 1:
        mask = inputs["completion_mask"]
        chosen = chosen & (mask * inputs["tool_mask"] if "tool_mask" in inputs else mask).bool()
    values = ratio[chosen]
    largest = values.max() if values.numel() else ratio.new_zeros(())
    return torch.stack([values.sum(), ratio.new_tensor(float(values.numel())), largest]).float()


def reduce_ratio_statistics(gathered: torch.Tensor) -> tuple[float, float]:
    """Mean and maximum over all processes' [`ratio_statistics`]; NaN, which TRL leaves out, if there are no tokens."""
    gathered = gathered.view(-1, 3)
    count = gathered[:, 1].sum().item()
    if not count:
        return float("nan"), float("nan")
    return gathered[:, 0].sum().item() / count, gathered[:, 2].max().item()
