"""
The contract of difficulty predictors, their registry, and the folder in which one is saved.

A predictor implements the abstract methods of [`DifficultyPredictor`]. That is enough for a run. Overriding the methods
under "in a run" makes it faster or better there. What is deliberately not here: reading a saved predictor
(`loading.py`), and checks of embeddings and success rates (`arrays.py`).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, TypeVar

import numpy as np
import torch
from safetensors.torch import save_file

from trl_dataeff.registry import PluginRegistry
from trl_dataeff.utils import UserError, write_atomically
from trl_dataeff.version import FORMAT, __version__


CONFIG_FILE = "config.json"
TENSORS_FILE = "predictor.safetensors"
ENTRY_POINTS = "trl_dataeff.predictors"
KEPT_GROUPS, KEPT_BATCHES = 2048, 16  # groups that a run keeps for the fit: at least so many, and of so many batches

#: `(N, h)`: a tensor, an array or a memory map, of float16, bfloat16 or float32.
Embeddings: TypeAlias = torch.Tensor | np.ndarray
C = TypeVar("C", bound=type)


class PredictorError(UserError):
    """A predictor is unknown, cannot be read, or does not fit the embeddings or success rates that it is given."""


class ObservedGroups:
    """
    Groups that a predictor is fitted to in a run, oldest first, each of another prompt.

    Attributes:
        ids (`torch.Tensor` of shape `(n,)`): int64, prompt of each group.
        p (`torch.Tensor` of shape `(n,)`): float32, success rates in [0, 1].
        weight (`torch.Tensor` of shape `(n,)`): float32, weights >= 0; a group counts less the older it is.
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
        self._embeddings, self._projections = embeddings, projections

    def __len__(self) -> int:
        """Number of groups, n."""
        return len(self.ids)

    def embeddings(self) -> torch.Tensor:
        """Embeddings of the groups' prompts, float32 `(n, h)`; read when called."""
        return self._embeddings()

    def projections(self) -> torch.Tensor:
        """What `project` makes of the groups' prompts, `(n, d)`; the whole pool is projected when first needed."""
        return self._projections()


