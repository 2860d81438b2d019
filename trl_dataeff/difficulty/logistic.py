"""`LogisticDifficultyPredictor`: logistic regression on the leading principal components of the embeddings."""

from __future__ import annotations

import numpy as np
import torch

from trl_dataeff.difficulty.predictor import ROWS, DifficultyPredictor, Embeddings, Groups, Values, check_labels, take
from trl_dataeff.utils import check_number


BASIS_ROWS = 20_000  # embeddings that the principal components are computed from, at most
PRECISION = 2.0**-10  # of float16, relative
NEGLIGIBLE_VARIANCE = 1e-10  # of a component, relative to the first one
CLAMP = 1e-4  # bounds of the mean success rate that an intercept without any spread in its labels is taken from

NEWTON_STEPS = 100
NEWTON_TOLERANCE = 1e-10
SMALLEST_SCALE = 1e-6  # of a step that is halved until the loss does not rise


class LogisticDifficultyPredictor(DifficultyPredictor):
    """
    Ridge logistic regression of success rates on principal components of the standardised embeddings. A component
    whose variance is v times that of the first one is scaled to the variance sqrt(v), half way to whitening: the
    directions in which kinds of prompts differ are rarely the largest, and the smallest are noise.

    Minimises `sum_i w_i BCE(p_i, sigmoid(z_i c + b)) + l2 / 2 |c - c_0|^2` over `c` and the unpenalised `b`, in
    float64. `c_0` is 0, or the coefficients that [`anchor`] keeps.

    Args:
        components (`int`, *optional*, defaults to `32`): principal components; fewer if the embeddings have fewer.
        l2 (`float`, *optional*, defaults to `3.0`): ridge, in units of a group's weight; greater than 0. A small one
            lets a single failed group condemn all prompts that resemble it, which are then not drawn again.

    Attributes:
        mean (`torch.Tensor` of shape `(h,)`): float32, mean of the embeddings; empty before the components are known.
        basis (`torch.Tensor` of shape `(h, d)`): float32, the scaled principal components.
        coefficients (`torch.Tensor` of shape `(d,)`): float32, c; empty before the first fit.
        intercept (`torch.Tensor` of shape `(1,)`): float32, b.
        prior (`torch.Tensor` of shape `(d,)`): float32, c_0; empty for 0.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, components: int = 32, l2: float = 3.0):
        check_number("components", components, "[1, inf)", integer=True)
        check_number("l2", l2, "(0, inf)")
        self.components = components
        self.l2 = l2
        self.mean = torch.zeros(0, dtype=torch.float32)
        self.basis = torch.zeros(0, 0, dtype=torch.float32)
        self.coefficients = torch.zeros(0, dtype=torch.float32)
        self.intercept = torch.zeros(1, dtype=torch.float32)
        self.prior = torch.zeros(0, dtype=torch.float32)

    @property
    def fitted(self) -> bool:
        return len(self.coefficients) > 0

    @property
    def embedding_width(self) -> int:
        return len(self.mean)

    def fit_basis(self, E: Embeddings) -> None:
        """
        Compute the principal components of a pool, and forget earlier fits. Reads at most 20,000 rows, evenly spread.

        Args:
            E (`torch.Tensor` or `np.ndarray` of shape `(N, h)`): embeddings of all prompts, N > 0.
        """
        num_rows = min(len(E), BASIS_ROWS)
        ids = np.unique(np.linspace(0, len(E) - 1, num_rows).astype(np.int64))
        mean, covariance = _moments(E, ids)  # (h,), (h, h)
        # A few dimensions of a language model's hidden states are far larger than all others: standardise them.
        # Differences that are lost in the precision of float16, in which embeddings are kept, are noise
        deviation = (covariance.diagonal() + (PRECISION * mean) ** 2).sqrt()
        scale = torch.where(deviation > 0, 1 / deviation, 0.0)
        correlation = scale[:, None] * covariance * scale
        values, vectors = torch.linalg.eigh(correlation)  # ascending (h,), and a column for each: (h, h)
        count = min(self.components, len(values))
        values = values.flip(0)[:count].clamp_min(0)  # (d,)
        vectors = vectors.flip(1)[:, :count]  # (h, d)
        # A direction in which the pool does not differ says nothing about it
        largest = values[0]
        is_kept = values > NEGLIGIBLE_VARIANCE * largest.clamp_min(1e-30)
        half_whitened = vectors / (values * largest).pow(0.25)
        basis = scale[:, None] * torch.where(is_kept, half_whitened, 0.0)  # (h, d)
        self.mean = mean.float()
        self.basis = _with_settled_signs(basis).float().contiguous()
        self.coefficients = torch.zeros(0, dtype=torch.float32)
        self.prior = torch.zeros(0, dtype=torch.float32)

    def anchor(self) -> None:
        """Regularise later fits towards the present coefficients instead of 0, to keep what was learned before."""
        self.prior = self.coefficients

    def fit(self, E: Embeddings, p: Values, weight: Values | None = None) -> None:
        if not self.embedding_width:
            self.fit_basis(E)
        self.fit_projected(self.project(E), p, weight)

    def fit_projected(self, Z: torch.Tensor, p: Values, weight: Values | None = None) -> None:
        """
        Fit to groups, given the projections of their prompts.

        Args:
            Z (`torch.Tensor` of shape `(n, d)`): projection of each group's prompt.
            p (`torch.Tensor` or `np.ndarray` of shape `(n,)`): see [`fit`].
            weight (`torch.Tensor` or `np.ndarray` of shape `(n,)`, *optional*): see [`fit`].

        Raises:
            PredictorError: shapes disagree, or values are out of range.
        """
        rates, weights = check_labels(Z, 0, p, weight)
        used = weights > 0
        ones = torch.ones(int(used.sum()), 1, dtype=torch.float32)
        X = torch.cat([Z[used], ones], dim=1).double()  # (n, d + 1); the intercept is the last coefficient
        prior = torch.zeros(X.shape[1], dtype=torch.float64)
        if len(self.prior):
            prior[:-1] = self.prior
        theta = _fit_by_newton(X, rates[used].double(), weights[used].double(), self.l2, prior)
        self.coefficients = theta[:-1].float()
        self.intercept = theta[-1:].float()

    def project_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.sub_(self.mean) @ self.basis

    def predict_projected(self, Z: torch.Tensor, groups: Groups | None = None) -> torch.Tensor:
        return torch.sigmoid(Z @ self.coefficients + self.intercept)

    def start(self, E: Embeddings) -> None:
        """
        Find the principal components of the pool if there are none, and [`anchor`].

        Args:
            E (`torch.Tensor` or `np.ndarray` of shape `(N, h)`): embeddings of all prompts.
        """
        if not self.embedding_width:
            self.fit_basis(E)
        self.anchor()

    def update(self, E: Embeddings, Z: torch.Tensor, groups: Groups) -> None:
        """
        Fit again to these groups. Without any, the coefficients stay as they are. See [`DifficultyPredictor.update`].
        """
        if len(groups.ids):
            self.fit_projected(Z[groups.ids], groups.p, groups.weight)

    def tensors(self) -> dict[str, torch.Tensor]:
        tensors = {"mean": self.mean, "basis": self.basis, "intercept": self.intercept}
        if len(self.coefficients):
            tensors["coefficients"] = self.coefficients
        if len(self.prior):
            tensors["prior"] = self.prior
        return tensors

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        self.mean = tensors["mean"]
        self.basis = tensors["basis"]
        self.intercept = tensors["intercept"]
        none = torch.zeros(0, dtype=torch.float32)
        self.coefficients = tensors.get("coefficients", none)
        self.prior = tensors.get("prior", none)


def _moments(E: Embeddings, ids: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean `(h,)` and covariance `(h, h)` of the rows `ids`, in float64, by two passes in chunks."""
    pieces = [ids[start : start + ROWS] for start in range(0, len(ids), ROWS)]
    total = torch.zeros(E.shape[1], dtype=torch.float64)
    for piece in pieces:
        total += take(E, piece).double().sum(dim=0)
    mean = total / len(ids)
    covariance = torch.zeros(len(mean), len(mean), dtype=torch.float64)
    for piece in pieces:
        rows = take(E, piece).double() - mean
        covariance += rows.T @ rows
    return mean, covariance / len(ids)


