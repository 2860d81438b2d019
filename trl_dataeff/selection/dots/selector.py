r"""
DOTS: draw prompts whose groups are likely to carry a gradient, after arXiv 2506.05316, without its reference rollouts.

1. The success rate \(p_i\) of a prompt joins the prediction \(q_i\) from its embedding with the prompt's own groups,
   which fade as the policy changes:
   \(p_i = (s q_i + \sum_t f_t \, successes_t) / (s + \sum_t f_t \, completions_t)\).
2. A group of G completions carries a gradient unless all rewards are equal: \(P_i = 1 - p_i^G - (1 - p_i)^G\).
3. Prompts are drawn without replacement with weights \(P_i^4 / (P_i^4 + t^4)\): alike where a gradient is likely,
   hardly ever where it is not. A pass goes on across generation batches until most of the weight has been drawn. Each
   group in a row that no reward function scores halves \(P_i\).

`estimator.py` has step 1, for several speeds of the policy side by side, and `sampling.py` steps 2 and 3. With graded
rewards a mean reward says little about whether rewards differ; then P is estimated as a success rate is: from whether
groups were effective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from trl_dataeff.difficulty.logistic import LogisticDifficultyPredictor
from trl_dataeff.difficulty.predictor import DifficultyPredictor
from trl_dataeff.rollouts.group import RolloutGroup
from trl_dataeff.rollouts.scale import RewardScale
from trl_dataeff.selection.base import SelectorContext, check_request, register_selector
from trl_dataeff.selection.dots.estimator import HALF_LIVES, PromptEstimator
from trl_dataeff.selection.dots.predicting import PredictingSelector
from trl_dataeff.selection.dots.sampling import PromptPass, chance_effective, gumbel_top_k, log_weight
from trl_dataeff.tracking.files import GROUPS_FILE, about_groups, read_groups
from trl_dataeff.utils import UserError, check_number


# s, of predictions from embeddings and of the mean, which says nothing about one prompt
PRIORS = (4.0, 0.25)  # of success rates, in completions
EFFECTIVE_PRIORS = (1.0, 1.0)  # of probabilities that a group is effective, in groups

#: Bounds of the probability that a group is effective: every prompt keeps a chance to be drawn.
LOWEST_CHANCE = 1e-6
HIGHEST_CHANCE = 1 - 1e-6


@register_selector("dots")
class DotsSelector(PredictingSelector):
    """
    Samples prompts by the estimated probability that their groups carry a gradient, in passes.

    Args:
        threshold (`float`, *optional*, defaults to `0.6`): t, the probability at which the weight of a prompt is one
            half, in (0, 1]. A lower one draws more hard and easy prompts.
        coverage (`float`, *optional*, defaults to `0.7`): share of the weight of all prompts that is drawn before a
            prompt may be drawn again, in [0, 1] (see [`PromptPass`]); 0 allows the same prompt in every batch.
        predictor (`str` or [`DifficultyPredictor`], *optional*, defaults to `"logistic"`): `"logistic"`,
            `"attention"`, the path of a saved or published predictor, or an instance.
        predictor_args (`dict`, *optional*): keyword arguments of a predictor that is named.
        history_from (`str`, *optional*): `output_dir` of an earlier run on the same dataset, or its
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
        threshold: float = 0.6,
        coverage: float = 0.7,
        predictor: str | DifficultyPredictor = "logistic",
        predictor_args: dict[str, Any] | None = None,
        history_from: str | None = None,
    ):
        check_number("threshold", threshold, "(0, 1]")
        check_number("coverage", coverage, "[0, 1]")
        super().__init__(predictor, predictor_args)
        self.threshold = threshold
        self.coverage = coverage
        self.history_from = history_from

    def bind(self, context: SelectorContext) -> None:
        super().bind(context)
        self.success, self.effective = self._new_estimators()
        self.graded = False
        self._totals = np.empty(0, dtype=np.float32)  # the lowest different total rewards so far, at most three
        # By prompt: how many of its latest groups, in a row, no reward function scored
        self._unscored = np.zeros(context.num_prompts, dtype=np.int16)
        self._pass = PromptPass(context.num_prompts, self.coverage)
        self._proposed = np.empty(0, dtype=np.int64)  # for this generation batch
        if self.history_from is not None and not context.resumed:
            self._start_from_earlier_run(self.history_from)

    def _new_estimators(self) -> tuple[PromptEstimator, PromptEstimator]:
        """Estimators of success rates, and of probabilities that groups are effective."""
        longest = HALF_LIVES[-1]
        rates = self.rolling(self.predictor, self.predictor_args, longest)
        predictor: DifficultyPredictor
        if self.predictor == "logistic":
            # `rolling` copies it, with the principal components of the embeddings, which it has found by now
            predictor = rates.predictor
        else:
            predictor = LogisticDifficultyPredictor()
        probabilities = self.rolling(predictor, half_life=longest)
        return (
            PromptEstimator(rates, PRIORS, HALF_LIVES),
            PromptEstimator(probabilities, EFFECTIVE_PRIORS, HALF_LIVES),
        )

    def _start_from_earlier_run(self, history_from: str) -> None:
        """Take the groups of an earlier run as a prior that this run's own groups outweigh."""
        context = self.context
        earlier = read_earlier_run(history_from, context.dataset_hash, context.scale)
        self.success.start_from(earlier.ids, earlier.rates, earlier.counts * context.group_size)
        self.effective.start_from(earlier.ids, earlier.effective, earlier.counts)
        self._scale_of_rates = replace(context.scale)

    def chances(self) -> torch.Tensor:
        """
        Estimated probabilities that the groups of prompts are effective.

        Returns:
            `torch.Tensor` of shape `(N,)`: float64, in (0, 1).
        """
        if self.graded:
            chances = torch.from_numpy(self.effective.mean()).double()
        else:
            rates = torch.from_numpy(self.success.estimates())  # (K, N)
            weights = torch.from_numpy(self.success.weights)  # (K,)
            # P is not linear in p: take the mean of the experts' P, and not the P of their mean p
            chances = weights @ chance_effective(rates, self.context.group_size)  # (K,) x (K, N) -> (N,)
        # A group without a score has no gradient either, and says nothing about the success rate
        chances = chances * 0.5 ** torch.from_numpy(self._unscored).double()
        return chances.clamp(LOWEST_CHANCE, HIGHEST_CHANCE)

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
        log_weights = log_weight(self.chances(), self.threshold)
        log_weights = self._pass.restrict(log_weights, excluded, n)
        log_weights = log_weights.masked_fill(excluded, -torch.inf)
        ids: np.ndarray = gumbel_top_k(log_weights, n, rng).numpy()
        self._pass.drawn[ids] = True
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
        self._unscored[ids] = np.where(has_no_score, self._unscored[ids] + 1, 0)

        self.record.add(self.predict(ids), rates)
        self.success.observe(ids, rates, num_scored, self.batch)
        self.success.refresh()
        one_each = np.ones_like(num_scored)
        self.effective.observe(ids, is_effective, one_each, self.batch)
        if not self.graded:
            self._note_totals(groups)
        if self.graded:
            self.effective.refresh()

    def _note_totals(self, groups: Sequence[RolloutGroup]) -> None:
        """Find out from the total rewards of groups whether rewards are graded."""
        totals = np.concatenate([self._totals, *(group.totals for group in groups)])
        self._totals = lowest_different(totals, 3)
        self.graded = len(self._totals) > 2

    def rescale(self, scale: float, offset: float) -> None:
        super().rescale(scale, offset)
        self.success.rescale(scale, offset)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "graded": self.graded,
            "proposed": self._proposed.copy(),
            "in_pass": self._pass.drawn.copy(),
            "totals": self._totals.copy(),
            "unscored": self._unscored.copy(),
            "success": self.success.state_dict(),
            "effective": self.effective.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.graded = state["graded"]
        self._proposed = state["proposed"].copy()
        self._pass.drawn = state["in_pass"].copy()
        self._totals = state["totals"].copy()
        self._unscored = state["unscored"].copy()
        self.success.load_state_dict(state["success"], predictor=self.same_embeddings)
        self.effective.load_state_dict(state["effective"], predictor=self.same_embeddings)


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


