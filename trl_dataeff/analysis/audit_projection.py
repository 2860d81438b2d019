r"""
What other settings would have saved on a recorded run: the package's selectors, rounds and replay on simulated prompts
that are fitted to the run.

The model is that of `simulate.py`: prompt i succeeds with probability \(\sigma(\ell_i + s)\), s being the policy's skill.
Both are estimated from the recorded groups: the distribution of \(\ell\) as a mixture on a grid, with "never" and "always"
at its ends, and s as a constant in each period of the run (EM; the M-step of s is Newton's). Each seed draws the log-odds of
every prompt from its posterior. How much skill a step adds follows from the rise of s and the recorded effective shares.

Rewards that are graded are mapped to as many successes as keep a group's kind.

What is deliberately not here: other trajectories. A prompt is as hard as it was in the recorded run at the same skill.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trl_dataeff.analysis.audit import recorded_every
from trl_dataeff.analysis.simulate import (
    BASELINE,
    DEAD_LOG_ODDS,
    EASY_LOG_ODDS,
    PREDICTABILITY,
    PREDICTABILITY_RANGE,
    SETTINGS,
    SPEED,
    Costs,
    Learning,
    NothingLearned,
    Outcome,
    SimulatedRun,
    compare,
    embed,
    make_config,
)
from trl_dataeff.difficulty.base import PredictorError
from trl_dataeff.rollouts.group import EASY, EFFECTIVE
from trl_dataeff.tracking.completions import RecordedGroups


#: What is projected, by its name in the report
PROJECTED: dict[str, Mapping[str, Any]] = {
    "dynamic sampling": SETTINGS["dynamic sampling"],
    "GRESO": SETTINGS["greso"],
    "DOTS": SETTINGS["dots"],
    "replay": {"selection": "uniform"},
    "DOTS and replay": SETTINGS["default"],
}
PERIODS, POINTS, ROUNDS = 5, 43, 60
FITTED, MOST_STEPS, MOST_GROUPS = 20_000, 120, 16  # prompts fitted; steps, and groups of a step, simulated
FEWEST = 32  # groups
FEWEST_TEXTS, FEATURES, FOLDS, PENALTIES = 48, 384, 4, (0.1, 1.0, 10.0)  # of the regression on prompts' characters
LEAST_GAIN = 0.05  # log-odds over the run, below which nothing is taken as learned
DEAD_BELOW, EASY_FROM = 0.002, 0.95  # success rates at the start
GROUP_SIZE = 8  # where it is not recorded


@dataclass(frozen=True)
class Fit:
    """
    A run as the simulation sees it.

    Attributes:
        prompts: numbers of the fitted prompts, ascending, `(P,)`.
        log_odds: grid `(K,)`; its ends stand for "never" and "always".
        weights: share of the prompts at each point, `(K,)`.
        posterior: of the fitted prompts, float32 `(P, K)`.
        skill: log-odds that the policy gained in the run.
        speed: log-odds that a step adds if all groups are effective. learned: whether the recorded run shows a gain.
    """

    prompts: np.ndarray
    log_odds: np.ndarray
    weights: np.ndarray
    posterior: np.ndarray
    skill: float
    speed: float
    learned: bool


@dataclass(frozen=True)
class Saving:
    """
    A setting against the recorded one, to learn as much: `rollouts` as a share of the run's, `low` to `high` over draws and
    plausible predictabilities, infinite where it does not get there; `steps` likewise; `effective` is the share of
    effective groups among those generated.
    """

    name: str
    rollouts: float
    low: float
    high: float
    steps: float
    effective: float
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Projection:
    """
    Savings, plain GRPO left out, the best first; and what they rest on.

    Attributes:
        simulated: effective share of the simulated plain run, to be compared with the recorded one.
        easy, dead: shares of prompts that the run would always, and never, solve.
        rates: success rates at the start, of nine tenths of the others.
        predictability: assumed. from_texts: what the prompts' characters alone give, NaN if they are not known.
        scaled: how many steps of the run a simulated one stands for.
    """

    savings: tuple[Saving, ...]
    simulated: float
    prompts: int
    easy: float
    dead: float
    rates: tuple[float, float] | None
    speed: float
    learned: bool
    predictability: float
    from_texts: float
    scaled: float

    def of(self, name: str) -> Saving:
        """The saving of a setting."""
        return next(saving for saving in self.savings if saving.name == name)


class TooLittle(ValueError):
    """The record does not hold enough to project from."""


def fit(groups: RecordedGroups, seed: int = 0) -> Fit:
    """Estimate log-odds and skill from the recorded groups (see the module's docstring)."""
    size = groups.group_size or GROUP_SIZE
    ids = np.unique(groups.prompt[~np.isnan(groups.success)])
    if len(ids) > FITTED:
        ids = np.sort(np.random.default_rng(seed).choice(ids, FITTED, replace=False))
    chosen = np.isin(groups.prompt, ids) & ~np.isnan(groups.success)
    kind, prompt = groups.kind[chosen], np.searchsorted(ids, groups.prompt[chosen])
    mixed = np.clip(np.round(groups.success[chosen] * size), 1, size - 1)
    successes = np.where(kind == EFFECTIVE, mixed, np.where(kind == EASY, size, 0))
    steps, number = np.unique(groups.step[chosen], return_inverse=True)
    periods = min(PERIODS, len(steps))
    cell = prompt * periods + number * periods // len(steps)
    wins = np.bincount(cell, successes, len(ids) * periods).reshape(-1, periods)
    trials = np.bincount(cell, minlength=len(ids) * periods).reshape(-1, periods) * float(size)

    grid = np.concatenate([[DEAD_LOG_ODDS[0]], np.linspace(-7.0, 5.0, POINTS - 2), [-DEAD_LOG_ODDS[0]]])
    weights, skill = np.full(POINTS, 1 / POINTS), np.zeros(periods)
    for _ in range(ROUNDS):
        p = 1 / (1 + np.exp(-np.clip(grid[:, None] + skill, -25.0, 25.0)))  # (K, periods)
        likelihood = wins @ np.log(p).T + (trials - wins) @ np.log1p(-p).T + np.log(np.maximum(weights, 1e-300))
        posterior = np.exp(likelihood - likelihood.max(axis=1, keepdims=True))
        posterior /= posterior.sum(axis=1, keepdims=True)
        weights = posterior.mean(axis=0)
        won, tried = posterior[:, 1:-1].T @ wins, posterior[:, 1:-1].T @ trials  # (K - 2, periods)
        slope = (won - tried * p[1:-1]).sum(axis=0)
        curvature = np.maximum((tried * p[1:-1] * (1 - p[1:-1])).sum(axis=0), 1.0)
        skill[1:] += np.clip(slope / curvature, -0.5, 0.5)[1:]  # 0 in the first period
    gained = float(skill[-1]) * periods / max(periods - 1, 1)  # from the middles of the periods to the ends of the run
    growth = float(np.power(effective_shares(groups), Learning().alpha).sum()) * every_of(groups)
    learned = gained > LEAST_GAIN and growth > 0
    return Fit(
        ids, grid, weights, posterior.astype(np.float32), gained, gained / growth if learned else SPEED, learned
    )


def effective_shares(groups: RecordedGroups) -> np.ndarray:
    """Share of effective groups in each recorded step."""
    _, number, counts = np.unique(groups.step, return_inverse=True, return_counts=True)
    return np.bincount(number, groups.kind == EFFECTIVE) / counts


def every_of(groups: RecordedGroups) -> int:
    """Steps from one recorded step to the next."""
    return recorded_every(np.unique(groups.step))


def predictability_of_texts(texts: Sequence[str], fitted: Fit) -> float:
    """
    How well the characters of a prompt tell its log-odds, as a correlation: ridge regression on hashed n-grams, on prompts
    left out of the fit. It is what the policy's embeddings give at least, about. NaN if it cannot be said.
    """
    known = fitted.prompts < len(texts)
    if known.sum() < FEWEST_TEXTS:
        return math.nan
    values = np.clip(fitted.log_odds, -6.0, 6.0)
    y = (fitted.posterior[known] @ values).astype(np.float64)
    spread = float(fitted.weights @ values**2 - (fitted.weights @ values) ** 2)
    if y.std() < 1e-6 or spread < 1e-6:
        return math.nan
    X = np.stack([_features(texts[i]) for i in fitted.prompts[known]])
    fold = np.random.default_rng(0).permutation(len(y)) % FOLDS
    found = []
    for penalty in PENALTIES:
        predicted = np.empty(len(y))
        for f in range(FOLDS):
            rest, mean = fold != f, X[fold != f].mean(axis=0)
            A = X[rest] - mean
            beta = np.linalg.solve(A.T @ A + penalty * np.eye(A.shape[1]), A.T @ (y[rest] - y[rest].mean()))
            predicted[~rest] = (X[~rest] - mean) @ beta + y[rest].mean()
        found.append(float(np.corrcoef(predicted, y)[0, 1]) if predicted.std() > 1e-9 else 0.0)
    reliability = min(float(y.var()) / spread, 1.0)  # what a few completions show of the log-odds
    return float(np.clip(max(found) / math.sqrt(reliability), 0.0, 0.95))


def _features(text: str) -> np.ndarray:
    """Counts of hashed 1- to 3-grams of bytes, damped and normalised, and the length: `(FEATURES + 1,)`."""
    data = np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.int64)
    counts = np.zeros(FEATURES)
    for n in (1, 2, 3):
        code = sum(data[i : len(data) - n + 1 + i] * 257**i for i in range(n)) * 1_000_003 + n
        counts += np.bincount(np.atleast_1d(code) % 999_983 % FEATURES, minlength=FEATURES)[:FEATURES]
    counts = np.log1p(counts)
    return np.append(counts / max(float(np.linalg.norm(counts)), 1e-9), math.log1p(len(data)) / 5)


