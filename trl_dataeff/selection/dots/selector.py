r"""
DOTS: draw prompts whose groups are likely to carry a gradient, after arXiv 2506.05316, without its reference rollouts.

1. The success rate of a prompt is taken as Beta distributed. What is predicted for it, from its embedding or a column
   of success rates, is joined with the prompt's own groups, which fade as the policy changes.
2. That gives the probability \(P_i\) that a group of G completions carries a gradient, which it does unless all
   rewards are equal.
3. Prompts are drawn without replacement with weights \(P_i^k / (P_i^k + \bar P^{2k/3})\), where \(\bar P\) is what
   uniform draws would find: alike where a gradient is likely, hardly ever where it is not. A pass goes on across
   generation batches until most of the weight has been drawn. Each group in a row that no reward function scores
   halves \(P_i\).

`estimator.py` has steps 1 and 2, for several speeds of the policy side by side, and `sampling.py` step 3. With graded
rewards a mean reward says little about whether rewards differ; then P is estimated as a success rate is: from whether
groups were effective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from trl_dataeff.difficulty.logistic import LogisticDifficultyPredictor
from trl_dataeff.difficulty.online import pearson
from trl_dataeff.difficulty.predictor import DifficultyPredictor
from trl_dataeff.rollouts.group import RolloutGroup
from trl_dataeff.selection.base import SelectorContext, check_request, register_selector
from trl_dataeff.selection.dots.beta_binomial import chance_at
from trl_dataeff.selection.dots.earlier import EarlierRun, read_earlier_run
from trl_dataeff.selection.dots.estimator import FIT_HALF_LIVES, PromptEstimator, column_difficulty
from trl_dataeff.selection.dots.predicting import PredictingSelector
from trl_dataeff.selection.dots.sampling import KindShares, PromptPass, gumbel_keys, log_weights_of, top_of_kinds
from trl_dataeff.utils import check_number, hash_json


logger = logging.get_logger(__name__)
#: Bounds of the probability that a group is effective: every prompt keeps a chance to be drawn.
LOWEST_CHANCE = 1e-6
HIGHEST_CHANCE = 1 - 1e-6
UNSCORED_HALF_LIFE = np.float32(4.0)  # passes after which a group without a score counts half
REVERSED = -0.3  # correlation of success with a column of success rates, below which it most likely has difficulties
SEEN_PROMPTS = 64  # prompts from which that is judged


@register_selector("dots")
class DotsSelector(PredictingSelector):
    """
    Samples prompts by the estimated probability that their groups carry a gradient, in passes.

    Args:
        sharpness (`float`, *optional*, defaults to `8.0`): how strongly prompts are avoided whose groups are less
            likely to carry a gradient than the mean, at least 0; 0 draws uniformly (see [`log_weights_of`]).
        predictor (`str` or [`DifficultyPredictor`], *optional*, defaults to `"logistic"`): `"logistic"`,
            `"attention"`, the path of a saved or published predictor, or an instance.
        predictor_args (`dict`, *optional*): keyword arguments of a predictor that is named.
        history_from (`str`, *optional*): `output_dir` of an earlier run on these prompts, or its
            `dataeff/groups.parquet`, whose success rates are the first predictions; groups of this run outweigh them.

    Attributes:
        success ([`PromptEstimator`]): estimates success rates.
        effective ([`PromptEstimator`]): estimates probabilities that groups are effective. It observes groups from the
            first batch on; its estimates are used once rewards are graded.
        graded (`bool`): whether more than two different total rewards have been seen. A mean reward is then not a
            chance of success.

    Raises:
        ValueError: an argument is out of range.
        PredictorError: the predictor is unknown, cannot be read, or does not take an argument.
    """

    def __init__(
        self,
        *,
        sharpness: float = 8.0,
        predictor: str | DifficultyPredictor = "logistic",
        predictor_args: dict[str, Any] | None = None,
        history_from: str | None = None,
    ):
        check_number("sharpness", sharpness, "[0, inf)")
        super().__init__(predictor, predictor_args)
        self.sharpness = sharpness
        self.history_from = history_from

    def bind(self, context: SelectorContext) -> None:
        earlier = None
        if self.history_from is not None and not context.resumed:
            # Before the prompts are embedded, which takes longer. It widens the range of rewards
            earlier = read_earlier_run(self.history_from, context)
        super().bind(context)
        self.success, self.effective = self._new_estimators()
        self.graded = False
        self._totals = np.empty(0, dtype=np.float32)  # the lowest different total rewards so far, at most three
        # By prompt: how many of its latest groups, in a row, no reward function scored, as faded at the last of them
        self._unscored = np.zeros(context.num_prompts, dtype=np.float32)
        self._unscored_at = np.zeros(context.num_prompts, dtype=np.float32)  # passes
        self._columns = hash_json(context.known_rates, context.kinds)
        kinds = context.kinds if context.kinds is not None else np.zeros(context.num_prompts, dtype=np.int64)
        self._kinds = torch.from_numpy(kinds)
        self._pass = PromptPass(self._kinds)
        self._shares = KindShares(self._kinds)
        self._proposed = np.empty(0, dtype=np.int64)  # for this generation batch
        self._uniform_ratio = float("nan")  # effective groups of uniform draws, at the latest proposal
        self._num_seen = 0  # prompts that have had a group, as far as groups are kept
        if earlier is not None:
            self._start_from(earlier)

    def _new_estimators(self) -> tuple[PromptEstimator, PromptEstimator]:
        """Estimators of success rates, and of probabilities that groups are effective."""
        longest = FIT_HALF_LIVES[-1]
        rates = self.rolling(self.predictor, self.predictor_args, longest)
        predictor: DifficultyPredictor
        if self.predictor == "logistic":
            # `rolling` copies it, with the principal components of the embeddings, which it has found by now
            predictor = rates.predictor
        else:
            predictor = LogisticDifficultyPredictor()
        probabilities = self.rolling(predictor, half_life=longest)
        known = self.context.known_rates
        if known is None:
            return PromptEstimator(rates), PromptEstimator(probabilities)
        known_chances = chance_at(torch.from_numpy(known), self.context.group_size).numpy()
        return (
            PromptEstimator(rates, column_difficulty(known)),
            PromptEstimator(probabilities, column_difficulty(known_chances)),
        )

    def _start_from(self, earlier: EarlierRun) -> None:
        """Take the groups of an earlier run as a prior that this run's own groups outweigh."""
        self.success.start_from(earlier.ids, earlier.rates, earlier.counts * self.context.group_size)
        self.effective.start_from(earlier.ids, earlier.effective, earlier.counts)

    def chances(self) -> torch.Tensor:
        """
        Estimated probabilities that the groups of prompts are effective.

        Returns:
            `torch.Tensor` of shape `(N,)`: float64, in (0, 1).
        """
        if self.graded:
            chances = torch.from_numpy(self.effective.mean()).double()
        else:
            chances = self.success.chances(self.context.group_size)
        # A group without a score has no gradient either, and says nothing about the success rate
        chances = chances * 0.5 ** torch.from_numpy(self._faded_unscored()).double()
        return chances.clamp(LOWEST_CHANCE, HIGHEST_CHANCE)

    def _faded_unscored(self, ids: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Groups of prompts without a score, in a row. They fade: a reward may come back."""
        age = np.float32(self.success.passes) - self._unscored_at[ids]
        return self._unscored[ids] * np.exp2(-age / UNSCORED_HALF_LIFE)

    def predict(self, prompt_ids: np.ndarray) -> np.ndarray:
        self.follow_range()
        if not self.success.fitted:
            return np.full(len(prompt_ids), np.nan, dtype=np.float32)
        return self.success.mean(prompt_ids)

    def propose(self, n: int, rng: torch.Generator) -> np.ndarray:
        self.follow_range()
        size = self.context.num_prompts
        check_request(n, size)
        excluded = torch.zeros(size, dtype=torch.bool)
        num_others = size - len(self._proposed)
        if num_others >= n:  # no prompt twice in a generation batch, as long as there are others
            excluded[torch.from_numpy(self._proposed)] = True
        chances = self.chances()
        own = torch.from_numpy(self.effective.own_means()).double()
        self._uniform_ratio = float(torch.where(own.isnan(), chances, own).mean())
        log_weights = log_weights_of(chances, self._kinds, self.sharpness)
        num_available = torch.bincount(self._kinds[~excluded], minlength=len(self._shares.due))
        counts = self._shares.take(n, num_available)
        log_weights = self._pass.restrict(log_weights, excluded, counts)
        log_weights = log_weights.masked_fill(excluded, -torch.inf)
        drawn = top_of_kinds(gumbel_keys(log_weights, rng), self._kinds, counts)
        self._pass.drawn[drawn] = True
        ids: np.ndarray = drawn.numpy()
        self._proposed = np.concatenate([self._proposed, ids])
        return ids

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        self.batch += 1
        self._proposed = np.empty(0, dtype=np.int64)
        ids = np.array([group.prompt_id for group in groups], dtype=np.int64)
        rates = self.context.success_rates(groups)
        num_scored = np.array([group.num_scored for group in groups], dtype=np.float32)
        is_effective = np.array([group.effective for group in groups], dtype=np.float32)
        has_no_score = np.isnan(rates)
        is_effective[has_no_score] = np.nan
        self.record.add(self.predict(ids), rates)
        self.success.observe(ids, rates, num_scored, self.batch)
        self.success.refresh()
        if not has_no_score.all():  # else the rewards are at fault, and no prompt
            self._unscored[ids] = np.where(has_no_score, self._faded_unscored(ids) + 1, 0)
            self._unscored_at[ids] = self.success.passes
        self._warn_of_difficulties()
        one_each = np.ones_like(num_scored)
        self.effective.observe(ids, is_effective, one_each, self.batch)
        if not self.graded:
            self._note_totals(groups)
        if self.graded:
            self.effective.refresh()

    def _warn_of_difficulties(self) -> None:
        """Once that many prompts have been seen, warn of a column of success rates that is one of difficulties."""
        seen = self.success.difficulty
        num_seen = len(seen.ids)
        is_due = self._num_seen < SEEN_PROMPTS <= num_seen
        self._num_seen = num_seen
        known_rates = self.context.known_rates
        if known_rates is None or not is_due:
            return
        correlation = pearson(known_rates[seen.ids], seen.rates)
        if correlation < REVERSED:
            logger.warning(
                f"The success of the first {num_seen} prompts has the correlation {correlation:.2f} with "
                "`success_rate_column`: does the column hold difficulties? It takes success rates, `1 - difficulty`. "
                "The run goes on, and learns to use the column the other way round."
            )

    def _note_totals(self, groups: Sequence[RolloutGroup]) -> None:
        """Find out from the total rewards of groups whether rewards are graded."""
        totals = np.concatenate([self._totals, *(group.totals for group in groups)])
        self._totals = lowest_different(totals, 3)
        self.graded = len(self._totals) > 2
        if self.graded:
            self.effective.forget_trust()  # until now nothing was predicted from groups

    def rescale(self, scale: float, offset: float) -> None:
        super().rescale(scale, offset)
        self.success.rescale(scale, offset)

    def metrics(self) -> dict[str, float]:
        """
        `predictor/pearson`, and `uniform_effective_ratio`: about the share of effective groups that uniform draws
        would find. Each prompt counts once, by its own groups so far, or by its chance if it has none. By how much
        `dataeff/effective_ratio` is above it, selection gains.
        """
        return self.record.metrics() | {"uniform_effective_ratio": self._uniform_ratio}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "graded": self.graded,
            "proposed": self._proposed.copy(),
            "in_pass": self._pass.drawn.numpy().copy(),
            "columns": self._columns,
            "due": self._shares.due.numpy().copy(),
            "totals": self._totals.copy(),
            "unscored": self._unscored.copy(),
            "unscored_at": self._unscored_at.copy(),
            "uniform_ratio": self._uniform_ratio,
            "success": self.success.state_dict(),
            "effective": self.effective.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.graded = state["graded"]
        self._proposed = state["proposed"].copy()
        self._pass.drawn = torch.from_numpy(state["in_pass"].copy())
        if state["columns"] == self._columns:
            self._shares.due = torch.from_numpy(state["due"].copy())
        else:
            logger.warning(
                "The values of `success_rate_column` or `stratify_by` differ from those of the run that is resumed. "
                "The run continues, but not exactly as it would have."
            )
        self._totals = state["totals"].copy()
        self._unscored = state["unscored"].copy()
        self._unscored_at = state["unscored_at"].copy()
        self._uniform_ratio = state["uniform_ratio"]
        self.success.load_state_dict(state["success"], predictor=self.same_embeddings)
        self.effective.load_state_dict(state["effective"], predictor=self.same_embeddings)
        self._num_seen = len(self.success.difficulty.ids)


def lowest_different(totals: np.ndarray, n: int) -> np.ndarray:
    """
    The lowest different total rewards. Two totals are different if they are further apart than the rounding of a sum.

    Args:
        totals (`np.ndarray` of shape `(m,)`): total rewards; NaN and infinite ones are ignored.
        n (`int`): number of values that are wanted.

    Returns:
        `np.ndarray` of shape `(k,)`: at most n values, ascending.
    """
    values = np.unique(totals[np.isfinite(totals)])
    if len(values) == 0:
        return values
    differs_from_last = np.diff(values) > 1e-6 * np.abs(values[1:])
    is_different = np.concatenate([[True], differs_from_last])
    return values[is_different][:n]
