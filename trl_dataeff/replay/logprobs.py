"""
Log-probabilities under the policy that sampled a group: recorded for groups that may be used again, and given to the loss.

Their cost, by where they come from:

- the sampler returned its own (vLLM): nothing;
- `old_per_token_logps`, which TRL computes where generation and optimization are misaligned: nothing;
- the loss's own forward pass, where they are aligned: a copy to the CPU;
- a forward pass of their own, without gradient, for leftover groups: they never meet the loss before the next update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from trl.trainer.utils import nanmax, nanmin, pad

from trl_dataeff.rollouts.distributed import Processes
from trl_dataeff.rollouts.group import RolloutGroup, Rollouts
from trl_dataeff.rollouts.skipping import is_active, token_mask


#: `(input_ids (B, P + T), attention_mask (B, P + T), T) -> log-probs (B, T)`, without gradient
Forward: TypeAlias = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
ADVICE = "Let each micro-batch pass through `_compute_loss`; else, or if you change advantages, set `replay='off'`."


class _Row(NamedTuple):
    """A row of a generation batch: completion `i` of `rollouts`, and what was seen so far of all completions of these."""

    rollouts: Rollouts
    i: int
    seen: dict[int, np.ndarray]


class LogprobRecorder:
    """Gives this process's groups their log-probs, collected row by row from the forward passes of the loss."""

    def __init__(self) -> None:
        self._expected: dict[int, _Row] = {}  # by row of the generation batch

    def expect(self, groups: Sequence[RolloutGroup], batch: dict[str, Any]) -> None:
        """
        Prepare for the rows of a generation batch. Log-probs that the batch has already are recorded at once.

        Args:
            groups: this process's groups, in the order of the batch. Recorded are effective ones that were generated
                for it and have no log-probs yet.
            batch (`dict`): TRL's batch; gets `batch_row` (B,), int64, if its forward passes are needed. Rows whose advantage
                is 0 may never meet the loss, and are not waited for.
        """
        if self._expected:
            raise RuntimeError(
                f"{len(self._expected)} rows of the last generation batch were not seen by the loss. {ADVICE}"
            )
        active = is_active(batch).tolist()
        for group, rollouts, own in in_batch(groups):
            if not group.generated_now or not group.effective or rollouts.sampling_logps is not None:
                continue
            # A row without a gradient now has none when it is replayed, and its log-probs do not count
            seen: dict[int, np.ndarray] = {}
            for i, tokens in enumerate(rollouts.completion_tokens):
                if active[own[i]]:
                    self._expected[own[i]] = _Row(rollouts, i, seen)
                else:
                    seen[i] = np.full(len(tokens), np.nan, dtype=np.float32)
            if len(seen) == len(rollouts):  # as where two reward functions cancel out
                rollouts.behavior_logps = list(seen.values())
        rows = torch.arange(len(active), device=batch["completion_ids"].device)
        if "old_per_token_logps" in batch:
            self.record(rows, batch["old_per_token_logps"])
        else:
            batch["batch_row"] = rows

    def record(self, rows: torch.Tensor, logps: torch.Tensor) -> None:
        """Enter the log-probs `(b, T)` of rows `(b,)` of the generation batch. A row counts once, at its first pass."""
        for row, values in zip(rows.tolist(), logps.float().cpu().numpy(), strict=True):
            if row not in self._expected:
                continue
            rollouts, i, seen = self._expected.pop(row)
            seen[i] = values[: len(rollouts.completion_tokens[i])].copy()
            if len(seen) == len(rollouts):
                rollouts.behavior_logps = [seen[j] for j in range(len(rollouts))]


def compute_leftover_logps(
    groups: Sequence[RolloutGroup],
    logps_of: Callable[[RolloutGroup], list[np.ndarray]],
    padding_group: RolloutGroup,
    processes: Processes,
) -> None:
    """
    Give leftover groups the log-probs of the present policy, in place, by a forward pass of their own. Where the sampler
    returned its log-probs (vLLM), those are used, at no cost.

    Sharded models run their forward passes in lockstep: every process makes as many as the one with most groups, and one that
    has no more groups repeats `padding_group`, any group that it holds. `groups` are those of all processes; `logps_of` a group
    that this process holds is what [`group_logps`] returns.
    """
    if not groups or (padding_group.rollouts is not None and padding_group.rollouts.sampling_logps is not None):
        return
    passes = max(sum(group.owner == r for group in groups) for r in range(processes.world_size))
    own = [group for group in groups if group.owner == processes.rank]
    for i in range(passes):
        group = own[i] if i < len(own) else padding_group
        logps = logps_of(group)
        if i < len(own) and group.rollouts is not None:
            group.rollouts.behavior_logps = logps