def _with_settled_signs(basis: torch.Tensor) -> torch.Tensor:
    """Columns `(h, d)` whose largest entry is positive: an eigenvector's sign depends on the library."""
    row_of_largest = basis.abs().argmax(dim=0, keepdim=True)  # (1, d)
    largest = basis.gather(0, row_of_largest)  # (1, d)
    return torch.where(largest < 0, -basis, basis)


def _fit_by_newton(
    X: torch.Tensor, p: torch.Tensor, weight: torch.Tensor, l2: float, prior: torch.Tensor
) -> torch.Tensor:
    """
    Minimise the loss of a logistic regression by Newton's method, with halved steps where the loss would rise.

    Args:
        X (`torch.Tensor` of shape `(n, d + 1)`): float64, projections and, last, a column of ones.
        p (`torch.Tensor` of shape `(n,)`): float64, success rates.
        weight (`torch.Tensor` of shape `(n,)`): float64, weights > 0.
        l2 (`float`): ridge.
        prior (`torch.Tensor` of shape `(d + 1,)`): float64, coefficients that the ridge pulls to.

    Returns:
        `torch.Tensor` of shape `(d + 1,)`: coefficients and, last, the intercept. Without labels: the prior. With
            labels that are all 0 or all 1, whose intercept would run away: the prior's coefficients, and the intercept
            of a mean clamped to [1e-4, 1 - 1e-4].
    """
    theta = prior.clone()
    if not len(p):
        return theta
    mean = float((weight * p).sum() / weight.sum())
    theta[-1] = torch.logit(torch.tensor(mean, dtype=torch.float32).clamp(CLAMP, 1 - CLAMP).double())
    all_equal = bool((p == p[0]).all())
    if all_equal and float(p[0]) in (0.0, 1.0):
        return theta
    ridge = torch.full_like(theta, l2)
    ridge[-1] = 0.0  # the intercept is not penalised

    def loss_at(at: torch.Tensor) -> torch.Tensor:
        scores = X @ at
        bce = torch.nn.functional.softplus(scores) - p * scores
        penalty = 0.5 * (ridge * (at - prior) ** 2).sum()
        return (weight * bce).sum() + penalty

    loss = loss_at(theta)
    for _ in range(NEWTON_STEPS):
        step = _newton_step(X, p, weight, ridge, prior, theta)
        scale = 1.0
        new_loss = loss_at(theta - step)
        while new_loss > loss and scale > SMALLEST_SCALE:
            scale /= 2
            new_loss = loss_at(theta - scale * step)
        if new_loss > loss or float(step.abs().max()) < NEWTON_TOLERANCE:
            break
        theta = theta - scale * step
        loss = new_loss
    return theta


def _newton_step(
    X: torch.Tensor,
    p: torch.Tensor,
    weight: torch.Tensor,
    ridge: torch.Tensor,
    prior: torch.Tensor,
    theta: torch.Tensor,
) -> torch.Tensor:
    """The inverse Hessian times the gradient of the loss at `theta`, `(d + 1,)`; see [`_fit_by_newton`]."""
    predicted = torch.sigmoid(X @ theta)  # (n,)
    gradient = X.T @ (weight * (predicted - p)) + ridge * (theta - prior)  # (d + 1,)
    curvature = weight * predicted * (1 - predicted)  # (n,)
    hessian = X.T @ (X * curvature[:, None]) + torch.diag(ridge)  # (d + 1, d + 1)
    # Nothing else bounds the curvature of the intercept from below
    hessian[-1, -1] += 1e-12 * float(weight.sum())
    return torch.linalg.solve(hessian, gradient)
