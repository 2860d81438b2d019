"""
TRL's metrics of the loss. TRL logs the plain mean of the micro-batches' means over tokens or rows. The update computes
other micro-batches, of unequal sizes, without the rows that have no gradient: their means are weighted, so that the
same is logged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


#: Means over the tokens that are computed: TRL's method gives no values of other rows
OF_COMPUTED_TOKENS = ("entropy", "kl")
#: Means over tokens, or over rows with `importance_sampling_level="sequence"`. 0 in rows without a gradient
OF_RATIOS = (
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/region_mean",
    "cispo_clip_ratio",
)
#: A mean over rows. 1 in rows without a gradient, whose policy is as it was
OF_PHI = "vespo/phi_seq_mean"
#: The smallest and the largest of rows; 0 in those without a gradient
SMALLEST = "clip_ratio/low_min"
LARGEST = "clip_ratio/high_max"


@dataclass(frozen=True)
class MetricWeights:
    """
    Weights of the means of a micro-batch. Over the micro-batches that were dealt together, the plain mean of weighted
    means is the mean over all tokens or rows.

    Attributes:
        computed_tokens: among the tokens that are computed.
        tokens: among all tokens.
        rows: among all rows.
        leaves_out: whether TRL's micro-batch at this place has rows that are left out.
    """

    computed_tokens: float
    tokens: float
    rows: float
    leaves_out: bool


def weights_of(
    trained: Sequence[int], all_trained: int, rows: Sequence[int], rows_per_batch: int, leaves_out: Sequence[bool]
) -> list[MetricWeights]:
    """
    The weights of micro-batches that were dealt together.

    Args:
        trained (`Sequence[int]`): tokens of each that are trained on, of all processes.
        all_trained (`int`): those of all rows, with the rows that are left out.
        rows (`Sequence[int]`): rows of each.
        rows_per_batch (`int`): rows of each of TRL's micro-batches.
        leaves_out (`Sequence[bool]`): whether TRL's micro-batch at each place has rows that are left out.
    """
    computed = sum(trained) / len(trained)
    of_all = all_trained / len(trained)
    return [
        MetricWeights(
            computed_tokens=own / computed if computed else 1.0,
            tokens=own / of_all if of_all else 1.0,
            rows=own_rows / rows_per_batch,
            leaves_out=leaves_out_here,
        )
        for own, own_rows, leaves_out_here in zip(trained, rows, leaves_out, strict=True)
    ]


def weigh_last(store: dict[str, list[float]], weights: MetricWeights, importance_sampling_level: str) -> None:
    """
    Weigh the values that TRL's loss has entered last.

    Args:
        store (`dict`): TRL's lists of values, by metric.
        weights ([`MetricWeights`]): of the micro-batch that was computed.
        importance_sampling_level (`str`): TRL's option.
    """
    of_ratios = weights.rows if importance_sampling_level == "sequence" else weights.tokens
    factors = dict.fromkeys(OF_COMPUTED_TOKENS, weights.computed_tokens) | dict.fromkeys(OF_RATIOS, of_ratios)
    for name, factor in factors.items():
        if store.get(name):
            store[name][-1] *= factor
    if store.get(OF_PHI):
        store[OF_PHI][-1] = store[OF_PHI][-1] * weights.rows + (1 - weights.rows)
    if not weights.leaves_out:
        return
    if store.get(SMALLEST):
        store[SMALLEST][-1] = 0.0
    if store.get(LARGEST) and math.isnan(store[LARGEST][-1]):
        store[LARGEST][-1] = 0.0
