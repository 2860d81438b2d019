"""
The metrics of the package: name, unit and meaning, in one table. A new metric is a line in it.

All of them go through `Trainer.log`, under the prefix `dataeff/`. What a selector reports is logged under
`dataeff/selector/`, by the selector's own names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from transformers import TrainerState
from trl.trainer.utils import nanstd

from trl_dataeff.rollouts.classification import total_rewards
from trl_dataeff.rollouts.group import RolloutGroup


PREFIX = "dataeff/"
SELECTOR_PREFIX = PREFIX + "selector/"


class Metric(NamedTuple):
    """
    `cumulative` metrics count since the start of training; the others are means over a logging interval. Those of a
    `fault` are logged from the first one on.
    """

    unit: str
    meaning: str
    cumulative: bool = False
    fault: bool = False


METRICS: dict[str, Metric] = {
    "rollouts_generated": Metric("completions", "Generated so far by all processes, dropped ones included.", True),
    "rollouts_trained": Metric("completions", "Trained on so far.", True),
    "rollouts_replayed": Metric(
        "completions", "Of those trained on, generated for an earlier generation batch.", True
    ),
    "rollouts_discarded": Metric(
        "completions",
        "Generated so far and dropped: of zero-variance groups, or of references that found no room.",
        True,
    ),
    "tokens_generated": Metric("tokens", "Generated so far by all processes, dropped completions included.", True),
    "rounds": Metric("rounds per generation batch", "Rounds of rollouts that a generation batch took."),
    "success_rate": Metric("share", "Mean success rate of the groups generated now."),
    "effective_ratio": Metric("share", "Effective groups among those generated now."),
    "easy_ratio": Metric("share", "Groups generated now in which every completion has the highest reward."),
    "hard_ratio": Metric("share", "Zero-variance groups generated now that are not easy."),
    "stopped_ratio": Metric(
        "share", "Groups generated now that were stopped after half of their completions (`sequential_rollouts`)."
    ),
    "fresh_groups": Metric("groups per generation batch", "Trained on, and generated for the same generation batch."),
    "replayed_groups": Metric(
        "groups per generation batch", "Trained on, and generated for an earlier generation batch."
    ),
    "effective_groups": Metric("groups per generation batch", "Trained on and effective, replayed ones included."),
    "effective_expected": Metric(
        "groups per generation batch",
        "Effective groups that were expected of those generated now (with `fresh_groups='adaptive'`).",
    ),
    "padded_groups": Metric(
        "groups per generation batch", "Zero-variance groups that completed a generation batch which stayed short."
    ),
    "leftover_groups": Metric(
        "groups per generation batch", "Effective groups kept for the next generation batch, or for the replay buffer."
    ),
    "unscorable_ratio": Metric("share", "Completions generated now that no reward function scored."),
    "baseline/informative_ratio": Metric(
        "share", "With a tracked baseline, groups generated now whose advantages are large enough to be replayed."
    ),
    "baseline/strength": Metric(
        "completions",
        "With a tracked baseline, what the predictions of the groups generated now are worth on average.",
    ),
    "replay/size": Metric("groups", "In the replay buffer."),
    "replay/evicted": Metric(
        "groups per generation batch", "Removed from the replay buffer: too old, replayed too often, or stale."
    ),
    "replay/age_mean": Metric(
        "steps", "Age of the groups trained on that were generated for an earlier generation batch."
    ),
    "replay/ess_running": Metric(
        "share",
        "Effective sample size of recently replayed tokens, over generation batches: what `replay_pause_ess` limits.",
    ),
    "replay/paused": Metric("share", "Generation batches in which replay paused (see `replay_pause_ess`)."),
    "replay/weight": Metric("factor", "On the advantages of replayed groups (see `replay_weight`)."),
    "replay/ratio_mean": Metric("ratio", "Mean of pi_old / pi_behavior, not truncated, over those groups' tokens."),
    "replay/ratio_max": Metric("ratio", "Largest pi_old / pi_behavior, not truncated, over those groups' tokens."),
    "replay/movement": Metric(
        "log-prob",
        "Mean absolute log of pi_old / pi_behavior over those tokens: how far the policy has moved since they were sampled.",
    ),
    "replay/ess": Metric(
        "share", "Effective sample size of those ratios: (sum w)^2 / (n sum w^2) in a micro-batch; 1 if all are equal."
    ),
    "replay/capped_share": Metric(
        "share", "Of those groups' tokens, those whose ratio was held at `replay_ratio_cap`."
    ),
    "replay/clipped_share": Metric(
        "share",
        "Of those groups' tokens, those whose gradient was removed by the clip, or with 'behavior' by the cap.",
    ),
    "reward_faults": Metric(
        "rewards", "So far, rewards that were non-numeric, infinite, or late (with `reward_timeout`).", True, True
    ),
    "overlong_prompts": Metric(
        "completions", "So far, those whose prompt leaves no room for a completion in the model's context.", True, True
    ),
    "steps_skipped": Metric("steps", "Skipped so far, because the gradient was not finite.", True, True),
    "server_returns": Metric("times", "So far, restarts of the vLLM server.", True, True),
    "time/selection_s": Metric("seconds per step", "Selecting prompts and groups, on the main process."),
    "time/generation_s": Metric("seconds per step", "Generating and scoring rollouts, on the main process."),
    "time/training_s": Metric("seconds per step", "The rest of the step, on the main process."),
}


def record_selector(store: dict[str, list[float]], values: dict[str, float]) -> None:
    """
    Hand a selector's metrics to TRL's store. The log has the latest value of each; NaN ones are left out.

    Args:
        store (`dict`): `trainer._metrics["train"]`.
        values (`dict`): by the selector's names, without the prefix.
    """
    for name, value in values.items():
        if value == value:
            store[SELECTOR_PREFIX + name] = [float(value)]


def record(store: dict[str, list[float]], values: dict[str, float]) -> None:
    """
    Hand metrics to TRL's store, which logs the mean of each list and then empties it.

    Args:
        store (`dict`): `trainer._metrics["train"]`.
        values (`dict`): by name in `METRICS`, without the prefix.
    """
    for name, value in values.items():
        if METRICS[name].cumulative:
            store[PREFIX + name] = [value]
        else:
            store[PREFIX + name].append(value)


@contextmanager
def without_rounds(store: dict[str, list[float]], state: TrainerState) -> Iterator[None]:
    """
    Keeps what TRL logs while it generates (lengths, token counts) out of its metrics. Rounds of rollouts run in this
    context: their completions are logged when the kept ones are played back, and dropped ones by `METRICS` alone.

    Args:
        store (`dict`): `trainer._metrics["train"]`.
        state ([`~transformers.TrainerState`]): its `num_input_tokens_seen` is restored.
    """
    tokens = state.num_input_tokens_seen
    before = {name: list(values) for name, values in store.items() if name.startswith("completions/")}
    yield
    for name in [name for name in store if name.startswith("completions/") or name == "num_tokens"]:
        store[name] = before.get(name, [])
    state.num_input_tokens_seen = tokens


def group_metrics(
    groups: Sequence[RolloutGroup], names: Sequence[str], weights: np.ndarray, *, over_batch: bool = False
) -> dict[str, float]:
    """
    TRL's metrics of rewards and lengths, over these groups only. NaN, which TRL leaves out, if there are none.

    Args:
        groups: groups of the present policy.
        names (`list[str]`), weights (`np.ndarray` of shape `(F,)`): the reward functions.
        over_batch (`bool`, *optional*, defaults to `False`): whether TRL normalises advantages over the whole batch.
    """
    nothing = np.full((1, len(names)), np.nan, dtype=np.float32)
    rewards = np.concatenate([group.rewards for group in groups] or [nothing])
    totals = torch.from_numpy(total_rewards(rewards, weights))
    lengths = np.concatenate([group.lengths for group in groups] or [nothing[:, 0]]).astype(np.float64)
    truncated = np.concatenate([group.truncated for group in groups] or [nothing[:, 0]]).astype(np.float64)
    ended = lengths[truncated != 1] if (truncated != 1).any() else np.zeros(1)
    values = {"reward": totals.nanmean().item(), "reward_std": nanstd(totals).item()}
    for name, column in zip(names, torch.from_numpy(rewards).T, strict=True):
        values[f"rewards/{name}/mean"] = column.nanmean().item()
        values[f"rewards/{name}/std"] = nanstd(column).item()
    if not over_batch:  # else TRL's says whether all rewards of the batch are equal
        each = totals.split([group.size for group in groups]) if groups else ()
        zero = [bool(np.isclose(nanstd(own).item(), 0)) for own in each]
        values["frac_reward_zero_std"] = float(np.mean(zero)) if zero else float("nan")
    values["completions/clipped_ratio"] = float(truncated.mean())
    for kind, tokens in (("", lengths), ("terminated_", ended)):
        for statistic in ("mean", "min", "max"):
            values[f"completions/{statistic}_{kind}length"] = float(getattr(tokens, statistic)())
    return values


def replace_last(store: dict[str, list[float]], values: dict[str, float]) -> None:
    """Replace the values that were entered last under these names."""
    for name, value in values.items():
        store[name][-1] = value


class Counters:
    """The cumulative metrics of a run, all starting at 0."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {name: 0 for name, metric in METRICS.items() if metric.cumulative}

    def logged(self) -> dict[str, int]:
        """What is logged: all counts but those of faults that have not occurred."""
        return {name: value for name, value in self.values.items() if value or not METRICS[name].fault}

    def load(self, values: dict[str, int]) -> None:
        """Continue from the counts of a checkpoint."""
        self.values.update(values)

    def add(self, **amounts: int) -> None:
        """Add to the counts of these names."""
        for name, amount in amounts.items():
            self.values[name] += int(amount)
