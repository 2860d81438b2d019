"""Checkpoints of the predictor that the authors of arXiv 2506.05316 published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from trl_dataeff.difficulty.attention import AttentionDifficultyPredictor
from trl_dataeff.difficulty.predictor import PredictorError


PREFIX = "regressor."  # of the names of the predictor's parameters


def read_published(path: Path) -> AttentionDifficultyPredictor:
    """
    Read a published checkpoint: the parameters `regressor.*` of its `model_state_dict`.

    Args:
        path (`Path`): the file.

    Returns:
        [`AttentionDifficultyPredictor`]: with the towers and the calibration of the checkpoint, without references.

    Raises:
        PredictorError: the file is corrupt, holds other objects than tensors, is of another architecture, or has
            values that are not finite.
    """
    checkpoint = _load_tensors(path)
    try:
        parameters = checkpoint["model_state_dict"]
        state = {name: value for name, value in parameters.items() if name.startswith(PREFIX)}
        width, embedding_width = state[f"{PREFIX}sim_head.query_proj.1.weight"].shape
        predictor = AttentionDifficultyPredictor(embedding_width, width)
        predictor.load_state_dict(state)
    except Exception as error:  # depends on what the file has instead
        raise PredictorError(
            f"{path} is not a checkpoint of a predictor of this architecture ({type(error).__name__}: {error})."
        ) from error
    not_finite = [name for name, value in state.items() if not bool(value.isfinite().all())]
    if not_finite:
        raise PredictorError(f"In {path} the parameters {', '.join(not_finite)} have values that are not finite.")
    return predictor


def _load_tensors(path: Path) -> Any:
    """What a checkpoint file of tensors alone holds. Nothing else is unpickled."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # depends on what the file is instead
        raise PredictorError(
            f"{path} ({path.stat().st_size} bytes) cannot be read as a torch checkpoint of tensors alone "
            f"({type(error).__name__}): it may be truncated (copy it again), or pickle other objects, which could run "
            "any code (save {'model_state_dict': model.state_dict()} alone)."
        ) from error
