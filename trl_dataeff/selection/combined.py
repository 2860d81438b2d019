"""DOTS proposes, GRESO admits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trl_dataeff.rollouts.group import RolloutGroup
from trl_dataeff.selection.dots import DotsSelector, gumbel_keys
from trl_dataeff.selection.greso import GresoGate


class DotsGresoSelector(DotsSelector):
    """
    Prompts come in the order in which DOTS draws them, and those that keep giving nothing are skipped with GRESO's
    probability. The share that is explored is not skipped, so that it stays unbiased.

    Args:
        gate ([`GresoGate`]): admits prompts; it adapts once as many were looked at as there are prompts.
        ...: see [`DotsSelector`].
    """

    def __init__(self, *args, gate: GresoGate, **kwargs):
        super().__init__(*args, **kwargs)
        self.gate = gate
        self._looked_at = 0

    def _draw(self, log_weights: torch.Tensor, n: int, rng: torch.Generator) -> np.ndarray:
        keys = gumbel_keys(log_weights, rng)
        left = int((~log_weights.isneginf()).sum())  # the others are out
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
        if len(chosen) < n:  # all that is left was skipped: the best of it after all, then what is out
            rest = np.setdiff1d(keys.argsort(descending=True).numpy(), order[chosen], assume_unique=True)
            return np.concatenate([order[chosen], rest[: n - len(chosen)]])
        return order[chosen]

    def observe(self, groups: Sequence[RolloutGroup], step: int) -> None:
        super().observe(groups, step)
        if self._looked_at >= self.size:
            self.gate.adapt(groups)

    def state_dict(self) -> dict[str, np.ndarray]:
        gate = {f"gate.{name}": value for name, value in self.gate.state_dict().items()}
        return {**super().state_dict(), **gate, "looked_at": np.array([self._looked_at])}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        super().load_state_dict(state)
        self.gate.load_state_dict({k.removeprefix("gate."): v for k, v in state.items() if k.startswith("gate.")})
        self._looked_at = int(state["looked_at"][0])

    def metrics(self) -> dict[str, float]:
        return super().metrics() | self.gate.metrics()
