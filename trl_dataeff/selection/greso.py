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
    The keep probability per group of one zero-variance kind.

    Args:
        initial (`float`): value at first.
        step (`float`): change per update.
        low (`float`): lower bound.
        high (`float`): upper bound.
        target (`float`): target share of groups of that kind.

    Attributes:
        value (`float`): the present keep probability.
    """

    def __init__(self, initial: float, step: float, low: float, high: float, target: float):
        self.value = initial
        self.step = step
        self.low = low
        self.high = high
        self.target = target

    def update(self, share: float) -> None:
        """
        Move one step: down if the observed share is at or above the target, else up.

        Args:
            share (`float`): share of groups of that kind in a generation batch.
        """
        # The tolerance counts 4 of 24 groups as a sixth, whatever 0.25 * (1 - 1/3) is rounded to
        if share >= self.target - 1e-9:
            moved = self.value - self.step
        else:
            moved = self.value + self.step
        self.value = min(max(moved, self.low), self.high)


@register_selector("greso")
class GresoSelector(Selector):
    """
    Shuffled passes over the prompts, in which prompts with repeated zero-variance groups are skipped at random. A pass
    that offers too few prompts continues with the next one. Prompts without a group so far are always admitted.

    The keep probabilities adapt once the first pass is over, when every prompt has had its chance.

    Args:
        p_init (`float`, *optional*, defaults to `0.5`): keep probability per zero-variance group at first, of both
            kinds.
        p_step (`float`, *optional*, defaults to `0.01`): change of a keep probability per generation batch.
        p_min (`float`, *optional*, defaults to `0.05`): lower bound of the keep probabilities.
        p_max (`float`, *optional*, defaults to `0.95`): upper bound of the keep probabilities.
        target_zero_variance (`float`, *optional*, defaults to `0.25`): target share of zero-variance groups.
        easy_share (`float`, *optional*, defaults to `1/3`): part of that target for easy groups; the rest is for hard
            ones.

    Raises:
        ValueError: an argument is out of range, or `p_init` lies outside of its bounds.
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
        check_number("p_init", p_init, "(0, 1]")
        check_number("p_min", p_min, "(0, 1]")
        check_number("p_max", p_max, "(0, 1]")
        check_number("p_step", p_step, "[0, 1]")
        check_number("target_zero_variance", target_zero_variance, "[0, 1)")
        check_number("easy_share", easy_share, "[0, 1]")
        if not p_min <= p_init <= p_max:
            raise ValueError(f"`p_min <= p_init <= p_max` must hold; got {p_min}, {p_init}, {p_max}.")
        self.p_init = p_init
        self.p_step = p_step
        self.p_min = p_min
        self.p_max = p_max
        self.target_easy = target_zero_variance * easy_share
        self.target_hard = target_zero_variance * (1 - easy_share)

    def bind(self, context: SelectorContext) -> None:
        super().bind(context)
        self.easy = KeepProbability(self.p_init, self.p_step, self.p_min, self.p_max, self.target_easy)
        self.hard = KeepProbability(self.p_init, self.p_step, self.p_min, self.p_max, self.target_hard)
        # By prompt: the kind of its latest group, and how many of its latest groups were of that kind; 0 after an
        # effective one
        self._kind = np.full(context.num_prompts, EFFECTIVE, dtype=np.int8)
        self._streak = np.zeros(context.num_prompts, dtype=np.int32)
        self._order = np.empty(0, dtype=np.int64)  # the prompts of the present pass
        self._key = 0  # the seed that this order is drawn with
        self._position = 0  # prompts of the present pass that were looked at
        self._passes = 0  # begun so far
        self._skipped = 0  # prompts so far

    def keep(self, ids: np.ndarray) -> np.ndarray:
        """
        Probabilities that prompts are kept (equation 3 of the paper).

        Args:
            ids (`np.ndarray` of shape `(n,)`): prompts.

        Returns:
            `np.ndarray` of shape `(n,)`: float64, in [0.01, 1].
        """
        p = np.where(self._kind[ids] == EASY, self.easy.value, self.hard.value)
        return np.maximum(p ** self._streak[ids], FLOOR)

    def propose(self, n: int, rng: torch.Generator) -> np.ndarray:
        check_request(n, self.context.num_prompts)
        chosen = np.empty(0, dtype=np.int64)
        piece = 2 * n
        while len(chosen) < n:
            if self._position == len(self._order):
                self._begin_pass(rng)
            ids = self._order[self._position : self._position + piece]
            draws = torch.rand(len(ids), generator=rng, dtype=torch.float64).numpy()
            is_kept = draws < self.keep(ids)
            is_new = ~np.isin(ids, chosen)  # a proposal that spans two passes may meet a prompt twice
            is_offered = is_kept & is_new
            # Look at prompts up to the one that completes the proposal, or at the whole piece
            num_offered = np.cumsum(is_offered)
            missing = n - len(chosen)
            looked_at = min(int(np.searchsorted(num_offered, missing)) + 1, len(ids))
            offered = ids[:looked_at][is_offered[:looked_at]]
            chosen = np.concatenate([chosen, offered])
            self._skipped += looked_at - int(is_kept[:looked_at].sum())
            self._position += looked_at
            piece *= 2  # most prompts may be skipped: look at more and more at once
        return chosen

    def _begin_pass(self, rng: torch.Generator) -> None:
        key = torch.randint(2**62, (1,), generator=rng)
        self._set_order(int(key))
        self._position = 0
        self._passes += 1

    def _set_order(self, key: int) -> None:
        """Draw the order of a pass from a key of its own: a checkpoint holds the key instead of the order."""
        self._key = key
        generator = torch.Generator().manual_seed(key)
        self._order = torch.randperm(self.context.num_prompts, generator=generator).numpy()

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        for group in groups:  # in the order of their generation; a prompt may occur more than once
            self._extend_streak(group.prompt_id, group.kind)
        pass_is_over = self._position == len(self._order)
        first_pass_is_over = self._passes > 1 or (self._passes == 1 and pass_is_over)
        if groups and first_pass_is_over:
            kinds = np.array([group.kind for group in groups])
            self.easy.update(float((kinds == EASY).mean()))
            self.hard.update(float((kinds == HARD).mean()))

    def _extend_streak(self, prompt_id: int, kind: int) -> None:
        if kind == EFFECTIVE:
            self._streak[prompt_id] = 0
        elif kind == self._kind[prompt_id]:
            self._streak[prompt_id] += 1
        else:
            self._streak[prompt_id] = 1
        self._kind[prompt_id] = kind

    def state_dict(self) -> dict[str, Any]:
        return {
            "order": [self._key, self._position, self._passes, self._skipped],
            "streak": self._streak.copy(),
            "streak_kind": self._kind.copy(),
            "keep": [self.easy.value, self.hard.value],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._streak = state["streak"].copy()
        self._kind = state["streak_kind"].copy()
        self.easy.value, self.hard.value = state["keep"]
        key, self._position, self._passes, self._skipped = state["order"]
        if self._passes:
            self._set_order(key)

    def metrics(self) -> dict[str, float]:
        return {"prompts_skipped": self._skipped, "p_easy": self.easy.value, "p_hard": self.hard.value}
