"""
`RolloutLedger`: what a run knows about its prompts and rollouts, and the one place where a group is classified and
entered. Equal on every process, because it is fed with gathered numbers only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trl_dataeff.config import DataEfficientGRPOConfig
from trl_dataeff.ledger_state import ledger_state, restore_ledger
from trl_dataeff.replay.buffer import ReplayBuffer, replay_groups
from trl_dataeff.reward_checks import RewardChecks
from trl_dataeff.rollouts.capture import Collection, ZeroVarianceShare, collect, round_size
from trl_dataeff.rollouts.distributed import from_main
from trl_dataeff.rollouts.group import (
    EASY,
    EFFECTIVE,
    HARD,
    RewardScale,
    RolloutGroup,
    Rollouts,
    classify,
    is_zero_variance,
    teaches_nothing_untruncated,
    total_rewards,
)
from trl_dataeff.selection import Selector
from trl_dataeff.selection.pool import PromptPool
from trl_dataeff.tracking.group_log import GroupLog
from trl_dataeff.tracking.metrics import Counters


class RolloutLedger:
    """
    Args:
        config ([`DataEfficientGRPOConfig`]): the run's configuration.
        pool ([`PromptPool`] or `None`): the prompts; `None` where they are not known by row (streaming, environments).
        selector ([`Selector`] or `None`): proposes prompts; `None` as above.
        reward_names (`list[str]`), reward_weights (`np.ndarray` of shape `(F,)`): the reward functions.
        group_log ([`GroupLog`] or `None`): `None` on all processes but the main one.
        rank (`int`), world_size (`int`): this process, and how many there are.
        refills (`bool`): whether zero-variance groups are dropped and made up for (dynamic sampling).
        replays (`bool`): whether groups can be replayed.
    """

    def __init__(
        self,
        config: DataEfficientGRPOConfig,
        pool: PromptPool | None,
        selector: Selector | None,
        reward_names: Sequence[str],
        reward_weights: np.ndarray,
        group_log: GroupLog | None,
        rank: int,
        world_size: int,
        refills: bool,
        replays: bool,
    ):
        self.config = config
        self.pool = pool
        self.selector = selector
        self.reward_names = list(reward_names)
        self.reward_weights = np.asarray(reward_weights, dtype=np.float32)
        self.group_log = group_log
        self.rank = rank
        self.world_size = world_size
        self.refills = refills
        self.group_size = config.num_generations
        self.batch_groups = config.generation_batch_size // config.num_generations
        self.scale = RewardScale.of(config.reward_range)
        self.zero_share = ZeroVarianceShare()
        self.counters = Counters()
        self.carried: list[RolloutGroup] = []
        self.buffer: ReplayBuffer | None = None
        if replays:
            self.buffer = ReplayBuffer(config.replay_capacity, self._max_age())
        self.replay_groups = replay_groups(config.replay_fraction, self.batch_groups, world_size) if replays else 0
        self.windows = 0
        self._reward_checks = RewardChecks(self.reward_names, speaks=group_log is not None)
        # TRL seeds the sampler of `GRPOTrainer` in the same way
        self.rng = torch.Generator().manual_seed(config.seed)
        # Apart from what is proposed, so that all processes replay the same groups
        self.replay_rng = torch.Generator().manual_seed(config.seed)

    def _max_age(self) -> int | None:
        """The age limit of replayed groups; those of the last window are within it."""
        config = self.config
        window = math.ceil(config.steps_per_generation * config.num_iterations / config.gradient_accumulation_steps)
        return None if config.replay_max_age is None else max(config.replay_max_age, window)

    def propose(self, n: int) -> np.ndarray:
        """Ids of n prompts, in the order of ranks: each process rolls out an equal, contiguous part of them."""
        if self.selector is None:
            return np.full(n, -1, dtype=np.int64)
        return self._agreed(self.selector.propose(n, self.rng))

    def _agreed(self, ids: np.ndarray) -> np.ndarray:
        """What the main process proposes, where rounding could make another one propose otherwise."""
        if self.world_size == 1 or self.selector is None or self.selector.exact:
            return ids
        return from_main(ids)

    def collect(self, roll_out: Callable[[np.ndarray, int, bool], list[RolloutGroup]], step: int) -> Collection:
        """
        The groups of the window that begins at optimizer step `step` (see [`trl_dataeff.rollouts.capture.collect`]).

        Args:
            roll_out: `(prompt ids, round, whether for the sake of predictions) -> groups`.
            step (`int`): the present optimizer step.
        """
        assert self.selector is not None  # rounds are rolled out only where prompts can be chosen
        references: list[RolloutGroup] = []
        asked = self._agreed(self.selector.propose_references(self.rng))
        if len(asked):
            asked = asked[: len(asked) // self.world_size * self.world_size]
            for start in range(0, len(asked), self.batch_groups):  # no more at once than a batch
                references += roll_out(asked[start : start + self.batch_groups], 0, True)
            self.selector.observe_references(references)
        replayed = 0
        if self.buffer is not None:
            self.buffer.expire(step)
            replayed = self.replay_groups if len(self.buffer) >= self.replay_groups else 0
        return collect(
            lambda n, round_index: roll_out(self.propose(n), round_index, False),
            self._round_size,
            batch_groups=self.batch_groups,
            max_rounds=self.config.max_rollout_rounds if self.refills else None,
            carried=self.carried,
            references=references,
            buffer=self.buffer,
            replay_groups=replayed,
            rng=self.replay_rng,
        )

    def _round_size(self, missing: int) -> int:
        if not self.refills:
            return math.ceil(missing / self.world_size) * self.world_size
        assert self.pool is not None  # rounds are rolled out only where prompts can be chosen
        config = self.config
        return round_size(
            missing,
            batch_groups=self.batch_groups,
            zero_share=self.zero_share.value,
            margin=config.rollout_margin,
            low=config.rollout_round_min,
            high=config.rollout_round_max,
            multiple=self.world_size,
            pool=len(self.pool),
        )

    def enter_round(
        self,
        prompt_ids: np.ndarray,
        rewards: np.ndarray,
        lengths: np.ndarray,
        truncated: np.ndarray,
        *,
        step: int,
        round_index: int,
        seconds: float,
        rollouts: Sequence[Rollouts] = (),
        reference: bool = False,
    ) -> list[RolloutGroup]:
        """
        Classify the groups of a round and enter them in the history.

        Args:
            prompt_ids (`np.ndarray` of shape `(n,)`): in the order of ranks.
            rewards (`np.ndarray` of shape `(n * G, F)`): of all processes.
            lengths (`np.ndarray` of shape `(n * G,)`): tokens of each completion.
            truncated (`np.ndarray` of shape `(n * G,)`): whether each was cut off.
            step (`int`), round_index (`int`), seconds (`float`): when the round was, and how long it took.
            rollouts: those that this process holds, n / world_size of them (or none).
            reference (`bool`): whether the round was for the sake of predictions.
        """
        n = len(prompt_ids)
        rewards = np.asarray(rewards, dtype=np.float32).reshape(n, self.group_size, len(self.reward_names))
        lengths = np.asarray(lengths, dtype=np.int32).reshape(n, self.group_size)
        truncated = np.asarray(truncated, dtype=bool).reshape(n, self.group_size)
        self._reward_checks.check(rewards, first_window=not self.windows)
        totals = total_rewards(rewards, self.reward_weights)
        self.scale.observe(totals)
        success_rates = self.scale.success_rate(totals)
        zero_variance = is_zero_variance(rewards, self.reward_weights, self.config.multi_objective_aggregation)
        if self.config.mask_truncated_completions:
            zero_variance |= teaches_nothing_untruncated(rewards, self.reward_weights, truncated)
        kinds = classify(zero_variance, success_rates)
        predicted = np.full(n, np.nan) if self.selector is None else self.selector.predict(prompt_ids)
        per_rank = n // self.world_size
        groups = [
            RolloutGroup(
                prompt_id=int(prompt_ids[i]),
                step=step,
                round=round_index,
                rewards=rewards[i],
                success_rate=float(success_rates[i]),
                kind=int(kinds[i]),
                lengths=lengths[i],
                truncated=truncated[i],
                seconds=seconds / n,
                owner=i // per_rank,
                predicted=float(predicted[i]),
                reference=reference,
                rollouts=rollouts[i % per_rank] if rollouts and i // per_rank == self.rank else None,
            )
            for i in range(n)
        ]
        if self.pool is not None:
            self.pool.observe(groups)
        if not reference:
            self.zero_share.observe(groups)
        return groups

    def enter_window(self, collection: Collection, step: int) -> dict[str, float]:
        """Close a window at optimizer step `step`: keep what may be used again, count, log the groups. Returns metrics."""
        fresh, stale = collection.fresh, collection.stale
        if self.buffer is None:
            self.carried = collection.surplus
        else:
            self.carried = []
            self.buffer.add(group for group in [*collection.surplus, *fresh] if group.effective)
        self.windows += 1
        if self.selector is not None and fresh:
            self.selector.observe(fresh, step)
        self.counters.add(
            rollouts_generated=len(fresh) * self.group_size,
            rollouts_trained=len(collection.trained) * self.group_size,
            rollouts_replayed=len(stale) * self.group_size,
            rollouts_discarded=len(collection.dropped) * self.group_size,
            tokens_generated=sum(group.tokens for group in fresh),
        )
        if self.group_log is not None:
            self.group_log.add(fresh, collection.dropped, self.reward_weights)
            self.group_log.flush()
        metrics: dict[str, float] = dict(self.counters.values)
        metrics.update(
            rounds=collection.rounds, padded_groups=collection.padded, surplus_groups=len(collection.surplus)
        )
        if fresh:
            kinds = np.array([group.kind for group in fresh])
            rates = np.array([group.success_rate for group in fresh])
            unscorable = np.isnan(np.stack([group.rewards for group in fresh])).all(axis=2)
            metrics.update(
                effective_ratio=float((kinds == EFFECTIVE).mean()),
                easy_ratio=float((kinds == EASY).mean()),
                hard_ratio=float((kinds == HARD).mean()),
                unscorable_ratio=float(unscorable.mean()),
            )
            if not np.isnan(rates).all():
                metrics["success_rate"] = float(np.nanmean(rates))
        if stale:
            metrics["replay/age_mean"] = float(np.mean([step - group.step for group in stale]))
        if self.buffer is not None:
            metrics["replay/size"] = len(self.buffer)
        return metrics | (self.selector.metrics() if self.selector is not None else {})

    def state_dict(self) -> tuple[dict[str, Any], dict[str, dict[str, np.ndarray]]]:
        """See [`ledger_state`]. A collective where groups are kept: they are spread over the processes."""
        return ledger_state(self)

    def load_state_dict(
        self, scalars: dict[str, Any], files: dict[str, dict[str, np.ndarray]], step: int, path: Path
    ) -> None:
        """See [`restore_ledger`]."""
        restore_ledger(self, scalars, files, step, path)