def group_logps(group: RolloutGroup, forward: Forward, pad_token_id: int, device: torch.device) -> list[np.ndarray]:
    """Log-probs of a group's completion tokens, one array of shape `(T_i,)` per completion, by TRL's forward pass."""
    rollouts = group.rollouts
    assert rollouts is not None
    completions = [torch.from_numpy(tokens).long() for tokens in rollouts.completion_tokens]
    completion_ids = pad(completions, padding_value=pad_token_id, padding_side="right")
    mask = pad([torch.ones_like(tokens) for tokens in completions], padding_value=0, padding_side="right")
    prompt_ids = torch.from_numpy(rollouts.prompt_tokens).long().expand(len(completions), -1)
    input_ids = torch.cat([prompt_ids, completion_ids], dim=1).to(device)
    attention_mask = torch.cat([torch.ones_like(prompt_ids), mask], dim=1).to(device)
    rows = forward(input_ids, attention_mask, completion_ids.size(1)).float().cpu().numpy()
    return [row[: len(tokens)].copy() for row, tokens in zip(rows, completions, strict=True)]


def in_batch(groups: Sequence[RolloutGroup]) -> Iterator[tuple[RolloutGroup, Rollouts, list[int]]]:
    """This process's groups with their rollouts, and their rows of its batch, in which they are in this order."""
    start = 0
    for group in groups:
        assert group.rollouts is not None
        rows = list(range(start, start + len(group.rollouts)))
        yield group, group.rollouts, rows
        start += len(rows)


def behavior_tensors(groups: Sequence[RolloutGroup], completion_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """
    Which of the completions `(B, T)` an earlier policy sampled, `replayed` (B,), bool; and the log-probs under it,
    `behavior_per_token_logps` (B, T), float32, NaN for padding and for the other rows.
    """
    logps = np.full(completion_ids.shape, np.nan, dtype=np.float32)
    replayed = np.zeros(len(logps), dtype=bool)
    for group, rollouts, own in in_batch(groups):
        if not group.generated_now:
            known = rollouts.sampling_logps or rollouts.behavior_logps
            if known is None:
                raise RuntimeError(f"The {group.origin} group of prompt {group.prompt_id} has no log-probs. {ADVICE}")
            for row, values in zip(own, known, strict=True):
                logps[row, : len(values)] = values
            replayed[own] = True
    device = completion_ids.device
    return {
        "replayed": torch.from_numpy(replayed).to(device),
        "behavior_per_token_logps": torch.from_numpy(logps).to(device),
    }


def exclude_masked(groups: Sequence[RolloutGroup], batch: dict[str, Any]) -> None:
    """
    Exclude a sequence whenever it is replayed, by an advantage of 0, if TRL's importance-sampling mask (vLLM) excluded it while it
    was fresh, because the sampler and the policy disagreed on it: then its `importance_sampling_ratio` (B, 1) was 0. A group that
    no loss has met while it was fresh, such as a leftover one, has none excluded: later the ratio tells how far the policy has moved.
    """
    if "importance_sampling_ratio" not in batch:
        return
    masked = (batch["importance_sampling_ratio"] == 0).flatten().tolist()
    excluded = torch.zeros(len(masked), dtype=torch.bool)
    for group, rollouts, own in in_batch(groups):
        if group.generated_now:
            rollouts.excluded = [masked[row] for row in own]
        else:
            excluded[own] = torch.tensor(rollouts.excluded or False)
    batch["advantages"] = batch["advantages"].masked_fill(excluded.to(batch["advantages"].device), 0.0)


def sampling_metrics(batch: dict[str, Any], processes: Processes) -> dict[str, float]:
    """
    TRL's `sampling/*` metrics of vLLM's log-probs, over fresh rows of TRL's batch that the pass for old log-probs did not skip
    (NaN in `old_per_token_logps`): NaN, which TRL leaves out, without any; empty if TRL has not logged them. A collective if
    it has.
    """
    if "importance_sampling_ratio" not in batch:
        return {}
    ratio = batch["importance_sampling_ratio"]
    fresh = ~batch["old_per_token_logps"].isnan().all(1, keepdim=True)  # (B, 1)
    if "replayed" in batch:
        fresh = fresh & ~batch["replayed"].unsqueeze(1)
    chosen = token_mask(batch).bool() & fresh
    difference = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]).abs()[chosen]
    ratio = ratio[fresh if ratio.size(1) == 1 else chosen]
    parts: dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]] = {
        "sampling_logp_difference/mean": (difference, torch.nanmean),
        "sampling_logp_difference/max": (difference, nanmax),
        "importance_sampling_ratio/min": (ratio, nanmin),
        "importance_sampling_ratio/mean": (ratio, torch.nanmean),
        "importance_sampling_ratio/max": (ratio, nanmax),
    }
    own = torch.stack([reduce(values) for values, reduce in parts.values()])
    columns = zip(parts.items(), processes.gather(own).view(-1, len(own)).T, strict=True)
    return {f"sampling/{name}": reduce(column).item() for (name, (_, reduce)), column in columns}
