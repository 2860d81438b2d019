r"""
DOTS: draw prompts whose groups are likely to carry a gradient (after arXiv 2506.05316, without its reference rollouts).

1. The success rate \(p_i\) of a prompt joins the prediction \(q_i\) from its embedding with the prompt's own groups, which
   fade as the policy changes: \(p_i = (s q_i + \sum_t f_t \, successes_t) / (s + \sum_t f_t \, completions_t)\).
2. A group of G completions carries a gradient unless all rewards are equal: \(P_i = 1 - p_i^G - (1 - p_i)^G\).
3. Prompts are drawn without replacement with weights \(P_i^4 / (P_i^4 + t^4)\): alike where a gradient is likely, hardly ever
   where it is not. A pass goes on across generation batches until most of the weight has been drawn. Each group in a row that no
   reward function scores halves \(P_i\).

`estimator.py` has step 1, for several speeds of the policy side by side, and `sampling.py` steps 2 and 3. With graded rewards a mean
reward says little about whether rewards differ; then P is estimated as a success rate is: from whether groups were effective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from trl_dataeff.difficulty.logistic import LogisticDifficultyPredictor
from trl_dataeff.difficulty.predictor import DifficultyPredictor
from trl_dataeff.rollouts.classification import RewardScale
from trl_dataeff.rollouts.group import RolloutGroup
from trl_dataeff.selection.base import SelectorContext, check_request, register_selector
from trl_dataeff.selection.dots.estimator import HALF_LIVES, PromptEstimator
from trl_dataeff.selection.dots.predicting import PredictingSelector
from trl_dataeff.selection.dots.sampling import PromptPass, chance_effective, gumbel_top_k, log_weight
from trl_dataeff.tracking.groups import GROUPS_FILE, about_groups, read_groups
from trl_dataeff.utils import UserError, check_number


# s, of predictions from embeddings and of the mean, which says nothing about one prompt
PRIORS = (4.0, 0.25)  # of success rates, in completions
EFFECTIVE_PRIORS = (1.0, 1.0)  # of probabilities that a group is effective, in groups


@register_selector("dots")
class DotsSelector(PredictingSelector):
    """
    Samples prompts by the estimated probability that their groups carry a gradient, in passes.

    Args:
        threshold (`float`, *optional*, defaults to `0.6`): t, the probability at which the weight of a prompt is one half,
            in (0, 1]. A lower one draws more hard and easy prompts.
        coverage (`float`, *optional*, defaults to `0.7`): share of the weight of all prompts that is drawn before a prompt may
            be drawn again, in [0, 1] (see [`PromptPass`]); 0 allows the same prompt in every batch.
        predictor (`str` or [`DifficultyPredictor`], *optional*, defaults to `"logistic"`): `"logistic"`, `"attention"`, the path
            of a saved or published predictor, or an instance.
        predictor_args (`dict`, *optional*): keyword arguments of a predictor that is named.
        history_from (`str`, *optional*): `output_dir` of an earlier run on the same dataset, or its `dataeff/groups.parquet`,
            whose success rates are the first predictions; groups of this run outweigh them.
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
        self.threshold, self.coverage = threshold, coverage
        self.history_from = history_from

    def bind(self, context: SelectorContext) -> None:
        super().bind(context)
        difficulty = self.rolling(self.predictor, self.predictor_args, HALF_LIVES[-1])
        self.success = PromptEstimator(difficulty, PRIORS, HALF_LIVES)
        # Which groups were effective: collected from the first batch, used once graded rewards have been seen. The predictor is
        # copied from one that has the principal components of the embeddings, if it is of the same kind
        new = difficulty.predictor if self.predictor == "logistic" else LogisticDifficultyPredictor()
        labels = self.rolling(new, half_life=HALF_LIVES[-1])
        self.effective, self.graded = PromptEstimator(labels, EFFECTIVE_PRIORS, HALF_LIVES), False
        # Groups in a row that no reward function scored, of each prompt
        self._unscored = np.zeros(context.num_prompts, dtype=np.int16)
        self._totals = np.empty(0, dtype=np.float32)  # the first three different total rewards
        if self.history_from is not None and not context.resumed:
            # A prior that this run's own groups outweigh
            earlier = read_earlier_run(self.history_from, context.dataset_hash, context.scale)
            self.success.start_from(earlier.ids, earlier.rates, earlier.counts * context.group_size)
            self.effective.start_from(earlier.ids, earlier.effective, earlier.counts)
            self._followed = replace(context.scale)
        self._pass = PromptPass(context.num_prompts, self.coverage)
        self._proposed = np.empty(0, dtype=np.int64)  # for this generation batch

    def chances(self) -> torch.Tensor:
        """Estimated probabilities that groups are effective, of all prompts: float64 `(N,)`, in (0, 1)."""
        if self.graded:
            p = torch.from_numpy(self.effective.mean()).double()
        else:  # each expert's, since P is not linear in p
            each = chance_effective(torch.from_numpy(self.success.estimates()), self.context.group_size)
            p = torch.from_numpy(self.success.weights) @ each
        # A group without a score has no gradient either, and says nothing about the success rate
        return (p * 0.5 ** torch.from_numpy(self._unscored)).clamp(1e-6, 1 - 1e-6)

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
        if size - len(self._proposed) >= n:  # no prompt twice in a generation batch, as long as there are others
            excluded[torch.from_numpy(self._proposed)] = True
        weights = self._pass.restrict(log_weight(self.chances(), self.threshold), excluded, n)
        ids: np.ndarray = gumbel_top_k(weights.masked_fill(excluded, -torch.inf), n, rng).numpy()
        self._pass.drawn[ids] = True
        self._proposed = np.concatenate([self._proposed, ids])
        return ids

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        self.batch += 1
        self._proposed = np.empty(0, dtype=np.int64)
        ids = np.array([group.prompt_id for group in groups], dtype=np.int64)
        rates = self.context.success_rates(groups)
        trials = np.array([group.scored for group in groups], dtype=np.float32)
        effective = np.array([group.effective for group in groups], dtype=np.float32)
        effective[np.isnan(rates)] = np.nan
        self._unscored[ids] = np.where(np.isnan(rates), self._unscored[ids] + 1, 0)
        self.record.add(self.predict(ids), rates)
        self.success.observe(ids, rates, trials, self.batch)
        self.success.refresh()
        self.effective.observe(ids, effective, np.ones_like(trials), self.batch)
        self.graded = self.graded or self._is_graded(groups)
        if self.graded:
            self.effective.refresh()

    def _is_graded(self, groups: Sequence[RolloutGroup]) -> bool:
        """Whether more than two different total rewards have been seen: then a mean reward is not a chance of success."""
        totals = np.concatenate([self._totals, *(group.totals for group in groups)])
        totals = np.unique(totals[np.isfinite(totals)])
        if len(totals):
            apart = np.diff(totals) > 1e-6 * np.abs(totals[1:])  # by more than the rounding of a sum
            self._totals = totals[np.concatenate([[True], apart])][:3]
        return len(self._totals) > 2

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
        self._proposed, self._totals = state["proposed"].copy(), state["totals"].copy()
        self._pass.drawn, self._unscored = state["in_pass"].copy(), state["unscored"].copy()
        self.success.load_state_dict(state["success"], predictor=self.same_embeddings)
        self.effective.load_state_dict(state["effective"], predictor=self.same_embeddings)
        self.graded = state["graded"]


