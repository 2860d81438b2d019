"""Uniform selection: shuffled passes over the dataset, in the order in which `GRPOTrainer` would take them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trl_dataeff.selection.base import Selector, SelectorContext, check_request, register_selector


@register_selector("uniform")
class UniformSelector(Selector):
    """
    Shuffled passes over the prompts. A pass holds as many whole batches as the dataset gives, as TRL's `RepeatSampler`
    does; the prompts that are left over are another random part in every pass. With `rng` seeded as TRL seeds that
    sampler and `n = batch_groups` at every call, the prompts come in exactly its order.

    Args:
        shuffle (`bool`, *optional*, defaults to `True`): without it, every pass is in the dataset's order.
    """

    exact = True

    def __init__(self, shuffle: bool = True):
        self.shuffle = shuffle

    def bind(self, context: SelectorContext) -> None:
        super().bind(context)
        check_request(context.batch_groups, context.num_prompts)
        self._pass = np.empty(0, dtype=np.int64)  # prompts of the present pass, in order
        self._position = 0  # prompts of the present pass that were proposed

    def propose(self, n: int, rng: torch.Generator) -> np.ndarray:
        check_request(n, self.context.num_prompts)
        rest_of_pass = self._pass[self._position : self._position + n]
        self._position += len(rest_of_pass)
        if len(rest_of_pass) == n:
            return rest_of_pass.copy()

        num_offered = self._begin_pass(rest_of_pass, rng)
        self._position = min(n - len(rest_of_pass), num_offered)
        ids = np.concatenate([rest_of_pass, self._pass[: self._position]])
        if len(ids) < n:  # the proposal is larger than a pass: take prompts that this pass leaves out
            left_out = np.setdiff1d(np.arange(self.context.num_prompts), ids)
            chosen = self._ordered(len(left_out), rng)[: n - len(ids)]
            ids = np.concatenate([ids, left_out[chosen]])
        return ids

    def _begin_pass(self, proposed: np.ndarray, rng: torch.Generator) -> int:
        """
        Begin a pass in the middle of a proposal. Prompts that this proposal has already move to the end of the pass,
        so that the proposal repeats none and the pass still offers each of its prompts once.

        Args:
            proposed (`np.ndarray` of shape `(k,)`): prompts that this proposal has already.
            rng (`torch.Generator`): source of randomness.

        Returns:
            `int`: number of prompts of the new pass that this proposal does not have.
        """
        size = self.context.num_prompts
        batch_groups = self.context.batch_groups
        whole_batches = size // batch_groups * batch_groups
        prompts = self._ordered(size, rng)[:whole_batches].astype(np.int64)
        is_offered = ~np.isin(prompts, proposed)
        self._pass = np.concatenate([prompts[is_offered], prompts[~is_offered]])
        return int(is_offered.sum())

    def _ordered(self, size: int, rng: torch.Generator) -> np.ndarray:
        """The numbers below `size` in the order in which prompts are taken: int64 `(size,)`."""
        if self.shuffle:
            return torch.randperm(size, generator=rng).numpy()
        return np.arange(size)

    def state_dict(self) -> dict[str, Any]:
        return {"pass": self._pass.copy(), "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pass = state["pass"].copy()
        self._position = state["position"]
