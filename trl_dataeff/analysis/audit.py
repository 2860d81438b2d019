"""What a finished run spent on groups without a gradient, from the files that it has left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
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


class Audit(NamedTuple):
    """
    Shares of the groups of a run.

    Attributes:
        source (`str`): what was read.
        shares (`pd.DataFrame`): a row for each part of the run and one for all of it: `steps`, `groups` (their number), and the
            shares of `effective`, `easy` and `hard` groups in [0, 1]. Easy ones have the highest reward of the run. Columns
            are NaN where the files do not tell.
        again (`float`): P(zero variance | the prompt's group before had zero variance); NaN if no prompt came twice.
        after_effective (`float`): P(zero variance | the prompt's group before was effective); likewise.
    """

    source: str
    shares: pd.DataFrame
    again: float
    after_effective: float


@np.printoptions(threshold=10**9)  # a prompt of token ids is compared as text
def audit(
    paths: Sequence[str | Path], prompt: str = "prompt", reward: str | None = None, step: str | None = None
) -> Audit:
    """
    Describe a run. Raises a [`UserError`] if there is nothing to read, or a column is missing.

    Args:
        paths: the `output_dir` of a run, or JSON or Parquet files with one completion a row.
        prompt, reward, step (`str`, *optional*): columns of such files; without a step, the completions of a group follow
            each other. In tables of TRL, by default, the total of all rewards and `step`.
    """
    files = [Path(path).expanduser() for path in paths]
    folder = files[0]
    if len(files) > 1 and any(file.is_dir() for file in files):
        raise UserError("`audit` describes one run: give a single `output_dir`, or files of one run.")
    if folder.absolute().match(GROUPS_FILE):
        folder = folder.absolute().parent.parent
    if not folder.is_dir():
        source, groups = ", ".join(map(str, files)), groups_of(_read(files), prompt, reward or "reward", step)
    elif (folder / GROUPS_FILE).exists():
        source, groups = str(folder / GROUPS_FILE), read_groups(folder / GROUPS_FILE).to_pandas()
        groups["step"] += 1  # optimizer steps that were done; TRL's tables have the step that a batch is for
    elif files := sorted(folder.glob(COMPLETIONS)):
        source = f"{len(files)} tables in {folder / 'completions'}"
        groups = groups_of(_read(files), prompt, reward, step or "step")
    else:
        return _of_logs(folder)
    return _summed(groups.assign(**{kind: groups["kind"] == kind for kind in KINDS}), source)


def _rows_of(file: Path) -> pd.DataFrame:
    try:
        if file.suffix.lower() == ".parquet":
            return pd.read_parquet(file)
        return pd.read_json(file, lines=not file.read_bytes().lstrip().startswith(b"["), dtype=False)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file} cannot be read ({error}). Give JSON, Parquet, or the `output_dir` of a run; remove a file that was cut off."
        ) from error


def _read(files: Sequence[Path]) -> pd.DataFrame:
    # TRL, whose tables have advantages, writes a generation batch again at each of its optimizer steps
    key = lambda t: repr(t.drop(columns="step", errors="ignore").values.tolist()) if "advantage" in t else object()  # noqa: E731
    return pd.concat([next(same) for _, same in groupby(map(_rows_of, files), key)], ignore_index=True)


def groups_of(rows: pd.DataFrame, prompt: str, reward: str | None, step: str | None) -> pd.DataFrame:
    """
    The groups of `rows`, a completion each: `step`, `prompt_id` (the prompt as text) and `kind`. The other arguments are names
    of columns; without a reward, it is a table of TRL, whose other numeric columns are rewards.
    """
    rewards = [reward] if reward else [name for name in rows.select_dtypes(["number", "bool"]) if name not in _OF_TRL]
    for role, column in (("prompt", prompt), ("reward", rewards[0] if rewards else "reward"), ("step", step)):
        if column is not None and column not in rows:
            raise UserError(
                f"There is no column {column!r} for the {role}.{closest(column, map(str, rows.columns))} The columns are "
                f"{', '.join(map(str, rows.columns))}. Name it: --{role}_column."
            )
    try:
        texts, totals = rows[prompt].astype(str), rows[rewards].astype(float).sum(axis=1, min_count=1)
        steps = rows[step].astype(float) if step else (texts != texts.shift()).cumsum()
    except (TypeError, ValueError) as error:
        raise UserError(
            f"Rewards ({', '.join(rewards)}) or steps are non-numeric ({error}). Name the columns: --reward_column, --step_column."
        ) from error
    # With several rewards their weights are not recorded, but TRL's advantages are 0 where the weighted totals are equal
    varied = rows["advantage"] if len(rewards) > 1 and "advantage" in rows else totals
    table = pd.DataFrame({"step": steps, "prompt_id": texts, "total": totals, "varied": varied})
    each = table.groupby(["step", "prompt_id"], sort=False, as_index=False).agg(
        low=("varied", "min"), high=("varied", "max"), top=("total", "max"), size=("total", "size")
    )
    each = each[each["size"] > 1]
    if each.empty:
        raise UserError(
            "No prompt has several completions in a step, so there are no groups. Name the step: --step_column."
        )
    zero, solved = ~each.eval("high - low > 1e-6"), each.top.ge(totals.max()) & (totals.max() > min(0, totals.min()))
    return each[["step", "prompt_id"]].assign(kind=np.select([~zero, solved], ["effective", "easy"], "hard"))


def _of_logs(folder: Path) -> Audit:
    """Of a TRL run without logged completions, whose logs have the share of zero-variance groups."""
    steps, zero = read_run(folder).series("frac_reward_zero_std")
    if not len(steps):
        raise UserError(
            f"{folder} has neither completions nor logs of `frac_reward_zero_std`. Train with `log_completions=True`."
        )
    unknown = dict.fromkeys(["prompt_id", "easy", "hard"], math.nan)
    source = f"the logs in {folder}, which count groups with `scale_rewards='group'` alone"  # else TRL's share is of batches
    return _summed(pd.DataFrame({"step": steps, "effective": 1 - zero, **unknown}), source)


def _summed(table: pd.DataFrame, source: str) -> Audit:
    """Of a table with `step`, `prompt_id` and the share of each kind, in each row: of a group, or of all groups of a log."""
    table = table.sort_values("step", kind="stable")
    steps = table["step"].unique()
    parts = [table[table["step"].isin(part)] for part in np.array_split(steps, min(PERIODS, len(steps)))]
    zero = table["effective"] == 0
    after = zero.groupby(zero.groupby(table["prompt_id"].where(table["prompt_id"] != -1)).shift()).mean()
    shares = pd.DataFrame(
        {
            "steps": f"{part['step'].min():.0f}-{part['step'].max():.0f}",
            "groups": part["prompt_id"].count() or math.nan,
            **part[list(KINDS)].mean(),
        }
        for part in [*parts, table]
    )
    return Audit(source, shares, float(after.get(True, math.nan)), float(after.get(False, math.nan)))
