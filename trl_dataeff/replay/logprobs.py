"""
Log-probabilities under the policy that sampled a group: recorded for groups that may be used again, and given to the
loss.

Their cost, by where they come from:

- the sampler returned its own (vLLM): nothing;
- `old_per_token_logps`, which TRL computes where generation and optimization are misaligned: nothing;
- the loss's own forward pass, where they are aligned: a copy to the CPU;
- a forward pass of their own, without gradient, for leftover groups: they never meet the loss before the next update.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from transformers import PreTrainedModel
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import pad

from trl_dataeff.compact.exact import has_gradient
from trl_dataeff.generation.pregenerated import PregeneratedGroups
from trl_dataeff.generation.trl_state import shadowed, temporarily
from trl_dataeff.rollouts.distributed import Processes
from trl_dataeff.rollouts.group import Origin, RolloutGroup, Rollouts, is_stale


#: `(input_ids (B, P + T), attention_mask (B, P + T), T) -> log-probs (B, T)`, without gradient
ForwardPass: TypeAlias = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
#: Key in TRL's batch, bool `(B,)`: rows that an earlier policy sampled, of replayed and of leftover groups (see
#: `is_stale`). Checkpoints hold half-used batches by their keys: with another value they could not be resumed
STALE = "replayed"
ADVICE = "Let each micro-batch pass through `_compute_loss`; else, or if you change advantages, set `replay='off'`."


# The groups of a batch


@dataclass(frozen=True)
class GroupInBatch:
    """
    A group that this process trains on.

    Attributes:
        group: the group, with its rollouts.
        origin: where it comes from, in this generation batch.
        rows: its rows of this process's batch.
    """

    group: RolloutGroup
    origin: Origin
    rows: list[int]

    @property
    def rollouts(self) -> Rollouts:
        return self.group.held_rollouts

    @property
    def is_stale(self) -> bool:
        """Whether an earlier policy sampled it."""
        return is_stale(self.origin)


def groups_in_batch(groups: Sequence[RolloutGroup], origins: Mapping[RolloutGroup, Origin]) -> list[GroupInBatch]:
    """This process's `groups`, which have their rows in this order; `origins` are of all groups of the batch."""
    result = []
    start = 0
    for group in groups:
        end = start + group.size
        result.append(GroupInBatch(group, origins[group], list(range(start, end))))
        start = end
    return result


# Recording


@dataclass(frozen=True)
class _ExpectedRow:
    """A row of a generation batch: a completion, and what was seen so far of all completions of its group."""

    rollouts: Rollouts
    completion: int
    seen: dict[int, np.ndarray]  # log-probs `(T_i,)` by completion


def _enter_if_complete(rollouts: Rollouts, seen: Mapping[int, np.ndarray]) -> None:
    """Give a group its log-probs, once those of all its completions are there."""
    if len(seen) == len(rollouts):
        rollouts.behavior_logps = [seen[i] for i in range(len(rollouts))]


