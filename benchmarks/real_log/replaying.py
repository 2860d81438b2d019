"""
Lets a selector draw prompts from the log. A prompt that is drawn at time t gets the outcome that it had in the log at
t. The policy is that of the log, which drew uniformly: this measures what selection finds, and not what training
learns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from trl_dataeff import SelectorContext
from trl_dataeff.rollouts.scale import RewardScale
from trl_dataeff.selection import DotsSelector, Selector
from trl_dataeff.selection.dots.beta_binomial import chance_at
from trl_dataeff.testing import make_groups


FILE = Path(__file__).parent / "log.npz"
GROUP_SIZE = 8
FIRST_VISITS = 3
#: Prompts by their mean success in the first visits: up to which each band reaches
BANDS = {"0": 0.0, "to .125": 0.125, "to .375": 0.375, "to .75": 0.75, "above": 1.0}


@dataclass(frozen=True)
class Log:
    """
    The log of some prompts.

    Attributes:
        success (`np.ndarray` of shape `(N, V)`): float64, success rate at each visit, NaN after a prompt's last one.
        visits (`np.ndarray` of shape `(N,)`): int64, visits of each prompt.
        embedding (`np.ndarray` of shape `(N, 576)`): float32.
        other_model (`np.ndarray` of shape `(N,)`): float32, success rate of another model, or NaN.
    """

    success: np.ndarray
    visits: np.ndarray
    embedding: np.ndarray
    other_model: np.ndarray

    def __len__(self) -> int:
        return len(self.success)

    def at(self, time: float) -> np.ndarray:
        """Success rates of all prompts at a time in [0, 1] of the log: float64 `(N,)`."""
        return self.success[np.arange(len(self)), self._visit(time)]

    def around(self, time: float) -> np.ndarray:
        """Mean success rates of the five visits around a time, which are nearer to the truth: float64 `(N,)`."""
        visits = self._visit(time)[:, None] + np.arange(-2, 3)
        within = np.clip(visits, 0, self.visits[:, None] - 1)
        mean: np.ndarray = np.take_along_axis(self.success, within, axis=1).mean(axis=1)
        return mean

    def _visit(self, time: float) -> np.ndarray:
        return np.minimum((time * self.visits).astype(np.int64), self.visits - 1)

    def kinds(self) -> np.ndarray:
        """Four kinds of different difficulty: quarters by the other model's success, unknown ones at its mean."""
        known = np.nan_to_num(self.other_model, nan=float(np.nanmean(self.other_model)))
        rank = known.argsort(kind="stable").argsort(kind="stable")
        kinds: np.ndarray = 4 * rank // len(self)
        return kinds

    def bands(self) -> np.ndarray:
        """The band of each prompt, by the order of `BANDS`: int64 `(N,)`."""
        first = np.nanmean(self.success[:, :FIRST_VISITS], axis=1)
        return np.searchsorted(list(BANDS.values()), first)


def read(part: slice = slice(None)) -> Log:
    """
    Read the log.

    Args:
        part (`slice`, *optional*): of the prompts; by default all.
    """
    with np.load(FILE) as arrays:
        success = arrays["success"][part].astype(np.float64)
        return Log(
            success,
            (~np.isnan(success)).sum(axis=1),
            arrays["embedding"][part].astype(np.float32),
            arrays["other_model"][part],
        )


@dataclass(frozen=True)
class Setting:
    """
    A run.

    Args:
        prompts (`int`): groups of a generation batch.
        passes (`float`): groups of the run, as a multiple of the number of prompts.
        span (`float`): share of the log's time that the run spans.
    """

    prompts: int
    passes: float
    span: float


@dataclass(frozen=True)
class Method:
    """
    What is compared.

    Args:
        title (`str`): in tables.
        make (`Callable`): makes the selector, from the log and a function that returns the present time, which none
            but a bound uses.
        has_column (`bool`, *optional*, defaults to `False`): whether the success rates of the other model are given.
        has_kinds (`bool`, *optional*, defaults to `False`): whether draws keep the shares of kinds.
    """

    title: str
    make: Callable[[Log, Callable[[], float]], Selector]
    has_column: bool = False
    has_kinds: bool = False


@dataclass(frozen=True)
class Replayed:
    """
    What a selector drew.

    Attributes:
        ids (`np.ndarray` of shape `(T, n)`): int64, prompts by generation batch.
        effective (`np.ndarray` of shape `(T, n)`): bool, whether their groups had a gradient.
        rates (`np.ndarray` of shape `(T, N)`): float32, the selector's predicted success rates of all prompts, before
            each batch; NaN if it makes none.
        chances (`np.ndarray` of shape `(T, N)`): float32, its estimates that groups have a gradient, likewise.
        observed (`np.ndarray` of shape `(T, N)`): float32, success rates of all prompts in the log at that time.
    """

    ids: np.ndarray
    effective: np.ndarray
    rates: np.ndarray
    chances: np.ndarray
    observed: np.ndarray

    def drawn_by_band(self, bands: np.ndarray) -> np.ndarray:
        """How often the prompts of each band were drawn, 1 being evenly: float64 `(number of bands,)`."""
        times = np.bincount(self.ids.ravel(), minlength=len(bands))
        return np.array([times[bands == band].mean() / times.mean() for band in range(len(BANDS))])

    def different(self, num_prompts: int) -> float:
        """
        Different prompts of one pass's groups, as a share of all prompts; the mean of the whole passes. Uniform draws
        have 1.
        """
        per_pass = num_prompts // self.ids.shape[1]
        whole = len(self.ids) // per_pass * per_pass
        if not whole:
            per_pass = whole = len(self.ids)
        passes = self.ids[:whole].reshape(whole // per_pass, -1)
        return float(np.mean([len(np.unique(ids)) / num_prompts for ids in passes]))


def replay(method: Method, log: Log, setting: Setting, seed: int) -> Replayed:
    """Let a method's selector draw. `seed` is that of the draws, and of the selector."""
    batches = round(setting.passes * len(log) / setting.prompts)
    now = 0.0
    selector = method.make(log, lambda: now)
    selector.bind(
        SelectorContext(
            len(log),
            batch_groups=setting.prompts,
            group_size=GROUP_SIZE,
            seed=seed,
            embed=lambda: log.embedding,
            scale=RewardScale.of((0.0, 1.0)),
            known_rates=log.other_model if method.has_column else None,
            kinds=log.kinds() if method.has_kinds else None,
        )
    )
    generator = torch.Generator().manual_seed(seed)
    everything = np.arange(len(log))
    drawn = []
    effective = []
    chances = []
    rates = []
    observed = []
    for batch in range(batches):
        now = setting.span * batch / batches
        success = log.at(now)
        references = selector.references(generator)
        if len(references):
            selector.observe(make_groups(references, success[references], origin="reference"))
        predicted = selector.predict(everything)
        rates.append(predicted)
        if isinstance(selector, DotsSelector):
            chances.append(selector.chances().float().numpy())
        else:
            chances.append(chance_at(torch.from_numpy(predicted), GROUP_SIZE).numpy())
        ids = selector.propose(setting.prompts, generator)
        selector.observe(make_groups(ids, success[ids]))
        drawn.append(ids)
        effective.append((success[ids] > 0) & (success[ids] < 1))
        observed.append(success)
    return Replayed(
        np.array(drawn),
        np.array(effective),
        np.array(rates),
        np.array(chances),
        np.array(observed, dtype=np.float32),
    )
