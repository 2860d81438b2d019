"""What a generation batch consists of, and which groups get its places: `fill_batch`, a pure function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trl_dataeff.rollouts.group import Disposition, Origin, RolloutGroup, is_stale


@dataclass(frozen=True)
class Assignment:
    """
    Which groups get the places of a generation batch.

    Attributes:
        trained: groups to train on, leftover ones first, in the order of their generation; stored groups come behind
            them.
        overflow: effective groups for which there is no place.
        num_replayed: places for stored groups.
    """

    trained: list[RolloutGroup]
    overflow: list[RolloutGroup]
    num_replayed: int


def groups_missing(
    leftover: Sequence[RolloutGroup],
    fresh: Sequence[RolloutGroup],
    num_stored: int,
    *,
    places: int,
    reserved: int,
    rounds: int,
    max_rounds: int,
) -> int:
    """
    How many groups the next round has to give, 0 if the batch is complete.

    A single round keeps its zero-variance groups; only several rounds replace them. After the last round the batch is
    complete if stored and zero-variance groups fill it.

    Once this is 0, [`fill_batch`] fills all places with the same groups: `len(trained) + num_replayed == places`. The
    two functions count by the same rules, and change together.

    Args:
        leftover (`Sequence[RolloutGroup]`): effective groups of an earlier batch.
        fresh (`Sequence[RolloutGroup]`): generated for this batch so far.
        num_stored (`int`): stored groups that could be replayed.
        places (`int`): B, groups trained on.
        reserved (`int`): places that stored groups get in any case, as far as there are so many.
        rounds (`int`): rounds of rollouts so far.
        max_rounds (`int`): rounds of rollouts at most, unless the batch cannot be filled without a further one: a
            round may be small because the dataset is, and a stored group whose prompt was generated meanwhile no
            longer counts in `num_stored`.
    """
    num_effective = len(leftover) + sum(group.effective for group in fresh)
    num_zero_variance = sum(not group.effective for group in fresh)
    num_to_generate = _places_to_generate(places, reserved, num_stored)
    if num_effective >= num_to_generate:
        return 0
    can_be_filled = num_effective + num_zero_variance + num_stored >= places
    if rounds >= max_rounds and can_be_filled:
        return 0
    num_taken = num_effective
    if max_rounds == 1:  # zero-variance groups are not replaced
        num_taken += num_zero_variance
    return num_to_generate - num_taken


def _places_to_generate(places: int, reserved: int, num_stored: int) -> int:
    """Places that are not kept for stored groups. A reserved place is kept only if there is a stored group for it."""
    return places - min(reserved, num_stored)


def fill_batch(
    leftover: Sequence[RolloutGroup],
    fresh: Sequence[RolloutGroup],
    num_stored: int,
    *,
    places: int,
    reserved: int = 0,
) -> Assignment:
    """
    Decide which groups get the places of a generation batch.

    Effective groups take places first, leftover ones before fresh ones. With `reserved` places (`replay="share"`),
    fresh zero-variance groups keep their places, and stored groups get the reserved ones; without (`replay="fill"`),
    stored groups come before zero-variance groups.

    Args:
        leftover (`Sequence[RolloutGroup]`): effective groups of an earlier batch, in the order of their generation.
        fresh (`Sequence[RolloutGroup]`): generated for this batch, in the order of their generation.
        num_stored (`int`): stored groups that could be replayed.
        places (`int`): B, groups trained on.
        reserved (`int`, *optional*, defaults to `0`): places that stored groups get in any case, as far as there are
            so many.

    Returns:
        [`Assignment`]: fills all places once [`groups_missing`] is 0.
    """
    effective = [*leftover, *(group for group in fresh if group.effective)]
    zero_variance = [group for group in fresh if not group.effective]
    num_to_generate = _places_to_generate(places, reserved, num_stored)
    chosen = effective[:num_to_generate]
    overflow = effective[num_to_generate:]
    if reserved:
        chosen += zero_variance[: num_to_generate - len(chosen)]
    num_replayed = min(places - len(chosen), num_stored)
    if not reserved:
        chosen += zero_variance[: places - len(chosen) - num_replayed]
    is_chosen = set(chosen)
    trained = [group for group in [*leftover, *fresh] if group in is_chosen]
    return Assignment(trained, overflow, num_replayed)


@dataclass(frozen=True, eq=False)
class GenerationBatch:
    """
    A generation batch, from the groups that it began with to those that it leaves.

    Attributes:
        generated: all groups generated for this batch, reference rollouts included, in order.
        predicted: success rate that was predicted of each of them, or NaN.
        seconds: share of each of them in the time its round took.
        rounds: rounds of rollouts, reference rollouts not counted.
        trained: the groups to train on, as many as a generation batch has places, in the order of ranks.
        leftover: effective groups beyond them, to be kept for a later batch.
        origins: where each group comes from: those of `generated` and of `trained`.
        selector_metrics: numbers of the selector, by its own names.
        trl_metrics: TRL's metrics of rewards and lengths of the groups generated, if it has logged them of others; a
            list of values for each, see [`group_metrics`].
    """

    generated: list[RolloutGroup]
    predicted: list[float]
    seconds: list[float]
    rounds: int
    trained: list[RolloutGroup]
    leftover: list[RolloutGroup]
    origins: Mapping[RolloutGroup, Origin]
    selector_metrics: dict[str, float] = field(default_factory=dict)
    trl_metrics: dict[str, list[float]] = field(default_factory=dict)

    @property
    def dispositions(self) -> dict[RolloutGroup, Disposition]:
        """What becomes of each group of `generated`, `trained` and `leftover`."""
        result: dict[RolloutGroup, Disposition] = dict.fromkeys(self.generated, "dropped")
        result.update(dict.fromkeys(self.leftover, "leftover"))
        result.update(dict.fromkeys(self.trained, "trained"))
        return result

    @property
    def dropped(self) -> list[RolloutGroup]:
        """Groups that were generated for this batch and are neither trained on nor kept."""
        kept = {*self.trained, *self.leftover}
        return [group for group in self.generated if group not in kept]

    @property
    def replayed(self) -> list[RolloutGroup]:
        """Groups of the buffer that are trained on."""
        return [group for group in self.trained if self.origins[group] == "replayed"]

    @property
    def trains_on_all_generated(self) -> bool:
        """
        Whether exactly the groups that were generated for this batch are trained on, in their order: none is dropped,
        kept for later or replayed, and none has moved to another process.
        """
        return self.generated == self.trained

    @property
    def trained_stale(self) -> list[RolloutGroup]:
        """Groups trained on that an earlier policy sampled: leftover or replayed ones, of all processes."""
        return [group for group in self.trained if is_stale(self.origins[group])]

    @property
    def leftover_now(self) -> list[RolloutGroup]:
        """Leftover groups that were generated for this batch."""
        generated = set(self.generated)
        return [group for group in self.leftover if group in generated]