def project(
    groups: RecordedGroups,
    *,
    settings: Mapping[str, Mapping[str, Any]] = PROJECTED,
    prompts: int | None = None,
    predictability: float | None = None,
    seeds: int = 3,
    progress: Callable[[float], None] = lambda share: None,
) -> Projection:
    """
    Simulate each setting until it has learned what the recorded run did.

    Args:
        groups ([`RecordedGroups`]): of a run that did not select its prompts.
        settings: by name, what differs from the package's defaults.
        prompts (`int`, *optional*): in the dataset, seen or not; by default those that were seen.
        predictability (`float`, *optional*): see [`Prompts`]; by default 0.6, or what the prompts' characters give if
            that is more, with 0.3 and 0.9 for the range.
        seeds (`int`, *optional*, defaults to `3`): draws of the prompts' log-odds, and simulated runs of each setting.
        progress (`Callable`, *optional*): called with the share that is done.

    Raises:
        [`TooLittle`]: there are too few groups, or no step is recorded, or nothing in the run can be learned.
    """
    if len(groups) < FEWEST:
        raise TooLittle(f"{len(groups)} groups are too few")
    if not groups.has_steps:
        raise TooLittle("no step is recorded (--map step=COLUMN)")
    if not (groups.kind == EFFECTIVE).any():
        raise TooLittle("none of the groups was effective: no setting would have learned from these prompts")
    fitted = fit(groups)
    from_texts = predictability_of_texts(groups.texts, fitted)
    usual = max(PREDICTABILITY, from_texts) if from_texts == from_texts else PREDICTABILITY
    assumed = usual if predictability is None else predictability
    low, high = PREDICTABILITY_RANGE
    others = sorted(
        {max(low, min(from_texts, usual)) if from_texts == from_texts else low, max(high, usual)} - {assumed}
    )
    predicting = {n: f for n, f in settings.items() if f.get("selection", "auto") not in ("uniform", "greso")}
    plans = [(assumed, settings)]
    if predictability is None:
        plans += [(value, predicting) for value in others]
    scale = _Scale.of(groups, prompts or len(np.unique(groups.prompt)))
    outcomes: dict[str, list[Outcome]] = {name: [] for name in (BASELINE, *settings)}
    ranges: dict[str, list[float]] = {name: [] for name in settings}
    jobs = [(seed, value, compared) for seed in range(seeds) for value, compared in plans]
    for done, (seed, value, compared) in enumerate(jobs):
        progress(done / len(jobs))
        make_run = scale.runs_on(fitted, value, seed, groups.group_size or GROUP_SIZE)
        try:
            found = compare(make_run, compared, steps=scale.steps, costs=Costs())
        except (NothingLearned, PredictorError) as error:
            raise TooLittle(
                "the fitted run learns next to nothing, so that there is nothing to compare with"
            ) from error
        for name in compared:
            ranges[name].append(found[name].ratio)
        if value == assumed:
            for name in outcomes:
                outcomes[name].append(found[name])
    savings = [_saving(name, fields, outcomes, ranges[name]) for name, fields in settings.items()]
    easy, dead, rates = _ends(fitted)
    return Projection(
        savings=tuple(sorted(savings, key=lambda saving: saving.rollouts)),
        simulated=float(np.mean([o.effective for o in outcomes[BASELINE]])),
        prompts=scale.population,
        easy=easy,
        dead=dead,
        rates=rates,
        speed=fitted.speed,
        learned=fitted.learned,
        predictability=assumed,
        from_texts=from_texts,
        scaled=scale.factor,
    )


