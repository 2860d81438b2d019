"""What groups of an earlier run showed of this dataset's prompts: `history_from`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trl_dataeff.checkpoint.runs import RUN_FILE
from trl_dataeff.checkpoint.state import FOLDER
from trl_dataeff.collector.baseline import TrackedBaseline
from trl_dataeff.rollouts.classification import RewardScale
from trl_dataeff.rollouts.group import EFFECTIVE, KINDS
from trl_dataeff.selection.base import EarlierGroups, Selector
from trl_dataeff.tracking.group_table import DATASET, RUN, UnreadableTable, read_group_table
from trl_dataeff.utils import UserError


NAME = "groups.parquet"
_NEEDED = ("step", "prompt_id", "success_rate", "reward", "kind")
_WAY_OUT = f"Give `{FOLDER}/{NAME}` of a run on this dataset, or leave `history_from` out."


class HistoryError(UserError):
    """`history_from` cannot be used; the message says why and what can."""


def start_from_earlier_run(
    given: str,
    dataset: dict[str, Any],
    scale: RewardScale,
    selector: Selector | None,
    baseline: TrackedBaseline | None,
) -> None:
    """
    Give the selector, and predictions in its place, what an earlier run showed.

    Args:
        given (`str`), dataset (`dict`), scale ([`RewardScale`]): see [`read_earlier_run`].
        selector ([`Selector`] or `None`): bound; `None` where prompts are not known by row.
        baseline ([`TrackedBaseline`] or `None`): of the run.

    Raises:
        [`HistoryError`]: the table cannot be used, or nothing makes use of it.
    """
    reason = "prompts are not known by row"
    if selector is not None:
        earlier = read_earlier_run(given, dataset, scale)
        taken = selector.start_from(earlier)
        if baseline is not None and baseline.tracker is not None:
            baseline.tracker.start_from(earlier.ids, earlier.rates, earlier.counts * selector.context.group_size)
            taken = True
        if taken:
            return
        reason = f"{type(selector).__name__} makes no use of it"
    raise HistoryError(
        f"`history_from` is {given!r}, and {reason}. Use a map-style dataset with `selection='dots'` or 'dots+greso', a "
        "selector with `start_from`, or `advantage_baseline='tracked'`; or leave `history_from` out."
    )


def read_earlier_run(given: str, dataset: dict[str, Any], scale: RewardScale) -> EarlierGroups:
    """
    The groups of an earlier run, one entry per prompt. Widens `scale`, unless it is fixed, by the range in which that run had
    its success rates, so that they need not be mapped when this run sees the ends of it.

    Args:
        given (`str`): `history_from`: the table of groups, or the output directory of the run.
        dataset (`dict`): `size` and `hash` of the prompts of this run.
        scale ([`RewardScale`]): of this run.

    Raises:
        [`HistoryError`]: the table is missing, corrupt, empty, or of another dataset.
    """
    path = Path(given).expanduser()
    path = path / FOLDER / NAME if path.is_dir() else path
    try:
        table, _ = read_group_table(path, _NEEDED)
        metadata = pq.read_schema(path).metadata or {}
    except FileNotFoundError as error:
        raise HistoryError(f"`history_from` is {given!r}, and there is no file {path}. {_WAY_OUT}") from error
    except UnreadableTable as error:
        raise HistoryError(f"`history_from` is {given!r}, and {path} {error}. {_WAY_OUT}") from error
    written_for = metadata.get(DATASET, b"").decode() or _hash_by_run_file(path, metadata)
    if written_for != dataset["hash"]:
        raise HistoryError(
            f"`history_from` is {given!r}, which was written for a dataset with the content hash {written_for or 'unknown'}; "
            f"this one has {dataset['size']} prompts and {dataset['hash']}. Prompts are known by their row. {_WAY_OUT}"
        )
    table = table.filter(pc.and_(pc.greater_equal(table["prompt_id"], 0), pc.is_valid(table["success_rate"])))
    table = table.filter(pc.is_finite(table["reward"]))
    if not len(table):
        raise HistoryError(f"`history_from` is {given!r}, and no group in it has a success rate. {_WAY_OUT}")
    return _by_prompt(table, scale)


def _hash_by_run_file(path: Path, metadata: dict[bytes, bytes]) -> str:
    """The dataset's hash in `run.json` beside a table that does not say it, if that is of the same run; else `""`."""
    try:
        about = json.loads((path.parent / Path(RUN_FILE).name).read_bytes())
        return str(about["dataset"]["hash"]) if about["run"].encode() == metadata.get(RUN) else ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""


def _by_prompt(table: pa.Table, scale: RewardScale) -> EarlierGroups:
    """In the order of each prompt's last group. The success rate is the mean over its groups, on this run's `scale`."""
    table = table.sort_by("step")
    ids, rates, rewards = (table[name].to_numpy() for name in ("prompt_id", "success_rate", "reward"))
    line = np.linalg.lstsq(np.stack([np.ones_like(rates), rates], axis=1), rewards, rcond=None)[0]
    if rates.min() < rates.max():  # else there is no telling what its range was
        low, high = line[0], line.sum()
        ends = [
            0.0 if abs(end) < 1e-6 * (high - low) else float(f"{end:.6g}") for end in (low, high)
        ]  # but for rounding
        scale.observe(np.array(ends))
        rates = np.clip((rewards - scale.low) / (scale.high - scale.low), 0.0, 1.0)
    effective = np.asarray(table["kind"].to_pylist()) == KINDS[EFFECTIVE]
    prompts, place, counts = np.unique(ids, return_inverse=True, return_counts=True)
    last = np.zeros(len(prompts), dtype=np.int64)
    np.maximum.at(last, place, np.arange(len(ids)))
    order = np.argsort(last)

    def mean(values: np.ndarray) -> np.ndarray:
        return (np.bincount(place, values)[order] / counts[order]).astype(np.float32)

    return EarlierGroups(prompts[order], mean(rates), mean(effective), counts[order])