class LogprobRecorder:
    """Gives this process's groups their log-probs, collected row by row from the forward passes of the loss."""

    def __init__(self) -> None:
        self._expected: dict[int, _ExpectedRow] = {}  # by row of the generation batch

    def expect(self, groups: Sequence[GroupInBatch], batch: dict[str, Any], *, least_advantage: float = 0.0) -> None:
        """
        Prepare for the rows of a generation batch. Log-probs that the batch has already are recorded at once.

        Args:
            groups (`Sequence[GroupInBatch]`): this process's groups. Recorded are effective ones that were generated
                for this batch and have no log-probs of their sampler.
            batch (`dict`): TRL's batch; gets `batch_row` (B,), int64, if its forward passes are needed. Rows whose
                advantage is 0 may never meet the loss, and are not waited for.
            least_advantage (`float`, *optional*, defaults to 0): advantages up to this size are 0, but for rounding.

        Raises:
            `RuntimeError`: the loss has not seen all rows of the last batch.
        """
        if self._expected:
            raise RuntimeError(
                f"{len(self._expected)} rows of the last generation batch were not seen by the loss. {ADVICE}"
            )
        row_has_gradient = has_gradient(batch, least_advantage).tolist()
        for group in groups:
            is_recorded = not group.is_stale and group.group.effective and group.rollouts.sampling_logps is None
            if is_recorded:
                self._expect_group(group, row_has_gradient)
        rows = torch.arange(len(row_has_gradient), device=batch["completion_ids"].device)
        if "old_per_token_logps" in batch:
            self.record(rows, batch["old_per_token_logps"])
        else:
            batch["batch_row"] = rows

    def _expect_group(self, group: GroupInBatch, row_has_gradient: Sequence[bool]) -> None:
        rollouts = group.rollouts
        seen: dict[int, np.ndarray] = {}
        for i, row in enumerate(group.rows):
            if row_has_gradient[row]:
                self._expected[row] = _ExpectedRow(rollouts, i, seen)
            else:
                # A row without a gradient now has none when it is replayed, and its log-probs do not count
                seen[i] = np.full(len(rollouts.completion_tokens[i]), np.nan, dtype=np.float32)
        _enter_if_complete(rollouts, seen)  # without any gradient, as where two reward functions cancel out

    def record(self, rows: torch.Tensor, logps: torch.Tensor) -> None:
        """
        Enter log-probs. A row counts once, at its first pass.

        Args:
            rows (`torch.Tensor` of shape `(b,)`): rows of the generation batch.
            logps (`torch.Tensor` of shape `(b, T)`): their log-probs. T may be smaller than a completion, where the
                columns behind are not trained on; the log-probs there stay NaN, which is: not known.
        """
        for row, values in zip(rows.tolist(), logps.float().cpu().numpy(), strict=True):
            expected = self._expected.pop(row, None)
            if expected is None:
                continue
            rollouts = expected.rollouts
            length = len(rollouts.completion_tokens[expected.completion])
            logps_of_row = np.full(length, np.nan, dtype=np.float32)
            known = values[:length]
            logps_of_row[: len(known)] = known
            expected.seen[expected.completion] = logps_of_row
            _enter_if_complete(rollouts, expected.seen)


# Forward passes for leftover groups


def compute_leftover_logps(
    groups: Sequence[RolloutGroup],
    logps_of: Callable[[RolloutGroup], list[np.ndarray]],
    padding_group: RolloutGroup,
    processes: Processes,
) -> None:
    """
    Give leftover groups the log-probs of the present policy, in place, by a forward pass of their own. Where the
    sampler returned its log-probs (vLLM), those are used, at no cost.

    Sharded models run their forward passes in lockstep: every process makes as many as the one with most groups, and
    one that has no more groups repeats `padding_group`.

    Args:
        groups (`Sequence[RolloutGroup]`): the leftover groups of all processes.
        logps_of (`Callable`): log-probs of a group that this process holds, as [`group_logps`] returns them.
        padding_group ([`RolloutGroup`]): any group that this process holds.
        processes ([`Processes`]): of the run.
    """
    if not groups:
        return
    # In a run all groups have the sampler's log-probs, or none: with this one, every process decides the same
    sampler_gave_logps = padding_group.held_rollouts.sampling_logps is not None
    if sampler_gave_logps:
        return
    counts = [sum(group.owner == rank for group in groups) for rank in range(processes.world_size)]
    own = [group for group in groups if group.owner == processes.rank]
    for group in own:
        group.held_rollouts.behavior_logps = logps_of(group)
    for _ in range(max(counts) - len(own)):
        logps_of(padding_group)