class EarlierRun(NamedTuple):
    """
    What an earlier run showed of n prompts, in the order of each prompt's last group.

    Attributes:
        ids (`np.ndarray` of shape `(n,)`): int64, prompts.
        rates (`np.ndarray` of shape `(n,)`): float32, mean success rates in [0, 1].
        effective (`np.ndarray` of shape `(n,)`): float32, shares of effective groups.
        counts (`np.ndarray` of shape `(n,)`): int64, groups.
    """

    ids: np.ndarray
    rates: np.ndarray
    effective: np.ndarray
    counts: np.ndarray


def read_earlier_run(given: str, dataset_hash: str, scale: RewardScale) -> EarlierRun:
    """
    Read the groups of an earlier run.

    Args:
        given (`str`): `output_dir` of the run, or its table of groups.
        dataset_hash (`str`): content hash of the prompts of this run.
        scale ([`RewardScale`]): of this run; widened by the range of the earlier run's rewards, unless it is fixed.

    Returns:
        [`EarlierRun`]: success rates by the widened range.

    Raises:
        UserError: the table is missing, corrupt, empty, or of prompts with another hash.
    """
    path = _groups_file(given)
    table = read_groups(path)
    about = about_groups(path)
    if about.get("dataset") != dataset_hash:
        raise UserError(
            f"`history_from` is {given!r}, which is of another dataset. Prompts are known by their row: give a run on "
            "the same prompts in the same order, or leave it out."
        )
    groups = table.select(["prompt_id", "success_rate", "reward", "kind"]).to_pandas().dropna()
    groups = groups[groups["prompt_id"] >= 0]  # prompts of a stream have -1
    if groups.empty:
        raise UserError(f"`history_from` is {given!r}, and no group in it has a success rate. Leave it out.")

    reward_range = about["reward_range"] or {}
    scale.observe(np.array(list(reward_range.values())))
    if scale.high > scale.low:
        # The range of that run may have widened since a rate was written
        rates = (groups["reward"] - scale.low) / (scale.high - scale.low)
        groups["success_rate"] = np.clip(rates, 0.0, 1.0)
    return _by_prompt(groups)


def _groups_file(given: str) -> Path:
    """The table of groups of a run, which is given by its `output_dir` or this file."""
    path = Path(given).expanduser()
    if path.is_dir():
        path = path / GROUPS_FILE
    if not path.is_file():
        raise UserError(f"`history_from` is {given!r}, and there is no file {path}. Give the `output_dir` of a run.")
    return path


def _by_prompt(groups: pd.DataFrame) -> EarlierRun:
    """Sum up rows of groups, oldest first, by prompt."""
    groups["effective"] = groups["kind"] == "effective"
    groups["position"] = np.arange(len(groups))
    prompts = groups.groupby("prompt_id").agg(
        rate=("success_rate", "mean"),
        effective=("effective", "mean"),
        count=("position", "size"),
        last=("position", "max"),
    )
    prompts = prompts.sort_values("last")
    return EarlierRun(
        ids=prompts.index.to_numpy(np.int64),
        rates=prompts["rate"].to_numpy(np.float32),
        effective=prompts["effective"].to_numpy(np.float32),
        counts=prompts["count"].to_numpy(np.int64),
    )
