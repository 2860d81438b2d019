"""
What predictors of success rates have in common, and the embeddings and success rates that they read: checked, in float32,
some rows at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import torch

from trl_dataeff.utils import UserError


KEPT_GROUPS, KEPT_BATCHES = 2048, 16  # groups that a run keeps for the fit: at least so many, and of so many batches

#: `(N, h)`: a tensor, an array or a memory map, of float16, bfloat16 or float32.
Embeddings: TypeAlias = torch.Tensor | np.ndarray
ROWS = 4096  # embeddings that are converted to float32 at a time


class PredictorError(UserError):
    """A predictor is unknown, cannot be read, or does not fit the embeddings or success rates that it is given."""


class ObservedGroups:
    """
    Groups that a predictor is fitted to in a run, oldest first, each of another prompt.

    Attributes:
        ids (`torch.Tensor` of shape `(n,)`): int64, prompt of each group.
        p (`torch.Tensor` of shape `(n,)`): float32, success rates in [0, 1].
        weight (`torch.Tensor` of shape `(n,)`): float32, weights >= 0; a group counts less the older it is.
        embeddings (`Callable`): reads the embeddings of the groups' prompts, float32 `(n, h)`.
        projections (`Callable`): what `project` makes of them, `(n, d)`; the whole pool is projected when first needed.
    """

    def __init__(
        self,
        ids: torch.Tensor,
        p: torch.Tensor,
        weight: torch.Tensor,
        embeddings: Callable[[], torch.Tensor],
        projections: Callable[[], torch.Tensor],
    ):
        self.ids, self.p, self.weight = ids, p, weight
        self.embeddings, self.projections = embeddings, projections

    def __len__(self) -> int:
        return len(self.ids)


class DifficultyPredictor(ABC):
    """
    Predicts the success rates of prompts from their embeddings.

    `project` computes what depends on the embedding alone, `predict_projected` the rest:
    `predict(E) == predict_projected(project(E))`. Fitting again to the same data gives the same predictions, bit by bit.

    Attributes:
        embedding (`str`): model whose embeddings it was fitted to; `""` if unknown.
    """

    embedding: str = ""

    @abstractmethod
    def fit(self, E: Embeddings, p: torch.Tensor, weight: torch.Tensor | None = None) -> None:
        """
        Fit to groups.

        Args:
            E (`torch.Tensor` or `np.ndarray` of shape `(n, h)`): embedding of each group's prompt.
            p (`torch.Tensor` of shape `(n,)`): success rates in [0, 1]; NaN ones are left out.
            weight (`torch.Tensor` of shape `(n,)`, *optional*): weights >= 0 of the groups; all 1 if not given.

        Raises:
            PredictorError: shapes disagree, or values are out of range.
        """

    @abstractmethod
    def project(self, E: Embeddings) -> torch.Tensor:
        """Projections, float32 `(N, d)`, of embeddings `(N, h)`, which are converted some rows at a time."""

    @abstractmethod
    def predict_projected(self, Z: torch.Tensor) -> torch.Tensor:
        """Success rates, float32 `(N,)` in [0, 1], from projections `(N, d)`."""

    @property
    @abstractmethod
    def fitted(self) -> bool:
        """Whether it can predict."""

    @property
    @abstractmethod
    def embedding_width(self) -> int:
        """Width h of the embeddings that it takes; 0 if any width will do."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Arguments of the class that make an unfitted copy: `cls(**settings)`. JSON values."""

    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that was fitted, by name."""

    @abstractmethod
    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Restore what `tensors` returned. Raises `KeyError`, `ValueError` or `RuntimeError` if they do not fit."""

    def predict(self, E: Embeddings) -> torch.Tensor:
        """Success rates, float32 `(N,)` in [0, 1], of prompts with embeddings `(N, h)`."""
        return self.predict_projected(self.project(E))

    # In a run

    def capacity(self, batch_groups: int) -> int:
        """Number of newest groups that a run keeps, by the groups of a generation batch."""
        return max(KEPT_GROUPS, KEPT_BATCHES * batch_groups)

    def start(self, E: Embeddings) -> None:
        """Prepare for a run, once, with the embeddings `(N, h)` of all prompts."""

    def refit(self, groups: ObservedGroups, seed: int) -> bool:
        """
        Do the slow part of fitting, if there are groups enough, every `fit_every` generation batches. Returns whether it was
        done: if so, all prompts are projected again; if not, it is called in the next batch.
        """
        return False

    @abstractmethod
    def update(self, groups: ObservedGroups) -> None:
        """Do the fast part of fitting, before each prediction. There may be no groups. Projections stay as they are."""

    def predict_pool(self, Z: torch.Tensor, groups: ObservedGroups) -> torch.Tensor:
        """
        Success rates, float32 `(N,)` in [0, 1], of all prompts from their projections `(N, d)`. `groups` are those last given
        to `update`.
        """
        return self.predict_projected(Z)


