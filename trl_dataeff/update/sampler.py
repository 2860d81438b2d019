"""
vLLM's log-probs. TRL corrects for their difference from the policy's by a ratio, and makes a forward pass over each
generation batch for it. Where generation and optimization are aligned, the loss computes the same log-probs: then the
ratio is computed there, and the pass is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from trl import GRPOConfig, GRPOTrainer


#: TRL's metrics of the ratio, which it logs in its pass
METRICS = (
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
    "sampling/importance_sampling_ratio/min",
    "sampling/importance_sampling_ratio/mean",
    "sampling/importance_sampling_ratio/max",
)


def is_aligned(trainer: GRPOTrainer) -> bool:
    """Whether the policy of a generation batch's loss is the one that sampled it: a step trains on whole batches."""
    config = cast(GRPOConfig, trainer.args)
    passes = cast(int, config.steps_per_generation) * trainer.num_iterations  # the config fills it in
    return config.gradient_accumulation_steps % passes == 0


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
        if not (trainer.use_vllm and trainer.vllm_importance_sampling_correction):
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
