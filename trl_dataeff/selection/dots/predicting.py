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
HASHED_ROWS = 256  # embeddings whose hash tells whether a resumed run has the same ones


class PredictingSelector(Selector):
    """
    A selector with a predictor of success rates. It keeps a record of its predictions, counts generation batches, and
    maps success rates of earlier groups when the range of rewards has changed.

    Args:
        predictor (`str` or [`DifficultyPredictor`]): see [`make_predictor`].
        predictor_args (`dict[str, Any]`, *optional*): keyword arguments of a predictor that is named.

    Attributes:
        embeddings (`torch.Tensor` or `np.ndarray` of shape `(N, h)`): of all prompts.
        record ([`PredictionRecord`]): predicted and observed success rates.
        batch (`int`): generation batches observed so far.
        same_embeddings (`bool`): whether a resumed run has the embeddings that it began with.

    Raises:
        PredictorError: the predictor is unknown, cannot be read, or does not take an argument.
    """

    def __init__(self, predictor: str | DifficultyPredictor, predictor_args: dict[str, Any] | None = None):
        make_predictor(predictor, arguments=predictor_args)  # finds errors before prompts are embedded
        self.predictor = predictor
        self.predictor_args = predictor_args

    def bind(self, context: SelectorContext) -> None:
        super().bind(context)
        self.embeddings = context.embeddings()
        self.same_embeddings = True
        self.record = PredictionRecord()
        self.batch = 0
        # The range of rewards in which the success rates of earlier groups are expressed
        self._scale_of_rates = replace(context.scale)

    def rolling(
        self,
        predictor: str | DifficultyPredictor,
        arguments: dict[str, Any] | None = None,
        half_life: float = 20.0,
    ) -> RollingDifficulty:
        """
        Make a predictor that follows the run.

        Args:
            predictor (`str` or [`DifficultyPredictor`]): see [`make_predictor`].
            arguments (`dict[str, Any]`, *optional*): keyword arguments of a predictor that is named.
            half_life (`float`, *optional*, defaults to `20.0`): generation batches after which a group counts half.

        Returns:
            [`RollingDifficulty`]: without groups.
        """
        context = self.context
        made, is_fitted_in_run = make_predictor(predictor, self.embeddings.shape[1], context.seed, arguments)
        return RollingDifficulty(
            self.embeddings,
            made,
            capacity=made.capacity(context.batch_groups),
            half_life=half_life,
            fit_every=FIT_EVERY if is_fitted_in_run else 0,
            seed=context.seed,
        )

    def follow_range(self) -> None:
        """Map success rates of earlier groups if the range of rewards has changed."""
        mapping = self.context.scale.mapping_from(self._scale_of_rates)
        self._scale_of_rates = replace(self.context.scale)
        if mapping is not None:
            scale, offset = mapping
            self.rescale(scale, offset)

    def rescale(self, scale: float, offset: float) -> None:
        """
        Map success rates of earlier groups.

        Args:
            scale (`float`): a rate becomes `scale * rate + offset`, in [0, 1].
            offset (`float`): see `scale`.
        """
        self.record.rescale(scale, offset)

    def metrics(self) -> dict[str, float]:
        return self.record.metrics()

    def state_dict(self) -> dict[str, Any]:
        return {
            "batch": self.batch,
            "embeddings": hash_rows(self.embeddings, HASHED_ROWS),
            "range": np.array([self._scale_of_rates.low, self._scale_of_rates.high]),
            "record": self.record.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batch = state["batch"]
        low, high = state["range"].tolist()
        self._scale_of_rates.low = low
        self._scale_of_rates.high = high
        self.record.load_state_dict(state["record"])
        self.same_embeddings = state["embeddings"] == hash_rows(self.embeddings, HASHED_ROWS)
        if not self.same_embeddings:
            logger.warning(
                "The prompts' embeddings differ from those of the run that is resumed, so that the predictor is "
                "fitted again. The run continues, but not exactly as it would have."
            )
