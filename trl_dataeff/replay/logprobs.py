"""
Log-probabilities under the policy that sampled: kept for groups that outlive their window, given back to the loss.

What they cost, by where they come from:

- the sampler gave its own (vLLM): nothing;
- `old_per_token_logps`, which TRL computes where generation and optimization are misaligned: nothing;
- the loss's own forward, where they are aligned: nothing but a copy to the CPU;
- a forward of their own, without gradient, for groups that are not trained on in their window (surplus).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import pad

from trl_dataeff.rollouts.group import RolloutGroup


if TYPE_CHECKING:
    from trl_dataeff.replay.trainer import CorrectedGRPOTrainer


class BehaviorRecorder:
    """Notes the log-probs of this process's fresh groups while they are trained on."""

    def __init__(self) -> None:
        self._waiting: dict[int, np.ndarray] = {}  # by row of the window

    def expect(self, groups: Sequence[RolloutGroup], wanted: Sequence[RolloutGroup], batch: dict) -> None:
        """
        Provide for the log-probs of a window's groups, from the batch where it has them, else from its forwards.

        Args:
            groups: this process's groups of the window, in the order of the batch.
            wanted: those whose log-probs are to be kept.
            batch (`dict`): TRL's batch; gets `window_row` (B,), int64, if its forwards are needed.
        """
        if self._waiting:
            raise RuntimeError(f"{len(self._waiting)} rows of the last window never met the loss.")
        wanted_ids, row = {id(group) for group in wanted}, 0
        for group in groups:
            rollouts = group.rollouts
            assert rollouts is not None
            if id(group) in wanted_ids and rollouts.sampling_logps is None:
                rollouts.behavior_logps = [np.full(len(t), np.nan, np.float32) for t in rollouts.completion_tokens]
                self._waiting.update(zip(range(row, row + len(rollouts)), rollouts.behavior_logps, strict=True))
            row += len(rollouts)
        rows = torch.arange(row, device=batch["completion_ids"].device)
        if "old_per_token_logps" in batch:
            self.note(rows, batch["old_per_token_logps"])
        else:
            batch["window_row"] = rows

    def note(self, rows: torch.Tensor, logps: torch.Tensor) -> None:
        """Enter the log-probs `(b, T)` of rows `(b,)` of the window."""
        for row, values in zip(rows.tolist(), logps.float().cpu().numpy(), strict=True):
            known = self._waiting.pop(row, None)
            if known is not None:
                known[:] = values[: len(known)]


def keep_behavior_logps(trainer: CorrectedGRPOTrainer, groups: Sequence[RolloutGroup], spare: RolloutGroup) -> None:
    """
    Give groups the log-probs of the present policy, in place. They never meet the loss's forward before the next
    update, so this is a forward of their own; where the sampler gave its log-probs (vLLM), those are it, at no cost.

    Sharded models run their forward in lockstep: every process makes as many passes as the one with most groups, and
    one that has no more groups repeats `spare`.

    Args:
        trainer: gives the model and TRL's forward.
        groups: fresh groups of all processes that are left for the next window.
        spare: any group that this process holds.
    """
    if not groups or (spare.rollouts is not None and spare.rollouts.sampling_logps is not None):
        return
    rank, world_size = trainer.accelerator.process_index, trainer.accelerator.num_processes
    held = [sum(group.owner == r for group in groups) for r in range(world_size)]
    mine = [group for group in groups if group.owner == rank]
    for i in range(max(held)):
        group = mine[i] if i < len(mine) else spare
        logps = _group_logps(trainer, group)
        if i < len(mine):
            assert group.rollouts is not None
            group.rollouts.behavior_logps = logps


@torch.no_grad()
def _group_logps(trainer: CorrectedGRPOTrainer, group: RolloutGroup) -> list[np.ndarray]:
    """Log-probs of a group's completion tokens by TRL's own forward, one array of shape `(T_i,)` per completion."""
    rollouts = group.rollouts
    assert rollouts is not None
    device = trainer.accelerator.device
    completions = [torch.from_numpy(tokens).long() for tokens in rollouts.completion_tokens]
    completion_ids = pad(completions, padding_value=trainer._tokenizer.pad_token_id, padding_side="right")
    mask = pad([torch.ones_like(tokens) for tokens in completions], padding_value=0, padding_side="right")
    prompt_ids = torch.from_numpy(rollouts.prompt_tokens).long().expand(len(completions), -1)
    input_ids = torch.cat([prompt_ids, completion_ids], dim=1).to(device)
    attention_mask = torch.cat([torch.ones_like(prompt_ids), mask], dim=1).to(device)
    with disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs):
        logps, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            input_ids,
            attention_mask,
            completion_ids.size(1),
            batch_size=trainer.args.per_device_train_batch_size,
        )
    rows = logps.float().cpu().numpy()
    return [row[: len(tokens)].copy() for row, tokens in zip(rows, completions, strict=True)]


def behavior_tensors(
    trained: Sequence[RolloutGroup], stale: Sequence[RolloutGroup], completion_ids: torch.Tensor
) -> dict[str, torch.Tensor]:
    """
    What the loss needs to know of groups from an earlier window.

    Args:
        trained: this process's groups of the window, in the order of the batch.
        stale: the groups of the window that earlier ones rolled out, of all processes.
        completion_ids (`torch.Tensor` of shape `(B, T)`): the batch's completions.

    Returns:
        `replayed` (B,), bool, and `behavior_per_token_logps` (B, T), float32, NaN for rows of this window (their
        behaviour policy is pi_old) and for padding.
    """
    stale_ids = {id(group) for group in stale}
    logps = np.full(completion_ids.shape, np.nan, dtype=np.float32)
    replayed = np.zeros(len(logps), dtype=bool)
    row = 0
    for group in trained:
        rollouts = group.rollouts
        assert rollouts is not None
        for i in range(len(rollouts)):
            if id(group) in stale_ids:
                known = rollouts.sampling_logps or rollouts.behavior_logps
                if known is None:
                    raise RuntimeError(f"The group of prompt {group.prompt_id} is used again without its log-probs.")
                logps[row, : len(known[i])] = known[i]
                replayed[row] = True
            row += 1
    device = completion_ids.device
    return {
        "replayed": torch.from_numpy(replayed).to(device),
        "behavior_per_token_logps": torch.from_numpy(logps).to(device),
    }
