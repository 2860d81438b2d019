"""
Every metric of the package: its name, unit and meaning, in one table.

All of them go through `Trainer.log`, under the prefix `dataeff/`. The documentation lists this table, and a name that
is not in it cannot be logged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from transformers import TrainerState
from trl.trainer.utils import nanstd

from trl_dataeff.rollouts.group import RolloutGroup, total_rewards


PREFIX = "dataeff/"


class Metric(NamedTuple):
    """`cumulative` metrics count since the start of training; the others are means over a logging interval."""

    unit: str
    meaning: str
    cumulative: bool = False


METRICS: dict[str, Metric] = {
    "rollouts_generated": Metric("completions", "Generated so far by all processes, dropped ones included.", True),
    "rollouts_trained": Metric("completions", "Trained on so far.", True),
    "rollouts_replayed": Metric("completions", "Of those trained on, rolled out in an earlier window.", True),
    "rollouts_discarded": Metric(
        "completions", "Generated so far and dropped: of zero variance, or references without room.", True
    ),
    "tokens_generated": Metric("tokens", "Generated so far by all processes, dropped completions included.", True),
    "prompts_skipped": Metric("prompts", "Skipped so far, before they were rolled out (GRESO).", True),
    "rounds": Metric("rounds per window", "Rounds of rollouts that a window took."),
    "success_rate": Metric("share", "Mean success rate of the fresh groups: what the policy does now."),
    "effective_ratio": Metric("share", "Effective groups among the fresh ones."),
    "easy_ratio": Metric("share", "Fresh groups in which every completion has the highest reward."),
    "hard_ratio": Metric("share", "Fresh groups of zero variance that are not easy."),
    "padded_groups": Metric("groups per window", "Zero-variance groups that completed a window which stayed short."),
    "surplus_groups": Metric(
        "groups per window", "Effective groups that are left to the next window, or to the replay buffer."
    ),
    "p_easy": Metric("probability", "Kept per visit of an easy streak (GRESO)."),
    "p_hard": Metric("probability", "Kept per visit of a hard streak (GRESO)."),
    "predictor/pearson": Metric(
        "correlation", "Of predicted and observed success rates, over the newest groups; each predicted beforehand."
    ),
    "predictor/pearson_explored": Metric("correlation", "The same over prompts drawn uniformly: unbiased."),
    "predictor/pearson_selected": Metric("correlation", "The same over prompts chosen for their prediction."),
    "predictor/mae": Metric("success rate", "Mean distance of predicted from observed success rates."),
    "predictor/calibration_error": Metric("success rate", "Expected calibration error of the predictions, 10 bins."),
    "unscorable_ratio": Metric("share", "Fresh completions that no reward function scored."),
    "replay/size": Metric("groups", "In the replay buffer."),
    "replay/age_mean": Metric("steps", "Age of the groups trained on that an earlier window rolled out."),
    "replay/ratio_mean": Metric("ratio", "Mean of pi_old / pi_behavior, not truncated, over those groups' tokens."),
    "replay/ratio_max": Metric("ratio", "Largest pi_old / pi_behavior, not truncated, over those groups' tokens."),
    "reward_faults": Metric("rewards", "So far, rewards that were no number, infinite, or late (no score).", True),
    "overlong_prompts": Metric("completions", "So far, those to whose prompt the model's context left no room.", True),
    "steps_skipped": Metric("steps", "Skipped so far, because the gradient was not finite.", True),
    "server_returns": Metric("times", "So far, that the vLLM server went away and came back.", True),
    "time/selection_s": Metric("seconds per step", "Choosing prompts and groups, on the main process."),
    "time/generation_s": Metric("seconds per step", "Generating and scoring rollouts, on the main process."),
    "time/training_s": Metric("seconds per step", "The rest of the step, on the main process."),
}


def record(store: dict[str, list[float]], values: dict[str, float]) -> None:
    """
    Hand metrics to TRL's store, which logs the mean of each list and then empties it.

    Args:
        store (`dict`): `trainer._metrics["train"]`.
        values (`dict`): by name, without the prefix.
    """
    for name, value in values.items():
        if METRICS[name].cumulative:
            store[PREFIX + name] = [value]
        else:
            store[PREFIX + name].append(value)


@contextmanager
def rounds_left_out(store: dict[str, list[float]], state: TrainerState) -> Iterator[None]:
    """
    Keeps what TRL logs while it generates (lengths, token counts) out of its metrics. Rounds of rollouts run in it:
    their completions are logged when those that are kept are played back, and the dropped ones by `METRICS` alone.

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


def of_fresh_groups(groups: Sequence[RolloutGroup], names: Sequence[str], weights: np.ndarray) -> dict[str, float]:
    """
    TRL's metrics of rewards and lengths, over fresh groups only: what the policy does now. NaN, which TRL leaves out,
    if there are none.

    Args:
        groups: fresh groups.
        names (`list[str]`), weights (`np.ndarray` of shape `(F,)`): the reward functions.
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
    values["completions/clipped_ratio"] = float(truncated.mean())
    for kind, tokens in (("", lengths), ("terminated_", ended)):
        for statistic in ("mean", "min", "max"):
            values[f"completions/{statistic}_{kind}length"] = float(getattr(tokens, statistic)())
    return values


def replace_last(store: dict[str, list[float]], values: dict[str, float]) -> None:
    """Put `values` in the place of those that were entered last under their names."""
    for name, value in values.items():
        store[name][-1] = value


class Counters:
    """The cumulative metrics, all from 0, but for the one that the selector counts."""

    def __init__(self) -> None:
        names = (name for name, metric in METRICS.items() if metric.cumulative and name != "prompts_skipped")
        self.values: dict[str, int] = dict.fromkeys(names, 0)

    def add(self, **amounts: int) -> None:
        for name, amount in amounts.items():
            self.values[name] += int(amount)
