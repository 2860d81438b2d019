"""What a run's files say, as arrays and small tables: the numbers behind the figures. NaN stands for what is not known."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

from trl_dataeff.rollouts.group import KINDS
from trl_dataeff.tracking.metrics import PREFIX, SELECTOR_PREFIX
from trl_dataeff.tracking.recorded import RecordedRun


MOST_BINS = 40
MOST_ROWS = 10  # of a heat map; the rarest values share the last one
OTHERS = "(others)"
FLOWS = ("trained", "leftover", "dropped", "replayed", "skipped")
OUTCOMES = ("always solved", "never solved", "became solvable")


class Bins(NamedTuple):
    """Intervals of optimizer steps, `edges` `(b + 1,)`."""

    edges: np.ndarray

    @property
    def centres(self) -> np.ndarray:
        return np.asarray((self.edges[:-1] + self.edges[1:]) / 2)

    def of(self, steps: np.ndarray) -> np.ndarray:
        """Index of the interval of each step, `(n,)`."""
        index = np.searchsorted(self.edges, steps, side="right") - 1
        return np.asarray(np.clip(index, 0, len(self.edges) - 2))


def bins(steps: np.ndarray, most: int = MOST_BINS) -> Bins:
    """Equal intervals of whole steps that hold all of `steps` `(n,)`, at most `most` of them."""
    end = int(np.max(steps, initial=0)) + 1
    width = max(1, -(-end // most))
    return Bins(np.arange(0, end + width, width, dtype=float))


def group_frame(run: RecordedRun) -> pd.DataFrame:
    """The groups of a run, one a row; empty without a table."""
    if run.groups is None:
        return pd.DataFrame({name: [] for name in ("step", "prompt_id", "kind", "success_rate", "tokens")})
    return run.groups.to_pandas()


def kind_shares(run: RecordedRun) -> tuple[np.ndarray, np.ndarray]:
    """
    Shares of effective, easy and hard groups among those generated.

    Returns:
        `(np.ndarray, np.ndarray)`: steps `(b,)` and shares `(3, b)`, in the order of `KINDS`; from the logs if there is no
        table of groups.
    """
    groups = group_frame(run)
    if len(groups):
        intervals = bins(groups["step"].to_numpy())
        counts = np.stack([_counts(intervals, groups["step"][groups["kind"] == kind]) for kind in KINDS])
        total = counts.sum(axis=0)
        present = total > 0
        return intervals.centres[present], counts[:, present] / total[present]
    series = [run.own(f"{kind}_ratio") for kind in KINDS]
    if any(len(values) != len(series[0][1]) for _, values in series) or not len(series[0][1]):
        return np.empty(0), np.empty((3, 0))
    return series[0][0], np.stack([values for _, values in series])


def _counts(intervals: Bins, steps: pd.Series, weights: np.ndarray | None = None) -> np.ndarray:
    return np.bincount(intervals.of(steps.to_numpy()), weights, minlength=len(intervals.edges) - 1)


def flow(run: RecordedRun) -> tuple[np.ndarray, dict[str, np.ndarray], int]:
    """
    Where rollouts went, in completions per optimizer step: of those generated what became of them in their own generation
    batch, and those that did not have to be generated (replayed; skipped by the selector, if the run counts them).

    Returns:
        `(np.ndarray, dict, int)`: steps `(b,)`; by name in `FLOWS` the completions per step, `(b,)`, of those that occur; and
        the width of an interval in steps.
    """
    groups, size = group_frame(run), run.group_size or 1
    if not len(groups) or "disposition" not in groups:
        return np.empty(0), {}, 1
    intervals = bins(groups["step"].to_numpy())
    width = int(intervals.edges[1])
    completions = groups["completions"] if "completions" in groups else pd.Series(size, groups.index)
    flows = {
        name: _counts(intervals, groups["step"][became], completions[became].to_numpy())
        for name in ("trained", "leftover", "dropped")
        for became in [groups["disposition"] == name]
    }
    flows["replayed"] = _increments(run, PREFIX + "rollouts_replayed", intervals)
    flows["skipped"] = _increments(run, SELECTOR_PREFIX + "prompts_skipped", intervals) * size
    last = int(groups["step"].max()) + 1
    steps_in = np.minimum(intervals.edges[1:], last) - intervals.edges[:-1]
    return intervals.centres, {name: values / steps_in for name, values in flows.items() if values.any()}, width


def _increments(run: RecordedRun, name: str, intervals: Bins) -> np.ndarray:
    """Of a cumulative metric, by interval."""
    steps, values = run.series(name)
    if not len(steps):
        return np.zeros(len(intervals.edges) - 1)
    return np.diff(np.interp(intervals.edges, [0, *steps], [0, *values]))


class HeatMap(NamedTuple):
    """
    Success rates by kind of prompt and time.

    Attributes:
        rows (`list[str]`): R values of a column, or ranges of success rates.
        centres (`np.ndarray`): steps, `(b,)`.
        values (`np.ndarray`): success rates, or shares of groups, `(R, b)`; NaN where there was no group.
        groups (`np.ndarray`): groups, `(R, b)`.
    """

    rows: list[str]
    centres: np.ndarray
    values: np.ndarray
    groups: np.ndarray


def columns_of(run: RecordedRun, most: int = 30) -> list[str]:
    """Columns of the prompts by which success rates can be shown: 2 to `most` different values, each of several prompts."""
    if run.prompts is None or run.groups is None or not len(run.groups):
        return []
    found = []
    for name in run.prompts.column_names:
        values = run.prompts[name]
        plain = not pa.types.is_floating(values.type) and not pa.types.is_nested(values.type)
        if name not in ("prompt", "prompt_id") and plain and 2 <= len(values.unique()) <= min(most, len(values) // 2):
            found.append(name)
    return found


def by_column(run: RecordedRun, column: str, most_bins: int = 24) -> HeatMap:
    """Mean success rate of each value of a column of the dataset over time, the values with the most groups first."""
    assert run.prompts is not None
    names = run.prompts.select(["prompt_id", column]).to_pandas().set_index("prompt_id")[column]
    groups = group_frame(run)
    labels = groups["prompt_id"].map(names.astype("string")).fillna("(none)")
    order = labels.value_counts().index.tolist()
    if len(order) > MOST_ROWS:
        labels = labels.where(labels.isin(order[: MOST_ROWS - 1]), OTHERS)
        order = [*order[: MOST_ROWS - 1], OTHERS]
    order = _sorted(order)
    intervals = bins(groups["step"].to_numpy(), most_bins)
    rates = groups["success_rate"].to_numpy(dtype=float)
    values, counts = [], []
    for name in order:
        own = (labels == name).to_numpy() & np.isfinite(rates)
        count = _counts(intervals, groups["step"][own])
        with np.errstate(invalid="ignore"):
            values.append(_counts(intervals, groups["step"][own], rates[own]) / count)
        counts.append(count)
    return HeatMap([str(name) for name in order], intervals.centres, np.stack(values), np.stack(counts))


def _sorted(names: Sequence[str]) -> list[str]:
    """By number if all are numbers, else as they are; `OTHERS` last."""
    plain = [name for name in names if name != OTHERS]
    with suppress(ValueError):
        plain = sorted(plain, key=float)
    return [*plain, *(name for name in names if name == OTHERS)]


RATE_ROWS = ("0", "to 0.2", "to 0.4", "to 0.6", "to 0.8", "below 1", "1")


def by_rate(run: RecordedRun, most_bins: int = 24) -> HeatMap:
    """Share of the groups of each time that have these success rates: `(7, b)`, the columns sum to 1."""
    groups = group_frame(run)
    groups = groups[groups["success_rate"].notna()]
    intervals = bins(groups["step"].to_numpy(), most_bins)
    rates = groups["success_rate"].to_numpy(dtype=float)
    row = np.digitize(rates, [1e-6, 0.2 + 1e-6, 0.4 + 1e-6, 0.6 + 1e-6, 0.8 + 1e-6, 1 - 1e-6])
    counts = np.stack([_counts(intervals, groups["step"][row == i]) for i in range(len(RATE_ROWS))])
    with np.errstate(invalid="ignore"):
        return HeatMap(list(RATE_ROWS), intervals.centres, counts / counts.sum(axis=0), counts)


class Calibration(NamedTuple):
    """
    Predicted and observed success rates, in bins of the former.

    Attributes:
        predicted, observed (`np.ndarray`): means, `(k,)`.
        half_width (`np.ndarray`): of the 95 % confidence interval of `observed`, `(k,)`.
        groups (`np.ndarray`): `(k,)`.
        correlation (`float`): Pearson's; NaN if one of them does not vary.
        bias (`float`): mean of observed minus predicted over the last third of the run.
        bias_half_width (`float`): of its 95 % confidence interval.
        explored (`bool`): whether these are prompts drawn uniformly; else all that had a prediction.
    """

    predicted: np.ndarray
    observed: np.ndarray
    half_width: np.ndarray
    groups: np.ndarray
    correlation: float
    bias: float
    bias_half_width: float
    explored: bool


def calibration(run: RecordedRun, fewest: int = 30) -> Calibration | None:
    """On explored prompts if there are `fewest` of them, else on all; `None` if fewer groups have a prediction."""
    groups = group_frame(run)
    if "predicted" not in groups:
        return None
    groups = groups[groups["predicted"].notna() & groups["success_rate"].notna()]
    explored = groups[_explored(groups)]
    enough = len(explored) >= fewest
    groups = explored if enough else groups
    if len(groups) < fewest:
        return None
    predicted, observed = (groups[name].to_numpy(dtype=float) for name in ("predicted", "success_rate"))
    index = np.minimum((predicted * 10).astype(int), 9)
    rows = [(predicted[index == i].mean(), *_mean(observed[index == i]), (index == i).sum()) for i in np.unique(index)]
    late = groups["step"].to_numpy() >= groups["step"].max() * 2 / 3
    varies = predicted.std() > 0 and observed.std() > 0
    correlation = float(np.corrcoef(predicted, observed)[0, 1]) if varies else float("nan")
    means, rates, half_widths, counts = (np.array(column) for column in zip(*rows, strict=True))
    bias, bias_half_width = _mean((observed - predicted)[late])
    return Calibration(means, rates, half_widths, counts, correlation, bias, bias_half_width, enough)


def _explored(groups: pd.DataFrame) -> np.ndarray:
    drawn = (
        groups["explored"].fillna(False).to_numpy(dtype=bool) if "explored" in groups else np.zeros(len(groups), bool)
    )
    return drawn | (groups["origin"] == "reference").to_numpy() if "origin" in groups else drawn


def _mean(values: np.ndarray) -> tuple[float, float]:
    """Mean and half-width of its 95 % confidence interval (normal); NaN for a single value."""
    if len(values) < 2:
        return float(values.mean()) if len(values) else float("nan"), float("nan")
    return float(values.mean()), float(1.96 * values.std(ddof=1) / np.sqrt(len(values)))


def outcomes(run: RecordedRun) -> dict[str, pd.DataFrame]:
    """
    Prompts by what became of them: by name in `OUTCOMES` a table with a row for each prompt, those with the most groups first:
    `prompt_id`, `groups`, `first` and `last` success rate. Of prompts with one group, only the first two can be said.
    """
    groups = group_frame(run)
    groups = groups[(groups["prompt_id"] >= 0) & groups["success_rate"].notna()].sort_values("step", kind="stable")
    rates = groups.groupby("prompt_id")["success_rate"]
    table = pd.DataFrame(
        {"groups": rates.size(), "first": rates.first(), "last": rates.last(), "low": rates.min(), "high": rates.max()}
    )
    table = table.sort_values(["groups", "last"], ascending=False, kind="stable").reset_index()
    masks = (table["low"] == 1, table["high"] == 0, (table["first"] == 0) & (table["last"] > 0))
    return {name: table[mask].drop(columns=["low", "high"]) for name, mask in zip(OUTCOMES, masks, strict=True)}
