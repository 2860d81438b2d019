"""`LogisticDifficultyPredictor`: logistic regression on the leading principal components of the embeddings."""

from __future__ import annotations

import numpy as np
import torch

from trl_dataeff.difficulty.predictor import ROWS, DifficultyPredictor, Embeddings, Groups, Values, check_labels, take
from trl_dataeff.utils import check_number


BASIS_ROWS = 20_000
NEWTON_STEPS = 100
PRECISION = 2.0**-10  # of float16, relative
CLAMP = 1e-4  # bounds of the mean success rate that an intercept without any spread in its labels is taken from


class LogisticDifficultyPredictor(DifficultyPredictor):
    """
    Ridge logistic regression of success rates on principal components of the standardised embeddings. A component whose
    variance is v times that of the first one is scaled to the variance sqrt(v), half way to whitening: the directions in
    which kinds of prompts differ are rarely the largest, and the smallest are noise.

    Minimises `sum_i w_i BCE(p_i, sigmoid(z_i c + b)) + l2 / 2 |c - c_0|^2` over `c` and the unpenalised `b`, in
    float64. `c_0` is 0, or the coefficients that [`anchor`] keeps.

    Args:
        components (`int`, *optional*, defaults to `32`): principal components; fewer if the embeddings have fewer.
        l2 (`float`, *optional*, defaults to `0.1`): ridge, in units of a group's weight; greater than 0.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, components: int = 32, l2: float = 0.1):
        check_number("components", components, "[1, inf)", integer=True)
        check_number("l2", l2, "(0, inf)")
        self.components, self.l2 = components, l2
        self.mean, self.basis, self.intercept = torch.zeros(0), torch.zeros(0, 0), torch.zeros(1)
        self.coefficients = self.prior = torch.zeros(0)  # empty: none

    @property
    def fitted(self) -> bool:
        return len(self.coefficients) > 0

    @property
    def embedding_width(self) -> int:
        return len(self.mean)

    def fit_basis(self, E: Embeddings) -> None:
        """
        Compute the principal components of a pool from its embeddings `(N, h)`, N > 0, and forget earlier fits. Reads at most
        20,000 rows, evenly spread.
        """
        ids = np.unique(np.linspace(0, len(E) - 1, min(len(E), BASIS_ROWS)).astype(np.int64))
        mean, covariance = _moments(E, ids)
        # A few dimensions of a language model's hidden states are far larger than all others. Differences that are lost
        # in the precision of float16, in which embeddings are kept, are noise
        deviation = (covariance.diagonal() + (PRECISION * mean) ** 2).sqrt()
        scale = torch.where(deviation > 0, 1 / deviation, 0.0)
        values, vectors = torch.linalg.eigh(scale[:, None] * covariance * scale)
        count = min(self.components, len(values))
        values, vectors = values.flip(0)[:count].clamp_min(0), vectors.flip(1)[:, :count]
        # A direction in which the pool does not differ says nothing about it
        kept = values > 1e-10 * values[0].clamp_min(1e-30)
        vectors = torch.where(kept, vectors / (values * values[0]).pow(0.25), 0.0)
        basis = scale[:, None] * vectors
        largest = basis.gather(0, basis.abs().argmax(dim=0, keepdim=True))
        self.mean = mean.float()
        self.basis = torch.where(largest < 0, -basis, basis).float().contiguous()
        self.coefficients = self.prior = torch.zeros(0)

    def anchor(self) -> None:
        """Regularise later fits towards the present coefficients instead of 0, to keep what was learned before."""
        self.prior = self.coefficients

    def fit(self, E: Embeddings, p: Values, weight: Values | None = None) -> None:
        if not self.embedding_width:
            self.fit_basis(E)
        self.fit_projected(self.project(E), p, weight)

    def fit_projected(self, Z: torch.Tensor, p: Values, weight: Values | None = None) -> None:
        """Fit to projections `(n, d)`; otherwise the same as [`fit`]."""
        rates, weights = check_labels(Z, 0, p, weight)
        used = weights > 0
        X = torch.cat([Z[used], torch.ones(int(used.sum()), 1)], dim=1).double()
        prior = torch.zeros(X.shape[1], dtype=torch.float64)
        if len(self.prior):
            prior[:-1] = self.prior
        theta = _newton(X, rates[used].double(), weights[used].double(), self.l2, prior)
        self.coefficients, self.intercept = theta[:-1].float(), theta[-1:].float()

    def project_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.sub_(self.mean) @ self.basis

    def predict_projected(self, Z: torch.Tensor, groups: Groups | None = None) -> torch.Tensor:
        return torch.sigmoid(Z @ self.coefficients + self.intercept)

    def start(self, E: Embeddings) -> None:
        """Find the principal components of the pool if there are none, and [`anchor`]."""
        if not self.embedding_width:
            self.fit_basis(E)
        self.anchor()

    def update(self, E: Embeddings, Z: torch.Tensor, groups: Groups) -> None:
        """Fit again to these groups. Without any, the coefficients stay as they are."""
        if len(groups.ids):
            self.fit_projected(Z[groups.ids], groups.p, groups.weight)

    def tensors(self) -> dict[str, torch.Tensor]:
        tensors = {"mean": self.mean, "basis": self.basis, "intercept": self.intercept}
        fitted = {"coefficients": self.coefficients, "prior": self.prior}
        return tensors | {name: value for name, value in fitted.items() if len(value)}

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        self.mean, self.basis, self.intercept = tensors["mean"], tensors["basis"], tensors["intercept"]
        self.coefficients, self.prior = (tensors.get(name, torch.zeros(0)) for name in ("coefficients", "prior"))


def _moments(E: Embeddings, ids: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean `(h,)` and covariance `(h, h)` of the rows `ids`, in float64, by two passes in chunks."""
    pieces = [ids[start : start + ROWS] for start in range(0, len(ids), ROWS)]
    mean = torch.zeros(E.shape[1], dtype=torch.float64)
    for piece in pieces:
        mean += take(E, piece).double().sum(dim=0)
    mean /= len(ids)
    covariance = torch.zeros(len(mean), len(mean), dtype=torch.float64)
    for piece in pieces:
        rows = take(E, piece).double() - mean
        covariance += rows.T @ rows
    return mean, covariance / len(ids)