class DifficultyPredictor(ABC):
    """
    Predicts the success rates of prompts from their embeddings.

    `project` computes what depends on the embedding alone, `predict_projected` the rest:
    `predict(E) == predict_projected(project(E))`. Fitting again to the same data gives the same predictions, bit by bit.

    Attributes:
        name (`str`): name that the class is registered as, see [`register_predictor`].
        embedding (`str`): model whose embeddings it was fitted to; `""` if unknown.
    """

    name: ClassVar[str] = ""
    embedding: str = ""

    @classmethod
    def create(cls, embedding_width: int, seed: int, /, **arguments: Any) -> DifficultyPredictor:
        """
        New predictor for a run. Override it if the class needs the width or the seed; by default neither is passed on.

        Args:
            embedding_width (`int`): width h of the embeddings.
            seed (`int`): seed of the run.
            arguments: arguments of the class.
        """
        return cls(**arguments)

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
        """Projections, float32 `(N, d)`, of embeddings `(N, h)`. N may be millions: convert some rows at a time."""

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
        """Everything that was fitted, by name. Dtypes that NumPy has."""

    @abstractmethod
    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Restore what `tensors` returned. Raises `KeyError`, `ValueError` or `RuntimeError` if they do not fit."""

    def predict(self, E: Embeddings) -> torch.Tensor:
        """Success rates, float32 `(N,)` in [0, 1], of prompts with embeddings `(N, h)`."""
        return self.predict_projected(self.project(E))

    # ------------------------------------------------------------ in a run

    def capacity(self, batch_groups: int) -> int:
        """
        Number of groups that a run keeps for `update`, the newest ones. Default: those of 16 generation batches, and at
        least 2048.

        Args:
            batch_groups (`int`): groups in a generation batch.
        """
        return max(KEPT_GROUPS, KEPT_BATCHES * batch_groups)

    def start(self, E: Embeddings) -> None:
        """
        Prepare for a run. Called once, before everything else. Default: nothing.

        Args:
            E (`torch.Tensor` or `np.ndarray` of shape `(N, h)`): embeddings of all prompts.
        """

    def refit(self, groups: ObservedGroups, seed: int) -> bool:
        """
        Do the slow part of fitting. Called every `fit_every` generation batches, before `update`. Default: nothing.

        Args:
            groups ([`ObservedGroups`]): all groups that are kept.
            seed (`int`): seed of this fit.

        Returns:
            `bool`: whether it was done. If so, all prompts are projected again; if not, it is called in the next batch.
        """
        return False

    def update(self, groups: ObservedGroups) -> bool:
        """
        Do the fast part of fitting, before each prediction. Default: `fit`, if a group has a weight above 0.

        Args:
            groups ([`ObservedGroups`]): the groups to predict from; possibly none.

        Returns:
            `bool`: whether projections have changed, so that all prompts are projected again. Default: after a `fit`.
        """
        if not bool((groups.weight > 0).any()):
            return False
        self.fit(groups.embeddings(), groups.p, groups.weight)
        return True

    def predict_pool(self, Z: torch.Tensor, groups: ObservedGroups) -> torch.Tensor:
        """
        Success rates, float32 `(N,)` in [0, 1], of all prompts. Default: `predict_projected(Z)`.

        Args:
            Z (`torch.Tensor` of shape `(N, d)`): projections of all prompts, by prompt id.
            groups ([`ObservedGroups`]): those last given to `update`, for predictors that must not predict a prompt
                from its own group.
        """
        return self.predict_projected(Z)

    # ------------------------------------------------------------ on disk

    def save(self, folder: str | Path) -> None:
        """
        Write `predictor.safetensors` and then `config.json`. [`~trl_dataeff.difficulty.loading.load_predictor`] reads
        them.

        Args:
            folder (`str` or `Path`): created if it does not exist.

        Raises:
            PredictorError: the class is not registered, so that it could not be loaded.
        """
        name = _PREDICTORS.name_of(type(self))
        if name is None:
            raise PredictorError(
                f"{type(self).__name__} is not registered, so that it could not be loaded again. Decorate the class with "
                "@register_predictor('a name')."
            )
        folder = Path(folder)
        tensors = {key: value.detach().cpu().contiguous().clone() for key, value in self.tensors().items()}
        config = {
            "predictor": name,
            "format": FORMAT,
            "trl_dataeff": __version__,
            "embedding": self.embedding,
            "settings": self.settings(),
        }
        write_atomically(folder / TENSORS_FILE, partial(save_file, tensors))
        write_atomically(folder / CONFIG_FILE, lambda path: path.write_text(json.dumps(config, indent=2) + "\n"))


_PREDICTORS = PluginRegistry(DifficultyPredictor, "predictor", ENTRY_POINTS, PredictorError)  # type: ignore[type-abstract]


def register_predictor(name: str) -> Callable[[C], C]:
    """
    Class decorator that registers a [`DifficultyPredictor`], so that `dots_predictor="name"` finds it and
    `load_predictor` can read it. A package can offer its class in the entry point group `trl_dataeff.predictors`
    instead.

    Args:
        name (`str`): the name; it becomes the class attribute `name`.

    Raises:
        PredictorError: the name belongs to another class, or the class is not a `DifficultyPredictor`.
    """
    return _PREDICTORS.register(name)


def predictor_class(name: str) -> type[DifficultyPredictor]:
    """
    Class that is registered as `name`. The built-in ones are there once `trl_dataeff.difficulty.loading` is imported.

    Raises:
        PredictorError: there is no such predictor, or its entry point cannot be imported.
    """
    return _PREDICTORS.get(name)


def is_predictor(name: str) -> bool:
    """Whether a predictor is registered as `name`, or offered under it by an installed package."""
    return name in _PREDICTORS


def registered_predictors() -> list[str]:
    """Names of all predictors, in alphabetical order, those of entry points included."""
    return _PREDICTORS.names()
