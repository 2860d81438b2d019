"""
`RolloutCollector` asks the selector for prompts, has rounds of rollouts generated, classifies the groups, adds replayed ones, and
updates selector, buffer and logs. It is equal on every process, because it works on gathered numbers only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from trl_dataeff.checkpoint.state import CheckpointError
from trl_dataeff.collector.rounds import GenerationBatch, RoundSizes, ZeroVarianceShare, batch_metrics, renormalize
from trl_dataeff.difficulty.predictor import Embeddings
from trl_dataeff.replay.buffer import ReplayBuffer
from trl_dataeff.rollouts.capture import GeneratedRound
from trl_dataeff.rollouts.classification import GroupClassifier, RewardChecks
from trl_dataeff.rollouts.distributed import Processes, assign, pack_distributed, redistribute, unpack_distributed
from trl_dataeff.rollouts.group import Origin, RolloutGroup
from trl_dataeff.selection import UniformSelector
from trl_dataeff.selection.base import CheckedSelector, SelectorContext
from trl_dataeff.tracking.groups import RunLogs
from trl_dataeff.tracking.metrics import METRICS
from trl_dataeff.utils import __version__


RollOut: TypeAlias = Callable[[np.ndarray], GeneratedRound]  # prompt ids (n,) -> what G completions of each gave
MOST_UNSCORED = 512  # completions without any score, after which training without one is an error


@dataclass(eq=False, repr=False, kw_only=True)
class RolloutCollector:
    """
    Made with the trainer; a run begins with [`bind`].

    Args:
        classifier ([`GroupClassifier`]): classifies groups by their rewards.
        group_size (`int`): G, completions per group.
        batch_groups (`int`): B, groups trained on per generation batch, of all processes.
        reward_names (`list[str]`): the reward functions.
        selector ([`CheckedSelector`], *optional*): proposes prompts; `None` where they come from TRL's dataloader (streaming).
        settings (`dict`, *optional*): settings on which the content of a checkpoint depends, by name; JSON values.
        round_sizes ([`RoundSizes`], *optional*): rounds of rollouts per generation batch; by default a single one.
        buffer ([`ReplayBuffer`], *optional*): stored groups; without it nothing is replayed.
        reserved (`int`, *optional*, defaults to `0`): places that stored groups get, while zero-variance groups keep theirs
            (`replay="share"`); 0: stored groups take the places of zero-variance groups.
        over_batch (`bool`, *optional*, defaults to `False`): whether TRL divides advantages by the deviation over the batch.
        generates_apart (`bool`, *optional*, defaults to `True`): whether groups are generated before TRL's pass over them. If
            not, a batch is trained on as its single round gave it.
        logs ([`RunLogs`], *optional*): files that the run writes; on the main process alone.
        seed (`int`, *optional*, defaults to `0`): of proposals and of replay.
        processes ([`Processes`], *optional*): of the run; by default a single one.
    """

    classifier: GroupClassifier
    group_size: int
    batch_groups: int
    reward_names: Sequence[str]
    selector: CheckedSelector | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    round_sizes: RoundSizes = RoundSizes()  # noqa: RUF009 (immutable)
    buffer: ReplayBuffer | None = None
    reserved: int = 0
    over_batch: bool = False
    generates_apart: bool = True
    logs: RunLogs | None = None
    seed: int = 0
    processes: Processes = Processes()  # noqa: RUF009 (immutable)

    def __post_init__(self) -> None:
        # With everything off, whatever TRL accepts is accepted
        unchosen = self.selector is None or isinstance(self.selector.selector, UniformSelector)
        self._off = unchosen and self.round_sizes.most == 1 and self.buffer is None
        self._reset()

    def _reset(self) -> None:
        """The state of a run that begins."""
        self.num_prompts, self.dataset_hash = 0, ""
        self.classifier.scale.reset()
        if self.buffer is not None:
            self.buffer.clear()
        self.zero_share = ZeroVarianceShare()
        self.counters = Counter({name: 0 for name, metric in METRICS.items() if metric.is_cumulative})
        self.batches = 0  # generation batches so far
        self._step, self._in_step = -1, set[int]()  # the present optimizer step, and prompts of its earlier batches
        self.leftover: list[RolloutGroup] = []
        most_unscored = None if self._off else MOST_UNSCORED
        self.reward_checks = RewardChecks(
            self.reward_names, most_unscored=most_unscored, is_main_process=self.processes.is_main
        )
        # TRL seeds the sampler of `GRPOTrainer` in the same way
        self.rng = torch.Generator().manual_seed(self.seed)
        # Another generator: other processes may use `rng` differently, and replay must agree on all of them
        self.replay_rng = torch.Generator().manual_seed(self.seed)

    def bind(
        self,
        num_prompts: int = 0,
        *,
        embed: Callable[[], Embeddings] | None = None,
        dataset_hash: str = "",
        resumed: bool = False,
    ) -> None:
        """Begin a run, which discards the state of an earlier one. The arguments are those of [`SelectorContext`]."""
        self._reset()
        self.num_prompts, self.dataset_hash = num_prompts, dataset_hash
        if self.selector is not None:
            size, scale = (num_prompts, self.batch_groups, self.group_size), self.classifier.scale
            self.selector.bind(SelectorContext(*size, self.seed, embed, scale, dataset_hash, resumed))

    # A generation batch

    def collect(self, roll_out: RollOut, step: int) -> GenerationBatch:
        """
        Collect the generation batch that begins at optimizer step `step`. `roll_out` generates and scores G completions of prompts.

        Leftover groups take places first. Rounds of rollouts are generated for the others; effective groups take places, and
        those beyond them are left over. Stored groups take the places that are empty then, or those that are reserved for them,
        but not of prompts that are in the batch or in an earlier one of the optimizer step.
        Zero-variance groups get what is left. Afterwards every process owns an equal share of `trained`, which is in the order
        of ranks.
        """
        batch, places, buffer = GenerationBatch(), self.batch_groups, self.buffer
        self._step, self._in_step = step, self._in_step if step == self._step else set()
        if buffer is not None:
            buffer.expire(self.batches)

        references = self._roll_out_references(batch, roll_out, step)
        for_later = [group for group in references if group.effective]
        effective, zero_variance = list(self.leftover), list[RolloutGroup]()
        if buffer is None:  # references take up to half of the batch: the rest is selected
            effective, for_later = [*effective, *for_later[: places // 2]], []

        while True:
            present = self._in_step.union(group.prompt_id for group in [*self.leftover, *batch.generated])
            stored = 0 if buffer is None else buffer.available(present)
            wanted = places - min(self.reserved, stored)
            complete = len(effective) + len(zero_variance) + stored >= places
            if len(effective) >= wanted or (batch.rounds >= self.round_sizes.most and complete):
                break
            # A single round keeps its zero-variance groups; only several rounds replace them
            missing = wanted - len(effective) - (len(zero_variance) if self.round_sizes.most == 1 else 0)
            groups = self._roll_out(batch, self._propose(missing), roll_out, step)
            self.zero_share.observe(groups)
            batch.rounds += 1
            effective += [group for group in groups if group.effective]
            zero_variance += [group for group in groups if not group.effective]

        # Without replay, and with a single round, the loss may be one that could not correct leftover groups
        may_keep = buffer is not None or self.round_sizes.most > 1
        taken, batch.leftover = effective[:wanted], [*effective[wanted:], *for_later] if may_keep else []
        if self.reserved:
            taken += zero_variance[: wanted - len(taken)]
        replayed = [] if buffer is None else buffer.sample(places - len(taken), self.replay_rng, present)
        if not self.reserved:
            taken += zero_variance[: places - len(taken) - len(replayed)]
        batch.assign(taken, replayed, self.leftover)
        if self.generates_apart:
            batch.trained = self._spread_evenly(batch.trained)
        self._update(batch, step)
        return batch

    def renormalize(self, advantages: torch.Tensor, batch: GenerationBatch) -> torch.Tensor:
        """TRL's advantages `(rows,)`; of groups generated now, over all of these where TRL normalises over the batch."""
        if not self.over_batch or batch.generated == batch.trained:
            return advantages
        return renormalize(advantages, self.own(batch.trained), batch, self.classifier)

    def own(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Those of `groups` whose rollouts this process holds."""
        return [group for group in groups if group.owner == self.processes.rank]

    def _propose(self, missing: int) -> np.ndarray:
        """Prompts of a round for so many places, in the order of ranks: each process generates for an equal, contiguous part."""
        if self.selector is None:
            return np.full(missing, -1, dtype=np.int64)
        zero_share, multiple = self.zero_share.value, self.processes.world_size
        sizes = {"batch_groups": self.batch_groups, "multiple": multiple, "num_prompts": self.num_prompts}
        n = self.round_sizes.size(missing, zero_share=zero_share, **sizes)
        return self.selector.propose(n, self.rng)

    def _roll_out_references(self, batch: GenerationBatch, roll_out: RollOut, step: int) -> list[RolloutGroup]:
        """Groups that the selector learns from before it proposes, at most a batch per call of the generator."""
        ids = np.empty(0, dtype=np.int64) if self.selector is None else self.selector.references(self.rng)
        groups: list[RolloutGroup] = []
        for start in range(0, len(ids), self.batch_groups):
            groups += self._roll_out(batch, ids[start : start + self.batch_groups], roll_out, step, "reference")
        if groups and self.selector is not None:
            self.selector.observe(groups)
        return groups

    def _roll_out(
        self, batch: GenerationBatch, ids: np.ndarray, roll_out: RollOut, step: int, origin: Origin = "fresh"
    ) -> list[RolloutGroup]:
        """Have completions of these prompts generated, and enter their groups into the batch."""
        generated, n = roll_out(ids), len(ids)
        rewards = generated.rewards.reshape(n, -1, len(self.reward_names)).astype(np.float32)
        lengths = generated.lengths.reshape(n, -1).astype(np.int32)
        truncated = generated.truncated.reshape(n, -1).astype(bool)
        self.reward_checks.check(rewards)
        shared = {"step": step, "round": batch.rounds, "origin": origin}
        groups = self.classifier.groups(ids, rewards, lengths, truncated, **shared)
        for i, group in enumerate(groups):
            group.owner = i * self.processes.world_size // n
        own = self.own(groups) if generated.rollouts else []  # which are not kept within TRL's pass
        for group, rollouts in zip(own, generated.rollouts, strict=True):
            group.rollouts = rollouts
        batch.generated += groups
        batch.predicted += [np.nan] * n if self.selector is None else self.selector.predict(ids).tolist()
        batch.seconds += [generated.seconds / n] * n
        return groups

    def _spread_evenly(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """Give each process as many of these groups, and about as many effective ones. Returns them in the order of ranks."""
        owners, effective = [group.owner for group in groups], [group.effective for group in groups]
        destinations = assign(owners, self.processes.world_size, effective)
        redistribute(groups, destinations, self.processes.rank)
        return [groups[i] for i in np.argsort(destinations, kind="stable")]

    # After a generation batch

    def _update(self, batch: GenerationBatch, step: int) -> None:
        """Keep what may be used again, let the selector learn, count, and write the table."""
        self.leftover = batch.leftover if self.buffer is None else []
        if self.buffer is not None:  # also those that were left over before replay was switched on
            self.buffer.add([*batch.leftover, *batch.generated], self.batches)
        self.batches += 1
        self._in_step.update(group.prompt_id for group in [*batch.generated, *batch.trained])
        self.counters.update(
            rollouts_generated=sum(group.size for group in batch.generated),
            rollouts_trained=sum(group.size for group in batch.trained),
            rollouts_replayed=sum(group.size for group in batch.trained_stale),
            rollouts_discarded=sum(group.size for group in batch.dropped),
            tokens_generated=sum(group.tokens for group in batch.generated),
        )
        success_rates = self.classifier.scale.success_rates(batch.generated)
        if self.logs is not None:
            self.logs.groups.add(batch.generated, success_rates, batch.predicted, batch.seconds)
            self.logs.groups.flush()
        if self.selector is not None:
            self.selector.observe([group for group in batch.generated if group.origin != "reference"])
            batch.selector_metrics = self.selector.metrics()
        batch.metrics.update(self._metrics(batch, success_rates, step))
        if batch.generated and batch.generated != batch.trained:
            batch.trl_metrics = batch_metrics(batch.generated, self.reward_names, self.classifier, self.over_batch)

    def _metrics(self, batch: GenerationBatch, success_rates: np.ndarray, step: int) -> dict[str, float]:
        """What the batch adds to the logs, by the names in `METRICS`: nothing about what cannot happen in this run."""
        metrics: dict[str, float] = {**self.counters}
        if batch.generated:
            # By code, in the order of `KINDS`
            shares = np.bincount([group.kind for group in batch.generated], minlength=3) / len(batch.generated)
            metrics.update(zip(("effective_ratio", "easy_ratio", "hard_ratio"), shares.tolist(), strict=True))
            if not np.isnan(success_rates).all():
                metrics["success_rate"] = float(np.nanmean(success_rates))
        if self.round_sizes.most > 1:
            metrics["rounds"] = batch.rounds
        if self.buffer is None:
            del metrics["rollouts_replayed"]
        elif batch.trained_stale:
            metrics["replay/age_mean"] = float(np.mean([step - group.step for group in batch.trained_stale]))
        return metrics

    def log(self, logs: Mapping[str, Any], step: int) -> None:
        """Write what the Trainer has logged at optimizer step `step` to `metrics.jsonl`."""
        rollouts, tokens = (self.counters[name] for name in ("rollouts_generated", "tokens_generated"))
        if self.logs is not None:
            self.logs.metrics.add(logs, step=step, rollouts=rollouts, tokens=tokens)

    def begin_logs(self, step: int, model: str) -> None:
        """Begin or continue the files of a run at optimizer step `step`; `model` is the model's name or path."""
        if self.logs is not None:
            name = None if self.selector is None else self.selector.name
            about = {"trl_dataeff": __version__, "model": model, "selector": name, "prompts": self.num_prompts}
            self.logs.begin(step, self.dataset_hash, self.classifier.scale, about)

    def flush_logs(self) -> None:
        """Write rows of the table of groups that wait in memory."""
        if self.logs is not None:
            self.logs.groups.flush(force=True)

    # State

    def state_dict(self) -> dict[str, Any]:
        """What decides the next generation batches, by part: JSON values and NumPy arrays. A collective."""
        state: dict[str, Any] = {
            "batches": self.batches,
            "counters": dict(self.counters),
            "reward_scale": self.classifier.scale.state_dict(),
            "reward_checks": self.reward_checks.state_dict(),
            "zero_variance_share": self.zero_share.state_dict(),
            "leftover_groups": pack_distributed(self.leftover, self.processes.rank, self.processes.world_size),
            "replay_rng": self.replay_rng.get_state().numpy(),
            "selection_rng": self.rng.get_state().numpy(),
        }
        if self.buffer is not None:
            state["replay_buffer"] = self.buffer.state_dict()
        if self.selector is not None:
            state["selector"] = self.selector.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        The inverse of [`state_dict`], after [`bind`]. Replay may have been switched on or off. Raises a `CheckpointError` if the
        selector's state does not fit its arguments.
        """
        self.batches = state["batches"]
        self.counters = Counter(state["counters"])
        self.classifier.scale.load_state_dict(state["reward_scale"])
        self.reward_checks.load_state_dict(state["reward_checks"])
        self.zero_share.load_state_dict(state["zero_variance_share"])
        rank, world_size = self.processes.rank, self.processes.world_size
        if self.generates_apart:  # leftover groups have no place within TRL's pass
            self.leftover = unpack_distributed(state["leftover_groups"], rank, world_size)
        self.replay_rng.set_state(torch.from_numpy(state["replay_rng"]))
        self.rng.set_state(torch.from_numpy(state["selection_rng"]))
        if self.buffer is not None and "replay_buffer" in state:
            self.buffer.load_state_dict(state["replay_buffer"])
        if self.selector is not None:
            try:
                self.selector.load_state_dict(state["selector"])
            except (LookupError, ValueError, RuntimeError) as error:
                raise CheckpointError(
                    f"The checkpoint's state does not fit the {self.selector.name} of this run. Resume with the arguments and the "
                    "version of this package that the run began with, or start a new run with this checkpoint's weights as the model."
                ) from error

    def about(self) -> dict[str, Any]:
        """What a checkpoint says of its run, to be compared with the run that resumes from it. JSON values."""
        holds_rollouts = bool(self.leftover or (self.buffer is not None and len(self.buffer)))
        dataset = {"size": self.num_prompts, "hash": self.dataset_hash}
        return {"settings": self.settings, "dataset": dataset, "holds_rollouts": holds_rollouts}

    def own_state(self) -> set[str]:
        """Parts of the state that may differ between processes: those of a selector whose proposals round."""
        exact = self.selector is None or self.selector.selector.exact
        return set() if exact else {"selector", "selection_rng"}
