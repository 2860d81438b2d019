"""
`RolloutCollector`: owns a generation batch from proposal to history.

It asks the selector for prompts, has rounds of rollouts generated, classifies the groups, adds replayed ones, and updates
history, selector and buffer. It is equal on every process, because it works on gathered numbers only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch

from trl_dataeff.collector.advantages import AdvantageWeights
from trl_dataeff.collector.rounds import GenerationBatch, RefillRounds, ZeroVarianceShare, fill_batch
from trl_dataeff.collector.sequential import SequentialGroups, complete
from trl_dataeff.replay.buffer import ReplayBuffer
from trl_dataeff.replay.pause import ReplayPause
from trl_dataeff.rollouts.capture import Round
from trl_dataeff.rollouts.classification import GroupClassifier
from trl_dataeff.rollouts.distributed import Processes, assign, broadcast_from_main, redistribute
from trl_dataeff.rollouts.group import EASY, EFFECTIVE, HARD, Origin, RolloutGroup
from trl_dataeff.selection import Selector, UniformSelector
from trl_dataeff.selection.base import (
    check_proposal,
    checked_metrics,
    checked_predictions,
    checked_strengths,
)
from trl_dataeff.tracking.groups import RunLogs
from trl_dataeff.tracking.metrics import Counters
from trl_dataeff.validation import RewardChecks


#: `(prompt ids (n,), completions per prompt) -> what they gave`
RollOut: TypeAlias = Callable[[np.ndarray, int], Round]
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
        refill ([`RefillRounds`], *optional*): drop zero-variance groups and replace them (dynamic sampling).
        sequential ([`SequentialGroups`], *optional*): decides which groups continue after half of their completions.
        buffer ([`ReplayBuffer`], *optional*): source of replayed groups.
        replay_groups (`int`, *optional*, defaults to `0`): replayed groups per generation batch; fewer while `buffer` has
            fewer.
        pause ([`ReplayPause`], *optional*): while it is active, as many groups as there are processes are replayed, to measure when
            the policy slows down.
        over_batch (`bool`, *optional*, defaults to `False`): whether TRL divides advantages by the deviation over the whole
            batch (`scale_rewards="batch"`, `multi_objective_aggregation="normalize_then_sum"`).
        overlaps (`bool`, *optional*, defaults to `False`): whether an optimizer step may end within a generation batch and the
            next one take the rest of it with another.
        replay_weight (`float`, *optional*): factor on the advantages of replayed groups; `None`: see [`AdvantageWeights`].
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
        refill: RefillRounds | None = None,
        sequential: SequentialGroups | None = None,
        buffer: ReplayBuffer | None = None,
        replay_groups: int = 0,
        pause: ReplayPause | None = None,
        over_batch: bool = False,
        overlaps: bool = False,
        replay_weight: float | None = None,
        logs: RunLogs | None = None,
        seed: int = 0,
        processes: Processes = Processes(),  # noqa: B008 (immutable)
    ):
        self.classifier = classifier
        self.group_size, self.batch_groups = group_size, batch_groups
        self.reward_names = list(reward_names)
        self.selector, self.num_prompts, self.dataset_hash = selector, num_prompts, dataset_hash
        self.settings = settings or {}
        self.refill, self.sequential = refill, sequential
        self.buffer, self.replay_groups = buffer, replay_groups
        self.pause = pause
        self.logs = logs
        self.processes = processes
        self.zero_share = ZeroVarianceShare()
        self.advantage_weights = AdvantageWeights(
            classifier, self.zero_share, refill is not None, over_batch, replay_weight, processes.rank
        )
        self.counters = Counters()
        self.leftover: list[RolloutGroup] = []
        self._present: list[RolloutGroup] = []  # groups of the present generation batch so far
        self.overlaps = overlaps
        #: Generation batches that may be in the next one's optimizer step: the step at which each began, and its prompts
        self.recent: list[tuple[int, list[int]]] = []
        # With everything off nothing that TRL accepts is an error
        unchosen = selector is None or isinstance(selector, UniformSelector)
        off = unchosen and refill is None and sequential is None and buffer is None
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
        Collect the generation batch that begins at optimizer step `step`, in as many rounds as it takes. Afterwards every
        process owns an equal share of `trained`, which is in the order of ranks, and each of these groups has G completions.

        Args:
            roll_out (`Callable`): prompt ids `(n,)` and the number of completions of each -> what they gave, with rollouts.
            step (`int`): the present optimizer step.
        """
        assert self.selector is not None  # rounds need prompts that can be chosen
        references = self._roll_out_references(roll_out, step)
        metrics: dict[str, float] = {}
        # If an optimizer step takes several generation batches, none replays what the step has already
        last = self.recent[-1:] if self.overlaps else []
        self.recent = [batch for batch in self.recent if batch[0] == step or batch in last]
        in_step = {prompt_id for _, prompt_ids in self.recent for prompt_id in prompt_ids}
        if self.buffer is not None:
            self.buffer.expire(step)
        replay_groups = self.replay_groups
        if self.pause is not None:
            self.pause.begin_batch()
            metrics["replay/paused"] = float(self.pause.active)
            if self.pause.active:
                replay_groups = min(replay_groups, self.processes.world_size)

        def generate(n: int, round_index: int) -> list[RolloutGroup]:
            groups = self._generate(self.propose(n), roll_out, step, round_index)
            self.zero_share.observe(groups)
            return groups

        batch = fill_batch(
            generate,
            self._round_size,
            batch_groups=self.batch_groups,
            max_rounds=None if self.refill is None else self.refill.most,
            leftover=self.leftover,
            references=references,
            buffer=self.buffer,
            replay_groups=replay_groups,
            exclude=in_step,
            rng=self.replay_rng,
        )
        self.recent.append((step, [group.prompt_id for group in batch.trained]))
        batch.trained = self._spread_evenly(batch.trained)
        batch.metrics.update(metrics)
        self._update(batch, step)
        batch.trained = [group.filled(self.group_size) for group in batch.trained]
        return batch

    def _spread_evenly(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Give each process an equal number of these groups. They are returned in the order of ranks."""
        destinations = assign([group.owner for group in groups], self.processes.world_size)
        redistribute(groups, destinations, self.processes.rank)
        return [groups[i] for i in np.argsort(destinations, kind="stable")]

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
        for group in groups:
            group.disposition = "trained"
        batch = GenerationBatch(trained=groups, generated=groups, rounds=1)
        self._update(batch, step)
        return batch

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
                references.extend(self._classify(part, roll_out(part, self.group_size), step, 0, origin="reference"))
            return references

        self.selector.roll_out_references(generate, self.rng)
        return references

    def _agreed(self, ids: np.ndarray) -> np.ndarray:
        """The main process's ids, unless proposals are equal on all processes to the last bit."""
        exact = self.processes.world_size == 1 or self.selector is None or self.selector.exact
        return ids if exact else broadcast_from_main(ids)

    def _round_size(self, missing: int) -> int:
        if self.refill is None:
            return math.ceil(missing / self.processes.world_size) * self.processes.world_size
        return self.refill.size(
            missing,
            batch_groups=self.batch_groups,
            zero_share=self.zero_share.value,
            multiple=self.processes.world_size,
            num_prompts=self.num_prompts,
        )

    def _generate(self, ids: np.ndarray, roll_out: RollOut, step: int, round_index: int) -> list[RolloutGroup]:
        """The groups of a round, in the order of `ids`: whole, or with `sequential` in two parts, of which some get one."""
        if self.sequential is None or self.selector is None:
            return self._classify(ids, roll_out(ids, self.group_size), step, round_index)
        groups = self._classify(ids, roll_out(ids, self.sequential.first), step, round_index)
        strengths = checked_strengths(self.selector, ids)
        chosen = self._agreed(self.sequential.continuing(groups, strengths, self.processes.world_size))
        if len(chosen):
            continuing = self._spread_evenly([groups[i] for i in chosen])
            ids = np.array([group.prompt_id for group in continuing])
            rest = self._classify(ids, roll_out(ids, self.sequential.rest), step, round_index)
            complete(continuing, rest, self.classifier)
        self.sequential.observe(groups)
        return groups

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
        spreads, graded = self.classifier.spreads(rewards), self.classifier.graded
        self._rescale(self.classifier.scale.mapping_from(scale))
        predicted = np.full(n, np.nan) if self.selector is None else checked_predictions(self.selector, ids)
        explored = np.zeros(n, dtype=bool) if self.selector is None else self.selector.explored(ids)
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
                explored=origin == "reference" or bool(explored[i]),
                spread=float(spreads[i]),
                graded=graded,
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
        if self.sequential is not None:
            self.sequential.rescale(*mapping)
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
            self.buffer.add([*batch.leftover, *batch.generated])
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
        if self.refill is not None:
            metrics["rounds"] = batch.rounds
        if batch.generated and self.sequential is not None:
            metrics["stopped_ratio"] = float(np.mean([g.size < self.group_size for g in batch.generated]))
        if self.buffer is None:
            del metrics["rollouts_replayed"]
        elif batch.trained_stale:
            metrics["replay/age_mean"] = float(np.mean([step - group.step for group in batch.trained_stale]))
        return metrics
