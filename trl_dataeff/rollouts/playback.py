"""Groups that were generated and scored before, as TRL's method asks for them. What is deliberately not here: the trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from trl_dataeff.rollouts.distributed import Processes
from trl_dataeff.rollouts.group import RolloutGroup
from trl_dataeff.rollouts.skipping import zero_advantage


class Playback:
    """
    Groups that were generated and scored before, in the form in which TRL asks for completions and rewards.

    Args:
        groups: the groups that this process trains on, with their rollouts.
        rewards (`np.ndarray` of shape `(all groups * G, F)`): rewards of all processes' groups, in the order of ranks.
    """

    def __init__(self, groups: Sequence[RolloutGroup], rewards: np.ndarray):
        self.rollouts = [group.rollouts for group in groups if group.rollouts is not None]
        self.rewards = rewards
        self.rows: torch.Tensor | None = None  # of this process that need the pass for old log-probs; None: all

    def skip_rows(self, weights: torch.Tensor, processes: Processes) -> None:
        """
        Leave completions whose advantage will be 0 out of the pass for old log-probs; each process makes it over as many rows.
        `weights` `(F,)`: of the reward functions, whose weighted sum is the reward.
        """
        rewards = torch.from_numpy(self.rewards).to(processes.device)
        zero = zero_advantage(rewards, weights, len(self.rollouts[0])).view(processes.world_size, -1)
        count = max(int((~zero).sum(1).max()), 1)
        self.rows = torch.sort(torch.argsort(zero[processes.rank], stable=True)[:count]).values

    @property
    def completions(self) -> list[Any]:
        return [completion for rollouts in self.rollouts for completion in rollouts.completions]

    def rollout_func(self, prompts: list[Any], trainer: Any = None) -> dict[str, Any]:
        """What TRL's `rollout_func` returns: token ids, and the sampler's log-probs and tool masks, where there are any."""
        output: dict[str, Any] = {
            "prompt_ids": [r.prompt_tokens.tolist() for r in self.rollouts for _ in range(len(r))],
            "completion_ids": [tokens.tolist() for r in self.rollouts for tokens in r.completion_tokens],
            "logprobs": self._listed("sampling_logps"),
        }
        tool_mask = self._listed("tool_masks")
        return output if tool_mask is None else output | {"env_mask": tool_mask}

    def _listed(self, name: str) -> list[list[Any]] | None:
        """The arrays of one field as lists, one per completion, with a default for groups that lack it; `None` if all do."""
        if all(getattr(r, name) is None for r in self.rollouts):
            return None
        missing = {"tool_masks": 1, "sampling_logps": float("nan")}[name]
        return [
            [missing] * len(tokens) if values is None else values.tolist()
            for r in self.rollouts
            for tokens, values in zip(r.completion_tokens, getattr(r, name) or [None] * len(r), strict=True)
        ]

    @property
    def logged(self) -> dict[str, list[Any]]:
        """The columns that reward functions logged, one entry per completion; `None` where a group lacks the column."""
        columns = dict.fromkeys(column for r in self.rollouts for column in r.logged)
        return {
            column: [v for r in self.rollouts for v in r.logged.get(column, [None] * len(r))] for column in columns
        }


def forward_of_rows(
    forward: Callable[..., tuple[Any, ...]],
    rows: torch.Tensor,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any, Any]:
    """TRL's log-probs `(B, T)` of these rows alone, by `forward`; NaN for the others."""
    logps, *others = forward(input_ids[rows], attention_mask[rows], *args, **kwargs)
    every = logps.new_full((len(input_ids), logps.size(1)), torch.nan)
    return every.index_copy(0, rows, logps), *others
