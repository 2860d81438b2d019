r"""
GRESO: skip prompts before they are rolled out (arXiv 2506.02177).

A prompt whose last z visits were all of zero variance, and of one kind, is skipped with probability
`1 - max(p^z, 0.01)` (equation 3 of the paper, with the floor of its code), where p is `p_easy` or `p_hard` by that
kind. Once a window, each of them moves one step toward its target share of the window's groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trl_dataeff.rollouts.group import EASY, HARD, RolloutGroup
from trl_dataeff.selection.base import Selector, check_request
from trl_dataeff.selection.pool import PromptPool
from trl_dataeff.selection.shuffle import ShuffledOrder


FLOOR = 0.01


def keep_probability(streak: np.ndarray, p: np.ndarray | float, floor: float = FLOOR) -> np.ndarray:
    """
    Probability that a prompt is admitted: `max(p^streak, floor)`, 1 for a streak of 0.

    Args:
        streak (`np.ndarray`): trailing zero-variance visits, integers >= 0.
        p (`np.ndarray` or `float`): keep probability per visit, in (0, 1]; broadcast against `streak`.
        floor (`float`, *optional*, defaults to `0.01`): so that no prompt is lost for ever.

    Returns:
        `np.ndarray`: in [floor, 1], of the broadcast shape.
    """
    return np.maximum(np.power(p, streak, dtype=np.float64), floor)


class GresoController:
    """
    Steers the shares of easy and hard groups to their targets.

    Args:
        p_init (`float`): keep probability per visit, at first, of both kinds.
        p_step (`float`): by how much one moves in an update.
        p_min (`float`), p_max (`float`): bounds.
        target (`float`): share of zero-variance groups among those rolled out.
        easy_share (`float`): part of `target` that falls to easy groups; the rest to hard ones.
    """

    def __init__(self, p_init: float, p_step: float, p_min: float, p_max: float, target: float, easy_share: float):
        self.p_easy = self.p_hard = p_init
        self.p_step, self.p_min, self.p_max = p_step, p_min, p_max
        self.target_easy, self.target_hard = target * easy_share, target * (1 - easy_share)

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
        pool ([`PromptPool`]): the history.
        controller ([`GresoController`]): the keep probabilities.
    """

    def __init__(self, pool: PromptPool, controller: GresoController):
        self.pool = pool
        self.controller = controller
        self.skipped = 0

    def admit(self, ids: np.ndarray, rng: torch.Generator) -> np.ndarray:
        """Whether each of `ids` is let through, bool of its shape: a draw."""
        draws = torch.rand(len(ids), generator=rng, dtype=torch.float64).numpy()
        p = np.where(self.pool.streak_kind[ids] == EASY, self.controller.p_easy, self.controller.p_hard)
        return draws < keep_probability(self.pool.streak[ids], p)

    def adapt(self, groups: Sequence[RolloutGroup]) -> None:
        """Move the keep probabilities by the groups of a window."""
        if groups:
            kinds = np.array([group.kind for group in groups])
            self.controller.update(float((kinds == EASY).mean()), float((kinds == HARD).mean()))

    def state_dict(self) -> dict[str, np.ndarray]:
        return {
            "keep": np.array([self.controller.p_easy, self.controller.p_hard]),
            "skipped": np.array([self.skipped]),
        }

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        self.controller.p_easy, self.controller.p_hard = (float(value) for value in state["keep"])
        self.skipped = int(state["skipped"][0])

    def metrics(self) -> dict[str, float]:
        return {
            "prompts_skipped": self.skipped,
            "p_easy": self.controller.p_easy,
            "p_hard": self.controller.p_hard,
        }


class GresoSelector(Selector):
    """
    Shuffled passes over the prompts, in which a prompt that keeps giving nothing is skipped with a probability. A pass
    that offers too few flows into the next. Prompts that were never visited are always admitted.

    Args:
        pool ([`PromptPool`]): the prompts and their history.
        controller ([`GresoController`]): the keep probabilities.
    """

    def __init__(self, pool: PromptPool, controller: GresoController):
        self.pool = pool
        self.gate = GresoGate(pool, controller)
        self._passes = 0
        self._position = len(pool)  # a pass that is over: the first proposal starts the first one
        self._order = ShuffledOrder(0, 0)

    def propose(self, n: int, rng: torch.Generator) -> np.ndarray:
        check_request(n, len(self.pool))
        chosen = np.empty(0, dtype=np.int64)
        piece = 2 * n
        while len(chosen) < n:
            if self._position == len(self.pool):
                self._order = ShuffledOrder(len(self.pool), int(torch.randint(2**62, (1,), generator=rng)))
                self._position, self._passes = 0, self._passes + 1
            ids = self._order.take(self._position, min(self._position + piece, len(self.pool)))
            kept = self.gate.admit(ids, rng)
            offered = kept & ~np.isin(ids, chosen)  # where this proposal spans two passes
            looked_at = np.searchsorted(np.cumsum(offered), n - len(chosen)) + 1 if offered.any() else len(ids)
            looked_at = min(int(looked_at), len(ids))
            chosen = np.concatenate([chosen, ids[:looked_at][offered[:looked_at]]])
            self.gate.skipped += looked_at - int(kept[:looked_at].sum())
            self._position += looked_at
            piece *= 2  # most prompts may be skipped: look at more and more at once
        return chosen

    def observe(self, groups: Sequence[RolloutGroup], step: int) -> None:
        """Adapt to the groups of a window, once every prompt has had its chance to be seen."""
        if self._first_pass_is_over():
            self.gate.adapt(groups)

    def _first_pass_is_over(self) -> bool:
        return self._passes > 1 or (self._passes == 1 and self._position == len(self.pool))

    def state_dict(self) -> dict[str, np.ndarray]:
        order = np.array([self._order.size, self._order.key, self._position, self._passes])
        return {"order": order, **self.gate.state_dict()}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        size, key, self._position, self._passes = (int(value) for value in state["order"])
        self._order = ShuffledOrder(size, key)
        self.gate.load_state_dict(state)

    def metrics(self) -> dict[str, float]:
        return self.gate.metrics()
