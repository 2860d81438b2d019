"""Reads a checkpoint of the authors of arXiv 2506.05316."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from trl_dataeff.difficulty.attention import AttentionDifficultyPredictor
from trl_dataeff.difficulty.base import PredictorError


PREFIX = "regressor."


def read_published(path: Path) -> AttentionDifficultyPredictor:
    """Towers and calibration of a published checkpoint. What it holds beside `regressor.*` is ignored."""
    checkpoint = _unpickle(path)
    state = checkpoint.get("model_state_dict") if isinstance(checkpoint, dict) else None
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise PredictorError(
            f"{path} is not a checkpoint of a difficulty predictor: it needs a dictionary of tensors under `model_state_dict`."
        )
    ours = {name: value for name, value in state.items() if name.startswith(PREFIX)}
    embedding_width, width = _published_widths(path, ours)
    predictor = AttentionDifficultyPredictor(embedding_width, width)
    _check_published(path, ours, predictor.state_dict())
    predictor.load_state_dict(ours)
    return predictor


def _unpickle(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a file that is something else leads to
        if isinstance(error, pickle.UnpicklingError) and zipfile.is_zipfile(path):
            raise PredictorError(
                f"{path} holds pickled objects other than tensors, which could run any code, and is not loaded. Save its "
                "`model_state_dict` alone: torch.save({'model_state_dict': model.state_dict()}, path)."
            ) from error
        reason = str(error).split("\n", 1)[0]
        raise PredictorError(
            f"{path} ({path.stat().st_size} bytes) cannot be read as a torch checkpoint: it is truncated or something else "
            f"({type(error).__name__}: {reason}). Copy it again, or name another file."
        ) from error


def _published_widths(path: Path, state: dict[str, torch.Tensor]) -> tuple[int, int]:
    """Widths of embeddings and projections, by the first linear layer of the query tower."""
    name = f"{PREFIX}sim_head.query_proj.1.weight"
    if name not in state:
        raise PredictorError(f"{path} lacks the parameter `{name}`; it is not a checkpoint of a difficulty predictor.")
    if state[name].ndim != 2:
        raise PredictorError(f"In {path} the parameter `{name}` has shape {tuple(state[name].shape)}, not (width, h).")
    width, embedding_width = state[name].shape
    return embedding_width, width


def _check_published(path: Path, given: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    missing, unknown = sorted(wanted.keys() - given.keys()), sorted(given.keys() - wanted.keys())
    if missing or unknown:
        what = [f"lacks {', '.join(missing)}"] if missing else []
        what += [f"has the unknown {', '.join(unknown)}"] if unknown else []
        raise PredictorError(
            f"The difficulty predictor in {path} {' and '.join(what)}: it is of another architecture."
        )
    for name, value in wanted.items():
        if given[name].shape != value.shape:
            raise PredictorError(
                f"In {path} the parameter `{name}` has shape {tuple(given[name].shape)}; towers whose first layer is "
                f"as wide as this one's need {tuple(value.shape)}."
            )
        if not bool(given[name].isfinite().all()):
            raise PredictorError(f"In {path} the parameter `{name}` has values that are not finite.")
