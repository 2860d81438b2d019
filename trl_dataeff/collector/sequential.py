r"""
Sequential groups: which prompts get the rest of their completions, once the first half has been scored.

A group that is mixed after h of its G completions carries a gradient whatever follows, and continues. One whose completions
all agree carries one only if a later completion differs. The success rate of its prompt is believed to be Beta(a, b)
distributed before the group, so that after h failures the probability of that is

    P = 1 - prod_{j < G - h} (b + h + j) / (a + b + h + j),

with a and b exchanged after h successes. It costs G - h completions, which generate effective groups elsewhere at the
running average rate; the group continues if P / (G - h) is at least that average (arXiv 2605.26606, 2510.04996).

What is deliberately not here: models, collectives, and who generates (see `collector.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from trl_dataeff.rollouts.classification import GroupClassifier
from trl_dataeff.rollouts.group import RolloutGroup


#: Strength of the uniform distribution, Beta(1, 1), and its mean: the belief before anything was seen.
UNIFORM_STRENGTH, UNIFORM_MEAN = 2.0, 0.5
#: Groups that this belief counts for against those of the run.
PRIOR_GROUPS = 4.0
MOST_AGREEMENT = 0.98  # bounds the correlation of two completions of a prompt away from 0 and 1


def share_that_differs(expected: np.ndarray, shown: np.ndarray) -> np.ndarray:
    """
    The share of a prompt's completions that differ from those seen, in [0, 1]: the smallest that explains its expected
    success rate. For rewards of 0 and 1 it is the only one: p after failures, 1 - p after successes.

    Args:
        expected (`np.ndarray` of shape `(n,)`): success rates expected before the group, in [0, 1].
        shown (`np.ndarray` of shape `(n,)`): success of the completions seen, which agree, in [0, 1].
    """
    above = (expected - shown) / np.maximum(1 - shown, 1e-9)
    below = (shown - expected) / np.maximum(shown, 1e-9)
    share: np.ndarray = np.clip(np.where(expected > shown, above, below), 0.0, 1.0)
    return share


def probability_of_difference(
    differing: np.ndarray, strength: np.ndarray, agreeing: np.ndarray, remaining: int
) -> np.ndarray:
    """
    P: the probability that one of the next completions differs from those seen, by the beta-binomial distribution.

    Args:
        differing (`np.ndarray` of shape `(n,)`): a / (a + b), expected share of completions that differ.
        strength (`np.ndarray` of shape `(n,)`): a + b, completions that this expectation counts for; above 0.
        agreeing (`np.ndarray` of shape `(n,)`): h, completions seen.
        remaining (`int`): G - h.

    Returns:
        `np.ndarray` of shape `(n,)`: float64 in [0, 1].
    """
    seen = np.asarray(agreeing)[:, None] + np.arange(remaining)  # (n, G - h)
    strength = np.asarray(strength, dtype=np.float64)[:, None]
    agree = strength * (1 - np.asarray(differing, dtype=np.float64)[:, None])
    probability: np.ndarray = 1 - ((agree + seen) / (strength + seen)).prod(axis=1)
    return probability


class SequentialGroups:
    """
    Decides which groups of a round continue, by what the run has shown. Its sums fade by `decay` with every round.

    Args:
        group_size (`int`): G, at least 2.
        decay (`float`, *optional*, defaults to `0.8`): of earlier rounds.

    Attributes:
        first (`int`): h = G // 2, completions that every group gets.
        rest (`int`): G - h, those of a group that continues.
    """

    def __init__(self, group_size: int, decay: float = 0.8):
        self.first, self.rest = group_size // 2, group_size - group_size // 2
        self.decay = decay
        self.gained = np.zeros(2)  # effective groups, and completions generated for all groups
        self.rates = np.zeros(2)  # of first halves: sum and number of success rates
        self.spreads = np.zeros(2)  # of first halves: sum and number of shares of pairs that differ

    @property
    def threshold(self) -> float:
        """Running average of effective groups per completion; 0 before the first round, where every group continues."""
        return float(self.gained[0] / self.gained[1]) if self.gained[1] else 0.0

    def population(self) -> tuple[float, float]:
        """
        Mean and strength of the Beta distribution of all prompts' success rates, by the moments of the first halves: their
        mean m, and the correlation 1 - d / (2 m (1 - m)) of two completions of a prompt, which differ with probability d.
        Regularised towards Beta(1, 1), which it is at the start.
        """
        mean = (PRIOR_GROUPS * UNIFORM_MEAN + self.rates[0]) / (PRIOR_GROUPS + self.rates[1])
        if not self.spreads[1]:
            return float(mean), UNIFORM_STRENGTH
        agreement = 1 - self.spreads[0] / self.spreads[1] / (2 * mean * (1 - mean))
        agreement = (PRIOR_GROUPS / (1 + UNIFORM_STRENGTH) + self.spreads[1] * agreement) / (
            PRIOR_GROUPS + self.spreads[1]
        )
        agreement = min(max(agreement, 1 - MOST_AGREEMENT), MOST_AGREEMENT)
        return float(mean), float(1 / agreement - 1)

    def continuing(self, groups: Sequence[RolloutGroup], strengths: np.ndarray, multiple: int = 1) -> np.ndarray:
        """
        Which groups get the rest of their completions.

        Args:
            groups: first halves of a round, with the success rates predicted before it.
            strengths (`np.ndarray` of shape `(n,)`): completions that each prediction is worth, NaN where that is unknown: it
                then counts for as many as a uniform distribution, 2. Where there is no prediction, the distribution of all
                prompts takes its place (see [`population`]).
            multiple (`int`, *optional*, defaults to `1`): the number is rounded up to a multiple of this (processes), by the
                groups that would be next; `n` is one.

        Returns:
            `np.ndarray`: indices, ascending.
        """
        self._observe_first(groups)
        worth = self._worth(groups, np.asarray(strengths, dtype=np.float64))
        count = math.ceil(np.count_nonzero(worth >= self.threshold) / multiple) * multiple
        return np.sort(np.argsort(-worth, kind="stable")[:count])

    def _worth(self, groups: Sequence[RolloutGroup], strengths: np.ndarray) -> np.ndarray:
        """Effective groups that each further completion gives on average, `(n,)`; infinite for mixed groups."""
        expected = np.array([group.predicted for group in groups], dtype=np.float64)
        known = ~np.isnan(expected)
        mean, strength = self.population()
        strengths = np.where(np.isnan(strengths), UNIFORM_STRENGTH, np.maximum(strengths, 1e-6))
        expected, strengths = np.where(known, expected, mean), np.where(known, strengths, strength)
        shown = np.nan_to_num(np.array([group.success_rate for group in groups], dtype=np.float64))
        agreeing = np.array([group.scored for group in groups])
        differing = share_that_differs(expected, shown)
        worth = probability_of_difference(differing, strengths, agreeing, self.rest) / self.rest
        # The spread is NaN for a single completion
        mixed = np.array([group.effective or group.spread > 0 for group in groups])
        return np.where(mixed, np.inf, worth)

    def _observe_first(self, groups: Sequence[RolloutGroup]) -> None:
        rates = np.array([group.success_rate for group in groups], dtype=np.float64)
        spreads = np.array([group.spread for group in groups], dtype=np.float64)
        self.rates = self.decay * self.rates + _sum_and_count(rates)
        self.spreads = self.decay * self.spreads + _sum_and_count(spreads)

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        """Enter the groups of a round, those that were stopped included."""
        effective, completions = sum(group.effective for group in groups), sum(group.size for group in groups)
        self.gained = self.decay * self.gained + [effective, completions]

    def rescale(self, scale: float, offset: float) -> None:
        """The reward's range has widened; see [`Selector.rescale`]."""
        self.rates[0] = scale * self.rates[0] + offset * self.rates[1]

    def state_dict(self) -> list[list[float]]:
        """What decides later rounds, for JSON."""
        return [self.gained.tolist(), self.rates.tolist(), self.spreads.tolist()]

    def load_state_dict(self, state: Sequence[Sequence[float]]) -> None:
        """Restore what `state_dict` returned."""
        self.gained, self.rates, self.spreads = (np.array(sums, dtype=np.float64) for sums in state)


def complete(groups: Sequence[RolloutGroup], rest: Sequence[RolloutGroup], classifier: GroupClassifier) -> None:
    """Append the rest of their completions to groups, in place, and classify them anew."""
    for group, others in zip(groups, rest, strict=True):
        group.extend(others)
    rewards, truncated = (np.stack([getattr(group, name) for group in groups]) for name in ("rewards", "truncated"))
    success_rates, kinds = classifier.classify(rewards, truncated)
    for group, rate, kind, spread in zip(groups, success_rates, kinds, classifier.spreads(rewards), strict=True):
        group.success_rate, group.kind, group.spread = float(rate), int(kind), float(spread)
        group.graded = classifier.graded


def _sum_and_count(values: np.ndarray) -> np.ndarray:
    known = values[~np.isnan(values)]
    return np.array([known.sum(), len(known)])