class EarlierRun(NamedTuple):
    """What an earlier run showed of n prompts, in the order of each prompt's last group; arrays of shape `(n,)`."""

    ids: np.ndarray  # prompts, int64
    rates: np.ndarray  # mean success rates, float32 in [0, 1]
    effective: np.ndarray  # shares of effective groups, float32
    counts: np.ndarray  # groups, int64


def read_earlier_run(given: str, dataset_hash: str, scale: RewardScale) -> EarlierRun:
    """
    The groups of an earlier run, `given` by its `output_dir` or its table of groups. Widens `scale`, unless it is fixed, by the
    range of its rewards. Raises a [`UserError`] if the table is missing, corrupt, empty, or of prompts with another hash.
    """
    path = Path(given).expanduser()
    path = path / GROUPS_FILE if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"`history_from` is {given!r}, and there is no file {path}. Give the `output_dir` of a run.")
    table = read_groups(path)
    about = about_groups(path)
    if about.get("dataset") != dataset_hash:
        raise UserError(
            f"`history_from` is {given!r}, which is of another dataset. Prompts are known by their row: give a run on the same "
            "prompts in the same order, or leave it out."
        )
    names = ["prompt_id", "success_rate", "reward", "kind"]
    groups = table.select(names).to_pandas().dropna()
    groups = groups[groups["prompt_id"] >= 0]
    if groups.empty:
        raise UserError(f"`history_from` is {given!r}, and no group in it has a success rate. Leave it out.")
    scale.observe(np.array(list((about["reward_range"] or {}).values())))
    if scale.high > scale.low:  # the range of that run may have widened since a rate was written
        groups["success_rate"] = np.clip((groups["reward"] - scale.low) / (scale.high - scale.low), 0.0, 1.0)
    groups["effective"] = groups["kind"] == "effective"
    groups["place"] = np.arange(len(groups))
    each = groups.groupby("prompt_id").agg(
        rate=("success_rate", "mean"), effective=("effective", "mean"), count=("place", "size"), last=("place", "max")
    )
    each = each.sort_values("last")
    rate, effective = (each[name].to_numpy(np.float32) for name in ("rate", "effective"))
    return EarlierRun(each.index.to_numpy(np.int64), rate, effective, each["count"].to_numpy(np.int64))