def chunks(E: Embeddings, width: int, device: torch.device | str = "cpu") -> Iterator[torch.Tensor]:
    """
    Float32 copies of the rows of `E`, `ROWS` at a time. Raises [`PredictorError`] if they are not `width` wide, or not
    finite.
    """
    check_width(E, width)
    for start in range(0, len(E), ROWS):
        rows = _rows(E, slice(start, start + ROWS))
        yield _finite(rows, np.arange(start, start + len(rows))).to(device)


def take(E: Embeddings, ids: np.ndarray) -> torch.Tensor:
    """Float32 copy `(len(ids), h)` of the rows `ids` of `E`. Raises [`PredictorError`] if they are not finite."""
    return _finite(_rows(E, ids), ids)


def check_width(E: Embeddings, width: int) -> None:
    """Raise [`PredictorError`] if `E` is not of shape `(N, width)`; any width will do if `width` is 0."""
    if E.ndim != 2:
        raise PredictorError(f"Embeddings have shape {tuple(E.shape)}; they need one row per prompt, (N, h).")
    if width and E.shape[1] != width:
        raise PredictorError(
            f"The predictor was fitted to embeddings of width {width}, and these have width {E.shape[1]}: they come "
            "from another model. Embed the prompts with the predictor's model, or fit a predictor to these."
        )


def check_labels(E: Embeddings, p: torch.Tensor, weight: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Success rates and weights of the same groups, float32 `(n,)` on the CPU; the weight of a NaN rate is 0. Raises
    [`PredictorError`] if they do not fit the rows of `E` or are out of range.
    """
    p = torch.as_tensor(p, dtype=torch.float32).cpu()
    weight = torch.ones_like(p) if weight is None else torch.as_tensor(weight, dtype=torch.float32).cpu()
    if p.shape != (len(E),) or weight.shape != p.shape:
        raise PredictorError(
            f"{len(E)} embeddings, success rates of shape {tuple(p.shape)} and weights of shape "
            f"{tuple(weight.shape)}: each embedding takes one of each."
        )
    unknown = p.isnan()
    rates = p[~unknown]
    if len(rates) and not bool((rates >= 0).all() and (rates <= 1).all()):
        raise PredictorError(f"Success rates lie in [0, 1]; these reach from {rates.min():g} to {rates.max():g}.")
    if not bool((weight >= 0).all() and weight.isfinite().all()):
        raise PredictorError("Weights of groups are finite and not negative; some of these are not.")
    return torch.where(unknown, 0.0, p), torch.where(unknown, 0.0, weight)


def _rows(E: Embeddings, index: slice | np.ndarray) -> torch.Tensor:
    if isinstance(E, torch.Tensor):
        return E[index].to(torch.float32, copy=True)
    return torch.from_numpy(np.array(E[index], dtype=np.float32))


def _finite(rows: torch.Tensor, ids: np.ndarray) -> torch.Tensor:
    bad = ~rows.isfinite().all(dim=1)
    if bool(bad.any()):
        first = ids[int(bad.nonzero()[0])]
        raise PredictorError(
            f"{int(bad.sum())} embeddings are not finite, the first in row {first}. Embed them again."
        )
    return rows
