"""Checkpoints of the predictor that the authors of arXiv 2506.05316 published."""

from __future__ import annotations

from pathlib import Path

import torch

from trl_dataeff.difficulty.attention import AttentionDifficultyPredictor
from trl_dataeff.difficulty.predictor import PredictorError


PUBLISHED = "regressor."  # prefix of the parameters in a published checkpoint


def read_published(path: Path) -> AttentionDifficultyPredictor:
    """Towers and calibration of a published checkpoint, the `regressor.*` of its `model_state_dict`. Raises a [`PredictorError`]."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a file that is something else leads to
        raise PredictorError(
            f"{path} ({path.stat().st_size} bytes) cannot be read as a torch checkpoint of tensors alone ({type(error).__name__}): it "
            "may be truncated (copy it again), or pickle other objects, which could run any code (save "
            "{'model_state_dict': model.state_dict()} alone)."
        ) from error
    try:
        state = {name: value for name, value in checkpoint["model_state_dict"].items() if name.startswith(PUBLISHED)}
        width, embedding_width = state[f"{PUBLISHED}sim_head.query_proj.1.weight"].shape
        predictor = AttentionDifficultyPredictor(embedding_width, width)
        predictor.load_state_dict(state)
    except Exception as error:
        raise PredictorError(
            f"{path} is not a checkpoint of a predictor of this architecture ({type(error).__name__}: {error})."
        ) from error
    wrong = [name for name, value in state.items() if not bool(value.isfinite().all())]
    if wrong:
        raise PredictorError(f"In {path} the parameters {', '.join(wrong)} have values that are not finite.")
    return predictor
