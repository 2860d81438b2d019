"""
`RolloutCollector` asks the selector for prompts, has rounds of rollouts generated, classifies the groups, adds
replayed ones, and updates selector, buffer and logs.

It decides the same on every process, because it works on gathered numbers only. Two things differ between processes:
each holds the rollouts of its own groups alone, and the state of a selector whose proposals round may differ in the
last bits (the main process's proposals count).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from transformers.utils import logging

from trl_dataeff.checkpoint.state import CheckpointError
from trl_dataeff.collector.batch import Assignment, GenerationBatch, fill_batch, groups_missing
from trl_dataeff.collector.rounds import RoundSizes, ZeroVarianceShare
from trl_dataeff.difficulty.predictor import Embeddings
from trl_dataeff.generation.recorder import GeneratedRound
from trl_dataeff.replay.advantages import deviation_over_batch, renormalize
from trl_dataeff.replay.buffer import ReplayBuffer
from trl_dataeff.replay.logprobs import GroupInBatch, groups_in_batch
from trl_dataeff.rollouts.checks import RewardChecks
from trl_dataeff.rollouts.classification import GroupClassifier
from trl_dataeff.rollouts.distributed import Processes, assign, pack_distributed, redistribute, unpack_distributed
from trl_dataeff.rollouts.group import Origin, RolloutGroup, Rollouts
from trl_dataeff.selection.base import CheckedSelector, SelectorContext
from trl_dataeff.tracking.metrics import group_metrics
from trl_dataeff.tracking.observer import SeenBatch


logger = logging.get_logger(__name__)
#: Generates and scores G completions of prompts `(n,)`
GenerateGroups: TypeAlias = Callable[[np.ndarray], GeneratedRound]


@dataclass
class _BatchSoFar:
    """What was generated for a batch so far: groups, reference ones first, and what is logged of each of them."""

    groups: list[RolloutGroup] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    rounds: int = 0  # reference rollouts not counted

    @property
    def references(self) -> list[RolloutGroup]:
        return [group for group in self.groups if group.is_reference]

    @property
    def fresh(self) -> list[RolloutGroup]:
        return [group for group in self.groups if not group.is_reference]


class RolloutCollector:
    """
    Makes the generation batches of a trainer. A run begins with [`bind`].

    Args:
        classifier ([`GroupClassifier`]): classifies groups by their rewards.
        group_size (`int`): G, completions per group.
        batch_groups (`int`): B, groups trained on per generation batch, of all processes.
        reward_names (`Sequence[str]`): the reward functions.
        selector ([`CheckedSelector`]): proposes prompts.
        round_sizes ([`RoundSizes`], *optional*): rounds of rollouts per generation batch; by default a single one.
        buffer ([`ReplayBuffer`], *optional*): stored groups; without it nothing is replayed.
        reserved (`int`, *optional*, defaults to `0`): places that stored groups get, while zero-variance groups keep
            theirs (`replay="share"`); 0: stored groups take the places of zero-variance groups. A stored group whose
            prompt is generated now is not replayed; if too few are left for the reserved places, there is a further
            round, even where a single one is configured.
        generates_before_trl (`bool`, *optional*, defaults to `True`): whether groups are generated before TRL's pass
            over them. If not, a batch is trained on as its single round gave it.
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
        selector: CheckedSelector,
        round_sizes: RoundSizes = RoundSizes(),  # noqa: B008 (immutable)
        buffer: ReplayBuffer | None = None,
        reserved: int = 0,
        generates_before_trl: bool = True,
        seed: int = 0,
        processes: Processes = Processes(),  # noqa: B008 (immutable)
    ):
        self.classifier = classifier
        self.group_size = group_size
        self.batch_groups = batch_groups
        self.reward_names = reward_names
        self.selector = selector
        self.round_sizes = round_sizes
        self.buffer = buffer
        self.reserved = reserved
        self.normalizes_over_batch = False  # whether TRL divides advantages by the deviation over the batch
        self.generates_before_trl = generates_before_trl
        self.balances = True  # whether each process gets as many effective groups, see `read_options`
        self.seed = seed
        self.processes = processes
        self._reset()

    def _reset(self) -> None:
        """The state of a run that begins."""
        self.num_prompts = 0
        self.dataset_hash = ""
        if self.buffer is not None:
            self.buffer.clear()
        self.zero_share = ZeroVarianceShare()
        self.batches = 0  # generation batches so far
        self._reward_checks: RewardChecks | None = None
        self.leftover: list[RolloutGroup] = []  # effective groups of earlier batches, for the next one
        self._reward_funcs: list[Any] | None = None  # of the last batch; `None` before the first one
        self._optimizer_step = -1  # the present one
        self._prompts_in_step: set[int] = set()  # of the generation batches of that step so far
        # TRL seeds the sampler of `GRPOTrainer` in the same way
        self.rng = torch.Generator().manual_seed(self.seed)
        # Another generator: other processes may use `rng` differently, and replay must agree on all of them
        self.replay_rng = torch.Generator().manual_seed(self.seed)

    def bind(
        self,
        num_prompts: int = 0,
        *,
        embed: Callable[[], Embeddings] | None = None,
        known_rates: np.ndarray | None = None,
        kinds: np.ndarray | None = None,
        dataset_hash: str = "",
        number_prompts: Callable[[], np.ndarray] | None = None,
        resumed: bool = False,
        reward_checks: RewardChecks | None = None,
    ) -> None:
        """
        Begin a run, which discards the state of an earlier one.

        Args:
            num_prompts, embed, known_rates, kinds, dataset_hash, number_prompts, resumed: see [`SelectorContext`].
            reward_checks ([`RewardChecks`], *optional*): find rewards that are most likely a mistake.
        """
        self._reset()
        self._reward_checks = reward_checks
        self.num_prompts = num_prompts
        self.dataset_hash = dataset_hash
        context = SelectorContext(
            num_prompts=num_prompts,
            batch_groups=self.batch_groups,
            group_size=self.group_size,
            seed=self.seed,
            embed=embed,
            scale=self.classifier.scale,
            known_rates=known_rates,
            kinds=kinds,
            dataset_hash=dataset_hash,
            number_prompts=number_prompts,
            resumed=resumed,
        )
        self.selector.bind(context)

    def read_options(
        self,
        functions: Sequence[Any],
        *,
        weights: np.ndarray,
        scale_rewards: str,
        aggregation: str,
        masks_truncated: bool,
        can_exchange_rows: bool,
    ) -> None:
        """
        Take over what decides rewards and advantages in TRL's next pass. Rollouts of other reward functions are
        dropped. Weights may change: totals are formed from the rewards of each function when a group is trained on.

        Args:
            functions (`Sequence`): the reward functions. Another object is another reward, but for a method, of which
                the object counts that it belongs to.
            weights (`np.ndarray` of shape `(F,)`): their weights.
            scale_rewards (`str`): TRL's option of that name.
            aggregation (`str`): TRL's `multi_objective_aggregation`.
            masks_truncated (`bool`): TRL's `mask_truncated_completions`.
            can_exchange_rows (`bool`): whether the gradient does not depend on which rows share a micro-batch. If it
                does, no group moves to another process for the sake of balance.
        """
        known = self._reward_funcs
        self._reward_funcs = list(functions)
        if known is not None and not _are_same(known, functions) and self.holds_rollouts:
            self.drop_rollouts()
            if self.processes.is_main:
                logger.warning_once(
                    "Stored rollouts were dropped, because the reward functions have changed. If they change with "
                    "every batch, nothing is replayed."
                )
        self.classifier.read_options(weights, aggregation, masks_truncated)
        self.balances = can_exchange_rows
        self.normalizes_over_batch = scale_rewards == "batch" or aggregation == "normalize_then_sum"

    @property
    def holds_rollouts(self) -> bool:
        """Whether there are groups of earlier batches, which later ones may train on."""
        return bool(self.leftover) or (self.buffer is not None and len(self.buffer) > 0)

    def drop_rollouts(self) -> None:
        """Drop the groups of earlier batches."""
        self.leftover = []
        if self.buffer is not None:
            self.buffer.clear()

    # A generation batch

    def collect(self, generate_groups: GenerateGroups, step: int) -> GenerationBatch:
        """
        Collect a generation batch.

        Leftover groups take places first. Rounds of rollouts are generated for the others; effective groups take
        places, and those beyond them are left over. Stored groups take the places that are empty then, or those that
        are reserved for them, but not of prompts that are in the batch or in an earlier one of the optimizer step.
        Zero-variance groups get what is left.

        Args:
            generate_groups (`Callable`): generates and scores G completions of prompts `(n,)`.
            step (`int`): the optimizer step at which the batch begins.

        Returns:
            [`GenerationBatch`]: every process owns an equal share of `trained`.
        """
        self._begin_batch(step)
        so_far = _BatchSoFar()
        self._generate_references(so_far, generate_groups)
        self._generate_rounds(so_far, generate_groups)
        assignment = fill_batch(
            self.leftover,
            self._candidates(so_far),
            self._num_replayable(so_far),
            places=self.batch_groups,
            reserved=self.reserved,
        )
        replayed = self._replay(assignment.num_replayed, so_far)
        # `groups_missing` ends the rounds by the same rules by which `fill_batch` fills the places
        assert len(assignment.trained) + len(replayed) == self.batch_groups, "the batch is not full"
        batch = self._make_batch(so_far, assignment, replayed)
        self._update(batch)
        return replace(
            batch,
            selector_metrics=self.selector.metrics(),
            trl_metrics=self._trl_metrics(batch),
        )

    def _begin_batch(self, step: int) -> None:
        if step != self._optimizer_step:
            self._optimizer_step = step
            self._prompts_in_step = set()
        if self.buffer is not None:
            self.buffer.expire(self.batches)

    def _generate_references(self, so_far: _BatchSoFar, generate_groups: GenerateGroups) -> None:
        """
        Generate groups that the selector learns from before it proposes, at most a batch per call of the generator.
        """
        ids = self.selector.references(self.rng)
        for start in range(0, len(ids), self.batch_groups):
            part = ids[start : start + self.batch_groups]
            self._generate_round(so_far, part, generate_groups, is_reference=True)
        if so_far.groups:
            self.selector.observe(so_far.groups)

    def _generate_rounds(self, so_far: _BatchSoFar, generate_groups: GenerateGroups) -> None:
        """Generate rounds of rollouts until the batch can be filled."""
        while True:
            missing = groups_missing(
                self.leftover,
                self._candidates(so_far),
                self._num_replayable(so_far),
                places=self.batch_groups,
                reserved=self.reserved,
                rounds=so_far.rounds,
                max_rounds=self.round_sizes.most,
            )
            if missing == 0:
                return
            groups = self._generate_round(so_far, self._propose(missing, so_far), generate_groups)
            self.zero_share.observe(groups)
            so_far.rounds += 1

    def _generate_round(
        self, so_far: _BatchSoFar, ids: np.ndarray, generate_groups: GenerateGroups, *, is_reference: bool = False
    ) -> list[RolloutGroup]:
        """Have completions of prompts `(n,)` generated, enter their groups into the batch, and return these groups."""
        n = len(ids)
        generated = generate_groups(ids)
        rewards = generated.rewards.reshape(n, -1, len(self.reward_names)).astype(np.float32)
        if self._reward_checks is not None:
            self._reward_checks.check(rewards, self.classifier.weights)
        owners = self.processes.owners_of(n)
        groups = self.classifier.groups(
            ids,
            rewards,
            generated.lengths.reshape(n, -1).astype(np.int32),
            generated.truncated.reshape(n, -1).astype(bool),
            step=self._optimizer_step,
            round=so_far.rounds,
            is_reference=is_reference,
            owners=owners,
            rollouts=self._by_group(generated.rollouts, owners),
        )
        so_far.groups += groups
        so_far.predicted += self.selector.predict(ids).tolist()
        so_far.seconds += [generated.seconds / n] * n
        return groups

    def _by_group(self, own_rollouts: Sequence[Rollouts], owners: Sequence[int]) -> list[Rollouts | None]:
        """The rollouts of this process at the places of its groups among all groups of a round; `None` elsewhere."""
        by_group: list[Rollouts | None] = [None] * len(owners)
        if not own_rollouts:  # they are not kept within TRL's pass
            return by_group
        own = [i for i, owner in enumerate(owners) if owner == self.processes.rank]
        for i, rollouts in zip(own, own_rollouts, strict=True):
            by_group[i] = rollouts
        return by_group

    def _propose(self, missing: int, so_far: _BatchSoFar) -> np.ndarray:
        """
        Prompts of a round for so many places, in the order of ranks: each process generates for an equal, contiguous
        part. A batch has two groups of a prompt only if too few other prompts are there.
        """
        n = self.round_sizes.size(
            missing,
            batch_groups=self.batch_groups,
            zero_share=self.zero_share.value,
            world_size=self.processes.world_size,
            num_prompts=self.num_prompts,
        )
        in_batch = {group.prompt_id for group in [*self.leftover, *self._candidates(so_far)]}
        return self.selector.propose(n, self.rng, in_batch)

    def _candidates(self, so_far: _BatchSoFar) -> list[RolloutGroup]:
        """
        Groups generated for this batch that may take places. With a buffer, reference groups go there; without,
        effective ones take up to half of the batch, and the rest is selected. A prompt with a leftover group has its
        place by that.
        """
        if self.buffer is not None:
            return so_far.fresh
        left_over = {group.prompt_id for group in self.leftover}
        references = [group for group in so_far.references if group.effective and group.prompt_id not in left_over]
        return [*references[: self.batch_groups // 2], *so_far.fresh]

    def _prompts_not_replayed(self, so_far: _BatchSoFar) -> set[int]:
        """
        Prompts whose stored groups are not replayed: those of the batch, and of earlier ones of the optimizer step.
        """
        groups = [*self.leftover, *so_far.groups]
        return self._prompts_in_step.union(group.prompt_id for group in groups)

    def _num_replayable(self, so_far: _BatchSoFar) -> int:
        """Stored groups that could be replayed."""
        if self.buffer is None:
            return 0
        return self.buffer.available(self._prompts_not_replayed(so_far))

    def _replay(self, n: int, so_far: _BatchSoFar) -> list[RolloutGroup]:
        if self.buffer is None:
            return []
        return self.buffer.sample(n, self.replay_rng, self._prompts_not_replayed(so_far))

    def _make_batch(
        self, so_far: _BatchSoFar, assignment: Assignment, replayed: Sequence[RolloutGroup]
    ) -> GenerationBatch:
        """The batch, with an equal share of its groups on every process."""
        kept = self._kept_for_later(so_far, assignment)
        trained, moved = self._spread_over_processes([*assignment.trained, *replayed])
        origins = self._origins(so_far, replayed)
        return GenerationBatch(
            generated=[moved.get(group, group) for group in so_far.groups],
            predicted=so_far.predicted,
            seconds=so_far.seconds,
            rounds=so_far.rounds,
            trained=trained,
            leftover=kept,
            origins={moved.get(group, group): origin for group, origin in origins.items()},
        )

    def _kept_for_later(self, so_far: _BatchSoFar, assignment: Assignment) -> list[RolloutGroup]:
        """The effective groups that this batch leaves for later ones."""
        may_keep = self.buffer is not None or self.round_sizes.most > 1
        kept = []
        if may_keep:
            kept += assignment.overflow
        if self.buffer is not None:
            kept += [group for group in so_far.references if group.effective]
        return kept

    def _spread_over_processes(
        self, trained: list[RolloutGroup]
    ) -> tuple[list[RolloutGroup], dict[RolloutGroup, RolloutGroup]]:
        """
        Give every process an equal share of the groups to train on. A collective if some move.

        Args:
            trained (`list[RolloutGroup]`): the groups to train on.

        Returns:
            `tuple`: the groups to train on, in the order of ranks; and, by each group as it was before, the group as
            it is now, since a group that moves becomes a new object.
        """
        if not self.generates_before_trl:
            return trained, {}
        owners = [group.owner for group in trained]
        effective = [group.effective and self.balances for group in trained]
        destinations = assign(owners, self.processes.world_size, effective)
        trained_now = redistribute(trained, destinations, self.processes.rank)
        moved = dict(zip(trained, trained_now, strict=True))
        if self.buffer is not None:
            self.buffer.replace(moved)
        in_order_of_ranks = np.argsort(destinations, kind="stable")
        return [trained_now[i] for i in in_order_of_ranks], moved

    def _origins(self, so_far: _BatchSoFar, replayed: Sequence[RolloutGroup]) -> dict[RolloutGroup, Origin]:
        """Where each group of the batch comes from: a group is generated now, or left over earlier, or replayed."""
        origins: dict[RolloutGroup, Origin] = {}
        for group in so_far.groups:
            origins[group] = "reference" if group.is_reference else "fresh"
        origins.update(dict.fromkeys(self.leftover, "leftover"))
        origins.update(dict.fromkeys(replayed, "replayed"))
        return origins

    # After a generation batch

    def _update(self, batch: GenerationBatch) -> None:
        """Keep what may be used again, count, and let the selector learn."""
        if self.buffer is None:
            self.leftover = batch.leftover
        else:
            # A run that resumes with replay may have leftover groups of before. They are older than what was generated
            generated = set(batch.generated)
            leftover_before = [group for group in batch.leftover if group not in generated]
            self.buffer.add([*leftover_before, *batch.generated], self.batches)
            self.leftover = []
        self.batches += 1
        self._prompts_in_step.update(group.prompt_id for group in [*batch.generated, *batch.trained])
        self.selector.observe([group for group in batch.generated if not group.is_reference])

    def seen(self, batch: GenerationBatch) -> SeenBatch:
        """A batch as the logs show it."""
        dispositions = batch.dispositions
        return SeenBatch(
            generated=batch.generated,
            trained=batch.trained,
            predicted=batch.predicted,
            seconds=batch.seconds,
            origins=[batch.origins[group] for group in batch.generated],
            dispositions=[dispositions[group] for group in batch.generated],
            stale=batch.trained_stale,
            dropped=batch.dropped,
            rounds=batch.rounds if self.round_sizes.most > 1 else None,
        )

    def _trl_metrics(self, batch: GenerationBatch) -> dict[str, list[float]]:
        """TRL's metrics of rewards and lengths of all generated groups; empty if TRL has logged them of these."""
        if not batch.generated or batch.trains_on_all_generated:
            return {}
        metrics = group_metrics(batch.generated, self.reward_names, self.classifier.weights)
        if self.normalizes_over_batch:
            # TRL divides advantages by the deviation over the batch, and logs whether that is 0
            deviation = deviation_over_batch(batch.generated, self.classifier)
            metrics["frac_reward_zero_std"] = [float(np.isclose(deviation, 0))]
        return metrics

    def own(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Those of `groups` whose rollouts this process holds."""
        return [group for group in groups if group.owner == self.processes.rank]

    def groups_of_this_process(self, batch: GenerationBatch) -> list[GroupInBatch]:
        """The groups that this process trains on, and their rows of its batch."""
        return groups_in_batch(self.own(batch.trained), batch.origins)

    def normalized_over_generated(self, advantages: torch.Tensor, batch: GenerationBatch) -> torch.Tensor:
        """
        TRL's advantages of this process's rows. Where TRL normalises over the batch, those of fresh groups are
        normalised over all groups generated now, see [`renormalize`].

        Args:
            advantages (`torch.Tensor` of shape `(rows,)`): TRL's.
            batch ([`GenerationBatch`]): the batch that they belong to.

        Returns:
            `torch.Tensor` of shape `(rows,)`.
        """
        if not self.normalizes_over_batch or batch.trains_on_all_generated:
            return advantages
        return renormalize(
            advantages,
            self.groups_of_this_process(batch),
            generated=batch.generated,
            trained=batch.trained,
            classifier=self.classifier,
        )

    # State

    def state_dict(self) -> dict[str, Any]:
        """What decides the next generation batches, by part: JSON values and NumPy arrays. A collective."""
        state: dict[str, Any] = {
            "batches": self.batches,
            "zero_variance_share": self.zero_share.state_dict(),
            "leftover_groups": pack_distributed(self.leftover, self.processes.rank, self.processes.world_size),
            "replay_rng": self.replay_rng.get_state().numpy(),
            "selection_rng": self.rng.get_state().numpy(),
        }
        if self.buffer is not None:
            state["replay_buffer"] = self.buffer.state_dict()
        state["selector"] = self.selector.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        The inverse of [`state_dict`], after [`bind`]. Replay may have been switched on or off.

        Raises:
            `CheckpointError`: the selector's state does not fit its arguments.
        """
        self.batches = state["batches"]
        self.zero_share.load_state_dict(state["zero_variance_share"])
        if self.generates_before_trl:  # leftover groups have no place within TRL's pass
            packed = state["leftover_groups"]
            self.leftover = unpack_distributed(packed, self.processes.rank, self.processes.world_size)
        self.replay_rng.set_state(torch.from_numpy(state["replay_rng"]))
        self.rng.set_state(torch.from_numpy(state["selection_rng"]))
        if self.buffer is not None and "replay_buffer" in state:
            self.buffer.load_state_dict(state["replay_buffer"])
        self._load_selector(self.selector, state["selector"])

    def _load_selector(self, selector: CheckedSelector, state: dict[str, Any]) -> None:
        try:
            selector.load_state_dict(state)
        except (LookupError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"The checkpoint's state does not fit the {selector.name} of this run. Resume with the arguments and "
                "the version of this package that the run began with, or start a new run with this checkpoint's "
                "weights as the model."
            ) from error

    def about(self) -> dict[str, Any]:
        """What a checkpoint says of its run, to be compared with the run that resumes from it. JSON values."""
        return {
            "dataset": {"size": self.num_prompts, "hash": self.dataset_hash},
            "holds_rollouts": self.holds_rollouts,
        }

    def own_state(self) -> set[str]:
        """Parts of the state that may differ between processes: those of a selector whose proposals round."""
        if self.selector.exact:
            return set()
        return {"selector", "selection_rng"}


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two sequences hold the same functions."""
    return len(some) == len(others) and all(_is_same(one, other) for one, other in zip(some, others, strict=True))


def _is_same(one: Any, other: Any) -> bool:
    """Whether two functions are one object, or a method of one object, which Python makes anew at each access."""
    if inspect.ismethod(one):
        return one == other
    return one is other
