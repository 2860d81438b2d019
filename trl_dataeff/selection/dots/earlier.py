"""What an earlier run on the same prompts showed of them (`history_from`)."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from trl_dataeff.selection.base import SelectorContext
from trl_dataeff.tracking.files import GROUPS_FILE, about_groups, read_groups
from trl_dataeff.utils import UserError


class EarlierRun(NamedTuple):
    """
    What an earlier run showed of n prompts, in the order of each prompt's last group.

    Attributes:
        ids (`np.ndarray` of shape `(n,)`): int64, prompts.
        rates (`np.ndarray` of shape `(n,)`): float32, mean success rates in [0, 1].
        effective (`np.ndarray` of shape `(n,)`): float32, shares of effective groups.
        counts (`np.ndarray` of shape `(n,)`): int64, groups.
    """

    ids: np.ndarray
    rates: np.ndarray
    effective: np.ndarray
    counts: np.ndarray


def read_earlier_run(given: str, context: SelectorContext) -> EarlierRun:
    """
    Read the groups of an earlier run. One that selected or replayed knows prompts by their row, and has to be of the
    same prompts in the same order. One of the default knows them by their content, and what it shows of prompts that
    this dataset has is used.

    Args:
        given (`str`): `output_dir` of the run, or its table of groups.
        context ([`SelectorContext`]): of this run. Its range of rewards is widened by that of the earlier run, unless
            it is fixed.

    Returns:
        [`EarlierRun`]: success rates by the widened range.

    Raises:
        UserError: the table is missing, corrupt, empty, or of other prompts.
    """
    path = _groups_file(given)
    table = read_groups(path)
    about = about_groups(path)
    knows_rows = bool(about.get("dataset"))
    if knows_rows and about["dataset"] != context.dataset_hash:
        raise UserError(
            f"`history_from` is {given!r}, which is of another dataset. A run with selection or replay knows prompts "
            "by their row: give a run on the same prompts in the same order, or leave it out."
        )
    groups = table.select(["prompt_id", "success_rate", "reward", "kind"]).to_pandas().dropna()
    groups = groups[groups["prompt_id"] >= 0]  # prompts of a stream have -1
    if groups.empty:
        raise UserError(f"`history_from` is {given!r}, and no group in it has a success rate. Leave it out.")
    if not knows_rows:
        groups = _by_row(groups, context)
        if groups.empty:
            raise UserError(
                f"`history_from` is {given!r}, and none of its prompts is in this dataset, by their content (system "
                "prompt included). Give a run on these prompts, with the table as the run wrote it, or leave it out."
            )

    scale = context.scale
    reward_range = about.get("reward_range") or {}
    scale.observe(np.array(list(reward_range.values())))
    if scale.high > scale.low:
        # The range of that run may have widened since a rate was written
        rates = (groups["reward"] - scale.low) / (scale.high - scale.low)
        groups["success_rate"] = np.clip(rates, 0.0, 1.0)
    return _by_prompt(groups)


def _groups_file(given: str) -> Path:
    """The table of groups of a run, which is given by its `output_dir` or this file."""
    path = Path(given).expanduser()
    if path.is_dir():
        path = path / GROUPS_FILE
    if not path.is_file():
        raise UserError(
            f"`history_from` is {given!r}, and there is no file {path}. Give the `output_dir` "
            "of a run of this package."
        )
    return path


def _by_row(groups: pd.DataFrame, context: SelectorContext) -> pd.DataFrame:
    """Groups with the row of their prompt, for each row that has it, in the place of the number of its content."""
    if context.number_prompts is None:
        return groups[:0]
    numbers = context.number_prompts()
    rows = pd.DataFrame({"number": numbers, "row": np.arange(len(numbers))})
    found = groups.merge(rows, left_on="prompt_id", right_on="number")
    return found.assign(prompt_id=found["row"])


def _by_prompt(groups: pd.DataFrame) -> EarlierRun:
    """Sum up rows of groups, oldest first, by prompt."""
    groups["effective"] = groups["kind"] == "effective"
    groups["position"] = np.arange(len(groups))
    prompts = groups.groupby("prompt_id").agg(
        rate=("success_rate", "mean"),
        effective=("effective", "mean"),
        count=("position", "size"),
        last=("position", "max"),
    )
    prompts = prompts.sort_values("last")
    return EarlierRun(
        ids=prompts.index.to_numpy(np.int64),
        rates=prompts["rate"].to_numpy(np.float32),
        effective=prompts["effective"].to_numpy(np.float32),
        counts=prompts["count"].to_numpy(np.int64),
    )
