"""The contract of difficulty predictors, and the folder in which one is saved."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from safetensors.torch import save_file

from trl_dataeff.checkpoint.files import write_atomically
from trl_dataeff.version import __version__


FORMAT = 1
CONFIG_FILE = "config.json"
TENSORS_FILE = "predictor.safetensors"
ROWS = 4096  # embeddings that are converted to float32 at a time

#: `(N, h)`: a tensor, an array or a memory map, of float16, bfloat16 or float32.
Embeddings: TypeAlias = torch.Tensor | np.ndarray


class PredictorError(ValueError):
    """A predictor cannot be read, or does not fit what it is given."""


class DifficultyPredictor(ABC):
    """
    Predicts the success rates of prompts from their embeddings.

    What a prediction owes to the embedding alone is computed once by [`project`], and `predict_projected` does the
    rest: `predict(E) == predict_projected(project(E))`. A predictor that is fitted anew to the same data predicts the
    same, to the last bit.

    Attributes:
        embedding (`str`): the model whose embeddings it was fitted to, or `""` if that is not known.
    """

    embedding: str = ""

    @abstractmethod
    def fit(self, E: Embeddings, p: torch.Tensor, weight: torch.Tensor | None = None) -> None:
        """
        Fit to groups of prompts.

        Args:
            E (`torch.Tensor` or `np.ndarray` of shape `(n, h)`): embedding of each group's prompt.
            p (`torch.Tensor` of shape `(n,)`): success rates in [0, 1]; NaN ones are left out.
            weight (`torch.Tensor` of shape `(n,)`, *optional*): weights >= 0 of the groups; all 1 if not given.

        Raises:
            PredictorError: shapes that disagree, or values out of range.
        """

    @abstractmethod
    def project(self, E: Embeddings) -> torch.Tensor:
        """Float32 `(N, d)` from embeddings `(N, h)`, some thousand rows at a time."""

    @abstractmethod
    def predict_projected(self, Z: torch.Tensor) -> torch.Tensor:
        """Success rates, float32 `(N,)` in [0, 1], from what [`project`] gave."""

    @property
    @abstractmethod
    def fitted(self) -> bool:
        """Whether it can predict."""

    @property
    @abstractmethod
    def embedding_width(self) -> int:
        """Width h of the embeddings it takes; 0 as long as any will do."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Arguments that make another one like it, for JSON."""

    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """All that was fitted."""

    @abstractmethod
    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """The inverse of `tensors`. Raises `KeyError`, `ValueError` or `RuntimeError` if they do not fit."""

    def predict(self, E: Embeddings) -> torch.Tensor:
        """Success rates, float32 `(N,)` in [0, 1], of embeddings `(N, h)`."""
        return self.predict_projected(self.project(E))

    def save(self, folder: str | Path) -> None:
        """Write `predictor.safetensors` and then `config.json` into `folder`, which is made if need be."""
        folder = Path(folder)
        tensors = {name: value.detach().cpu().contiguous().clone() for name, value in self.tensors().items()}
        config = {
            "class": type(self).__name__,
            "format": FORMAT,
            "trl_dataeff": __version__,
            "embedding": self.embedding,
            "settings": self.settings(),
        }
        write_atomically(folder / TENSORS_FILE, partial(save_file, tensors))
        write_atomically(folder / CONFIG_FILE, lambda path: path.write_text(json.dumps(config, indent=2) + "\n"))

    @classmethod
    def load(cls, folder: str | Path) -> DifficultyPredictor:
        """Read a predictor that [`save`] wrote. Raises [`PredictorError`] if it is damaged or of another class."""
        from trl_dataeff.difficulty.predictor import load_predictor

        predictor = load_predictor(folder)
        if not isinstance(predictor, cls):
            raise PredictorError(f"{folder} holds a {type(predictor).__name__}, not a {cls.__name__}.")
        return predictor


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