def _newton(X: torch.Tensor, p: torch.Tensor, weight: torch.Tensor, l2: float, prior: torch.Tensor) -> torch.Tensor:
    """
    Coefficients and, last, the intercept, `(d + 1,)`, by Newton's method with halved steps where the loss would rise.
    Without labels: the prior; with labels that are all 0 or all 1, whose intercept would run away: the prior's
    coefficients, and the intercept of a mean clamped to [1e-4, 1 - 1e-4].
    """
    theta = prior.clone()
    if not len(p):
        return theta
    mean = float((weight * p).sum() / weight.sum())
    theta[-1] = torch.logit(torch.tensor(mean).clamp(CLAMP, 1 - CLAMP).double())
    if bool((p == p[0]).all()) and float(p[0]) in (0.0, 1.0):
        return theta
    ridge = torch.full_like(theta, l2)
    ridge[-1] = 0.0

    def loss(at: torch.Tensor) -> torch.Tensor:
        scores = X @ at
        bce = torch.nn.functional.softplus(scores) - p * scores
        return (weight * bce).sum() + 0.5 * (ridge * (at - prior) ** 2).sum()

    present = loss(theta)
    for _ in range(NEWTON_STEPS):
        q = torch.sigmoid(X @ theta)
        gradient = X.T @ (weight * (q - p)) + ridge * (theta - prior)
        hessian = X.T @ (X * (weight * q * (1 - q))[:, None]) + torch.diag(ridge)
        hessian[-1, -1] += 1e-12 * float(weight.sum())
        step = torch.linalg.solve(hessian, gradient)
        scale, moved = 1.0, loss(theta - step)
        while moved > present and scale > 1e-6:
            scale /= 2
            moved = loss(theta - scale * step)
        if moved > present or float(step.abs().max()) < 1e-10:
            break
        theta, present = theta - scale * step, moved
    return theta
