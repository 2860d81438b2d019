"""
A Gaussian process on the logistic predictor's components, as its rival: a squared-exponential kernel, whose length scale
and noise are those of a small grid with the highest marginal likelihood. It is no part of the package: it predicts about
as well, and each prediction costs as much as there are groups.
"""

from __future__ import annotations

import math

import torch


LENGTHS = (0.5, 1.0, 2.0, 4.0)  # in units of the median distance of groups
NOISE = (0.03, 0.1, 0.3)  # variance, as a share of that of the success rates
ROWS = 4096


class GaussianProcess:
    """`fit_projected(Z, p, weight)` and `predict_projected(Z)`, as those of [`LogisticDifficultyPredictor`]."""

    def fit_projected(self, Z: torch.Tensor, p: torch.Tensor, weight: torch.Tensor | None = None) -> None:
        """`(n, d)` and `(n,)`, float32; a group's noise is divided by its weight."""
        self.Z, noise_share = Z, 1 / (torch.ones_like(p) if weight is None else weight).clamp_min(1e-3)
        self.mean, variance = p.mean(), p.var(correction=0).clamp_min(1e-4)
        distances = torch.cdist(Z, Z)
        median = distances.median().clamp_min(1e-6)
        best = -math.inf
        for length in LENGTHS:
            kernel = variance * torch.exp(-0.5 * (distances / (length * median)) ** 2)
            for noise in NOISE:
                L = torch.linalg.cholesky(kernel + torch.diag(variance * noise * noise_share))
                alpha = torch.cholesky_solve((p - self.mean)[:, None], L)[:, 0]
                likelihood = float(-0.5 * (p - self.mean) @ alpha - L.diagonal().log().sum())
                if likelihood > best:
                    best, self.alpha, self.length, self.variance = likelihood, alpha, length * median, variance

    def predict_projected(self, Z: torch.Tensor) -> torch.Tensor:
        """Posterior mean `(N,)`, cut to [0, 1]."""
        pieces = [
            torch.exp(-0.5 * (torch.cdist(rows, self.Z) / self.length) ** 2) @ self.alpha for rows in Z.split(ROWS)
        ]
        return (self.mean + self.variance * torch.cat(pieces)).clamp(0, 1)
