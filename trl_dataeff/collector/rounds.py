"""What a generation batch consists of, how many groups a round generates for it, and what TRL computes over all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from trl.trainer.utils import nanstd

from trl_dataeff.rollouts.classification import GroupClassifier, total_rewards
from trl_dataeff.rollouts.group import RolloutGroup
from trl_dataeff.tracking.metrics import group_metrics


@dataclass
class GenerationBatch:
    """
    A generation batch. Each group of `generated`, of the leftover groups it began with and of those it replays has its
    `origin` and, once the batch is full, its `disposition`.

    Attributes:
        generated: all groups generated for this batch, reference rollouts included, in order.
        predicted: success rate that was predicted of each of them, or NaN.
        seconds: share of each of them in the time its round took.
        rounds: rounds of rollouts, reference rollouts not counted.
        trained: the groups to train on, as many as a generation batch has places.
        leftover: effective groups beyond them, to be kept for a later batch.
        metrics: numbers to log, by their names in `trl_dataeff.tracking.metrics.METRICS`.
        selector_metrics: numbers of the selector, by its own names.
        trl_metrics: TRL's metrics of rewards and lengths of the groups generated, if it has logged them of others.
    """

    generated: list[RolloutGroup] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    rounds: int = 0
    trained: list[RolloutGroup] = field(default_factory=list)
    leftover: list[RolloutGroup] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    selector_metrics: dict[str, float] = field(default_factory=dict)
    trl_metrics: dict[str, float] = field(default_factory=dict)

    def assign(
        self, taken: Sequence[RolloutGroup], replayed: Sequence[RolloutGroup], leftover: Sequence[RolloutGroup]
    ) -> None:
        """
        Train on the groups `taken`, of `generated` and of the `leftover` groups that the batch began with, in the order of
        their generation, and then on those `replayed`. Sets the origin and the disposition of every group.
        """
        for group in leftover:
            group.origin = "leftover"
        for group in replayed:
            group.origin = "replayed"
        for group in self.generated:
            group.disposition = "dropped"  # unless it is trained on or left over
        for group in self.leftover:
            group.disposition = "leftover"
        for group in [*taken, *replayed]:
            group.disposition = "trained"
        own = [group for group in [*leftover, *self.generated] if group.disposition == "trained"]
        self.trained = [*own, *replayed]

    @property
    def dropped(self) -> list[RolloutGroup]:
        """Groups that were generated for this batch and are neither trained on nor kept."""
        return [group for group in self.generated if group.disposition == "dropped"]

    @property
    def trained_stale(self) -> list[RolloutGroup]:
        """Groups trained on that an earlier policy sampled: leftover or replayed ones."""
        return [group for group in self.trained if not group.generated_now]

    @property
    def leftover_now(self) -> list[RolloutGroup]:
        """Leftover groups that were generated for this batch."""
        return [group for group in self.leftover if group.generated_now]


@dataclass
class ZeroVarianceShare:
    """Running share of zero-variance groups, 0 before the first round: counts of groups that fade by `decay` with every round."""

    decay: float = 0.8
    zero: float = 0.0
    total: float = 0.0

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        """Enter the groups of a round."""
        self.zero = self.decay * self.zero + sum(not group.effective for group in groups)
        self.total = self.decay * self.total + len(groups)

    def state_dict(self) -> dict[str, float]:
        return {"zero": self.zero, "total": self.total}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.zero, self.total = state["zero"], state["total"]

    @property
    def value(self) -> float:
        """The share, in [0, 1]."""
        return self.zero / self.total if self.total else 0.0


SMALLEST, LARGEST = 0.25, 1.5  # rounds of dynamic sampling, as shares of the batch


@dataclass(frozen=True)
class RoundSizes:
    """
    At most `most` rounds of rollouts in a generation batch, and their sizes. A single round has as many groups as places are wanted.
    Several rounds replace zero-variance groups (dynamic sampling, DAPO, arXiv 2503.14476); each has
    `ceil(margin * missing / (1 - zero_share))` groups, with a `margin` of at least 1, within 0.25 and 1.5 times the batch (GRESO,
    arXiv 2506.02177, section on adaptive batch size), and never fewer than are missing while the bounds allow it.
    """

    most: int = 1
    margin: float = 1.0

    def size(self, missing: int, *, batch_groups: int, zero_share: float, multiple: int, num_prompts: int) -> int:
        """
        Groups to generate in a round, for so many `missing` places (1 to `batch_groups`) and an expected `zero_share` of
        zero-variance groups in [0, 1]; at 1 the upper bound is taken. Rounded up to a `multiple` (of processes), within
        `num_prompts`.
        """
        size = missing
        if self.most > 1:
            largest = math.floor(LARGEST * batch_groups)
            wanted = largest if zero_share >= 1 else math.ceil(self.margin * missing / (1 - zero_share))
            size = min(max(wanted, missing, math.ceil(SMALLEST * batch_groups)), largest)
        return min(math.ceil(size / multiple) * multiple, num_prompts // multiple * multiple)


# What TRL computes over the batch

EPSILON = 1e-4  # TRL adds it to the deviations by which it divides


def renormalize(
    advantages: torch.Tensor, own: Sequence[RolloutGroup], batch: GenerationBatch, classifier: GroupClassifier
) -> torch.Tensor:
    """
    Advantages `(rows,)` of this process's `own` groups of the batch. TRL has normalised them over all groups trained on
    (`scale_rewards="batch"`, and `normalize_then_sum`); those generated now are normalised over all groups generated for the
    batch instead: with replayed groups, which are all effective, they would be smaller. Unchanged if rewards are not finite.
    """
    deviation = deviation_over_batch(batch.generated, classifier)
    # TRL also subtracts the mean over the batch, which is 0 because each group's mean is 0
    factor = (deviation_over_batch(batch.trained, classifier) + EPSILON) / (deviation + EPSILON)
    fresh = [group.generated_now and 0 < factor < math.inf for group in own for _ in group.rewards]
    return advantages.where(~torch.tensor(fresh, device=advantages.device), advantages * factor)


def deviation_over_batch(groups: Sequence[RolloutGroup], classifier: GroupClassifier) -> float:
    """The deviation by which TRL divides if these groups are the batch; 0 without any, NaN or infinite for rewards that are not finite."""
    return nanstd(_normalized(groups, classifier)).item() if groups else 0.0


def batch_metrics(
    groups: Sequence[RolloutGroup], names: Sequence[str], classifier: GroupClassifier, over_batch: bool
) -> dict[str, float]:
    """
    TRL's metrics of rewards and lengths over all groups generated for a batch. With `over_batch` TRL divides advantages by the
    deviation over the batch, and logs whether that is 0.
    """
    values = group_metrics(groups, names, classifier.weights)
    if over_batch:
        values["frac_reward_zero_std"] = float(np.isclose(deviation_over_batch(groups, classifier), 0))
    return values


def _normalized(groups: Sequence[RolloutGroup], classifier: GroupClassifier) -> torch.Tensor:
    """What TRL normalises over the batch: total rewards, or the sums of each function's normalised rewards; NaN if unscored."""
    rewards = np.stack([group.rewards for group in groups])  # (n, G, F)
    values = torch.from_numpy(total_rewards(rewards, classifier.weights))
    if classifier.aggregation == "normalize_then_sum":
        each = torch.from_numpy(rewards)
        each = (each - each.nanmean(1, keepdim=True)) / (nanstd(each, dim=1, keepdim=True) + EPSILON)
        values = (each * torch.from_numpy(classifier.weights)).nansum(-1).where(~values.isnan(), values)
    return values.flatten()
