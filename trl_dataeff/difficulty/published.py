"""Reads a checkpoint of the authors of arXiv 2506.05316."""

from __future__ import annotations

from pathlib import Path

import torch

from trl_dataeff.difficulty.attention import AttentionDifficultyPredictor
from trl_dataeff.difficulty.predictor import PredictorError


PREFIX = "regressor."
FIRST_LAYER = f"{PREFIX}sim_head.query_proj.1.weight"  # (width, h)


def read_published(path: Path) -> AttentionDifficultyPredictor:
    """
    Towers and calibration of a published checkpoint, the `regressor.*` of its `model_state_dict`. What it holds beside them is
    ignored. Raises a [`PredictorError`] if it cannot be read, holds other objects than tensors, or is of another architecture.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a file that is something else leads to
        raise PredictorError(
            f"{path} ({path.stat().st_size} bytes) cannot be read as a torch checkpoint of tensors ({type(error).__name__}). It may "
            "be truncated: copy it again. Or it pickles other objects, which could run any code: save its `model_state_dict` "
            "alone, torch.save({'model_state_dict': model.state_dict()}, path)."
        ) from error
    try:
        state = {name: value for name, value in checkpoint["model_state_dict"].items() if name.startswith(PREFIX)}
        width, embedding_width = state[FIRST_LAYER].shape
        predictor = AttentionDifficultyPredictor(embedding_width, width)
        predictor.load_state_dict(state)
    except Exception as error:
        raise PredictorError(
            f"{path} is not a checkpoint of a difficulty predictor, or one of another architecture "
            f"({type(error).__name__}: {error})."
        ) from error
    wrong = [name for name, value in state.items() if not bool(value.isfinite().all())]
    if wrong:
        raise PredictorError(f"In {path} the parameters {', '.join(wrong)} have values that are not finite.")
    return predictor
