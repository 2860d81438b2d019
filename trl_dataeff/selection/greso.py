r"""
GRESO: skip prompts before they are rolled out (arXiv 2506.02177).

A prompt whose last z groups were all of zero variance, and of one kind, is skipped with probability
`1 - max(p^z, 0.01)` (equation 3 of the paper, with the floor of its code), where p is `p_easy` or `p_hard` by that
kind. Once per generation batch, each of them moves one step toward its target share of the batch's groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from trl_dataeff.rollouts.group import EASY, HARD, RolloutGroup
from trl_dataeff.selection.base import Selector, SelectorContext, check_request, register_selector
from trl_dataeff.selection.pool import PromptPool


FLOOR = 0.01
PATIENCE = 10  # updates in a row that show whether a target can be reached


def keep_probability(streak: np.ndarray, p: np.ndarray | float, floor: float = FLOOR) -> np.ndarray:
    """
    Probability that a prompt is admitted: `max(p^streak, floor)`, 1 for a streak of 0.

    Args:
        streak (`np.ndarray`): trailing zero-variance groups, at least 0; a fraction if they fade.
        p (`np.ndarray` or `float`): keep probability per group, in (0, 1]; broadcast against `streak`.
        floor (`float`, *optional*, defaults to `0.01`): lower bound, so that every prompt is tried again.

    Returns:
        `np.ndarray`: in [floor, 1], of the broadcast shape.
    """
    kept: np.ndarray = np.maximum(np.power(p, streak, dtype=np.float64), floor)
    return kept


class KeepProbability:
    """
    The keep probability per group of one kind. It moves one step per update: down if the observed share of that kind is
    at or above its target, else up.

    A target is unreachable if, in 10 updates in a row, the share is at or above it although the probability is at its
    lower bound. The probability then returns to its initial value and is held there, until the share is below the target in
    10 updates in a row.

    Args:
        initial (`float`), step (`float`), low (`float`), high (`float`): initial value, change per update, bounds.
        target (`float`): target share of the groups.

    Attributes:
        value (`float`): the probability.
        held (`bool`): whether its target is unreachable.
    """

    def __init__(self, initial: float, step: float, low: float, high: float, target: float):
        self.initial, self.step, self.low, self.high, self.target = initial, step, low, high, target
        self.value = initial
        self.held = False
        self._in_a_row = 0  # updates that speak for a change of `held`

    def update(self, share: float) -> None:
        """Move by the observed share."""
        above = share >= self.target - 1e-9  # 4 of 24 are a sixth, whatever 0.25 * (1 - 1/3) rounds to
        self._in_a_row = self._in_a_row + 1 if self._contradicts(above) else 0
        if self._in_a_row == PATIENCE:
            self.value, self.held, self._in_a_row = self.initial, not self.held, 0
        elif not self.held:
            self.value = min(max(self.value - self.step if above else self.value + self.step, self.low), self.high)

    def _contradicts(self, above: bool) -> bool:
        """Whether an update is evidence against the present state: that the target is reachable, or that it is not."""
        return not above if self.held else above and self.value == self.low

    def state(self) -> list[float]:
        return [self.value, self.held, self._in_a_row]

    def load_state(self, state: Sequence[float]) -> None:
        self.value, self.held, self._in_a_row = float(state[0]), bool(state[1]), int(state[2])


class GresoGate:
    """
    Decides by streaks of zero-variance groups with which probability a prompt is kept.

    Args:
        pool ([`PromptPool`]): the streaks.
        easy ([`KeepProbability`]), hard ([`KeepProbability`]): the keep probabilities of both kinds.

    Attributes:
        skipped (`int`): prompts skipped so far.
    """

    def __init__(self, pool: PromptPool, easy: KeepProbability, hard: KeepProbability):
        self.pool, self.easy, self.hard = pool, easy, hard
        self.skipped = 0

    def keep(self, ids: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Probabilities that prompts `ids`, by default all, are kept: float64 `(n,)`, in [0.01, 1]."""
        p = np.where(self.pool.streak_kind[ids] == EASY, self.easy.value, self.hard.value)
        return keep_probability(self.pool.faded(ids), p)

    def adapt(self, groups: Sequence[RolloutGroup]) -> None:
        """Move the keep probabilities by the kinds of groups; they stay as they are if there are none."""
        if groups:
            kinds = np.array([group.kind for group in groups])
            self.easy.update(float((kinds == EASY).mean()))
            self.hard.update(float((kinds == HARD).mean()))

    def state_dict(self) -> dict[str, np.ndarray]:
        return {
            **self.pool.state_dict(),
            "keep": np.array([self.easy.state(), self.hard.state()]),
            "skipped": np.array([self.skipped]),
        }

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        self.pool.load_state_dict(state)
        self.easy.load_state(state["keep"][0])
        self.hard.load_state(state["keep"][1])
        self.skipped = int(state["skipped"][0])

    def metrics(self) -> dict[str, float]:
        return {"prompts_skipped": self.skipped, "p_easy": self.easy.value, "p_hard": self.hard.value}