@dataclass(frozen=True)
class _Scale:
    """
    The size of a simulated run. Long runs are made shorter, and large steps smaller, with as many fewer prompts, so that
    each is rolled out as often as in the run.
    """

    population: int
    prompts: int
    steps: int
    batch_groups: int
    factor: float

    @classmethod
    def of(cls, groups: RecordedGroups, population: int) -> _Scale:
        steps, counts = np.unique(groups.step, return_counts=True)
        total, batch = len(steps) * every_of(groups), int(np.median(counts))
        short = min(total, MOST_STEPS)
        small = max(min(batch, MOST_GROUPS, population // 2), 1)
        kept = round(population * short * small / (total * batch))
        return cls(population, min(population, max(kept, 8 * small)), short, small, total / short)

    def runs_on(
        self, fitted: Fit, predictability: float, draw: int, group_size: int
    ) -> Callable[[Mapping[str, Any], int], SimulatedRun]:
        """Makes runs on prompts whose log-odds are drawn from their posteriors, the unseen ones from all prompts'."""

        def make_run(fields: Mapping[str, Any], seed: int) -> SimulatedRun:
            rng = np.random.default_rng(draw)
            seen = round(self.prompts * min(1.0, len(fitted.prompts) / self.population))
            chosen = rng.permutation(len(fitted.prompts))[:seen]
            cumulative = np.vstack(
                [
                    np.cumsum(fitted.posterior[chosen], axis=1),
                    np.tile(np.cumsum(fitted.weights), (self.prompts - len(chosen), 1)),
                ]
            )
            point = (cumulative < rng.random((self.prompts, 1)) * cumulative[:, -1:]).sum(axis=1)
            log_odds = fitted.log_odds[point].astype(np.float32)
            log_odds = np.where(log_odds > 100, np.float32(sum(EASY_LOG_ODDS) / 2), log_odds)
            config = make_config(group_size, self.batch_groups, seed=draw, **fields)
            learning = Learning(speed=fitted.speed * self.factor)
            return SimulatedRun(config, log_odds, lambda: embed(log_odds, predictability, rng), learning)

        return make_run


def _saving(
    name: str, fields: Mapping[str, Any], outcomes: Mapping[str, list[Outcome]], ratios: list[float]
) -> Saving:
    """Means over the draws; a setting arrives if it does in every draw."""
    base, own = outcomes[BASELINE], outcomes[name]
    return Saving(
        name=name,
        rollouts=float(np.mean([o.ratio for o in own])),
        low=min(ratios),
        high=max(ratios),
        steps=float(np.mean([o.steps / b.steps for o, b in zip(own, base, strict=True)])),
        effective=float(np.mean([o.effective for o in own])),
        fields=fields,
    )


def _ends(fitted: Fit) -> tuple[float, float, tuple[float, float] | None]:
    """Shares of easy and dead prompts, and the range of nine tenths of the others' success rates."""
    rates = 1 / (1 + np.exp(-np.clip(fitted.log_odds, -50, 50)))
    easy, dead = rates >= EASY_FROM, rates < DEAD_BELOW
    between = ~easy & ~dead
    shares = float(fitted.weights[easy].sum()), float(fitted.weights[dead].sum())
    if fitted.weights[between].sum() < 0.5 / len(fitted.prompts):
        return *shares, None
    cumulative = np.cumsum(fitted.weights[between]) / fitted.weights[between].sum()
    low, high = (float(rates[between][np.searchsorted(cumulative, q)]) for q in (0.05, 0.95))
    return *shares, (low, high)
