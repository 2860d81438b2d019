r"""
DOTS as published (arXiv 2506.05316): difficulty-targeted selection with reference rollouts.

Every `refresh_batches` generation batches the policy answers the prompts of a random reference set. A predictor that
attends from each prompt's embedding to those of the references gives the success rate \(\hat p_i\) of every prompt
(section 3.1 of the paper), and the prompts of the next generation batches are drawn without replacement with

    P_i ~ exp(-|p_i - alpha| / tau)

The difficulty of the paper is the failure rate 1 - p; at its target 0.5 the two are the same. Reference prompts are
not drawn again before the next references. Predictions rest on references alone, and not on a prompt's own groups.
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
        predictor (`str` or [`DifficultyPredictor`], *optional*, defaults to `"attention"`): `"attention"`,
            `"logistic"`, the path of a saved or published predictor, or an instance. One that was not fitted before is
            fitted in the run.
        predictor_args (`dict`, *optional*): keyword arguments of a predictor that is named.

    Raises:
        ValueError: an argument is out of range.
        PredictorError: the predictor is unknown, cannot be read, or does not take an argument.
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
        self.reference_size = reference_size
        self.refresh_batches = refresh_batches
        self.target = target
        self.temperature = temperature

    def bind(self, context: SelectorContext) -> None:
        super().bind(context)
        self.difficulty = self.rolling(self.predictor, self.predictor_args)
        self.predicted = np.full(context.num_prompts, 0.5, dtype=np.float32)
        self._start_draw(references=np.empty(0, dtype=np.int64))

    def _start_draw(self, references: np.ndarray) -> None:
        """Begin a new draw, after the rollouts of `references`, int64 `(k,)`."""
        self._references = references
        self._drawn = np.empty(0, dtype=np.int64)  # prompts in the order in which they are proposed
        self._num_proposed = 0  # how many of these were proposed so far

    def predict(self, prompt_ids: np.ndarray) -> np.ndarray:
        self.follow_range()
        return self.predicted[prompt_ids]

    def references(self, rng: torch.Generator) -> np.ndarray:
        if self.batch % self.refresh_batches != 0:
            return np.empty(0, dtype=np.int64)
        order = torch.randperm(self.context.num_prompts, generator=rng)
        return order[: self.reference_size].numpy()

    def propose(self, n: int, rng: torch.Generator) -> np.ndarray:
        """
        The next prompts of the draw that follows reference rollouts. It is made at once for all generation batches up
        to the next references, and in random order, so that these batches are alike. If they take more than that, the
        draw goes on without the prompts that it has given already, as long as there are others.

        Args:
            n (`int`): number of prompts, at most `context.num_prompts`.
            rng (`torch.Generator`): the only source of randomness.

        Returns:
            `np.ndarray` of shape `(n,)`: int64 prompt ids without repetition.
        """
        self.follow_range()
        check_request(n, self.context.num_prompts)
        waiting = self._drawn[self._num_proposed :]
        if len(waiting) < n:
            drawn = self._draw(n, waiting, rng)
            self._drawn = np.concatenate([self._drawn, drawn])
            waiting = np.concatenate([waiting, drawn])
        self._num_proposed += n
        return waiting[:n]

    def _draw(self, n: int, waiting: np.ndarray, rng: torch.Generator) -> np.ndarray:
        """
        Continue the draw, so that n prompts can be proposed.

        Args:
            n (`int`): number of prompts to be proposed.
            waiting (`np.ndarray` of shape `(k,)`): prompts that are drawn and not proposed yet, k < n.
            rng (`torch.Generator`): the only source of randomness.

        Returns:
            `np.ndarray` of shape `(m,)`: int64 prompt ids in random order, m >= n - k.
        """
        log_weights = self._log_weights(n)
        candidates = log_weights.index_fill(0, torch.from_numpy(self._drawn), -torch.inf)
        num_candidates = int((~candidates.isneginf()).sum())
        missing = n - len(waiting)
        if num_candidates < missing:  # prompts that were proposed may come again
            candidates = log_weights.index_fill(0, torch.from_numpy(waiting), -torch.inf)
        is_first_draw = len(self._drawn) == 0
        if is_first_draw:
            count = min(self.refresh_batches * n, num_candidates)
        else:
            count = missing
        drawn = gumbel_top_k(candidates, count, rng).numpy()
        order = torch.randperm(count, generator=rng).numpy()
        return drawn[order]

    def _log_weights(self, n: int) -> torch.Tensor:
        """Log-weights of all prompts, float64 `(N,)`; -inf for references, as long as there are n other prompts."""
        distance = (torch.from_numpy(self.predicted).double() - self.target).abs()
        log_weights = -distance / self.temperature
        num_others = self.context.num_prompts - len(self._references)
        if num_others >= n:
            log_weights[self._references] = -torch.inf
        return log_weights

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        ids = np.array([group.prompt_id for group in groups], dtype=np.int64)
        rates = self.context.success_rates(groups)
        self.record.add(self.predict(ids), rates)
        are_references = bool(groups) and groups[0].is_reference
        if are_references:
            self.predicted = self.difficulty.predict_with_references(ids, rates, self.batch)
            self._start_draw(references=ids)
        self.difficulty.observe(ids, rates, self.batch + 1)
        if not are_references:
            self.batch += 1

    def rescale(self, scale: float, offset: float) -> None:
        super().rescale(scale, offset)
        self.predicted = np.clip(scale * self.predicted + offset, 0, 1).astype(np.float32)
        self.difficulty.rescale(scale, offset)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "taken": self._num_proposed,
            "predicted": self.predicted.copy(),
            "references": self._references.copy(),
            "order": self._drawn.copy(),
            "difficulty": self.difficulty.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._num_proposed = state["taken"]
        self.predicted = state["predicted"].copy()
        self._references = state["references"].copy()
        self._drawn = state["order"].copy()
        self.difficulty.load_state_dict(state["difficulty"], predictor=self.same_embeddings)