class GresoBase(Selector):
    """
    What both GRESO selectors share: their arguments, and the gate with its state.

    Args:
        p_init (`float`, *optional*, defaults to `0.5`): keep probability per zero-variance group at first, of both kinds.
        p_step (`float`, *optional*, defaults to `0.01`): change of a keep probability per generation batch.
        p_min (`float`, *optional*, defaults to `0.05`), p_max (`float`, *optional*, defaults to `0.95`): bounds.
        target_zero_variance (`float`, *optional*, defaults to `0.25`): target share of zero-variance groups.
        easy_share (`float`, *optional*, defaults to `1/3`): part of that target for easy groups; the rest is for hard ones.
        streak_half_life (`float`, *optional*): generation batches after which a group of a streak counts half; `inf`:
            streaks do not fade. By default, the class's `default_half_life`.
        ...: arguments of the next base class.
    """

    default_half_life: ClassVar[float] = math.inf

    def __init__(
        self,
        *,
        p_init: float = 0.5,
        p_step: float = 0.01,
        p_min: float = 0.05,
        p_max: float = 0.95,
        target_zero_variance: float = 0.25,
        easy_share: float = 1 / 3,
        streak_half_life: float | None = None,
        **others: Any,
    ):
        super().__init__(**others)
        if streak_half_life is None:
            streak_half_life = self.default_half_life
        if not streak_half_life > 0:
            raise ValueError(
                f"`streak_half_life` is {streak_half_life!r}; it takes a number > 0, or `inf` for no fading."
            )
        self._movement = (p_init, p_step, p_min, p_max)
        self._targets = (target_zero_variance * easy_share, target_zero_variance * (1 - easy_share))
        self.streak_half_life = streak_half_life

    def bind(self, context: SelectorContext) -> None:
        super().bind(context)
        easy, hard = (KeepProbability(*self._movement, target) for target in self._targets)
        self.gate = GresoGate(PromptPool(context.num_prompts, self.streak_half_life), easy, hard)

    def state_dict(self) -> dict[str, np.ndarray]:
        return {**super().state_dict(), **{f"gate.{name}": value for name, value in self.gate.state_dict().items()}}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        super().load_state_dict(state)
        self.gate.load_state_dict({k.removeprefix("gate."): v for k, v in state.items() if k.startswith("gate.")})

    def metrics(self) -> dict[str, float]:
        return super().metrics() | self.gate.metrics()


@register_selector("greso")
class GresoSelector(GresoBase):
    """
    Shuffled passes over the prompts, in which prompts with repeated zero-variance groups are skipped at random. A pass
    that offers too few prompts continues with the next one. Prompts without a group so far are always admitted.

    The keep probabilities adapt once the first pass is over, when every prompt has had its chance. Streaks do not fade.

    Args:
        p_init, p_step, p_min, p_max, target_zero_variance, easy_share, streak_half_life: see [`GresoBase`].
    """

    def bind(self, context: SelectorContext) -> None:
        super().bind(context)
        self._order = np.empty(0, dtype=np.int64)
        self._key = 0  # the order of a pass is drawn from it
        self._position = 0
        self._passes = 0  # begun so far

    def propose(self, n: int, rng: torch.Generator) -> np.ndarray:
        check_request(n, self.context.num_prompts)
        chosen = np.empty(0, dtype=np.int64)
        piece = 2 * n
        while len(chosen) < n:
            if self._position == len(self._order):
                self._set_order(int(torch.randint(2**62, (1,), generator=rng)))
                self._position, self._passes = 0, self._passes + 1
            ids = self._order[self._position : self._position + piece]
            kept = torch.rand(len(ids), generator=rng, dtype=torch.float64).numpy() < self.gate.keep(ids)
            offered = kept & ~np.isin(ids, chosen)  # where this proposal spans two passes
            looked_at = np.searchsorted(np.cumsum(offered), n - len(chosen)) + 1 if offered.any() else len(ids)
            looked_at = min(int(looked_at), len(ids))
            chosen = np.concatenate([chosen, ids[:looked_at][offered[:looked_at]]])
            self.gate.skipped += looked_at - int(kept[:looked_at].sum())
            self._position += looked_at
            piece *= 2  # most prompts may be skipped: look at more and more at once
        return chosen

    def _set_order(self, key: int) -> None:
        self._key = key
        self._order = torch.randperm(self.context.num_prompts, generator=torch.Generator().manual_seed(key)).numpy()

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        self.gate.pool.observe(groups)
        if self._passes > 1 or (self._passes == 1 and self._position == len(self._order)):
            self.gate.adapt(groups)

    def state_dict(self) -> dict[str, np.ndarray]:
        return {"order": np.array([self._key, self._position, self._passes]), **super().state_dict()}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        super().load_state_dict(state)
        key, self._position, self._passes = (int(value) for value in state["order"])
        if self._passes:
            self._set_order(key)
