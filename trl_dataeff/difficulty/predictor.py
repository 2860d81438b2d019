"""`DifficultyPredictor`: what predictors of success rates have in common, and checks of what they read."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from trl_dataeff.utils import UserError


# Groups that a run keeps for the fit: at least so many, and at least those of so many generation batches
KEPT_GROUPS = 2048
KEPT_BATCHES = 16

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
    `predict(E) == predict_projected(project(E))`. Fitting again to the same data gives the same predictions, bit by
    bit.
    """

    @abstractmethod
    def fit(self, E: Embeddings, p: Values, weight: Values | None = None) -> None:
        """
        Fit to groups.

        Args:
            E (`torch.Tensor` or `np.ndarray` of shape `(n, h)`): embedding of each group's prompt.
            p (`torch.Tensor` or `np.ndarray` of shape `(n,)`): success rates in [0, 1]; NaN ones are left out.
            weight (`torch.Tensor` or `np.ndarray` of shape `(n,)`, *optional*): weights >= 0 of the groups; all 1 if
                not given.

        Raises:
            PredictorError: shapes disagree, or values are out of range.
        """

    @abstractmethod
    def project_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """
        Compute what depends on the embeddings alone, of some prompts.

        Args:
            rows (`torch.Tensor` of shape `(n, h)`): float32 embeddings, which may be changed in place.

        Returns:
            `torch.Tensor` of shape `(n, d)`: float32 projections.
        """

    @abstractmethod
    def predict_projected(self, Z: torch.Tensor, groups: Groups | None = None) -> torch.Tensor:
        """
        Predict success rates from projections.

        Args:
            Z (`torch.Tensor` of shape `(N, d)`): projections of prompts.
            groups ([`Groups`], *optional*): those last given to `update`. With them, `Z` has the projections of all
                prompts, and no prompt is predicted by comparison with its own group.

        Returns:
            `torch.Tensor` of shape `(N,)`: float32 in [0, 1].
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
        """
        Restore what `tensors` returned.

        Args:
            tensors (`dict[str, torch.Tensor]`): what `tensors` returned.

        Raises:
            KeyError or RuntimeError: they are those of another predictor.
        """

    def settings(self) -> dict[str, Any]:
        """Arguments of the class that make an unfitted copy: `cls(**settings)`. JSON values."""
        arguments = inspect.signature(type(self)).parameters
        return {name: getattr(self, name) for name in arguments if hasattr(self, name)}

    def project(self, E: Embeddings) -> torch.Tensor:
        """
        Compute what depends on the embeddings alone, of all prompts. Embeddings are converted to float32 some rows at
        a time.

        Args:
            E (`torch.Tensor` or `np.ndarray` of shape `(N, h)`): embeddings of prompts.

        Returns:
            `torch.Tensor` of shape `(N, d)`: float32 projections.

        Raises:
            PredictorError: the embeddings have another width.
        """
        check_width(E, self.embedding_width)
        ids = np.arange(len(E))
        starts = range(0, max(len(E), 1), ROWS)  # without prompts a single empty piece, which has the width d
        pieces = [take(E, ids[start : start + ROWS]) for start in starts]
        return torch.cat([self.project_rows(piece) for piece in pieces])

    def predict(self, E: Embeddings) -> torch.Tensor:
        """
        Predict success rates.

        Args:
            E (`torch.Tensor` or `np.ndarray` of shape `(N, h)`): embeddings of prompts.

        Returns:
            `torch.Tensor` of shape `(N,)`: float32 in [0, 1].

        Raises:
            PredictorError: nothing was fitted before, or the embeddings have another width.
        """
        if not self.fitted:
            raise PredictorError(f"This {type(self).__name__} has not been fitted: call `fit` first.")
        return self.predict_projected(self.project(E))

    # In a run

    def capacity(self, batch_groups: int) -> int:
        """
        Number of newest groups that a run keeps.

        Args:
            batch_groups (`int`): groups of a generation batch.
        """
        return max(KEPT_GROUPS, KEPT_BATCHES * batch_groups)

    def start(self, E: Embeddings) -> None:
        """
        Prepare for a run. Called once.

        Args:
            E (`torch.Tensor` or `np.ndarray` of shape `(N, h)`): embeddings of all prompts.
        """

    def refit(self, E: Embeddings, groups: Groups, seed: int) -> bool:
        """
        Do the slow part of fitting, if there are groups enough. Called every `fit_every` generation batches.

        Args:
            E (`torch.Tensor` or `np.ndarray` of shape `(N, h)`): embeddings of all prompts.
            groups ([`Groups`]): the groups that the run keeps.
            seed (`int`): seed of this fit.

        Returns:
            `bool`: whether it was done. If so, all prompts are projected again; if not, it is called in the next
                batch.
        """
        return False

    @abstractmethod
    def update(self, E: Embeddings, Z: torch.Tensor, groups: Groups) -> None:
        """
        Do the fast part of fitting. Called before each prediction.

        Args:
            E (`torch.Tensor` or `np.ndarray` of shape `(N, h)`): embeddings of all prompts, which stay as they are.
            Z (`torch.Tensor` of shape `(N, d)`): projections of all prompts, which stay as they are.
            groups ([`Groups`]): the groups to predict from. There may be none.
        """


def take(E: Embeddings, ids: np.ndarray) -> torch.Tensor:
    """
    Copy rows of embeddings.

    Args:
        E (`torch.Tensor` or `np.ndarray` of shape `(N, h)`): embeddings.
        ids (`np.ndarray` of shape `(n,)`): rows.

    Returns:
        `torch.Tensor` of shape `(n, h)`: float32.
    """
    return torch.as_tensor(E[ids]).float()


def check_width(E: Embeddings, width: int) -> None:
    """
    Check the shape of embeddings.

    Args:
        E (`torch.Tensor` or `np.ndarray`): embeddings.
        width (`int`): width that they need; any will do if it is 0.

    Raises:
        PredictorError: they are not of shape `(N, width)`.
    """
    if E.ndim != 2:
        raise PredictorError(f"Embeddings have shape {tuple(E.shape)}; they need one row per prompt, (N, h).")
    if width and E.shape[1] != width:
        raise PredictorError(
            f"The predictor was fitted to embeddings of width {width}, and these have width {E.shape[1]}: they come "
            "from another model. Embed the prompts with the predictor's model, or fit a predictor to these."
        )


def check_labels(E: Embeddings, width: int, p: Values, weight: Values | None) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Check the success rates and weights of groups.

    Args:
        E (`torch.Tensor` or `np.ndarray` of shape `(n, h)`): embedding of each group's prompt.
        width (`int`): width that the embeddings need; any will do if it is 0.
        p (`torch.Tensor` or `np.ndarray` of shape `(n,)`): success rates in [0, 1], or NaN.
        weight (`torch.Tensor` or `np.ndarray` of shape `(n,)`, *optional*): weights >= 0; all 1 if not given.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: success rates and weights of the groups, float32 `(n,)`. Where the rate is
            NaN, both are 0.

    Raises:
        PredictorError: shapes disagree, or values are out of range.
    """
    check_width(E, width)
    p = torch.as_tensor(p, dtype=torch.float32)
    weight = torch.ones_like(p) if weight is None else torch.as_tensor(weight, dtype=torch.float32)
    if p.shape != (len(E),) or weight.shape != p.shape:
        raise PredictorError(
            f"{len(E)} embeddings, success rates of shape {tuple(p.shape)} and weights of shape "
            f"{tuple(weight.shape)}: each embedding takes one of each."
        )
    unknown = p.isnan()
    out_of_range = (p < 0) | (p > 1)
    if bool(out_of_range.any()):
        low, high = p[~unknown].aminmax()
        raise PredictorError(f"Success rates lie in [0, 1]; these reach from {low:g} to {high:g}.")
    is_weight = (weight >= 0) & weight.isfinite()
    if not bool(is_weight.all()):
        raise PredictorError("Weights of groups are finite and not negative; some of these are not.")
    return torch.where(unknown, 0.0, p), torch.where(unknown, 0.0, weight)
