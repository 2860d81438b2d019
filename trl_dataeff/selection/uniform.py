"""Uniform selection: shuffled passes over the dataset, in the order in which `GRPOTrainer` would take them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trl_dataeff.selection.base import Selector, SelectorContext, check_request, register_selector


@register_selector("uniform")
class UniformSelector(Selector):
    """
    Shuffled passes over the prompts. A pass holds as many whole batches as the dataset gives, as TRL's
    `RepeatSampler` does; the prompts that are left over are another random part in every pass. With `rng` seeded as TRL
    seeds that sampler and `n = batch_groups` at every call, the prompts come in exactly its order.

    Args:
        shuffle (`bool`, *optional*, defaults to `True`): without it, every pass is in the dataset's order.
    """

    exact = True

    def __init__(self, shuffle: bool = True):
        self.shuffle = shuffle

    def bind(self, context: SelectorContext) -> None:
        super().bind(context)
        check_request(context.batch_groups, context.num_prompts)
        self._pass = np.empty(0, dtype=np.int64)
        self._position = 0

    def propose(self, n: int, rng: torch.Generator) -> np.ndarray:
        size = self.context.num_prompts
        check_request(n, size)
        taken = self._pass[self._position : self._position + n]
        self._position += len(taken)
        if len(taken) == n:
            return taken.copy()
        # The pass is over: take the rest from the next one, without the prompts that this proposal has already. Those
        # move to the end, so that the new pass still offers each of its prompts once.
        order = torch.randperm(size, generator=rng).numpy() if self.shuffle else np.arange(size)
        self._pass = order[: size // self.context.batch_groups * self.context.batch_groups].astype(np.int64)
        offered = ~np.isin(self._pass, taken)
        self._pass = np.concatenate([self._pass[offered], self._pass[~offered]])
        self._position = min(n - len(taken), int(offered.sum()))
        taken = np.concatenate([taken, self._pass[: self._position]])
        if len(taken) < n:  # only where a proposal is larger than a pass: the prompts that this pass left out
            left_out = np.setdiff1d(np.arange(size), taken)
            chosen = torch.randperm(len(left_out), generator=rng).numpy() if self.shuffle else np.arange(len(left_out))
            taken = np.concatenate([taken, left_out[chosen[: n - len(taken)]]])
        return taken

    def state_dict(self) -> dict[str, Any]:
        return {"pass": self._pass.copy(), "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pass, self._position = state["pass"].copy(), state["position"]
