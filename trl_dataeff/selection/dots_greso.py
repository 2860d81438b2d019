"""DOTS proposes, GRESO admits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from trl_dataeff.rollouts.group import RolloutGroup
from trl_dataeff.selection.base import SelectorContext, register_selector
from trl_dataeff.selection.dots import DotsSelector, gumbel_keys
from trl_dataeff.selection.greso import GresoController, GresoGate


@register_selector("dots+greso")
class DotsGresoSelector(DotsSelector):
    """
    Prompts come in the order in which DOTS draws them, and those with repeated zero-variance groups are skipped with
    GRESO's probability. The explored share is not skipped, so that it stays unbiased. The keep probabilities adapt once
    as many prompts were looked at as there are.

    Args:
        p_init, p_step, p_min, p_max, target_zero_variance, easy_share: see [`GresoController`].
        ...: see [`DotsSelector`].
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
        **dots: Any,
    ):
        super().__init__(**dots)
        self._controller_arguments = (p_init, p_step, p_min, p_max, target_zero_variance, easy_share)

    def bind(self, context: SelectorContext) -> None:
        super().bind(context)
        self.gate = GresoGate(context.num_prompts, GresoController(*self._controller_arguments))
        self._looked_at = 0

    def _draw(self, log_weights: torch.Tensor, n: int, rng: torch.Generator) -> np.ndarray:
        keys = gumbel_keys(log_weights, rng)
        left = int((~log_weights.isneginf()).sum())  # the others are excluded
        order, admitted = np.empty(0, dtype=np.int64), np.empty(0, dtype=bool)
        wanted = min(2 * n, left)
        while True:  # most prompts may be skipped: look at more and more at once
            order = keys.topk(wanted).indices.numpy()
            admitted = np.concatenate([admitted, self.gate.admit(order[len(admitted) :], rng)])
            if admitted.sum() >= n or wanted == left:
                break
            wanted = min(2 * wanted, left)
        chosen = np.flatnonzero(admitted)[:n]
        looked_at = int(chosen[-1]) + 1 if len(chosen) == n and n else len(order)
        self.gate.skipped += looked_at - len(chosen)
        self._looked_at += looked_at
        if len(chosen) < n:  # all others were skipped: the first of these after all, then excluded ones
            rest = np.setdiff1d(keys.argsort(descending=True).numpy(), order[chosen], assume_unique=True)
            return np.concatenate([order[chosen], rest[: n - len(chosen)]])
        return order[chosen]

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        super().observe(groups)
        self.gate.observe(groups, adapt=self._looked_at >= self.context.num_prompts)

    def state_dict(self) -> dict[str, np.ndarray]:
        gate = {f"gate.{name}": value for name, value in self.gate.state_dict().items()}
        return {**super().state_dict(), **gate, "looked_at": np.array([self._looked_at])}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        super().load_state_dict(state)
        self.gate.load_state_dict({k.removeprefix("gate."): v for k, v in state.items() if k.startswith("gate.")})
        self._looked_at = int(state["looked_at"][0])

    def metrics(self) -> dict[str, float]:
        return super().metrics() | self.gate.metrics()
