r"""
What a configuration would save, on simulated prompts: the package's own selection, rounds and replay, driven as the
trainer drives them, over a population of success rates that rise as the policy learns.

The population stands for the policy. Prompt i succeeds with probability \(\sigma(\ell_i + s)\), where \(\ell_i\) is its
log-odds at the start and s the policy's skill, which is 0 at the start; *dead* prompts are unsolvable
at any skill. An optimizer step on e effective groups of B adds \((e / B)^\alpha\) times `speed` to the
skill, a replayed group counting `replay_value` of a fresh one: twice the signal in a batch is less than twice
the progress. `alpha` and `replay_value` are those that fit the runs of a language model (see `benchmarks/simulate.py`).

What is deliberately not here: what is particular to a prompt (memorising, forgetting), lengths of completions, and the
noise of training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from trl_dataeff.collector import GenerationBatch, make_collector
from trl_dataeff.config import DataEfficientGRPOConfig
from trl_dataeff.rollouts.capture import Round
from trl_dataeff.utils import UserError
from trl_dataeff.validation import check_selection, resolve_selector


#: Progress of a step is its effective share to this power.
ALPHA = 0.75
#: What a replayed effective group adds to a step, against a fresh one.
REPLAY_VALUE = 0.15
#: Log-odds that a step gains if all of its groups are effective.
SPEED = 0.1
#: How well a prompt's embedding tells how hard it is, unless a caller knows better, and the range of what is plausible.
#: The paper's predictions correlate with success rates by 0.70 to 0.78 (arXiv 2506.05316), a simulated run's by 0.72 at 0.6.
PREDICTABILITY, PREDICTABILITY_RANGE = 0.6, (0.3, 0.9)
EMBEDDING_WIDTH = 8
EASY_LOG_ODDS, DEAD_LOG_ODDS = (3.0, 8.0), (-1000.0, -900.0)  # no skill that a run gets to brings the dead to life


@dataclass(frozen=True)
class Prompts:
    """
    The prompts of a run that has not been made.

    Args:
        size (`int`): N.
        easy (`float`), dead (`float`): shares that are solved at once, and that are unsolvable; the rest is learnable.
        rates (`tuple[float, float]`, *optional*, defaults to `(0.01, 0.7)`): success rates that the learnable ones have
            at the start, spread evenly in log-odds.
        predictability (`float`, *optional*, defaults to `0.6`): correlation, in [0, 1], of the log-odds at the start
            (within -6 and 6) with the best that can be said from a prompt's embedding.
    """

    size: int
    easy: float
    dead: float
    rates: tuple[float, float] = (0.01, 0.7)
    predictability: float = PREDICTABILITY

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"There are {self.size} prompts; there has to be at least one.")
        if not (self.easy >= 0 and self.dead >= 0 and self.easy + self.dead <= 1):
            raise ValueError(
                f"The shares of easy ({self.easy}) and dead ({self.dead}) prompts have to be at least 0 and together at "
                "most 1."
            )
        if not 0 < self.rates[0] <= self.rates[1] < 1:
            raise ValueError(f"Success rates at the start are {self.rates}; they take 0 < low <= high < 1.")
        if not 0 <= self.predictability <= 1:
            raise ValueError(f"predictability is {self.predictability}; it takes a number in [0, 1].")

    def log_odds(self, rng: np.random.Generator) -> np.ndarray:
        """Log-odds of success at the start, in random order, float32 `(N,)`."""
        kind = rng.random(self.size, dtype=np.float32)
        low, high = (math.log(p / (1 - p)) for p in self.rates)
        out = rng.random(self.size, dtype=np.float32)
        dead, easy = kind < self.dead, kind >= 1 - self.easy
        for chosen, (a, b) in ((dead, DEAD_LOG_ODDS), (easy, EASY_LOG_ODDS), (~dead & ~easy, (low, high))):
            out[chosen] = a + (b - a) * out[chosen]
        return out


def embed(log_odds: np.ndarray, predictability: float, rng: np.random.Generator) -> np.ndarray:
    """
    Embeddings that tell the log-odds with the correlation `predictability`, float16 `(N, 8)`. Beyond a success rate of
    1 in 400, how hard a prompt is does not show.
    """
    signal = np.clip(log_odds, -6.0, 6.0)
    signal = (signal - signal.mean()) / max(float(signal.std()), 1e-6)
    out = np.empty((len(log_odds), EMBEDDING_WIDTH), dtype=np.float16)
    noise = rng.standard_normal(len(log_odds), dtype=np.float32)
    out[:, 0] = predictability * signal + math.sqrt(1 - predictability**2) * noise
    for column in range(1, EMBEDDING_WIDTH):
        out[:, column] = 0.3 * rng.standard_normal(len(log_odds), dtype=np.float32)
    return out


@dataclass(frozen=True)
class Learning:
    """How skill grows: `speed * (e / B) ** alpha` a step, a replayed group counting `replay_value` in e."""

    speed: float = SPEED
    alpha: float = ALPHA
    replay_value: float = REPLAY_VALUE

    def gain(self, batch: GenerationBatch, batch_groups: int) -> float:
        replayed = sum(group.effective for group in batch.replayed)
        fresh = sum(group.effective for group in batch.trained) - replayed
        return float(self.speed * ((fresh + self.replay_value * replayed) / batch_groups) ** self.alpha)


@dataclass(frozen=True)
class Costs:
    """Seconds that a rollout takes (generation and reward, all devices at work), and the rest of an optimizer step."""

    rollout: float = 1.0
    step: float = 0.0

    def seconds(self, rollouts: float, steps: float) -> float:
        return self.rollout * rollouts + self.step * steps


@dataclass(frozen=True)
class Progress:
    """Where a simulated run is after a step. `effective` counts effective groups among the `groups` rolled out."""

    step: int
    rollouts: int
    skill: float
    groups: int
    effective: int


def make_config(group_size: int, batch_groups: int, **fields: Any) -> DataEfficientGRPOConfig:
    """The configuration of a simulated run on one process, a generation batch per step."""
    return DataEfficientGRPOConfig(
        "unused",
        use_cpu=True,
        bf16=False,
        report_to="none",
        per_device_train_batch_size=batch_groups * group_size,
        gradient_accumulation_steps=1,
        num_generations=group_size,
        **fields,
    )


class SimulatedRun:
    """
    A run of the package's selection on prompts that are numbers.

    Args:
        config ([`DataEfficientGRPOConfig`]): see [`make_config`].
        log_odds (`np.ndarray` of shape `(N,)`): of success, at the start.
        embeddings (`Callable`): gives the embeddings `(N, h)`, if the selection asks for them.
        learning ([`Learning`], *optional*): how skill grows.
    """

    def __init__(
        self,
        config: DataEfficientGRPOConfig,
        log_odds: np.ndarray,
        embeddings: Callable[[], np.ndarray],
        learning: Learning | None = None,
    ):
        self.log_odds, self.learning = log_odds, learning or Learning()
        self.rng = np.random.default_rng([config.seed, 1])  # apart from the one that a caller draws the prompts with
        check_selection(config, None)
        self.collector = make_collector(
            config,
            selector=resolve_selector(config, None, None, sharded=False),
            num_prompts=len(log_odds),
            embed=embeddings,
            reward_names=["simulated"],
            reward_weights=np.ones(1),
            refills=config.dynamic_sampling,
            replays=config.replay_fraction > 0,
            sequential=config.sequential_rollouts,
        )
        self.now = Progress(0, 0, 0.0, 0, 0)

    def success(self, ids: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Success rates of prompts (ids, or a mask) as they are now."""
        return 1 / (1 + np.exp(-np.clip(self.log_odds[ids].astype(np.float64) + self.now.skill, -50.0, 50.0)))

    @property
    def learnable(self) -> np.ndarray:
        """Prompts that were neither easy nor dead at the start, bool `(N,)`."""
        return (self.log_odds < EASY_LOG_ODDS[0]) & (self.log_odds > DEAD_LOG_ODDS[1])

    def learnable_success(self) -> float:
        """Mean success rate, now, of the learnable prompts; NaN if there are none."""
        return float(self.success(self.learnable).mean()) if self.learnable.any() else math.nan

    def _roll_out(self, ids: np.ndarray, completions: int) -> Round:
        rewards = self.rng.random((len(ids), completions)) < self.success(ids)[:, None]
        rows = len(ids) * completions
        return Round(rewards.reshape(-1, 1).astype(np.float32), np.ones(rows, np.int32), np.zeros(rows, bool))

    def step(self) -> tuple[Progress, GenerationBatch]:
        """One generation batch: collect its groups, learn from them."""
        batch = self.collector.collect(self._roll_out, self.now.step)
        self.now = Progress(
            self.now.step + 1,
            self.now.rollouts + sum(group.size for group in batch.generated),
            self.now.skill + self.learning.gain(batch, self.collector.batch_groups),
            self.now.groups + len(batch.generated),
            self.now.effective + sum(group.effective for group in batch.generated),
        )
        return self.now, batch

    def steps(self, n: int) -> Iterator[Progress]:
        for _ in range(n):
            yield self.step()[0]


