"""What a finished run spent on groups without a gradient, from the files that it has left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from trl_dataeff.analysis.recorded import read_run
from trl_dataeff.rollouts.group import KINDS
from trl_dataeff.tracking.groups import GROUPS_FILE, read_groups
from trl_dataeff.utils import UserError, closest


PERIODS = 6
COMPLETIONS = "completions/completions_*.parquet"  # of TRL, with `log_completions=True`
_OF_TRL = ("step", "prompt", "completion", "advantage")  # columns of its tables beside those of the rewards
MORE = (
    "Train with `log_completions=True` and `logging_steps=1` to see which prompts, and whether they are easy or hard."
)


class Shares(NamedTuple):
    """
    Groups of the steps from `first` to `last`; `groups` is 0 where their number is not known. `easy` and `hard` are the shares
    of zero-variance groups with the highest reward of the run and with any other; NaN where only `effective` is known.
    """

    first: int
    last: int
    groups: int
    effective: float
    easy: float
    hard: float


class Audit(NamedTuple):
    """
    Shares of a run.

    Attributes:
        source (`str`): what was read.
        overall ([`Shares`]), periods (`list[Shares]`): of the whole run, and of its parts.
        again (`float`): P(zero variance | the prompt's group before had zero variance); NaN if no prompt came twice.
        after_effective (`float`): P(zero variance | the prompt's group before was effective); likewise.
        note (`str`): how to learn more; empty if all is known.
    """

    source: str
    overall: Shares
    periods: list[Shares]
    again: float
    after_effective: float
    note: str


def audit(
    paths: Sequence[str | Path], prompt: str = "prompt", reward: str | None = None, step: str | None = None
) -> Audit:
    """
    Describe a run. Raises a [`UserError`] if there is nothing to read, or a column is missing.

    Args:
        paths: the `output_dir` of a run, or JSON lines or Parquet files with one completion a row.
        prompt, reward, step (`str`, *optional*): columns of such files; without a step, the completions of a group follow
            each other. In tables of TRL, by default, the total of all rewards and `step`.
    """
    files = [Path(path).expanduser() for path in paths]
    folder = files[0]
    if len(files) > 1 or not folder.is_dir():
        groups = groups_of(_read(files), prompt, reward or "reward", step)
        return _described(groups, ", ".join(map(str, files)))
    if (folder / GROUPS_FILE).exists():
        return _described(read_groups(folder / GROUPS_FILE).to_pandas(), f"{folder / GROUPS_FILE}")
    if files := sorted(folder.glob(COMPLETIONS)):
        groups = groups_of(_read(files), prompt, reward, step or "step")
        return _described(groups, f"{len(files)} tables in {folder / 'completions'}")
    return _of_logs(folder)


def _read(files: Sequence[Path]) -> pd.DataFrame:
    """The rows of all files."""
    tables = []
    for file in files:
        try:
            tables.append(pd.read_parquet(file) if file.suffix == ".parquet" else pd.read_json(file, lines=True))
        except (OSError, ValueError) as error:
            raise UserError(
                f"{file} cannot be read ({error}). Give JSON lines, Parquet, or the `output_dir` of a run."
            ) from error
    return pd.concat(tables, ignore_index=True)


def groups_of(rows: pd.DataFrame, prompt: str, reward: str | None, step: str | None) -> pd.DataFrame:
    """
    The groups of `rows`, a completion each: `step`, `prompt_id` and `kind`. The other arguments are names of columns. Prompts are
    compared as text; without a reward it is a table of TRL, whose other columns are rewards; without a step, a group's rows
    follow each other.
    """
    rewards = [reward] if reward else [name for name in rows.columns if name not in _OF_TRL]
    for role, column in (("prompt", prompt), ("reward", rewards[0] if rewards else "reward"), ("step", step)):
        if column is not None and column not in rows:
            raise UserError(
                f"There is no column {column!r} for the {role}.{closest(column, rows.columns)} The columns are "
                f"{', '.join(map(str, rows.columns))}. Name it: --{role}_column."
            )
    try:
        totals = rows[rewards].astype(float).sum(axis=1, min_count=1)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"The rewards in {', '.join(rewards)} are non-numeric ({error}). Name the column: --reward_column."
        ) from error
    texts = rows[prompt].astype(str)
    steps = rows[step] if step else (texts != texts.shift()).cumsum()
    # With several rewards their weights are not recorded, but TRL's advantages are 0 where the weighted totals are equal
    varied = rows["advantage"] if len(rewards) > 1 and "advantage" in rows else totals
    table = pd.DataFrame({"step": steps, "prompt": texts, "total": totals, "varied": varied})
    each = table.groupby(["step", "prompt"], sort=False).agg(
        low=("varied", "min"), high=("varied", "max"), top=("total", "max"), size=("total", "count")
    )
    each = each[each["size"] > 1].reset_index()
    if not len(each):
        raise UserError(
            "No prompt has several scored completions in a step, so there are no groups. Name the step: --step_column."
        )
    zero = each["high"] - each["low"] <= 1e-6
    kind = np.where(~zero, "effective", np.where(each["top"] >= totals.max(), "easy", "hard"))
    return pd.DataFrame({"step": each["step"], "prompt_id": each["prompt"], "kind": kind})


def _described(groups: pd.DataFrame, source: str) -> Audit:
    """Of a table with a row for each group: `step`, `prompt_id` and `kind`."""
    return _summed(groups.assign(**{kind: groups["kind"] == kind for kind in KINDS}), source)


def _of_logs(folder: Path) -> Audit:
    """Of a TRL run without logged completions, whose logs have the share of zero-variance groups."""
    steps, zero = read_run(folder).series("frac_reward_zero_std")
    if not len(steps):
        raise UserError(f"{folder} has neither completions nor logs of `frac_reward_zero_std`. {MORE}")
    unknown = dict.fromkeys(["prompt_id", "easy", "hard"], math.nan)
    return _summed(pd.DataFrame({"step": steps, "effective": 1 - zero, **unknown}), f"the logs in {folder}", MORE)


def _summed(table: pd.DataFrame, source: str, note: str = "") -> Audit:
    """Of a table with `step`, `prompt_id` and the share of each kind, in each row: of a group, or of all groups of a log."""
    table = table.sort_values("step", kind="stable")
    steps = table["step"].unique()
    periods = [table[table["step"].isin(part)] for part in np.array_split(steps, min(PERIODS, len(steps)))]
    zero = table["effective"] == 0
    before = zero.groupby(table["prompt_id"]).shift()
    return Audit(
        source,
        _shares(table),
        [_shares(period) for period in periods],
        again=float(zero[before == True].mean()),  # noqa: E712  # there is NaN, too
        after_effective=float(zero[before == False].mean()),  # noqa: E712
        note=note,
    )


def _shares(table: pd.DataFrame) -> Shares:
    first, last = int(table["step"].min()), int(table["step"].max())
    return Shares(first, last, int(table["prompt_id"].count()), *(float(table[kind].mean()) for kind in KINDS))
