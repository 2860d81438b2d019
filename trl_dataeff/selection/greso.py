r"""
GRESO: skip prompts before they are rolled out (arXiv 2506.02177).

A prompt whose last z visits were all of zero variance, and of one kind, is skipped with probability
`1 - max(p^z, 0.01)` (equation 3 of the paper, with the floor of its code), where p is `p_easy` or `p_hard` by that
kind. Once per generation batch, each of them moves one step toward its target share of the batch's groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trl_dataeff.rollouts.group import EASY, HARD, RolloutGroup
from trl_dataeff.selection.base import Selector, SelectorContext, check_request, register_selector
from trl_dataeff.selection.pool import PromptPool


FLOOR = 0.01


def keep_probability(streak: np.ndarray, p: np.ndarray | float, floor: float = FLOOR) -> np.ndarray:
    """
    Probability that a prompt is admitted: `max(p^streak, floor)`, 1 for a streak of 0.

    Args:
        streak (`np.ndarray`): trailing zero-variance visits, integers >= 0.
        p (`np.ndarray` or `float`): keep probability per visit, in (0, 1]; broadcast against `streak`.
        floor (`float`, *optional*, defaults to `0.01`): lower bound, so that every prompt is tried again.

    Returns:
        `np.ndarray`: in [floor, 1], of the broadcast shape.
    """
    return np.maximum(np.power(p, streak, dtype=np.float64), floor)


class GresoController:
    """
    Adapts the keep probabilities, so that the shares of easy and hard groups approach their targets.

    Args:
        p_init (`float`, *optional*, defaults to `0.5`): keep probability per visit at the start, of both kinds.
        p_step (`float`, *optional*, defaults to `0.01`): change per update.
        p_min (`float`, *optional*, defaults to `0.05`), p_max (`float`, *optional*, defaults to `0.95`): bounds.
        target_zero_variance (`float`, *optional*, defaults to `0.25`): target share of zero-variance groups.
        easy_share (`float`, *optional*, defaults to `1/3`): part of that target for easy groups; the rest is for hard ones.
    """

    def __init__(
        self,
        p_init: float = 0.5,
        p_step: float = 0.01,
        p_min: float = 0.05,
        p_max: float = 0.95,
        target_zero_variance: float = 0.25,
        easy_share: float = 1 / 3,
    ):
        self.p_easy = self.p_hard = p_init
        self.p_step, self.p_min, self.p_max = p_step, p_min, p_max
        self.target_easy = target_zero_variance * easy_share
        self.target_hard = target_zero_variance * (1 - easy_share)

    def update(self, easy_ratio: float, hard_ratio: float) -> None:
        """Move by the observed shares: a share at or above its target lowers its keep probability, else raises it."""
        self.p_easy = self._moved(self.p_easy, easy_ratio >= self.target_easy)
        self.p_hard = self._moved(self.p_hard, hard_ratio >= self.target_hard)

    def _moved(self, p: float, down: bool) -> float:
        return min(max(p - self.p_step if down else p + self.p_step, self.p_min), self.p_max)


class GresoGate:
    """
    Admits prompts by their streaks of zero-variance groups.

    Args:
        size (`int`): number of prompts, N.
        controller ([`GresoController`]): the keep probabilities.

    Attributes:
        pool ([`PromptPool`]): the streaks.
        skipped (`int`): prompts skipped so far.
    """

    def __init__(self, size: int, controller: GresoController):
        self.pool = PromptPool(size)
        self.controller = controller
        self.skipped = 0

    def admit(self, ids: np.ndarray, rng: torch.Generator) -> np.ndarray:
        """A draw for each of `ids`: whether the prompt is admitted, bool `(n,)`."""
        draws = torch.rand(len(ids), generator=rng, dtype=torch.float64).numpy()
        p = np.where(self.pool.streak_kind[ids] == EASY, self.controller.p_easy, self.controller.p_hard)
        return draws < keep_probability(self.pool.streak[ids], p)

    def observe(self, groups: Sequence[RolloutGroup], *, adapt: bool) -> None:
        """Enter the groups of a generation batch; with `adapt`, move the keep probabilities by their kinds."""
        self.pool.observe(groups)
        if groups and adapt:
            kinds = np.array([group.kind for group in groups])
            self.controller.update(float((kinds == EASY).mean()), float((kinds == HARD).mean()))

    def state_dict(self) -> dict[str, np.ndarray]:
        return {
            **self.pool.state_dict(),
            "keep": np.array([self.controller.p_easy, self.controller.p_hard]),
            "skipped": np.array([self.skipped]),
        }

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        self.pool.load_state_dict(state)
        self.controller.p_easy, self.controller.p_hard = (float(value) for value in state["keep"])
        self.skipped = int(state["skipped"][0])

    def metrics(self) -> dict[str, float]:
        return {
            "prompts_skipped": self.skipped,
            "p_easy": self.controller.p_easy,
            "p_hard": self.controller.p_hard,
        }


@register_selector("greso")
class GresoSelector(Selector):
    """
    Shuffled passes over the prompts, in which prompts with repeated zero-variance groups are skipped at random. A pass
    that offers too few prompts continues with the next one. Prompts without a group so far are always admitted.

    The keep probabilities adapt once the first pass is over, when every prompt has had its chance.

    Args:
        p_init, p_step, p_min, p_max, target_zero_variance, easy_share: see [`GresoController`].
    """

    def __init__(
        self,
        p_init: float = 0.5,
        p_step: float = 0.01,
        p_min: float = 0.05,
        p_max: float = 0.95,
        target_zero_variance: float = 0.25,
        easy_share: float = 1 / 3,
    ):
        self._controller_arguments = (p_init, p_step, p_min, p_max, target_zero_variance, easy_share)

    def bind(self, context: SelectorContext) -> None:
        super().bind(context)
        self.gate = GresoGate(context.num_prompts, GresoController(*self._controller_arguments))
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
            kept = self.gate.admit(ids, rng)
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
        first_pass_is_over = self._passes > 1 or (self._passes == 1 and self._position == len(self._order))
        self.gate.observe(groups, adapt=first_pass_is_over)

    def state_dict(self) -> dict[str, np.ndarray]:
        return {"order": np.array([self._key, self._position, self._passes]), **self.gate.state_dict()}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        key, self._position, self._passes = (int(value) for value in state["order"])
        if self._passes:
            self._set_order(key)
        self.gate.load_state_dict(state)

    def metrics(self) -> dict[str, float]:
        return self.gate.metrics()
