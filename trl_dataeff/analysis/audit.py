"""
What the groups of a finished run say: how many had zero variance, whether their prompts stay that way, and what they cost.

What is deliberately not here: reading (`tracking/completions.py`), and what a selector would have saved
(`audit_projection.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from trl_dataeff.rollouts.group import EASY, EFFECTIVE, HARD
from trl_dataeff.tracking.completions import RecordedGroups


PERIODS = 6
SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True)
class Shares:
    """
    Groups of the steps from `first` to `last`. `easy` and `hard` are the shares of zero-variance groups with the top
    reward and with any other; `success` is the mean success rate, NaN if no completion was scored.
    """

    first: int
    last: int
    groups: int
    effective: float
    easy: float
    hard: float
    success: float


@dataclass(frozen=True)
class Chance:
    """How often something was so, `hits` of `cases`. `share` is NaN without a case."""

    hits: int
    cases: int

    @property
    def share(self) -> float:
        return self.hits / self.cases if self.cases else math.nan


@dataclass(frozen=True)
class Persistence:
    """
    Whether a prompt's groups stay of zero variance, over pairs of a group and the next group of its prompt.

    Attributes:
        again: P(zero variance now | zero variance before).
        after_effective: P(zero variance now | effective before).
        before: P(zero variance before | zero variance now).
        prompts_seen_once: prompts that are in no pair.
    """

    again: Chance
    after_effective: Chance
    before: Chance
    prompts_seen_once: int


@dataclass(frozen=True)
class Cost:
    """
    What the recorded part of a run took, and the part of that which went to zero-variance groups. NaN where it is not known.

    Attributes:
        run_hours: of the whole run, with the steps that are not recorded.
    """

    rollouts: int
    wasted_rollouts: int
    tokens: float
    wasted_tokens: float
    hours: float
    wasted_hours: float
    run_hours: float


@dataclass(frozen=True)
class Audit:
    """
    The whole audit of a run.

    Attributes:
        prompts: different prompts. steps: recorded steps. every: steps from one recorded step to the next.
        groups_per_step: groups of a step, in the median.
    """

    prompts: int
    steps: int
    every: int
    groups_per_step: int
    overall: Shares
    periods: tuple[Shares, ...]
    persistence: Persistence
    cost: Cost


def audit(groups: RecordedGroups, step_seconds: float | None = None) -> Audit:
    """
    Describe a run.

    Args:
        groups ([`RecordedGroups`]): of the run, at least one.
        step_seconds (`float`, *optional*): duration of an optimizer step; by default the recorded one, if any.
    """
    steps, counts = np.unique(groups.step, return_counts=True)
    bounds = np.array_split(steps, min(PERIODS, len(steps)))
    place = np.searchsorted([period[-1] for period in bounds], groups.step)
    every = recorded_every(steps) if groups.has_steps else 1
    return Audit(
        prompts=len(np.unique(groups.prompt)),
        steps=len(steps),
        every=every,
        groups_per_step=int(np.median(counts)) if groups.has_steps else 0,
        overall=shares(groups, np.ones(len(groups), dtype=bool)),
        periods=tuple(shares(groups, place == i) for i in range(len(bounds))),
        persistence=persistence(groups),
        cost=cost(groups, groups.step_seconds if step_seconds is None else step_seconds, every),
    )


def recorded_every(steps: np.ndarray) -> int:
    """Steps from one recorded step to the next, in the median: TRL records a step of each `logging_steps`."""
    return int(np.median(np.diff(steps))) if len(steps) > 1 else 1


def shares(groups: RecordedGroups, chosen: np.ndarray) -> Shares:
    """Shares of the kinds among the chosen groups, a mask `(M,)` that is true somewhere."""
    kinds, success, steps = groups.kind[chosen], groups.success[chosen], groups.step[chosen]
    effective, easy, hard = (float((kinds == kind).mean()) for kind in (EFFECTIVE, EASY, HARD))
    mean = math.nan if np.isnan(success).all() else float(np.nanmean(success))
    return Shares(int(steps.min()), int(steps.max()), len(kinds), effective, easy, hard, mean)


def persistence(groups: RecordedGroups) -> Persistence:
    """Compare each group with the one before of its prompt."""
    order = np.lexsort((np.arange(len(groups)), groups.step, groups.prompt))
    prompt, zero = groups.prompt[order], groups.kind[order] != EFFECTIVE
    pair = prompt[1:] == prompt[:-1]
    before, now = zero[:-1][pair], zero[1:][pair]
    both = int((before & now).sum())
    return Persistence(
        again=Chance(both, int(before.sum())),
        after_effective=Chance(int((~before & now).sum()), int((~before).sum())),
        before=Chance(both, int(now.sum())),
        prompts_seen_once=int((np.unique(prompt, return_counts=True)[1] == 1).sum()),
    )


def cost(groups: RecordedGroups, step_seconds: float, every: int = 1) -> Cost:
    """
    Rollouts, tokens and hours of the recorded steps, which are one of `every`. Hours are those of whole steps if `step_seconds`
    is known, else of generation, where the groups have their seconds; a zero-variance group has its share of them.
    """
    zero = groups.kind != EFFECTIVE
    sizes = np.full(len(groups), groups.group_size or 1) if groups.sizes is None else groups.sizes
    if not math.isnan(step_seconds):
        hours = step_seconds * len(np.unique(groups.step)) / SECONDS_PER_HOUR
        wasted_hours, run_hours = hours * float(zero.mean()), hours * every
    else:
        hours, wasted_hours = (float(groups.seconds[c].sum()) / SECONDS_PER_HOUR for c in (slice(None), zero))
        run_hours = hours  # where groups have seconds, all of them are recorded
    return Cost(
        rollouts=int(sizes.sum()),
        wasted_rollouts=int(sizes[zero].sum()),
        tokens=float(groups.tokens.sum()),
        wasted_tokens=float(groups.tokens[zero].sum()),
        hours=hours,
        wasted_hours=wasted_hours,
        run_hours=run_hours,
    )