def group_logps(
    group: RolloutGroup, forward: ForwardPass, pad_token_id: int, device: torch.device
) -> list[np.ndarray]:
    """
    Log-probs of a group's completion tokens.

    Args:
        group ([`RolloutGroup`]): a group that this process holds.
        forward (`Callable`): TRL's forward pass, such as [`forward_of`] of a trainer.
        pad_token_id (`int`): the token that completions are padded with.
        device (`torch.device`): of the model.

    Returns:
        `list[np.ndarray]`: of shape `(T_i,)`, one per completion.
    """
    rollouts = group.held_rollouts
    completions = [torch.from_numpy(tokens).long() for tokens in rollouts.completion_tokens]
    completion_ids = pad(completions, padding_value=pad_token_id, padding_side="right")  # (G, T)
    completion_mask = pad([torch.ones_like(tokens) for tokens in completions], padding_value=0, padding_side="right")
    prompt_ids = torch.from_numpy(rollouts.prompt_tokens).long().expand(len(completions), -1)  # (G, P)
    input_ids = torch.cat([prompt_ids, completion_ids], dim=1).to(device)
    attention_mask = torch.cat([torch.ones_like(prompt_ids), completion_mask], dim=1).to(device)
    logps = forward(input_ids, attention_mask, completion_ids.size(1)).float().cpu().numpy()
    return _cut_to_lengths(logps, rollouts)


@torch.no_grad()
def forward_of(
    trainer: GRPOTrainer, input_ids: torch.Tensor, attention_mask: torch.Tensor, length: int
) -> torch.Tensor:
    """Log-probs of the last `length` tokens of each row, `(B, length)`, under the present policy."""
    options = cast("dict[str, Any] | None", trainer.args.gradient_checkpointing_kwargs)
    with disable_gradient_checkpointing(cast("PreTrainedModel", trainer.model), options):
        outputs = trainer._get_per_token_logps_and_entropies(
            trainer.model, input_ids, attention_mask, length, batch_size=trainer.args.per_device_train_batch_size
        )
    logps: torch.Tensor = outputs[0]
    return logps


def logps_of_trls_pass(
    trainer: GRPOTrainer,
    group: RolloutGroup,
    make_batch: Callable[[], dict[str, Any]],
    trls_generate: Callable[[list[Any]], tuple[Any, ...]],
    world_size: int,
) -> list[np.ndarray]:
    """
    Log-probs of a group's completions where TRL prepares prompts in its pass over a batch, as it does with images. The
    pass leaves no logs. A collective.

    Args:
        trainer ([`~trl.GRPOTrainer`]): whose policy it is.
        group ([`RolloutGroup`]): a group of this process.
        make_batch (`Callable`): makes TRL's pass over the rows of this group, and returns its batch.
        trls_generate (`Callable`): TRL's `_generate`.
        world_size (`int`): number of processes.

    Returns:
        `list[np.ndarray]`: of shape `(T_i,)` each.
    """
    # Any will do: of TRL's batch only the log-probs are used
    rewards = np.zeros((world_size * len(group.rewards), group.rewards.shape[1]), dtype=np.float32)
    state: dict[str, Any] = {
        # TRL computes old log-probs if `steps_per_generation * num_iterations` does not divide
        # `gradient_accumulation_steps`: a number above that never does
        "num_iterations": trainer.args.gradient_accumulation_steps + 1,
        "beta": 0.0,  # no pass of a reference model
        "_metrics": {"train": defaultdict(list)},
        "_logs": copy.deepcopy(trainer._logs),
    }
    tokens_seen = trainer.state.num_input_tokens_seen
    pregenerated = PregeneratedGroups([group], rewards)
    with temporarily(trainer, **state), shadowed(trainer, **pregenerated.methods(trainer, trls_generate)):
        batch = make_batch()
    trainer.state.num_input_tokens_seen = tokens_seen
    logps = batch["old_per_token_logps"].float().cpu().numpy()
    return _cut_to_lengths(logps, group.held_rollouts)


def _cut_to_lengths(logps: np.ndarray, rollouts: Rollouts) -> list[np.ndarray]:
    """The rows of log-probs `(G, T)` without their padding, `(T_i,)` each."""
    rows = zip(logps, rollouts.completion_tokens, strict=True)
    return [row[: len(tokens)].copy() for row, tokens in rows]


# What the loss gets


