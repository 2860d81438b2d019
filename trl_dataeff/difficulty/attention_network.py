"""
The network of [`~trl_dataeff.difficulty.attention.AttentionDifficultyPredictor`], with the parameter names of the
paper's authors: two towers, and a calibration.
"""

from __future__ import annotations

import math

import torch
from torch import nn


class _Towers(nn.Module):
    def __init__(self, embedding_width: int, width: int, dropout: float):
        super().__init__()
        self.query_proj = _tower(embedding_width, width, dropout)
        self.ref_proj = _tower(embedding_width, width, dropout)
        self.ref_proj.load_state_dict(self.query_proj.state_dict())


class Regressor(nn.Module):
    def __init__(self, embedding_width: int, width: int, dropout: float):
        super().__init__()
        self.sim_head = _Towers(embedding_width, width, dropout)
        last = nn.Linear(10, 2)
        self.mlp = nn.Sequential(nn.Linear(2, 10), nn.ReLU(), last)
        nn.init.zeros_(last.weight)
        with torch.no_grad():  # temperature softplus(log(e - 1)) = 1, bias tanh(0) = 0
            last.bias.copy_(torch.tensor([math.log(math.e - 1), 0.0]))


def _tower(embedding_width: int, width: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        nn.LayerNorm(embedding_width),
        nn.Linear(embedding_width, width),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(width, width),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(width, width),
        nn.LayerNorm(width),
    )


def attention_average(
    zq: torch.Tensor,
    keys: torch.Tensor,
    log_weight: torch.Tensor,
    p_ref: torch.Tensor,
    exclude: torch.Tensor | None,
) -> torch.Tensor:
    """Attention averages of success rates: `(n, width) x (width, K) -> (n, K)`, `(n, K) x (K,) -> (n,)`."""
    scores = torch.addmm(log_weight, zq.float(), keys)
    if exclude is None:
        return torch.softmax(scores, dim=1) @ p_ref
    rows = torch.nonzero(exclude >= 0).squeeze(1)
    scores = scores.index_put((rows, exclude[rows]), scores.new_tensor(-math.inf))
    alone = scores.detach().amax(dim=1) == -math.inf
    if bool(alone.any()):
        scores = scores.masked_fill(alone[:, None], 0.0)
    return torch.where(alone, 0.5, torch.softmax(scores, dim=1) @ p_ref)


def weighted_moments(p: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted mean and unbiased deviation, scalars: with equal weights those of `torch.mean` and `torch.std`."""
    share = weight / weight.sum()
    mean = (share * p).sum()
    freedom = 1 - (share**2).sum()
    variance = (share * (p - mean) ** 2).sum() / freedom.clamp_min(1e-6)
    return mean, variance.sqrt()
