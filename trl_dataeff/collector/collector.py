"""
`RolloutCollector`: owns a generation batch from proposal to history.

It asks the selector for prompts, has rounds of rollouts generated, classifies the groups, adds replayed ones, and updates
history, selector and buffer. It is equal on every process, because it works on gathered numbers only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch

from trl_dataeff.collector.rounds import GenerationBatch, Rounds, ZeroVarianceShare
from trl_dataeff.replay.buffer import ReplayBuffer
from trl_dataeff.rollouts.capture import Round
from trl_dataeff.rollouts.checks import RewardChecks
from trl_dataeff.rollouts.classification import GroupClassifier
from trl_dataeff.rollouts.distributed import Processes, assign, broadcast_from_main, redistribute
from trl_dataeff.rollouts.group import EASY, EFFECTIVE, HARD, Origin, RolloutGroup
from trl_dataeff.selection import Selector, UniformSelector
from trl_dataeff.selection.base import (
    check_proposal,
    checked_metrics,
    checked_predictions,
)
from trl_dataeff.tracking.groups import RunLogs
from trl_dataeff.tracking.metrics import Counters


RollOut: TypeAlias = Callable[[np.ndarray], Round]  # prompt ids (n,) -> what G completions of each gave
MOST_UNSCORED = 512  # completions without any score, after which training without one is an error


class RolloutCollector:
    """
    Args:
        classifier ([`GroupClassifier`]): classifies groups by their rewards.
        group_size (`int`): G, completions per group.
        batch_groups (`int`): B, groups trained on per generation batch, of all processes.
        reward_names (`list[str]`): the reward functions.
        selector ([`Selector`], *optional*): proposes prompts, bound; `None` where prompts are not known by row
            (streaming, environments).
        num_prompts (`int`, *optional*, defaults to `0`): N; 0 without a selector.
        dataset_hash (`str`, *optional*, defaults to `""`): content hash of the prompts.
        settings (`dict`, *optional*): settings on which the content of a checkpoint depends, by name.
        rounds ([`Rounds`], *optional*): rounds of rollouts per generation batch; by default a single one.
        buffer ([`ReplayBuffer`], *optional*): stored groups; without it nothing is replayed.
        reserved (`int`, *optional*, defaults to `0`): places that stored groups get, while zero-variance groups keep theirs
            (`replay="share"`); 0: stored groups take the places of zero-variance groups.
        overlaps (`bool`, *optional*, defaults to `False`): whether an optimizer step may end within a generation batch and the
            next one take the rest of it with another.
        logs ([`RunLogs`], *optional*): files that the run writes; on the main process alone.
        seed (`int`, *optional*, defaults to `0`): of proposals and of replay.
        processes ([`Processes`], *optional*): of the run; by default a single one.
    """

    def __init__(
        self,
        *,
        classifier: GroupClassifier,
        group_size: int,
        batch_groups: int,
        reward_names: Sequence[str],
        selector: Selector | None = None,
        num_prompts: int = 0,
        dataset_hash: str = "",
        settings: dict[str, Any] | None = None,
        rounds: Rounds = Rounds(),  # noqa: B008 (immutable)
        buffer: ReplayBuffer | None = None,
        reserved: int = 0,
        overlaps: bool = False,
        logs: RunLogs | None = None,
        seed: int = 0,
        processes: Processes = Processes(),  # noqa: B008 (immutable)
    ):
        self.classifier = classifier
        self.group_size, self.batch_groups = group_size, batch_groups
        self.reward_names = list(reward_names)
        self.selector, self.num_prompts, self.dataset_hash = selector, num_prompts, dataset_hash
        self.settings = settings or {}
        self.rounds, self.buffer, self.reserved = rounds, buffer, reserved
        self.logs = logs
        self.processes = processes
        self.zero_share = ZeroVarianceShare()
        self.counters = Counters()
        self.batches = 0  # generation batches so far
        self.leftover: list[RolloutGroup] = []
        self._present: list[RolloutGroup] = []  # groups of the present generation batch so far
        self.overlaps = overlaps
        #: Generation batches that may be in the next one's optimizer step: the step at which each began, and its prompts
        self.recent: list[tuple[int, list[int]]] = []
        # With everything off nothing that TRL accepts is an error
        unchosen = selector is None or isinstance(selector, UniformSelector)
        off = unchosen and rounds.most == 1 and buffer is None
        self.reward_checks = RewardChecks(
            self.reward_names, most_unscored=None if off else MOST_UNSCORED, is_main_process=processes.is_main
        )
        # TRL seeds the sampler of `GRPOTrainer` in the same way
        self.rng = torch.Generator().manual_seed(seed)
        # Of its own: proposals of the main process alone would leave the processes' states different
        self.replay_rng = torch.Generator().manual_seed(seed)

    # A generation batch

    def propose(self, n: int) -> np.ndarray:
        """Ids of n prompts, in the order of ranks: each process generates for an equal, contiguous part of them."""
        if self.selector is None:
            return np.full(n, -1, dtype=np.int64)
        ids = self._agreed(self.selector.propose(n, self.rng))
        return check_proposal(ids, n, self.num_prompts, type(self.selector).__name__)

    def collect(self, roll_out: RollOut, step: int) -> GenerationBatch:
        """
        Collect the generation batch that begins at optimizer step `step`.

        Leftover groups take places first. Rounds of rollouts are generated for the others; effective groups take places, and
        those beyond them are left over. Stored groups take the places that are empty then, or those that are reserved for them.
        Zero-variance groups get what is left. Afterwards every process owns an equal share of `trained`, which is in the order
        of ranks.

        Args:
            roll_out (`Callable`): generates and scores G completions of prompts.
            step (`int`): the present optimizer step.
        """
        places, in_step = self.batch_groups, self._prompts_in_step(step)
        if self.buffer is not None:
            self.buffer.expire(self.batches)
        references = self._roll_out_references(roll_out, step)
        batch = GenerationBatch(generated=list(references))
        for_buffer = [group for group in references if group.effective]
        effective, zero_variance = list(self.leftover), list[RolloutGroup]()
        if self.buffer is None:  # references take up to half of the batch: the rest is selected
            effective, for_buffer = [*effective, *for_buffer[: places // 2]], []
        while True:
            present = {*in_step, *(group.prompt_id for group in [*self.leftover, *batch.generated])}
            stored = 0 if self.buffer is None else self.buffer.available(present)
            wanted = places - min(self.reserved, stored)
            complete = len(effective) + len(zero_variance) + stored >= places
            if len(effective) >= wanted or (batch.rounds >= self.rounds.most and complete):
                break
            missing = wanted - len(effective) - (len(zero_variance) if self.rounds.most == 1 else 0)
            ids = self.propose(self._round_size(missing))
            groups = self._classify(ids, roll_out(ids), step, batch.rounds)
            self.zero_share.observe(groups)
            batch.rounds += 1
            batch.generated += groups
            effective += [group for group in groups if group.effective]
            zero_variance += [group for group in groups if not group.effective]

        taken, batch.leftover = effective[:wanted], [*effective[wanted:], *for_buffer]
        if self.reserved:
            taken += zero_variance[: wanted - len(taken)]
        replayed = [] if self.buffer is None else self.buffer.sample(places - len(taken), self.replay_rng, present)
        taken += zero_variance[: places - len(taken) - len(replayed)] if not self.reserved else []
        batch.assign(taken, replayed, self.leftover)
        self.recent.append((step, [group.prompt_id for group in batch.trained]))
        batch.trained = self._spread_evenly(batch.trained)
        self._update(batch, step)
        return batch

    def _prompts_in_step(self, step: int) -> set[int]:
        """Prompts that the present optimizer step trains on already, if it takes several generation batches."""
        last = self.recent[-1:] if self.overlaps else []
        self.recent = [batch for batch in self.recent if batch[0] == step or batch in last]
        return {prompt_id for _, prompt_ids in self.recent for prompt_id in prompt_ids}

    def enter(self, ids: np.ndarray, generated: Round, step: int) -> GenerationBatch:
        """
        Enter a generation batch that was generated in a single round and is trained on as it is.

        Args:
            ids (`np.ndarray` of shape `(B,)`): prompt ids, from [`propose`].
            generated ([`Round`]): what they gave.
            step (`int`): the present optimizer step.
        """
        groups = self._classify(ids, generated, step, 0)
        self.zero_share.observe(groups)
        batch = GenerationBatch(generated=groups, rounds=1)
        batch.assign(groups, [], [])
        self._update(batch, step)
        return batch

    def _spread_evenly(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """
        Give each process an equal number of these groups, and about as many effective ones. They are returned in the order of
        ranks.
        """
        owners, effective = [group.owner for group in groups], [group.effective for group in groups]
        destinations = assign(owners, self.processes.world_size, effective)
        redistribute(groups, destinations, self.processes.rank)
        return [groups[i] for i in np.argsort(destinations, kind="stable")]

    def own(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Those of `groups` whose rollouts this process holds."""
        return [group for group in groups if group.owner == self.processes.rank]

    def _roll_out_references(self, roll_out: RollOut, step: int) -> list[RolloutGroup]:
        references: list[RolloutGroup] = []
        if self.selector is None or not self.selector.uses_references:
            return references

        def generate(ids: np.ndarray) -> list[RolloutGroup]:
            ids = self._agreed(ids)
            if not np.size(ids):
                return references
            name = type(self.selector).__name__
            ids = check_proposal(ids, np.size(ids), self.num_prompts, name, references=True)
            ids = ids[: len(ids) // self.processes.world_size * self.processes.world_size]
            for start in range(0, len(ids), self.batch_groups):  # at most a batch per call of the generator
                part = ids[start : start + self.batch_groups]
                references.extend(self._classify(part, roll_out(part), step, 0, origin="reference"))
            return references

        self.selector.roll_out_references(generate, self.rng)
        return references

    def _agreed(self, ids: np.ndarray) -> np.ndarray:
        """The main process's ids, unless proposals are equal on all processes to the last bit."""
        exact = self.processes.world_size == 1 or self.selector is None or self.selector.exact
        return ids if exact else broadcast_from_main(ids)

    def _round_size(self, missing: int) -> int:
        return self.rounds.size(
            missing,
            batch_groups=self.batch_groups,
            zero_share=self.zero_share.value,
            multiple=self.processes.world_size,
            num_prompts=self.num_prompts,
        )

    def _classify(
        self, ids: np.ndarray, generated: Round, step: int, round_index: int, origin: Origin = "fresh"
    ) -> list[RolloutGroup]:
        n = len(ids)
        rewards = generated.rewards.reshape(n, -1, len(self.reward_names)).astype(np.float32)
        lengths = generated.lengths.reshape(n, -1).astype(np.int32)
        truncated = generated.truncated.reshape(n, -1).astype(bool)
        self.reward_checks.check(rewards)
        self.counters.add(overlong_prompts=generated.overlong_prompts)
        scale = replace(self.classifier.scale)
        success_rates, kinds = self.classifier.classify(rewards, truncated)
        self._rescale(self.classifier.scale.mapping_from(scale))
        predicted = np.full(n, np.nan) if self.selector is None else checked_predictions(self.selector, ids)
        per_rank, rollouts = n // self.processes.world_size, generated.rollouts
        groups = [
            RolloutGroup(
                prompt_id=int(ids[i]),
                step=step,
                round=round_index,
                rewards=rewards[i],
                success_rate=float(success_rates[i]),
                kind=int(kinds[i]),
                lengths=lengths[i],
                truncated=truncated[i],
                seconds=generated.seconds / n,
                owner=i // per_rank,
                predicted=float(predicted[i]),
                graded=self.classifier.graded,
                origin=origin,
                rollouts=rollouts[i % per_rank] if rollouts and i // per_rank == self.processes.rank else None,
            )
            for i in range(n)
        ]
        self._present += groups
        return groups

    def _rescale(self, mapping: tuple[float, float] | None) -> None:
        """Success rates of earlier groups follow when the reward's range has widened."""
        if mapping is None:
            return
        kept = [*self._present, *self.leftover, *(self.buffer.groups if self.buffer is not None else [])]
        for group in kept:
            group.success_rate = mapping[0] * group.success_rate + mapping[1]
            group.predicted = mapping[0] * group.predicted + mapping[1]
        if self.selector is not None:
            self.selector.rescale(*mapping)

    # After a generation batch

    def _update(self, batch: GenerationBatch, step: int) -> None:
        """Keep what may be used again, let the selector learn, count, and write the table."""
        self._present = []
        if self.buffer is None:
            self.leftover = batch.leftover
        else:
            self.leftover = []
            self.buffer.add([*batch.leftover, *batch.generated], self.batches)
        self.batches += 1
        if self.selector is not None and batch.generated:
            self.selector.observe(batch.generated)
        self.counters.add(
            rollouts_generated=sum(group.size for group in batch.generated),
            rollouts_trained=sum(group.size for group in batch.trained),
            rollouts_replayed=sum(group.size for group in batch.trained_stale),
            rollouts_discarded=sum(group.size for group in batch.dropped),
            tokens_generated=sum(group.tokens for group in batch.generated),
        )
        if self.logs is not None:
            self.logs.groups.add(batch.generated, self.classifier.weights)
            self.logs.groups.flush()
        batch.metrics.update(self._metrics(batch, step))
        batch.selector_metrics = checked_metrics(self.selector) if self.selector is not None else {}

    def log(self, logs: Mapping[str, Any], step: int) -> None:
        """Write what the Trainer has logged at optimizer step `step` to `metrics.jsonl`."""
        rollouts, tokens = (self.counters.values[name] for name in ("rollouts_generated", "tokens_generated"))
        if self.logs is not None:
            self.logs.metrics.add(logs, step=step, rollouts=rollouts, tokens=tokens)

    def _metrics(self, batch: GenerationBatch, step: int) -> dict[str, float]:
        """What the batch adds to the logs, by the names in `METRICS`: nothing about what cannot happen in this run."""
        metrics: dict[str, float] = {**self.counters.logged()}
        if batch.generated:
            kinds = np.array([group.kind for group in batch.generated])
            metrics["effective_ratio"] = float((kinds == EFFECTIVE).mean())
            metrics["easy_ratio"] = float((kinds == EASY).mean())
            metrics["hard_ratio"] = float((kinds == HARD).mean())
            rates = np.array([group.success_rate for group in batch.generated])
            if not np.isnan(rates).all():
                metrics["success_rate"] = float(np.nanmean(rates))
        if self.rounds.most > 1:
            metrics["rounds"] = batch.rounds
        if self.buffer is None:
            del metrics["rollouts_replayed"]
        elif batch.trained_stale:
            metrics["replay/age_mean"] = float(np.mean([step - group.step for group in batch.trained_stale]))
        return metrics