def behavior_tensors(groups: Sequence[GroupInBatch], completion_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """
    What an earlier policy sampled of a batch.

    Args:
        groups (`Sequence[GroupInBatch]`): this process's groups.
        completion_ids (`torch.Tensor` of shape `(B, T)`): of TRL's batch.

    Returns:
        `dict`:

        - `STALE` (B,), bool: rows that an earlier policy sampled;
        - `behavior_per_token_logps` (B, T), float32: the log-probs under it, NaN for padding and for the other rows.

    Raises:
        `RuntimeError`: the log-probs of a group are not known.
    """
    logps = np.full(completion_ids.shape, np.nan, dtype=np.float32)
    stale = np.zeros(len(logps), dtype=bool)
    for group in groups:
        if not group.is_stale:
            continue
        known = group.rollouts.sampling_logps or group.rollouts.behavior_logps
        if known is None:
            raise RuntimeError(
                f"The {group.origin} group of prompt {group.group.prompt_id} has no log-probs. {ADVICE}"
            )
        for row, values in zip(group.rows, known, strict=True):
            logps[row, : len(values)] = values
        stale[group.rows] = True
    device = completion_ids.device
    return {
        STALE: torch.from_numpy(stale).to(device),
        "behavior_per_token_logps": torch.from_numpy(logps).to(device),
    }


def exclude_masked(groups: Sequence[GroupInBatch], batch: dict[str, Any]) -> None:
    """
    Exclude a sequence whenever it is replayed, by an advantage of 0, if TRL's importance-sampling mask (vLLM) excluded
    it while it was fresh, because the sampler and the policy disagreed on it. A group that no loss has met while it
    was fresh, such as a leftover one, has none excluded: later the ratio tells how far the policy has moved.

    Args:
        groups (`Sequence[GroupInBatch]`): this process's groups; fresh ones get `excluded`.
        batch (`dict`): TRL's batch, with `importance_sampling_ratio` (B, 1), 0 where the mask excludes a sequence; its
            `advantages` (B,) are replaced.
    """
    ratio = batch.get("importance_sampling_ratio")  # absent where the loss computes it, see `ExclusionRecorder`
    advantages = batch["advantages"]
    excluded = torch.zeros(len(advantages), dtype=torch.bool)
    for group in groups:
        rollouts = group.rollouts
        if group.is_stale:
            if rollouts.excluded is not None:
                excluded[group.rows] = torch.tensor(rollouts.excluded, dtype=torch.bool)
        elif ratio is not None:
            rollouts.excluded = (ratio[group.rows] == 0).flatten().tolist()
    batch["advantages"] = advantages.masked_fill(excluded.to(advantages.device), 0.0)


class ExclusionRecorder:
    """Notes which sequences TRL's importance-sampling mask (vLLM) excludes, where the loss computes the ratio."""

    def __init__(self) -> None:
        self._expected: dict[int, tuple[Rollouts, int]] = {}  # by row: its rollouts, and which of them

    def expect(self, groups: Sequence[GroupInBatch], batch: dict[str, Any]) -> None:
        """
        Prepare for the rows of a generation batch. Those that never meet the loss are not excluded.

        Args:
            groups (`Sequence[GroupInBatch]`): this process's groups; fresh ones get `excluded`.
            batch (`dict`): TRL's batch; gets `batch_row` (B,), int64.
        """
        self._expected = {}
        for group in groups:
            if not group.is_stale:
                group.rollouts.excluded = [False] * len(group.rows)
                for completion, row in enumerate(group.rows):
                    self._expected[row] = (group.rollouts, completion)
        batch["batch_row"] = torch.arange(len(batch["advantages"]), device=batch["advantages"].device)

    def record(self, rows: torch.Tensor, is_masked: torch.Tensor) -> None:
        """Enter whether the mask excludes rows `(b,)` of the generation batch, bool `(b, 1)`."""
        for row, masked in zip(rows.tolist(), is_masked.flatten().tolist(), strict=True):
            if row in self._expected:
                rollouts, completion = self._expected.pop(row)
                assert rollouts.excluded is not None
                rollouts.excluded[completion] = masked
