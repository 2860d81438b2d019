"""`DifficultyPredictor`: what predictors of success rates have in common, and checks of what they read."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from trl_dataeff.utils import UserError


KEPT_GROUPS, KEPT_BATCHES = 2048, 16  # groups that a run keeps for the fit: at least so many, and of so many batches

#: `(N, h)`: a tensor, an array or a memory map, of float16, bfloat16 or float32; all values are finite.
Embeddings: TypeAlias = torch.Tensor | np.ndarray
#: `(n,)`: success rates or weights of groups, a tensor or an array.
Values: TypeAlias = torch.Tensor | np.ndarray
ROWS = 4096  # embeddings that are converted to float32 at a time


class PredictorError(UserError):
    """A predictor is unknown, cannot be read, or does not fit the embeddings or success rates that it is given."""


class Groups(NamedTuple):
    """
    Groups that a predictor is fitted to, oldest first, each of another prompt.

    Attributes:
        ids (`np.ndarray` of shape `(n,)`): int64, prompt of each group: a row of the embeddings.
        p (`np.ndarray` of shape `(n,)`): float32, success rates in [0, 1].
        weight (`np.ndarray` of shape `(n,)`): float32, weights >= 0; in a run, a group counts less the older it is.
    """

    ids: np.ndarray
    p: np.ndarray
    weight: np.ndarray


class DifficultyPredictor(ABC):
    """
    Predicts the success rates of prompts from their embeddings, on the CPU.

    `project` computes what depends on the embedding alone, `predict_projected` the rest:
    `predict(E) == predict_projected(project(E))`. Fitting again to the same data gives the same predictions, bit by bit.
    """

    @abstractmethod
    def fit(self, E: Embeddings, p: Values, weight: Values | None = None) -> None:
        """
        Fit to groups.

        Args:
            E (`torch.Tensor` or `np.ndarray` of shape `(n, h)`): embedding of each group's prompt.
            p (`torch.Tensor` or `np.ndarray` of shape `(n,)`): success rates in [0, 1]; NaN ones are left out.
            weight (`torch.Tensor` or `np.ndarray` of shape `(n,)`, *optional*): weights >= 0 of the groups; all 1 if not given.

        Raises:
            PredictorError: shapes disagree, or values are out of range.
        """

    @abstractmethod
    def project_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Projections `(n, d)` of float32 embeddings `(n, h)`, which may be changed in place."""

    @abstractmethod
    def predict_projected(self, Z: torch.Tensor, groups: Groups | None = None) -> torch.Tensor:
        """
        Success rates, float32 `(N,)` in [0, 1], from projections `(N, d)`. With the `groups` last given to `update`, and
        the projections of all prompts, no prompt is predicted by comparison with its own group.
        """

    @property
    @abstractmethod
    def fitted(self) -> bool:
        """Whether it can predict."""

    @property
    @abstractmethod
    def embedding_width(self) -> int:
        """Width h of the embeddings that it takes; 0 if any width will do."""

    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that was fitted, by name."""

    @abstractmethod
    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Restore what `tensors` returned. Raises a `KeyError` or `RuntimeError` if they are those of another predictor."""

    def settings(self) -> dict[str, Any]:
        """Arguments of the class that make an unfitted copy: `cls(**settings)`. JSON values."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters if hasattr(self, name)}

    def project(self, E: Embeddings) -> torch.Tensor:
        """Projections, float32 `(N, d)`, of embeddings `(N, h)`, which are converted to float32 some rows at a time."""
        check_width(E, self.embedding_width)
        starts = range(0, max(len(E), 1), ROWS)
        return torch.cat([self.project_rows(take(E, np.arange(len(E))[start : start + ROWS])) for start in starts])

    def predict(self, E: Embeddings) -> torch.Tensor:
        """Success rates, float32 `(N,)` in [0, 1], of prompts with embeddings `(N, h)`."""
        if not self.fitted:
            raise PredictorError(f"This {type(self).__name__} has not been fitted: call `fit` first.")
        return self.predict_projected(self.project(E))

    # In a run

    def capacity(self, batch_groups: int) -> int:
        """Number of newest groups that a run keeps, by the groups of a generation batch."""
        return max(KEPT_GROUPS, KEPT_BATCHES * batch_groups)

    def start(self, E: Embeddings) -> None:
        """Prepare for a run, once, with the embeddings `(N, h)` of all prompts."""

    def refit(self, E: Embeddings, groups: Groups, seed: int) -> bool:
        """
        Do the slow part of fitting, if there are groups enough, every `fit_every` generation batches. Returns whether it was
        done: if so, all prompts are projected again; if not, it is called in the next batch.
        """
        return False

    @abstractmethod
    def update(self, E: Embeddings, Z: torch.Tensor, groups: Groups) -> None:
        """
        Do the fast part of fitting, before each prediction, from the embeddings `(N, h)` and projections `(N, d)` of all
        prompts, which stay as they are. There may be no groups.
        """


def take(E: Embeddings, ids: np.ndarray) -> torch.Tensor:
    """Float32 copy `(len(ids), h)` of the rows `ids` of `E`."""
    return torch.as_tensor(E[ids]).float()


def check_width(E: Embeddings, width: int) -> None:
    """Raise [`PredictorError`] if `E` is not of shape `(N, width)`; any width will do if `width` is 0."""
    if E.ndim != 2:
        raise PredictorError(f"Embeddings have shape {tuple(E.shape)}; they need one row per prompt, (N, h).")
    if width and E.shape[1] != width:
        raise PredictorError(
            f"The predictor was fitted to embeddings of width {width}, and these have width {E.shape[1]}, of another model. Embed "
            "the prompts with its model, or fit a predictor to these."
        )


def check_labels(E: Embeddings, width: int, p: Values, weight: Values | None) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Success rates and weights of the same groups, float32 `(n,)`; the weight of a NaN rate is 0. Raises [`PredictorError`] if
    they do not fit the rows of `E`, `E` is not of this width, or they are out of range.
    """
    check_width(E, width)
    p = torch.as_tensor(p, dtype=torch.float32)
    weight = torch.ones_like(p) if weight is None else torch.as_tensor(weight, dtype=torch.float32)
    if p.shape != (len(E),) or weight.shape != p.shape:
        shapes = f"success rates of shape {tuple(p.shape)} and weights of shape {tuple(weight.shape)}"
        raise PredictorError(f"{len(E)} embeddings, {shapes}: each embedding takes one of each.")
    unknown = p.isnan()
    if bool(((p < 0) | (p > 1)).any()):
        low, high = p[~unknown].aminmax()
        raise PredictorError(f"Success rates lie in [0, 1]; these reach from {low:g} to {high:g}.")
    if not bool((weight >= 0).all() and weight.isfinite().all()):
        raise PredictorError("Weights of groups are finite and not negative; some of these are not.")
    return torch.where(unknown, 0.0, p), torch.where(unknown, 0.0, weight)
