r"""
DOTS as published (arXiv 2506.05316): difficulty-targeted selection with reference rollouts.

Every `refresh_batches` generation batches the policy answers the prompts of a random reference set. A predictor that attends
from each prompt's embedding to those of the references gives the success rate \(\hat p_i\) of every prompt (section 3.1 of the
paper), and the prompts of the next generation batches are drawn without replacement with

    P_i ~ exp(-|p_i - alpha| / tau)

The difficulty of the paper is the failure rate 1 - p; at its target 0.5 the two are the same. Reference prompts are not drawn
again before the next references. Predictions rest on references alone, and not on a prompt's own groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from trl_dataeff.difficulty.predictor import DifficultyPredictor
from trl_dataeff.rollouts.group import RolloutGroup
from trl_dataeff.selection.base import SelectorContext, check_request, register_selector
from trl_dataeff.selection.dots.predicting import PredictingSelector
from trl_dataeff.selection.dots.sampling import gumbel_top_k
from trl_dataeff.utils import check_number


@register_selector("dots_paper")
class PaperDotsSelector(PredictingSelector):
    """
    Samples prompts whose success rate, predicted from reference rollouts, is near a target.

    Args:
        reference_size (`int`, *optional*, defaults to `256`): prompts of a reference set, K in the paper.
        refresh_batches (`int`, *optional*, defaults to `2`): generation batches between two reference sets.
        target (`float`, *optional*, defaults to `0.5`): alpha, in [0, 1].
        temperature (`float`, *optional*, defaults to `1e-3`): tau, above 0.
        predictor (`str` or [`DifficultyPredictor`], *optional*, defaults to `"attention"`): `"attention"`, `"logistic"`, the path
            of a saved or published predictor, or an instance. One that was not fitted before is fitted in the run.
        predictor_args (`dict`, *optional*): keyword arguments of a predictor that is named.
    """

    def __init__(
        self,
        *,
        reference_size: int = 256,
        refresh_batches: int = 2,
        target: float = 0.5,
        temperature: float = 1e-3,
        predictor: str | DifficultyPredictor = "attention",
        predictor_args: dict[str, Any] | None = None,
    ):
        check_number("reference_size", reference_size, "[1, inf)", integer=True)
        check_number("refresh_batches", refresh_batches, "[1, inf)", integer=True)
        check_number("target", target, "[0, 1]")
        check_number("temperature", temperature, "(0, inf]")
        super().__init__(predictor, predictor_args)
        self.reference_size, self.refresh_batches = reference_size, refresh_batches
        self.target, self.temperature = target, temperature

    def bind(self, context: SelectorContext) -> None:
        super().bind(context)
        self.difficulty = self.rolling(self.predictor, self.predictor_args)
        self.predicted = np.full(context.num_prompts, 0.5, dtype=np.float32)
        self._references = np.empty(0, dtype=np.int64)  # of the present predictions
        self._order = np.empty(0, dtype=np.int64)  # prompts drawn since then
        self._taken = 0  # how many of them were proposed

    def predict(self, prompt_ids: np.ndarray) -> np.ndarray:
        self.follow_range()
        return self.predicted[prompt_ids]

    def references(self, rng: torch.Generator) -> np.ndarray:
        if self.batch % self.refresh_batches:
            return np.empty(0, dtype=np.int64)
        return torch.randperm(self.context.num_prompts, generator=rng)[: self.reference_size].numpy()

    def propose(self, n: int, rng: torch.Generator) -> np.ndarray:
        """
        The next n prompts of the draw that follows reference rollouts. It is made at once for all generation batches up to
        the next references, and in random order, so that these batches are alike. If they take more than that, the draw goes
        on without the prompts that it has given already, as long as there are others.
        """
        self.follow_range()
        size = self.context.num_prompts
        check_request(n, size)
        log_weights = -(torch.from_numpy(self.predicted).double() - self.target).abs() / self.temperature
        if size - len(self._references) >= n:
            log_weights[self._references] = -torch.inf
        ahead = self._order[self._taken :]
        if len(ahead) < n:
            others = log_weights.index_fill(0, torch.from_numpy(self._order), -torch.inf)
            left = int((~others.isneginf()).sum())
            if left < n - len(ahead):
                others = log_weights.index_fill(0, torch.from_numpy(ahead), -torch.inf)
            count = n - len(ahead) if len(self._order) else min(self.refresh_batches * n, left)
            drawn = gumbel_top_k(others, count, rng).numpy()
            ahead = np.concatenate([ahead, drawn[torch.randperm(len(drawn), generator=rng).numpy()]])
        self._order = np.concatenate([self._order[: self._taken], ahead])
        self._taken += n
        return ahead[:n]

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        ids = np.array([group.prompt_id for group in groups], dtype=np.int64)
        rates = self.context.success_rates(groups)
        self.record.add(self.predict(ids), rates)
        references = bool(groups) and groups[0].origin == "reference"
        if references:
            self.predicted = self.difficulty.predict_with_references(ids, rates, self.batch)
            self._references, self._order, self._taken = ids, np.empty(0, dtype=np.int64), 0
        self.difficulty.observe(ids, rates, self.batch + 1)
        self.batch += not references

    def rescale(self, scale: float, offset: float) -> None:
        super().rescale(scale, offset)
        self.predicted = np.clip(scale * self.predicted + offset, 0, 1).astype(np.float32)
        self.difficulty.rescale(scale, offset)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "taken": self._taken,
            "predicted": self.predicted.copy(),
            "references": self._references.copy(),
            "order": self._order.copy(),
            "difficulty": self.difficulty.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._taken, self.predicted = state["taken"], state["predicted"].copy()
        self._references, self._order = state["references"].copy(), state["order"].copy()
        self.difficulty.load_state_dict(state["difficulty"], predictor=self.same_embeddings)