#: Settings that are compared, by what changes from the package's defaults.
SETTINGS: dict[str, dict[str, Any]] = {
    "uniform": {"selection": "uniform", "replay_fraction": 0.0},
    "dynamic sampling": {"selection": "uniform", "replay_fraction": 0.0, "dynamic_sampling": True},
    "greso": {"selection": "greso", "replay_fraction": 0.0},
    "dots": {"selection": "dots", "replay_fraction": 0.0},
    "dots+greso": {"selection": "dots+greso", "replay_fraction": 0.0},
    "dots, replay 0.25": {"selection": "dots", "replay_fraction": 0.25},
    "default": {},
}
BASELINE = "uniform"
#: A setting gets so many times the baseline's time, then it counts as not arriving; and so many times its steps at most.
PATIENCE, MOST_STEPS = 2.0, 20.0


@dataclass(frozen=True)
class Outcome:
    """
    What a setting takes to learn what uniform sampling learns in the planned steps; means over seeds.

    Attributes:
        steps, rollouts, seconds: until it is there; infinite if a seed does not arrive.
        effective: share of effective groups among those rolled out.
        ratio: `rollouts` over those of uniform sampling.
        success: mean success rate of the learnable prompts at the end, by the simulated policy.
    """

    steps: float
    rollouts: float
    seconds: float
    effective: float
    ratio: float = 1.0
    success: float = math.nan


