"""What a generation batch adds to the logs."""

from __future__ import annotations

import numpy as np

from trl_dataeff.collector.batch import GenerationBatch
from trl_dataeff.rollouts.group import EASY, EFFECTIVE, HARD


def batch_metrics(batch: GenerationBatch, step: int) -> dict[str, float]:
    """
    Numbers of a generation batch, by their names in `trl_dataeff.tracking.metrics.METRICS`.

    Args:
        batch ([`GenerationBatch`]): the batch, once it is full.
        step (`int`): the present optimizer step.
    """
    metrics: dict[str, float] = {
        "rounds": batch.rounds,
        "padded_groups": batch.padded,
        "leftover_groups": len(batch.leftover),
        "fresh_groups": len(batch.trained_now),
        "replayed_groups": len(batch.trained_stale),
        "effective_groups": sum(group.effective for group in batch.trained),
    }
    if batch.generated:
        kinds = np.array([group.kind for group in batch.generated])
        rates = np.array([group.success_rate for group in batch.generated])
        unscorable = np.isnan(np.concatenate([group.rewards for group in batch.generated])).all(axis=1)
        metrics.update(
            effective_ratio=float((kinds == EFFECTIVE).mean()),
            easy_ratio=float((kinds == EASY).mean()),
            hard_ratio=float((kinds == HARD).mean()),
            unscorable_ratio=float(unscorable.mean()),
        )
        if not np.isnan(rates).all():
            metrics["success_rate"] = float(np.nanmean(rates))
    if batch.trained_stale:
        metrics["replay/age_mean"] = float(np.mean([step - group.step for group in batch.trained_stale]))
    return metrics
