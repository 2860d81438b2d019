"""`TrackedBaseline`: what a generation batch's advantages are measured against with `advantage_baseline="tracked"`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trl_dataeff.rollouts.advantages import Posterior, Prior, advantages, leave_one_out
from trl_dataeff.rollouts.classification import GroupClassifier, total_rewards
from trl_dataeff.rollouts.group import RolloutGroup
from trl_dataeff.selection.base import Selector, checked_predictions, checked_strengths
from trl_dataeff.selection.estimator import PromptEstimator, group_arrays, under


#: By how much the run's variances of rewards fade with each generation batch
DECAY = 0.9
#: Groups of two values that count in them from the start: rewards that never differ within a group have no variance
LEAST_GROUPS = 0.01
_TRACKER = "tracker."


class TrackedBaseline:
    """
    The prior variance of a reward is that of a reward at the ends of the range with the predicted mean, times the share of that
    which groups of this run have had: 1 for rewards of two values.

    Args:
        scale (`str`): TRL's `scale_rewards`.
        prior (`float`): completions that a prediction is worth whose selector does not say.
        strength (`float`, *optional*): completions that every prediction is worth.
        masks_truncated (`bool`, *optional*, defaults to `False`): TRL's `mask_truncated_completions`.
        tracker ([`PromptEstimator`], *optional*): predicts in the place of a selector that does not.
    """

    def __init__(
        self,
        scale: str,
        *,
        prior: float,
        strength: float | None = None,
        masks_truncated: bool = False,
        tracker: PromptEstimator | None = None,
    ):
        self.scale, self.prior, self.strength = scale, prior, strength
        self.masks_truncated = masks_truncated
        self.tracker = tracker
        self._batch = 0
        self._variance = np.zeros(2)  # within groups, and of two values with the same means

    def predict(self, selector: Selector | None, ids: np.ndarray) -> np.ndarray:
        """Predicted success rates, NaN where there is no prediction, and the strengths of these predictions: float32 `(2, n)`."""
        if self.tracker is not None and len(self.tracker.difficulty):
            rates, strengths = self.tracker.mean(ids), self.tracker.strength(ids)
        elif self.tracker is None and selector is not None:
            rates, strengths = checked_predictions(selector, ids), checked_strengths(selector, ids)
        else:
            rates = strengths = np.full(len(ids), np.nan, dtype=np.float32)
        strengths = np.where(np.isnan(strengths), self.prior, strengths)
        return np.stack([rates, strengths if self.strength is None else np.full_like(strengths, self.strength)])

    def mark(self, groups: Sequence[RolloutGroup], classifier: GroupClassifier) -> None:
        """Set `surprise` of groups that were generated now: the root mean square of their advantages, scaled by group."""
        rewards, posterior = self._posterior(groups, classifier)
        rows = np.stack([group.truncated for group in groups]) if self.masks_truncated else np.zeros(rewards.shape)
        squares = np.where(rows, 0.0, advantages(rewards, posterior, "group") ** 2)
        counts = np.maximum((~np.isnan(rewards)).sum(axis=1), 1)
        for group, surprise in zip(groups, np.sqrt(squares.sum(axis=1) / counts).tolist(), strict=True):
            group.surprise = surprise

    def advantages(self, groups: Sequence[RolloutGroup], classifier: GroupClassifier) -> np.ndarray:
        """Advantages `(n, G)`, float32, of all groups of a generation batch."""
        rewards, posterior = self._posterior(groups, classifier)
        return advantages(rewards, posterior, self.scale).astype(np.float32)

    def observe(self, groups: Sequence[RolloutGroup], classifier: GroupClassifier) -> None:
        """Learn from the groups that were generated for a batch."""
        low, high = classifier.scale.low, classifier.scale.high
        totals = _totals(groups, classifier)
        totals = np.clip(np.where(np.isinf(totals), np.nan, totals), low, high)
        totals = totals[~np.isnan(totals).all(axis=1)]
        mean = np.nanmean(totals, axis=1)
        sums = [np.nanvar(totals, axis=1).sum(), ((mean - low) * (high - mean)).sum()]
        self._variance = DECAY * self._variance + sums
        self._batch += 1
        if self.tracker is not None:
            self.tracker.observe(*group_arrays(groups), self._batch)
            self.tracker.refresh()

    def rescale(self, scale: float, offset: float) -> None:
        """The reward's range has widened; see [`Selector.rescale`]."""
        if self.tracker is not None:
            self.tracker.rescale(scale, offset)

    def state_dict(self) -> dict[str, np.ndarray]:
        tracked = {} if self.tracker is None else self.tracker.state_dict()
        own = {"batch": np.array([self._batch]), "variance": self._variance.copy()}
        return own | {_TRACKER + name: value for name, value in tracked.items()}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        self._batch, self._variance = int(state["batch"][0]), state["variance"].copy()
        tracked = under(state, _TRACKER)
        if self.tracker is not None and tracked:
            self.tracker.load_state_dict(tracked)

    def _posterior(self, groups: Sequence[RolloutGroup], classifier: GroupClassifier) -> tuple[np.ndarray, Posterior]:
        rewards = _totals(groups, classifier)
        low, high = classifier.scale.low, classifier.scale.high
        width = high - low if np.isfinite(low) else np.nan  # before the first score the scale is unknown
        within, binary = self._variance + LEAST_GROUPS * width**2 / 4
        share = min(within / binary, 1.0) if binary > 0 else 1.0
        p = np.array([group.predicted for group in groups], dtype=np.float64)
        strength = np.array([group.strength for group in groups], dtype=np.float64)
        strength = np.where(np.isnan(strength), self.prior, strength)  # of a checkpoint without this baseline
        prior = Prior(
            mean=p * width + (low if np.isfinite(low) else 0.0),
            strength=strength,
            variance=share * p * (1 - p) * width**2,
            # That of a group of two values in which one completion differs: advantages are at most the root of G, as in TRL
            least_variance=share * width**2 / rewards.shape[1],
        )
        return rewards, leave_one_out(rewards, prior)


def _totals(groups: Sequence[RolloutGroup], classifier: GroupClassifier) -> np.ndarray:
    return total_rewards(np.stack([group.rewards for group in groups]), classifier.weights).astype(np.float64)
