"""
vLLM's log-probs. TRL corrects for their difference from the policy's by a ratio, and makes a forward pass over each
generation batch for it. Where generation and optimization are aligned, the loss computes the same log-probs: then the
ratio is computed there, and the pass is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from trl import GRPOTrainer
from trl.trainer.utils import nanmax, nanmin

from trl_dataeff.compact.exact import corrects_sampler, token_mask


#: TRL's metrics of the ratio, which it logs in its pass
METRICS = (
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
    "sampling/importance_sampling_ratio/min",
    "sampling/importance_sampling_ratio/mean",
    "sampling/importance_sampling_ratio/max",
)


@dataclass(frozen=True)
class SamplerRatio:
    """
    TRL's importance-sampling ratio of the policy to vLLM's sampler, pi_old / pi_sampler.

    Attributes:
        mode: TRL's `vllm_importance_sampling_mode`: `"token_truncate"`, `"token_mask"`, `"sequence_truncate"` or
            `"sequence_mask"`.
        low: its lower bound, if there is one.
        high: its upper bound, if there is one.
    """

    mode: str
    low: float | None
    high: float | None

    @classmethod
    def of(cls, trainer: GRPOTrainer) -> SamplerRatio | None:
        """The ratio of a trainer's loss; `None` where TRL does not correct for the sampler."""
        if not corrects_sampler(trainer):
            return None
        return cls(
            mode=trainer.vllm_importance_sampling_mode,
            low=trainer.vllm_importance_sampling_clip_min,
            high=trainer.vllm_importance_sampling_clip_max,
        )

    @property
    def masks_sequences(self) -> bool:
        """Whether the ratio excludes whole sequences from the loss."""
        return self.mode == "sequence_mask"

    def of_rows(self, batch: dict[str, Any], old_logps: torch.Tensor) -> torch.Tensor:
        """The ratio of a batch's rows, whose log-probs under the policy are `old_logps` `(B, T)`."""
        return self(old_logps, batch["sampling_per_token_logps"], token_mask(batch))

    def __call__(self, old_logps: torch.Tensor, sampling_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """
        The ratio, truncated or masked.

        Args:
            old_logps (`torch.Tensor` of shape `(B, T)`): log-probs under the policy.
            sampling_logps (`torch.Tensor` of shape `(B, T)`): the sampler's; NaN: ratio 1.
            mask (`torch.Tensor` of shape `(B, T)`): 1 for the tokens that are trained on.

        Returns:
            `torch.Tensor`: `(B, T)` for tokens, `(B, 1)` for sequences; 0 where the mask excludes it.
        """
        log_ratio = torch.nan_to_num((old_logps - sampling_logps) * mask, nan=0.0)
        if self.mode.startswith("sequence"):
            log_ratio = log_ratio.sum(dim=-1, keepdim=True)
        ratio = log_ratio.exp()
        if self.mode.endswith("truncate"):
            return ratio.clamp(min=self.low, max=self.high)
        low = -math.inf if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


class SampledTokens:
    """What TRL's `sampling/*` metrics are made of, of one or several micro-batches."""

    def __init__(self) -> None:
        self._differences: list[torch.Tensor] = []
        self._ratios: list[torch.Tensor] = []

    def add(self, batch: dict[str, Any], is_stale: torch.Tensor | None = None) -> None:
        """
        Add the rows of a micro-batch.

        Args:
            batch (`dict`): with `old_per_token_logps` and `importance_sampling_ratio`.
            is_stale (`torch.Tensor` of shape `(B,)`, *optional*): rows that an earlier policy sampled, which are left
                out.
        """
        old_logps = batch["old_per_token_logps"]
        ratio = batch["importance_sampling_ratio"]  # (B, T), or (B, 1) for sequences
        fresh = ~old_logps.isnan().all(1, keepdim=True)  # (B, 1)
        if is_stale is not None:
            fresh = fresh & ~is_stale.unsqueeze(1)
        fresh_tokens = token_mask(batch).bool() & fresh  # (B, T)
        self._differences.append((old_logps - batch["sampling_per_token_logps"]).abs()[fresh_tokens])
        self._ratios.append(ratio[fresh] if ratio.size(1) == 1 else ratio[fresh_tokens])

    def metrics(self, gather: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """
        The metrics. A collective.

        Args:
            gather (`Callable`): that of the trainer's accelerator.

        Returns:
            `dict[str, float]`: by name; NaN, which TRL leaves out, without any row.
        """
        difference = torch.cat(self._differences)
        ratio = torch.cat(self._ratios)
        statistics: dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]] = {
            "sampling/sampling_logp_difference/mean": (difference, torch.nanmean),
            "sampling/sampling_logp_difference/max": (difference, nanmax),
            "sampling/importance_sampling_ratio/min": (ratio, nanmin),
            "sampling/importance_sampling_ratio/mean": (ratio, torch.nanmean),
            "sampling/importance_sampling_ratio/max": (ratio, nanmax),
        }
        own = torch.stack([reduce(values) for values, reduce in statistics.values()])
        by_process = gather(own).view(-1, len(own))  # (processes, statistics)
        metrics = {}
        for i, (name, (_, reduce)) in enumerate(statistics.items()):
            metrics[name] = reduce(by_process[:, i]).item()
        return metrics


def sampling_metrics(
    batch: dict[str, Any],
    gather: Callable[[torch.Tensor], torch.Tensor],
    is_stale: torch.Tensor | None = None,
) -> dict[str, float]:
    """
    TRL's `sampling/*` metrics of a batch. A collective if TRL has logged them.

    Args:
        batch (`dict`): TRL's batch.
        gather (`Callable`): that of the trainer's accelerator.
        is_stale (`torch.Tensor` of shape `(B,)`, *optional*): see [`SampledTokens.add`].

    Returns:
        `dict[str, float]`: see [`SampledTokens.metrics`]. Empty if TRL has not logged them.
    """
    if "importance_sampling_ratio" not in batch:
        return {}
    tokens = SampledTokens()
    tokens.add(batch, is_stale)
    return tokens.metrics(gather)
