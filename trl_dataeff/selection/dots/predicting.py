"""What selectors share that predict success rates from embeddings of the prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from transformers.utils import logging

from trl_dataeff.difficulty.loading import make_predictor
from trl_dataeff.difficulty.online import PredictionRecord, RollingDifficulty
from trl_dataeff.difficulty.predictor import DifficultyPredictor
from trl_dataeff.selection.base import Selector, SelectorContext
from trl_dataeff.utils import hash_rows


logger = logging.get_logger(__name__)
FIT_EVERY = 16  # generation batches between two refits of a predictor that is fitted in the run


class PredictingSelector(Selector):
    """
    A selector with a predictor (see [`make_predictor`]). It keeps a record of its predictions, counts generation batches (`batch`),
    and maps success rates of earlier groups when the range of rewards has changed.
    """

    def __init__(self, predictor: str | DifficultyPredictor, predictor_args: dict[str, Any] | None = None):
        make_predictor(predictor, arguments=predictor_args)  # finds errors before prompts are embedded
        self.predictor, self.predictor_args = predictor, predictor_args

    def bind(self, context: SelectorContext) -> None:
        super().bind(context)
        self.embeddings = context.embeddings()
        self.record = PredictionRecord()
        self.batch = 0
        self._followed = replace(context.scale)  # the range of rewards that present success rates are in

    def rolling(
        self, predictor: str | DifficultyPredictor, arguments: dict[str, Any] | None = None, half_life: float = 20.0
    ) -> RollingDifficulty:
        """A predictor that follows the run; see [`RollingDifficulty`] for the half-life."""
        context = self.context
        made, fitted_in_run = make_predictor(predictor, self.embeddings.shape[1], context.seed, arguments)
        return RollingDifficulty(
            self.embeddings,
            made,
            capacity=made.capacity(context.batch_groups),
            half_life=half_life,
            fit_every=FIT_EVERY if fitted_in_run else 0,
            seed=context.seed,
        )

    def follow_range(self) -> None:
        """Map success rates of earlier groups if the range of rewards has changed."""
        mapping = self.context.scale.mapping_from(self._followed)
        self._followed = replace(self.context.scale)
        if mapping is not None:
            self.rescale(*mapping)

    def rescale(self, scale: float, offset: float) -> None:
        """Map success rates r to `scale * r + offset`, in [0, 1]."""
        self.record.rescale(scale, offset)

    def metrics(self) -> dict[str, float]:
        return self.record.metrics()

    def state_dict(self) -> dict[str, Any]:
        return {
            "batch": self.batch,
            "embeddings": hash_rows(self.embeddings, 256),
            "range": np.array([self._followed.low, self._followed.high]),
            "record": self.record.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batch = state["batch"]
        self._followed.low, self._followed.high = state["range"].tolist()
        self.record.load_state_dict(state["record"])
        self.same_embeddings = state["embeddings"] == hash_rows(self.embeddings, 256)
        if not self.same_embeddings:
            logger.warning(
                "The prompts' embeddings differ from those of the run that is resumed, so that the predictor is fitted again. The run "
                "continues, but not exactly as it would have."
            )
