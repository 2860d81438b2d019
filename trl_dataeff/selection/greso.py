r"""
GRESO: skip prompts before they are rolled out (arXiv 2506.02177).

A prompt whose last z groups were all of zero variance, and of one kind, is skipped with probability
`1 - max(p^z, 0.01)` (equation 3 of the paper, with the floor of its code), where p is `p_easy` or `p_hard` by that
kind. Once per generation batch, each of them moves one step toward its target share of the batch's groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from trl_dataeff.rollouts.group import EASY, EFFECTIVE, HARD, RolloutGroup
from trl_dataeff.selection.base import Selector, SelectorContext, check_request, register_selector
from trl_dataeff.utils import check_number


FLOOR = 0.01  # of the probability to keep a prompt: every prompt is tried again


class KeepProbability:
    """
    The keep probability per group of one kind, its `value`. It moves one `step` per update, within `low` and `high`: down if the
    observed share of that kind is at or above its `target`, else up.
    """

    def __init__(self, initial: float, step: float, low: float, high: float, target: float):
        self.value, self.step, self.low, self.high, self.target = initial, step, low, high, target

    def update(self, share: float) -> None:
        above = share >= self.target - 1e-9  # 4 of 24 are a sixth, whatever 0.25 * (1 - 1/3) rounds to
        self.value = min(max(self.value - self.step if above else self.value + self.step, self.low), self.high)


@register_selector("greso")
class GresoSelector(Selector):
    """
    Shuffled passes over the prompts, in which prompts with repeated zero-variance groups are skipped at random. A pass
    that offers too few prompts continues with the next one. Prompts without a group so far are always admitted.

    The keep probabilities adapt once the first pass is over, when every prompt has had its chance.

    Args:
        p_init (`float`, *optional*, defaults to `0.5`): keep probability per zero-variance group at first, of both kinds.
        p_step (`float`, *optional*, defaults to `0.01`): change of a keep probability per generation batch.
        p_min (`float`, *optional*, defaults to `0.05`), p_max (`float`, *optional*, defaults to `0.95`): bounds.
        target_zero_variance (`float`, *optional*, defaults to `0.25`): target share of zero-variance groups.
        easy_share (`float`, *optional*, defaults to `1/3`): part of that target for easy groups; the rest is for hard ones.
    """

    def __init__(
        self,
        *,
        p_init: float = 0.5,
        p_step: float = 0.01,
        p_min: float = 0.05,
        p_max: float = 0.95,
        target_zero_variance: float = 0.25,
        easy_share: float = 1 / 3,
    ):
        for name, value in (("p_init", p_init), ("p_min", p_min), ("p_max", p_max)):
            check_number(name, value, "(0, 1]")
        check_number("p_step", p_step, "[0, 1]")
        check_number("target_zero_variance", target_zero_variance, "[0, 1)")
        check_number("easy_share", easy_share, "[0, 1]")
        if not p_min <= p_init <= p_max:
            raise ValueError(f"`p_min <= p_init <= p_max` must hold; got {p_min}, {p_init}, {p_max}.")
        self._movement = (p_init, p_step, p_min, p_max)
        self._targets = (target_zero_variance * easy_share, target_zero_variance * (1 - easy_share))

    def bind(self, context: SelectorContext) -> None:
        super().bind(context)
        self.easy, self.hard = (KeepProbability(*self._movement, target) for target in self._targets)
        # By prompt: how many of its latest groups were of one zero-variance kind, 0 after an effective one, and that kind
        self._streak = np.zeros(context.num_prompts, dtype=np.int32)
        self._kind = np.full(context.num_prompts, EFFECTIVE, dtype=np.int8)
        self._order = np.empty(0, dtype=np.int64)
        self._key = 0  # the order of a pass is drawn from it
        self._position = 0
        self._passes = 0  # begun so far
        self._skipped = 0  # prompts so far

    def keep(self, ids: np.ndarray) -> np.ndarray:
        """Probabilities that prompts `ids` are kept: float64 `(n,)`, in [0.01, 1]."""
        p = np.where(self._kind[ids] == EASY, self.easy.value, self.hard.value)
        return np.maximum(p ** self._streak[ids], FLOOR)

    def propose(self, n: int, rng: torch.Generator) -> np.ndarray:
        check_request(n, self.context.num_prompts)
        chosen = np.empty(0, dtype=np.int64)
        piece = 2 * n
        while len(chosen) < n:
            if self._position == len(self._order):
                self._set_order(int(torch.randint(2**62, (1,), generator=rng)))
                self._position, self._passes = 0, self._passes + 1
            ids = self._order[self._position : self._position + piece]
            kept = torch.rand(len(ids), generator=rng, dtype=torch.float64).numpy() < self.keep(ids)
            offered = kept & ~np.isin(ids, chosen)  # where this proposal spans two passes
            looked_at = np.searchsorted(np.cumsum(offered), n - len(chosen)) + 1 if offered.any() else len(ids)
            looked_at = min(int(looked_at), len(ids))
            chosen = np.concatenate([chosen, ids[:looked_at][offered[:looked_at]]])
            self._skipped += looked_at - int(kept[:looked_at].sum())
            self._position += looked_at
            piece *= 2  # most prompts may be skipped: look at more and more at once
        return chosen

    def _set_order(self, key: int) -> None:
        self._key = key
        self._order = torch.randperm(self.context.num_prompts, generator=torch.Generator().manual_seed(key)).numpy()

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        for group in groups:  # in the order of their generation; a prompt may occur more than once
            i, kind = group.prompt_id, group.kind
            self._streak[i] = 0 if kind == EFFECTIVE else self._streak[i] + 1 if kind == self._kind[i] else 1
            self._kind[i] = kind
        first_pass_is_over = self._passes > 1 or (self._passes == 1 and self._position == len(self._order))
        if groups and first_pass_is_over:
            kinds = np.array([group.kind for group in groups])
            self.easy.update(float((kinds == EASY).mean()))
            self.hard.update(float((kinds == HARD).mean()))

    def state_dict(self) -> dict[str, Any]:
        return {
            "order": [self._key, self._position, self._passes, self._skipped],
            "streak": self._streak.copy(),
            "streak_kind": self._kind.copy(),
            "keep": [self.easy.value, self.hard.value],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._streak, self._kind = state["streak"].copy(), state["streak_kind"].copy()
        self.easy.value, self.hard.value = state["keep"]
        key, self._position, self._passes, self._skipped = state["order"]
        if self._passes:
            self._set_order(key)

    def metrics(self) -> dict[str, float]:
        return {"prompts_skipped": self._skipped, "p_easy": self.easy.value, "p_hard": self.hard.value}