class NothingLearned(UserError):
    """Uniform sampling learns nothing in the planned steps, so that there is nothing to compare with."""


def compare(
    make_run: Callable[[Mapping[str, Any], int], SimulatedRun],
    settings: Mapping[str, Mapping[str, Any]],
    *,
    steps: int,
    costs: Costs,
    seeds: int = 1,
    progress: Callable[[str, int, int], None] = lambda name, seed, step: None,
) -> dict[str, Outcome]:
    """
    Simulate each setting until it has learned what uniform sampling learns in `steps` steps.

    Args:
        make_run (`Callable`): `(fields of the configuration, seed) -> run`; equal prompts for equal seeds.
        settings: fields by name; `BASELINE` is simulated first, whether it is among them or not.
        steps (`int`): steps that are planned with uniform sampling.
        costs ([`Costs`]): what rollouts and steps take.
        seeds (`int`, *optional*, defaults to `1`): populations, and draws, to average over.
        progress (`Callable`, *optional*): called with the setting's name, the seed and the number of steps that the run has
            made, at the start of each run and after each step.

    Raises:
        [`NothingLearned`]: no prompt is learnable, or less than one step's worth of full batches is learned by uniform
            sampling.
    """
    ends: dict[str, list[Progress | None]] = {name: [] for name in (BASELINE, *settings)}
    shares: dict[str, list[float]] = {name: [] for name in ends}
    successes: list[float] = []
    for seed in range(seeds):
        progress(BASELINE, seed, 0)
        base = make_run(SETTINGS[BASELINE], seed)
        if not base.learnable.any():
            raise NothingLearned(
                f"None of {len(base.log_odds)} prompts is learnable: all are easy (solved already) or dead. No setting "
                "saves anything there; the run needs other prompts."
            )
        for now in base.steps(steps):
            progress(BASELINE, seed, now.step)
        if base.now.skill < base.learning.speed:
            raise NothingLearned(
                f"In {steps} steps uniform sampling had {base.now.effective} effective groups of {base.now.groups}: it "
                "learns next to nothing, so that there is nothing to compare. Plan more steps, or more prompts that can "
                "be learned."
            )
        successes.append(base.learnable_success())
        for name in ends:
            if name == BASELINE:
                end: Progress | None = base.now
                last = base.now
            else:
                progress(name, seed, 0)
                run = make_run(settings[name], seed)
                end, last = _arrival(run, base.now, costs, partial(progress, name, seed))
            ends[name].append(end)
            shares[name].append(last.effective / max(last.groups, 1))
    outcomes = {name: _outcome(ends[name], shares[name], costs) for name in ends}
    base_rollouts, success = outcomes[BASELINE].rollouts, float(np.mean(successes))
    return {name: replace(o, ratio=o.rollouts / base_rollouts, success=success) for name, o in outcomes.items()}


