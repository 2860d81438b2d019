"""What a finished run spent on groups without a gradient, from the files that it has left."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from trl_dataeff.analysis.recorded import read_run
from trl_dataeff.rollouts.group import KINDS
from trl_dataeff.tracking.groups import GROUPS_FILE, read_groups
from trl_dataeff.utils import UserError, closest


#: Parts into which a run is divided at most
PERIODS = 6
#: Tables that TRL writes with `log_completions=True`
COMPLETIONS = "completions/completions_*.parquet"
#: Columns of these tables that are not rewards
_OTHER_COLUMNS = ("step", "prompt", "completion", "advantage")
#: Rewards of a group that differ by no more are equal
_EQUAL_WITHIN = 1e-6


class Audit(NamedTuple):
    """
    Shares of the groups of a run.

    Attributes:
        source (`str`): what was read.
        shares (`pd.DataFrame`): a row for each part of the run and one for all of it: `steps`, `groups` (their
            number), and the shares of `effective`, `easy` and `hard` groups in [0, 1]. Easy ones have the highest
            reward of the run. Columns are NaN where the files do not tell.
        again (`float`): P(zero variance | the prompt's group before had zero variance); NaN if no prompt came twice.
        after_effective (`float`): P(zero variance | the prompt's group before was effective); likewise.
    """

    source: str
    shares: pd.DataFrame
    again: float
    after_effective: float


# Prompts of token ids are compared as text, which must not be abbreviated
@np.printoptions(threshold=sys.maxsize)
def audit(
    paths: Sequence[str | Path], prompt: str = "prompt", reward: str | None = None, step: str | None = None
) -> Audit:
    """
    Describe a run.

    Args:
        paths (`Sequence[str | Path]`): the `output_dir` of a run, or JSON or Parquet files with one completion a row.
        prompt (`str`, *optional*, defaults to `"prompt"`): column of the prompts.
        reward (`str`, *optional*): column of the rewards; by default, `"reward"` or, in TRL's tables, the total of all
            rewards.
        step (`str`, *optional*): column of the steps. By default, `"step"` in TRL's tables; in other files, the
            completions of a group follow each other.

    Returns:
        [`Audit`]: shares of groups.

    Raises:
        [`UserError`]: there is nothing to read, or a column is missing.
    """
    files = [Path(path).expanduser() for path in paths]
    if len(files) > 1 and any(file.is_dir() for file in files):
        raise UserError("`audit` describes one run: give a single `output_dir`, or files of one run.")
    folder = files[0]
    if folder.absolute().match(GROUPS_FILE):
        folder = folder.absolute().parent.parent
    if not folder.is_dir():
        groups = groups_of(_read_completions(files), prompt, reward or "reward", step)
        return _audit_groups(groups, ", ".join(str(file) for file in files))
    if (folder / GROUPS_FILE).exists():
        groups = read_groups(folder / GROUPS_FILE).to_pandas()
        groups["step"] += 1  # ours are the steps done before the batch; TRL's tables have the step that it is for
        return _audit_groups(groups, str(folder / GROUPS_FILE))
    tables = sorted(folder.glob(COMPLETIONS))
    if tables:
        groups = groups_of(_read_completions(tables), prompt, reward, step or "step")
        return _audit_groups(groups, f"{len(tables)} tables in {folder / 'completions'}")
    return _audit_logs(folder)


# Groups from completions


def _read_completions(files: Sequence[Path]) -> pd.DataFrame:
    """
    Read files with one completion a row into one table. TRL writes a generation batch again at each of its optimizer
    steps: such a table is left out if it repeats the one before.
    """
    tables = []
    content_before = None
    for file in files:
        table = _read_table(file)
        content = _content_of_trl(table)
        is_repeated = content is not None and content == content_before
        if not is_repeated:
            tables.append(table)
        content_before = content
    return pd.concat(tables, ignore_index=True)


def _read_table(file: Path) -> pd.DataFrame:
    try:
        if file.suffix.lower() == ".parquet":
            return pd.read_parquet(file)
        is_array = file.read_bytes().lstrip().startswith(b"[")
        return pd.read_json(file, lines=not is_array, dtype=False)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file} cannot be read ({error}). Give JSON, Parquet, or the `output_dir` of a run; remove a file that "
            "was cut off."
        ) from error


def _content_of_trl(table: pd.DataFrame) -> str | None:
    """All of a table of TRL but its step, as text; `None` for another table. TRL's tables have advantages."""
    if "advantage" not in table:
        return None
    return repr(table.drop(columns="step", errors="ignore").values.tolist())


def groups_of(rows: pd.DataFrame, prompt: str, reward: str | None, step: str | None) -> pd.DataFrame:
    """
    Find the groups in a table of completions.

    Args:
        rows (`pd.DataFrame`): a completion a row.
        prompt (`str`): column of the prompts.
        reward (`str` or `None`): column of the rewards; `None` for a table of TRL, in which every other numeric column
            is a reward.
        step (`str` or `None`): column of the steps; `None` if the completions of a group follow each other.

    Returns:
        `pd.DataFrame`: a row for each group of several completions, with `step`, `prompt_id` (the prompt as text) and
        `kind`.

    Raises:
        [`UserError`]: a column is missing or non-numeric, or there are no groups.
    """
    rewards = [reward] if reward else _reward_columns(rows)
    _check_column(rows, "prompt", prompt)
    _check_column(rows, "reward", rewards[0] if rewards else "reward")
    if step is not None:
        _check_column(rows, "step", step)
    try:
        prompts = rows[prompt].astype(str)
        totals = rows[rewards].astype(float).sum(axis=1, min_count=1)
        if step is None:
            is_next_prompt = prompts != prompts.shift()
            steps = is_next_prompt.cumsum()
        else:
            steps = rows[step].astype(float)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"Rewards ({', '.join(rewards)}) or steps are non-numeric ({error}). Name the columns: --reward_column, "
            "--step_column."
        ) from error
    # With several rewards their weights are not recorded, but TRL's advantages are 0 where weighted totals are equal
    has_advantages = len(rewards) > 1 and "advantage" in rows
    varied = rows["advantage"] if has_advantages else totals
    completions = pd.DataFrame({"step": steps, "prompt_id": prompts, "total": totals, "varied": varied})
    groups = completions.groupby(["step", "prompt_id"], sort=False, as_index=False).agg(
        low=("varied", "min"), high=("varied", "max"), best=("total", "max"), size=("total", "size")
    )
    groups = groups[groups["size"] > 1]
    if groups.empty:
        raise UserError(
            "No prompt has several completions in a step, so there are no groups. Name the step: --step_column."
        )
    kinds = _kinds(groups, highest=totals.max(), lowest=totals.min())
    return groups[["step", "prompt_id"]].assign(kind=kinds)


def _reward_columns(rows: pd.DataFrame) -> list[str]:
    """The columns of rewards in a table of TRL."""
    numeric = rows.select_dtypes(["number", "bool"])
    return [name for name in numeric if name not in _OTHER_COLUMNS]


def _check_column(rows: pd.DataFrame, role: str, column: str) -> None:
    """Raise a `UserError` if there is no such column for a role: `"prompt"`, `"reward"` or `"step"`."""
    if column in rows:
        return
    columns = [str(name) for name in rows.columns]
    raise UserError(
        f"There is no column {column!r} for the {role}.{closest(column, columns)} The columns are "
        f"{', '.join(columns)}. Name it: --{role}_column."
    )


def _kinds(groups: pd.DataFrame, highest: float, lowest: float) -> np.ndarray:
    """
    The kind of each group.

    Args:
        groups (`pd.DataFrame` of n rows): `low` and `high`, whose difference tells whether the group is effective, and
            `best`, its highest total reward. They are NaN for a group without scores.
        highest (`float`): highest total reward of the run.
        lowest (`float`): lowest total reward of the run.

    Returns:
        `np.ndarray` of shape `(n,)`: names of `KINDS`.
    """
    is_effective = groups["high"] - groups["low"] > _EQUAL_WITHIN
    # If no reward is above 0 and all are equal, none is a success
    has_success = highest > min(0, lowest)
    is_solved = (groups["best"] >= highest) & has_success
    return np.select([is_effective, is_solved], ["effective", "easy"], "hard")


# Shares


def _audit_groups(groups: pd.DataFrame, source: str) -> Audit:
    """The audit of a table with a group a row: `step`, `prompt_id` and `kind`."""
    is_kind = {kind: groups["kind"] == kind for kind in KINDS}
    return _summarize(groups.assign(**is_kind), source)


def _audit_logs(folder: Path) -> Audit:
    """The audit of a TRL run without logged completions, whose logs have the share of zero-variance groups."""
    steps, zero_variance = read_run(folder).series("frac_reward_zero_std")
    if len(steps) == 0:
        raise UserError(
            f"{folder} has neither completions nor logs of `frac_reward_zero_std`. Train with `log_completions=True`."
        )
    logs = pd.DataFrame({"step": steps, "effective": 1 - zero_variance})
    logs = logs.assign(prompt_id=math.nan, easy=math.nan, hard=math.nan)
    # With other scales TRL's share is one of batches
    source = f"the logs in {folder}, which count groups with `scale_rewards='group'` alone"
    return _summarize(logs, source)


def _summarize(table: pd.DataFrame, source: str) -> Audit:
    """
    Compute the shares of a run.

    Args:
        table (`pd.DataFrame`): `step`, `prompt_id` and a share of each kind in each row, which stands for a group or
            for all groups of a log. The `prompt_id` is -1 or NaN where it is not known.
        source (`str`): what was read.

    Returns:
        [`Audit`]: shares of groups.
    """
    table = table.sort_values("step", kind="stable")
    steps = table["step"].unique()
    periods = np.array_split(steps, min(PERIODS, len(steps)))
    parts = [table[table["step"].isin(period)] for period in periods]
    shares = pd.DataFrame([_shares_of(part) for part in [*parts, table]])
    again, after_effective = _probabilities_of_zero_variance(table)
    return Audit(source, shares, again, after_effective)


def _shares_of(part: pd.DataFrame) -> dict[str, float | str]:
    """A row of `Audit.shares`, of a part of the table."""
    num_groups = part["prompt_id"].count()
    return {
        "steps": f"{part['step'].min():.0f}-{part['step'].max():.0f}",
        "groups": num_groups if num_groups else math.nan,
        **part[list(KINDS)].mean(),
    }


def _probabilities_of_zero_variance(table: pd.DataFrame) -> tuple[float, float]:
    """
    How often groups have zero variance, by the group before of the same prompt.

    Args:
        table (`pd.DataFrame`): see [`_summarize`], in the order of steps.

    Returns:
        `tuple[float, float]`: P(zero variance) after a group with zero variance, and after an effective one; NaN if
        there is no such group.
    """
    has_zero_variance = table["effective"] == 0
    known_prompt = table["prompt_id"].where(table["prompt_id"] != -1)
    had_zero_variance = has_zero_variance.groupby(known_prompt).shift()  # NaN for the first group of each prompt
    probabilities = has_zero_variance.groupby(had_zero_variance).mean()
    return float(probabilities.get(True, math.nan)), float(probabilities.get(False, math.nan))
