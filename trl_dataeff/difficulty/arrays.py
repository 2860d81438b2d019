"""Embeddings, success rates and weights as predictors read them: checked, in float32, some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from trl_dataeff.difficulty.base import Embeddings, PredictorError


ROWS = 4096  # embeddings that are converted to float32 at a time


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