def _arrival(
    run: SimulatedRun, base: Progress, costs: Costs, on_step: Callable[[int], None]
) -> tuple[Progress | None, Progress]:
    """Where the run reaches the baseline's skill (`None`: it does not), and where it was stopped."""
    patience = PATIENCE * costs.seconds(base.rollouts, base.step)
    while costs.seconds(run.now.rollouts, run.now.step) < patience and run.now.step < MOST_STEPS * base.step:
        run.step()
        on_step(run.now.step)
        if run.now.skill >= base.skill:
            return run.now, run.now
    return None, run.now


def _outcome(ends: list[Progress | None], shares: list[float], costs: Costs) -> Outcome:
    there = [end for end in ends if end is not None]
    if len(there) < len(ends):
        return Outcome(math.inf, math.inf, math.inf, float(np.mean(shares)))
    steps, rollouts = (float(np.mean([getattr(end, name) for end in there])) for name in ("step", "rollouts"))
    return Outcome(steps, rollouts, costs.seconds(rollouts, steps), float(np.mean(shares)))


def best(outcomes: Mapping[str, Outcome], tolerance: float = 0.05) -> str:
    """
    The setting that takes the least time. Uniform sampling stays unless another is faster by more than `tolerance`, and
    the defaults are preferred within that margin of the fastest.
    """
    fastest = min(outcomes, key=lambda name: outcomes[name].seconds)
    limit = outcomes[fastest].seconds * (1 + tolerance)
    for name in (BASELINE, "default"):
        if name in outcomes and outcomes[name].seconds <= limit:
            return name
    return fastest


def success_rate_distribution(
    successes: np.ndarray, trials: np.ndarray, points: int = 41, rounds: int = 2000
) -> tuple[np.ndarray, np.ndarray]:
    """
    The distribution of success rates from which counts of successes most likely come (the nonparametric
    maximum-likelihood estimate for a mixture of binomials, by EM on a grid; Laird 1978).

    A prompt that succeeds in none of 8 completions may be dead or have a success rate of 0.1: the share of zeros says
    little, the whole distribution of counts says more.

    Args:
        successes (`np.ndarray` of shape `(n,)`), trials (`np.ndarray` of shape `(n,)`): of each prompt's group.
        points (`int`, *optional*, defaults to `41`): of the grid, which is even in log-odds, with 0 and 1 at its ends.
        rounds (`int`, *optional*, defaults to `2000`): of EM.

    Returns:
        Grid `(points,)` and weights `(points,)` that sum to 1.
    """
    inner = 1 / (1 + np.exp(-np.linspace(-5.0, 5.0, points - 2)))
    grid = np.concatenate([[0.0], inner, [1.0]])
    counts, inverse = np.unique(np.stack([successes, trials], 1), axis=0, return_inverse=True)
    repeats = np.bincount(inverse.ravel())
    k, n = counts[:, :1], counts[:, 1:]
    likelihood = np.power(grid, k) * np.power(1 - grid, n - k)  # (distinct counts, points)
    likelihood /= likelihood.max(axis=1, keepdims=True)
    weights = np.full(points, 1 / points)
    for _ in range(rounds):
        posterior = likelihood * weights
        posterior *= (repeats / posterior.sum(axis=1))[:, None]
        weights = posterior.sum(axis=0) / repeats.sum()
    return grid, weights
