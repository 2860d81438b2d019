"""
`fill_batch()`: rounds of rollouts until a generation batch has its groups.

The rounds run in lockstep on all processes: every decision here is taken on numbers that all of them hold. What is
deliberately not here: models and collectives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from trl_dataeff.replay.buffer import ReplayBuffer
from trl_dataeff.rollouts.group import Disposition, Origin, RolloutGroup


@dataclass
class GenerationBatch:
    """
    A generation batch. Each group of `generated`, of the leftover groups it began with and of those it replays has its
    `origin` and, once the batch is full, its `disposition`.

    Attributes:
        trained: the groups to train on, as many as a generation batch holds.
        leftover: effective groups beyond them, to be kept for a later batch.
        generated: all groups generated for this batch, reference rollouts included, in order.
        rounds: rounds of rollouts, reference rollouts not counted.
        padded: how many of `trained` are zero-variance groups that complete a batch which stayed short.
        metrics: numbers to log, by their names in `trl_dataeff.tracking.metrics.METRICS`.
        selector_metrics: numbers of the selector, by its own names.
    """

    trained: list[RolloutGroup] = field(default_factory=list)
    leftover: list[RolloutGroup] = field(default_factory=list)
    generated: list[RolloutGroup] = field(default_factory=list)
    rounds: int = 0
    padded: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    selector_metrics: dict[str, float] = field(default_factory=dict)

    @property
    def dropped(self) -> list[RolloutGroup]:
        """Groups that were generated for this batch and are neither trained on nor kept."""
        return [group for group in self.generated if group.disposition == "dropped"]

    @property
    def replayed(self) -> list[RolloutGroup]:
        """Groups trained on that come from the replay buffer."""
        return [group for group in self.trained if group.origin == "replayed"]

    @property
    def trained_now(self) -> list[RolloutGroup]:
        """Groups trained on that were generated for this batch."""
        return [group for group in self.trained if group.generated_now]

    @property
    def trained_stale(self) -> list[RolloutGroup]:
        """Groups trained on that an earlier policy sampled: leftover or replayed ones."""
        return [group for group in self.trained if not group.generated_now]

    @property
    def leftover_now(self) -> list[RolloutGroup]:
        """Leftover groups that were generated for this batch."""
        return [group for group in self.leftover if group.generated_now]


def fill_batch(
    roll_out: Callable[[int, int], Sequence[RolloutGroup]],
    round_size: Callable[[int], int],
    *,
    batch_groups: int,
    max_rounds: int | None = None,
    leftover: Sequence[RolloutGroup] = (),
    references: Sequence[RolloutGroup] = (),
    buffer: ReplayBuffer | None = None,
    replay_groups: int = 0,
    exclude: Collection[int] = (),
    rng: torch.Generator | None = None,
) -> GenerationBatch:
    """
    Generate rollouts until a batch has its groups, `replay_groups` of them from `buffer` and the rest generated.

    With `max_rounds` zero-variance groups are dropped, and further rounds replace them until the batch is full or so many
    rounds have been made (dynamic sampling). Leftover groups come first, then new ones in the order of their rounds,
    then replayed ones. A batch that stays short is completed with more from `buffer`, then with its own zero-variance
    groups. Without `max_rounds` every new group is trained on. In either case the batch has `batch_groups` groups, and no
    replayed prompt was generated for it too.

    Args:
        roll_out (`Callable`): `(n, round) -> at least n groups`, generated and scored.
        round_size (`Callable`): `(missing groups) -> n`, at least as many as are missing in the first round.
        batch_groups (`int`): B, groups trained on per generation batch.
        max_rounds (`int`, *optional*): at least 1; `None`: nothing is dropped.
        leftover: effective groups that an earlier batch had too many.
        references: reference rollouts of this batch. Effective ones are left over for `buffer`, if there is one; else
            they are trained on, up to half of the batch. The others are dropped.
        buffer ([`ReplayBuffer`], *optional*): source of replayed groups.
        replay_groups (`int`, *optional*, defaults to `0`): below `batch_groups`; fewer are replayed where `buffer` has
            no more of other prompts.
        exclude (`Collection[int]`, *optional*): prompts that are not replayed.
        rng (`torch.Generator`, *optional*): draws the replayed groups; needed with `buffer`.
    """
    if buffer is not None and rng is None:
        raise ValueError("`buffer` is given without `rng`, which draws the replayed groups. Give both.")
    _set_origin(leftover, "leftover")
    effective = [group for group in references if group.effective]
    # Without a buffer references take up to half of the batch: the rest is selected
    kept = [*leftover, *(effective[: batch_groups // 2] if buffer is None else [])]
    stored = effective if buffer is not None else []
    batch = GenerationBatch(generated=list(references))
    zero_variance: list[RolloutGroup] = []
    while True:
        present = {*exclude, *(group.prompt_id for group in [*kept, *zero_variance, *references])}
        available = buffer.available(present) if buffer is not None else 0
        wanted = batch_groups - min(replay_groups, available)
        no_more_rounds = max_rounds is not None and batch.rounds >= max_rounds
        if len(kept) >= wanted or (no_more_rounds and len(kept) + len(zero_variance) + available >= batch_groups):
            break
        groups = roll_out(round_size(wanted - len(kept)), batch.rounds)
        batch.rounds += 1
        batch.generated.extend(groups)
        kept.extend(group for group in groups if group.effective or max_rounds is None)
        zero_variance.extend(group for group in groups if not group.effective and max_rounds is not None)
    used = min(len(kept), wanted if max_rounds is not None else batch_groups)
    replayed = []
    if buffer is not None and rng is not None:
        replayed = buffer.sample(min(batch_groups - used, available), rng, present)
        _set_origin(replayed, "replayed")
    batch.padded = batch_groups - used - len(replayed)
    batch.trained = [*kept[:used], *replayed, *zero_variance[: batch.padded]]
    batch.leftover = [*(group for group in kept[used:] if group.effective), *stored]
    _set_disposition(batch.generated, "dropped")  # unless it is trained on or left over
    _set_disposition(batch.leftover, "leftover")
    _set_disposition(batch.trained, "trained")
    return batch


def _set_origin(groups: Sequence[RolloutGroup], origin: Origin) -> None:
    for group in groups:
        group.origin = origin


def _set_disposition(groups: Sequence[RolloutGroup], disposition: Disposition) -> None:
    for group in groups:
        group.disposition = disposition


@dataclass
class ZeroVarianceShare:
    """
    Running share of zero-variance groups among those generated: counts that fade by `decay` with every round, so that large rounds weigh more than small ones. 0 before the first round.
    """

    decay: float = 0.8
    zero: float = 0.0
    total: float = 0.0

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        """Enter the groups of a round."""
        self.zero = self.decay * self.zero + sum(not group.effective for group in groups)
        self.total = self.decay * self.total + len(groups)

    @property
    def value(self) -> float:
        """The share, in [0, 1]."""
        return self.zero / self.total if self.total else 0.0


SMALLEST, LARGEST = 0.25, 1.5  # rounds of dynamic sampling, as shares of the batch


@dataclass(frozen=True)
class RefillRounds:
    """
    Rounds of dynamic sampling (DAPO, arXiv 2503.14476).

    Attributes:
        most: rounds that one generation batch may take.
        margin: oversampling of a round, at least 1.
    """

    most: int = 4
    margin: float = 1.0

    def size(self, missing: int, *, batch_groups: int, zero_share: float, multiple: int, num_prompts: int) -> int:
        """
        Groups to generate in a round: `ceil(margin * missing / (1 - zero_share))`, within 0.25 and 1.5 times the batch
        (GRESO, arXiv 2506.02177, section on adaptive batch size), never fewer than are missing while the bounds allow it.

        Args:
            missing (`int`): groups that the batch lacks, from 1 to `batch_groups`.
            batch_groups (`int`): B, groups of a generation batch.
            zero_share (`float`): expected share of zero-variance groups, in [0, 1]; at 1 the upper bound is taken.
            multiple (`int`): the size is rounded up to a multiple of this (processes).
            num_prompts (`int`): N; the size is at most the largest multiple within it.
        """
        most = math.floor(LARGEST * batch_groups)
        wanted = most if zero_share >= 1 else math.ceil(self.margin * missing / (1 - zero_share))
        size = min(max(wanted, missing, math.ceil(SMALLEST * batch_groups)), most)
        return min(math.ceil(size / multiple) * multiple, num_prompts // multiple * multiple)
