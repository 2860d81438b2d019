"""What is seen of the generation batches of a run: counts, shares, and a row per group. It changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trl_dataeff.generation.recorder import GeneratedRound
from trl_dataeff.rollouts.checks import RewardChecks
from trl_dataeff.rollouts.classification import GroupClassifier
from trl_dataeff.rollouts.group import EASY, EFFECTIVE, HARD, KINDS, UNKNOWN_PROMPT, Disposition, Origin, RolloutGroup
from trl_dataeff.tracking.groups import RunLogs
from trl_dataeff.tracking.metrics import METRICS
from trl_dataeff.utils import __version__, number_by_content


@dataclass(frozen=True)
class SeenBatch:
    """
    A generation batch as the logs show it.

    Attributes:
        generated: all groups generated for it.
        trained: the groups trained on.
        stale: those of them that an earlier policy sampled.
        dropped: groups that were generated, and are neither trained on nor kept.
        predicted: success rate that was predicted of each generated group, or NaN.
        seconds: share of each generated group in the time its round took.
        origins: where each generated group comes from.
        dispositions: what becomes of each.
        rounds: rounds of rollouts; `None` where there is always one.
    """

    generated: Sequence[RolloutGroup]
    trained: Sequence[RolloutGroup]
    predicted: Sequence[float]
    seconds: Sequence[float]
    origins: Sequence[Origin]
    dispositions: Sequence[Disposition]
    stale: Sequence[RolloutGroup] = ()
    dropped: Sequence[RolloutGroup] = ()
    rounds: int | None = None


@dataclass
class About:
    """
    What the files of a run say of it.

    Attributes:
        selector: name of the selector; `None` where prompts come from TRL's dataloader.
        num_prompts: prompts of the dataset, 0 if they are not counted.
        dataset_hash: content hash of the prompts; empty if they are not known by row.
    """

    selector: str | None = None
    num_prompts: int = 0
    dataset_hash: str = ""


class Observer:
    """
    Counts and logs the generation batches of a trainer.

    Args:
        classifier ([`GroupClassifier`]): classifies groups by their rewards.
        reward_names (`Sequence[str]`): the reward functions.
        replays (`bool`, *optional*, defaults to `False`): whether groups are replayed: only then it is counted.
        max_unscored (`int`, *optional*): see [`RewardChecks`].
        logs ([`RunLogs`], *optional*): files that the run writes; on the main process alone.
        is_main (`bool`, *optional*, defaults to `True`): whether this is the main process.
    """

    def __init__(
        self,
        classifier: GroupClassifier,
        reward_names: Sequence[str],
        *,
        replays: bool = False,
        max_unscored: int | None = None,
        logs: RunLogs | None = None,
        is_main: bool = True,
    ):
        self.classifier = classifier
        self.reward_names = list(reward_names)
        self.replays = replays
        self.max_unscored = max_unscored
        self.logs = logs
        self.is_main = is_main
        self.begin_run()

    def begin_run(self, about: About | None = None) -> None:
        """Forget an earlier run."""
        self.about = about or About()
        self.classifier.scale.reset()
        self.counters = Counter({name: 0 for name, metric in METRICS.items() if metric.is_cumulative})
        self.reward_checks = RewardChecks(
            self.reward_names, max_unscored=self.max_unscored, is_main_process=self.is_main
        )

    def see(self, batch: SeenBatch, step: int, progress: float) -> dict[str, float]:
        """
        Count a generation batch, and write its groups to the table.

        Args:
            batch ([`SeenBatch`]): the batch.
            step (`int`): the optimizer step at which it begins.
            progress (`float`): the share of the run that has passed, in [0, 1].

        Returns:
            `dict[str, float]`: what it adds to the logs, by the names in `METRICS`.
        """
        self.counters.update(
            rollouts_generated=sum(group.size for group in batch.generated),
            rollouts_trained=sum(group.size for group in batch.trained),
            rollouts_replayed=sum(group.size for group in batch.stale),
            rollouts_discarded=sum(group.size for group in batch.dropped),
            tokens_generated=sum(group.tokens for group in batch.generated),
        )
        self.reward_checks.check_gradient(any(group.effective for group in batch.generated), progress)
        if self.logs is not None:
            self.logs.groups.add(
                batch.generated,
                success_rates=self.classifier.scale.success_rates(batch.generated),
                predicted=batch.predicted,
                seconds=batch.seconds,
                origins=batch.origins,
                dispositions=batch.dispositions,
            )
            self.logs.groups.flush()
        return self._metrics(batch, step)

    def _metrics(self, batch: SeenBatch, step: int) -> dict[str, float]:
        metrics: dict[str, float] = {**self.counters}
        if batch.generated:
            counts = np.bincount([group.kind for group in batch.generated], minlength=len(KINDS))
            shares = (counts / len(batch.generated)).tolist()
            metrics["effective_ratio"] = shares[EFFECTIVE]
            metrics["easy_ratio"] = shares[EASY]
            metrics["hard_ratio"] = shares[HARD]
            success_rates = self.classifier.scale.success_rates(batch.generated)
            if not np.isnan(success_rates).all():
                metrics["success_rate"] = float(np.nanmean(success_rates))
        if batch.rounds is not None:
            metrics["rounds"] = batch.rounds
        if not self.replays:
            del metrics["rollouts_replayed"]
        elif batch.stale:
            metrics["replay/age_mean"] = float(np.mean([step - group.step for group in batch.stale]))
        return metrics

    def groups_of(
        self, generated: GeneratedRound, prompt_hashes: np.ndarray, group_size: int, step: int
    ) -> SeenBatch | None:
        """
        The groups of a generation batch that is TRL's own: all are trained on.

        Args:
            generated ([`GeneratedRound`]): what was generated and scored, of all processes.
            prompt_hashes (`np.ndarray` of shape `(n * G,)`): see [`hash_of_prompts`], of all processes.
            group_size (`int`): G, completions per group.
            step (`int`): the optimizer step at which the batch begins.

        Returns:
            [`SeenBatch`], *optional*: `None` if a subclass generates or scores another number of completions.
        """
        num_completions = len(generated.rewards)
        num_seen = {num_completions, len(generated.lengths), len(prompt_hashes)}
        has_whole_groups = num_completions % group_size == 0 and len(num_seen) == 1
        if not has_whole_groups or generated.rewards.shape[1] != len(self.reward_names):
            return None
        n = num_completions // group_size
        rewards = generated.rewards.reshape(n, group_size, -1).astype(np.float32)
        self.reward_checks.check(rewards, self.classifier.weights)
        groups = self.classifier.groups(
            prompt_hashes[::group_size],
            rewards,
            generated.lengths.reshape(n, group_size),
            generated.truncated.reshape(n, group_size),
            step=step,
            round=0,
        )
        return SeenBatch(
            generated=groups,
            trained=groups,
            predicted=[np.nan] * n,
            seconds=[generated.seconds / n] * n,
            origins=["fresh"] * n,
            dispositions=["trained"] * n,
        )

    # Files

    def begin_logs(self, step: int, model: str) -> None:
        """Begin or continue the files of a run at optimizer step `step`; `model` is the model's name or path."""
        if self.logs is None:
            return
        about = {
            "trl_dataeff": __version__,
            "model": model,
            "selector": self.about.selector,
            "prompts": self.about.num_prompts or None,
        }
        self.logs.begin(step, self.about.dataset_hash, self.classifier.scale, about)

    def log(self, logs: Mapping[str, Any], step: int) -> None:
        """Write what the Trainer has logged at optimizer step `step` to `metrics.jsonl`."""
        if self.logs is not None:
            rollouts = self.counters["rollouts_generated"]
            tokens = self.counters["tokens_generated"]
            self.logs.metrics.add(logs, step=step, rollouts=rollouts, tokens=tokens)

    def flush_logs(self) -> None:
        """Write rows of the table of groups that wait in memory."""
        if self.logs is not None:
            self.logs.groups.flush(force=True)

    # State

    def state_dict(self) -> dict[str, Any]:
        """What was seen, as JSON values."""
        return {
            "counters": dict(self.counters),
            "reward_scale": self.classifier.scale.state_dict(),
            "reward_checks": self.reward_checks.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what [`state_dict`] returned."""
        self.counters = Counter(state["counters"])
        self.classifier.scale.load_state_dict(state["reward_scale"])
        self.reward_checks.load_state_dict(state["reward_checks"])


def hash_of_prompts(rows: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """
    What tells the prompts of rows apart where their row indices are not known: a number of 62 bits for each, by its
    content, int64 `(rows,)`; -1 for a row without a prompt, or with images, which may be all that differs.
    """
    numbers = []
    for row in rows:
        prompt = row.get("prompt")
        has_images = row.get("image") is not None or row.get("images") is not None
        numbers.append(UNKNOWN_PROMPT if prompt is None or has_images else number_by_content(prompt))
    return torch.tensor(numbers, dtype=torch.int64)
