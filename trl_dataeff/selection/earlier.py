"""What groups of an earlier run showed of this dataset's prompts: `history_from` of [`DotsSelector`]."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from trl_dataeff.rollouts.classification import RewardScale
from trl_dataeff.tracking.groups import GROUPS_FILE, dataset_of, read_groups
from trl_dataeff.utils import UserError


class EarlierGroups(NamedTuple):
    """
    Groups of n prompts, in the order of each prompt's last group.

    Attributes:
        ids: prompts, int64 of shape `(n,)`, each once.
        rates: mean success rates, float32 of shape `(n,)`, in [0, 1].
        effective: shares of effective groups, float32 of shape `(n,)`.
        counts: groups, int64 of shape `(n,)`.
    """

    ids: np.ndarray
    rates: np.ndarray
    effective: np.ndarray
    counts: np.ndarray


def read_earlier_groups(given: str, dataset_hash: str, scale: RewardScale) -> EarlierGroups:
    """
    The groups of an earlier run. Widens `scale`, unless it is fixed, by the range in which that run had its success rates, so
    that they need not be mapped when this run sees the ends of it.

    Args:
        given (`str`): the table of groups, or the `output_dir` of the run.
        dataset_hash (`str`): content hash of this run's prompts.
        scale ([`RewardScale`]): of this run.

    Raises:
        [`UserError`]: the table is missing, corrupt, empty, or of another dataset.
    """
    path = Path(given).expanduser()
    path = path / GROUPS_FILE if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"`history_from` is {given!r}, and there is no file {path}. Give the `output_dir` of a run.")
    table = read_groups(path)
    if dataset_of(path) != dataset_hash:
        raise UserError(
            f"`history_from` is {given!r}, which is of another dataset. Prompts are known by their row: give a run on the same "
            "prompts in the same order, or leave `history_from` out."
        )
    columns = {name: table[name].to_numpy() for name in ("prompt_id", "success_rate", "reward", "kind")}
    known = (columns["prompt_id"] >= 0) & np.isfinite(columns["success_rate"]) & np.isfinite(columns["reward"])
    ids, rates, rewards, kinds = (column[known] for column in columns.values())
    if not len(ids):
        raise UserError(
            f"`history_from` is {given!r}, and no group in it has a success rate. Leave `history_from` out."
        )
    if rates.min() < rates.max():  # else there is no telling what the range of that run was
        line = np.linalg.lstsq(np.stack([np.ones_like(rates), rates], axis=1), rewards, rcond=None)[0]
        scale.observe(np.array([float(f"{end:.6g}") for end in (line[0], line.sum())]))
        rates = np.clip((rewards - scale.low) / (scale.high - scale.low), 0.0, 1.0)
    prompts, place, counts = np.unique(ids, return_inverse=True, return_counts=True)
    last = np.zeros(len(prompts), dtype=np.int64)
    np.maximum.at(last, place, np.arange(len(ids)))
    order = np.argsort(last)

    def mean(values: np.ndarray) -> np.ndarray:
        return (np.bincount(place, values)[order] / counts[order]).astype(np.float32)

    return EarlierGroups(prompts[order], mean(rates), mean(kinds == "effective"), counts[order])
