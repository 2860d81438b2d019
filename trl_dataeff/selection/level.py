"""Success rates of prompts without embeddings: what the tracked baseline predicts from where a selector predicts nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from trl_dataeff.difficulty.base import DifficultyPredictor, Embeddings
from trl_dataeff.difficulty.online import RollingDifficulty
from trl_dataeff.selection.base import SelectorContext
from trl_dataeff.selection.estimator import HALF_LIVES, PromptEstimator


class _SameForAll(DifficultyPredictor):
    """Predicts 0.5 for every prompt, which the estimator moves to the level of the recent groups."""

    fitted = False
    embedding_width = 0

    def fit(self, E: Embeddings, p: torch.Tensor, weight: torch.Tensor | None = None) -> None:
        pass

    def project(self, E: Embeddings) -> torch.Tensor:
        return torch.zeros(len(E), 1)

    def predict_projected(self, Z: torch.Tensor) -> torch.Tensor:
        return torch.full((len(Z),), 0.5)

    def settings(self) -> dict[str, Any]:
        return {}

    def tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        pass


def level_estimator(
    context: SelectorContext, prior: float, half_lives: Sequence[float] | None = None
) -> PromptEstimator:
    """
    Estimates from the level of the recent groups and each prompt's own (see [`PromptEstimator`]).

    Args:
        context ([`SelectorContext`]): the run.
        prior (`float`): strength of that level against a prompt's own groups, in completions.
        half_lives (`Sequence[float]`, *optional*): of the experts, in generation batches.
    """
    predictor, half_lives = _SameForAll(), tuple(half_lives or HALF_LIVES)
    difficulty = RollingDifficulty(
        np.zeros((context.num_prompts, 1), dtype=np.float16),
        predictor,
        capacity=predictor.capacity(context.batch_groups),
        half_life=half_lives[-1],
        fit_every=0,
    )
    return PromptEstimator(difficulty, context.num_prompts, prior, half_lives)
