"""What a finished run spent on groups without a gradient, from the files that it has left."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from trl_dataeff.analysis.recorded import (
    CHECKPOINT,
    STATE_FILE,
    check_exists,
    is_state_file,
    read_about,
    read_logs,
    read_run,
)
from trl_dataeff.rollouts.group import KINDS
from trl_dataeff.tracking.files import GROUPS_FILE, METRICS_FILE, read_groups
from trl_dataeff.tracking.methods import selection_title, selector_of
from trl_dataeff.utils import UserError, closest


#: Parts into which a run is divided at most
PERIODS = 6
#: Tables that TRL writes with `log_completions=True`
COMPLETIONS = "completions/completions_*.parquet"
#: Columns that these tables have beside rewards
_OTHER_COLUMNS = ("step", "prompt", "completion", "advantage")
#: Rewards of a group that differ by no more are equal
_EQUAL_WITHIN = 1e-6


class Followed(NamedTuple):
    """
    Groups that follow another one of their prompt.

    Attributes:
        groups (`int`): how many there are.
        zero_variance (`float`): the share of them that has zero variance; NaN if there are none.
    """

    groups: int
    zero_variance: float


class Audit(NamedTuple):
    """
    Shares of the groups of a run.

    Attributes:
        source (`str`): what was read.
        shares (`pd.DataFrame`): a row for each part of the run and one for all of it: `steps` (without a column of
            steps: `files`, or the groups by their number, `in order`), `groups` (how many), and the shares of
            `effective`, `easy` and `hard` groups in [0, 1]. Easy ones have the highest reward of the run. Columns are
            NaN where the files do not tell.
        again ([`Followed`]): groups whose prompt had a group with zero variance before, in an earlier step.
        after_effective ([`Followed`]): groups whose prompt had an effective one before.
        notes (`tuple[str, ...]`): how completions were grouped where that was not given, how many are in no group, and
            which selector chose the prompts.
    """

    source: str
    shares: pd.DataFrame
    again: Followed
    after_effective: Followed
    notes: tuple[str, ...] = ()


# Prompts of token ids are compared as text, which must not be abbreviated
@np.printoptions(threshold=sys.maxsize)
def audit(
    paths: Sequence[str | Path], prompt: str = "prompt", reward: str | None = None, step: str | None = None
) -> Audit:
    """
    Describe a run.

    Args:
        paths (`Sequence[str | Path]`): the `output_dir` of a run or its folder of tables, or JSON or Parquet files
            with one completion a row.
        prompt (`str`, *optional*, defaults to `"prompt"`): column of the prompts.
        reward (`str`, *optional*): column of the rewards; by default, `"reward"` or, in TRL's tables, the total of all
            rewards.
        step (`str`, *optional*): column of the steps; by default, `"step"` if there is one. Without steps, completions
            of a prompt that follow each other are a group if all such runs of rows are equally long, or multiples of
            one length. Otherwise all completions of a prompt in a file are a group.

    Returns:
        [`Audit`]: shares of groups.

    Raises:
        [`UserError`]: there is nothing to read, it does not fit into memory, a column is missing, or groups
            cannot be found.
    """
    files = [Path(path).expanduser() for path in paths]
    for file in files:
        check_exists(file)
    try:
        return _audit_files([_run_of(file) for file in files], prompt, reward, step)
    except MemoryError as error:
        raise _too_large(files) from error


def _audit_files(files: Sequence[Path], prompt: str, reward: str | None, step: str | None) -> Audit:
    """See [`audit`]."""
    if len(files) > 1 and any(file.is_dir() or is_state_file(file) for file in files):
        raise UserError("`audit` describes one run: give a single `output_dir`, or files of one run.")
    folder = files[0]
    if is_state_file(folder):
        return _audit_logs(folder)
    if not folder.is_dir():
        rows = _read_completions(files)
        if reward is None and ("reward" in rows or not _is_of_trl(rows)):
            reward = "reward"
        groups, unit, notes = groups_of(rows, prompt, reward, step)
        return _audit_groups(groups, ", ".join(str(file) for file in files), notes, unit)
    last_step: float = math.inf
    checkpoint = CHECKPOINT.fullmatch(folder.absolute().name)
    if checkpoint and (folder.absolute().parent / GROUPS_FILE).exists():
        folder = folder.parent if folder.name == checkpoint[0] else folder.absolute().parent
        last_step = int(checkpoint[1])
    if (folder / GROUPS_FILE).exists():
        groups = read_groups(folder / GROUPS_FILE).to_pandas()
        groups["step"] += 1  # ours are the steps done before the batch; TRL's tables have the step that it is for
        source = str(folder / GROUPS_FILE)
        return _audit_groups(groups[groups["step"] <= last_step], source, _note_of_selection(read_about(folder)))
    tables = sorted(folder.glob(COMPLETIONS))
    if tables:
        groups, _, notes = groups_of(_read_completions(tables), prompt, reward, step or "step")
        return _audit_groups(groups, f"{len(tables)} tables in {folder / 'completions'}", notes)
    return _audit_logs(folder)


def _run_of(path: Path) -> Path:
    """The run of its folder `dataeff` or `completions`, or of a file that is about all of it; else the path itself."""
    path_in_run = path.absolute()
    if any(path_in_run.match(name) for name in (GROUPS_FILE, METRICS_FILE)):
        return path_in_run.parent.parent
    for name in (GROUPS_FILE, METRICS_FILE, COMPLETIONS):
        folder, _, files = name.partition("/")
        if path_in_run.name == folder and any(path.glob(files)):
            return path_in_run.parent
    return path


def _note_of_selection(about: Mapping[str, Any]) -> tuple[str, ...]:
    """Say that a selector chose the prompts of a run, which has this `run.json`; nothing if they were drawn."""
    selector = selector_of(about)
    if selector == "UniformSelector":
        return ()
    return (f"{selection_title(selector)} chose the prompts: uniform draws would have found another share.",)


# Groups from completions


def _read_completions(files: Sequence[Path]) -> pd.DataFrame:
    """
    Read files with one completion a row into one table, whose index has the number of the file and that of the row.
    TRL writes a generation batch again at each of its optimizer steps: such a table is left out if it repeats the one
    before.
    """
    if sum(file.stat().st_size for file in files if file.is_file()) > _memory():
        raise _too_large(files)
    tables = []
    content_before = None
    for file in files:
        table = _read_table(file)
        content = _content_of_trl(table)
        is_repeated = content is not None and content == content_before
        if not is_repeated:
            tables.append(table)
        content_before = content
    return pd.concat(tables, keys=range(len(tables)))


def _memory() -> float:
    """The memory of this machine in bytes; infinite where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # as on Windows
        return math.inf


def _too_large(files: Sequence[Path]) -> UserError:
    names = ", ".join(str(file) for file in files)
    return UserError(
        f"{names}: larger than the memory. Give files of a part of the run, or Parquet files with the columns of "
        "prompt, reward and step alone."
    )


def _read_table(file: Path) -> pd.DataFrame:
    try:
        if file.suffix.lower() == ".parquet":
            return pd.read_parquet(file)
        with open(file, "rb") as opened:
            is_array = opened.read(1024).lstrip().startswith(b"[")
        return pd.read_json(file, lines=not is_array, dtype=False)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file} cannot be read ({error}). Give JSON, Parquet, or the `output_dir` of a run; remove a file that "
            "was cut off."
        ) from error


def _is_of_trl(table: pd.DataFrame) -> bool:
    return set(_OTHER_COLUMNS) <= set(table)


def _content_of_trl(table: pd.DataFrame) -> str | None:
    """All of a table of TRL but its step, as text; `None` for another table. TRL's tables have advantages."""
    if "advantage" not in table:
        return None
    return repr(table.drop(columns="step", errors="ignore").values.tolist())


def groups_of(
    rows: pd.DataFrame, prompt: str, reward: str | None, step: str | None
) -> tuple[pd.DataFrame, str, tuple[str, ...]]:
    """
    Find the groups in a table of completions: those of a prompt in a step, wherever they stand; several groups if the
    prompt occurs several times there.

    Args:
        rows (`pd.DataFrame`): a completion a row. The first level of its index is the number of the file.
        prompt (`str`): column of the prompts.
        reward (`str` or `None`): column of the rewards; `None` for a table of TRL, in which every other numeric column
            is a reward.
        step (`str` or `None`): column of the steps; `None` for `"step"`, or without such a column for the parts that
            [`_parts_without_steps`] finds.

    Returns:
        `tuple[pd.DataFrame, str, tuple[str, ...]]`: a row for each group of several completions, with `step`,
        `prompt_id` (the prompt as text) and `kind`; what `step` counts; and what is to be said of the groups.

    Raises:
        [`UserError`]: a column is missing or non-numeric, or there are no groups.
    """
    if rows.empty:
        raise UserError("No completions: the files have no rows. Give files of a run that has generated some.")
    rewards = [reward] if reward else _reward_columns(rows)
    _check_column(rows, "prompt", prompt)
    _check_column(rows, "reward", rewards[0] if rewards else "reward")
    if step is None and "step" in rows:
        step = "step"
    if step is not None:
        _check_column(rows, "step", step)
    num_rows = len(rows)
    notes = []
    rows = rows[rows[prompt].notna()]
    prompts = rows[prompt].astype(str)
    totals = _as_numbers(rows[rewards], "reward").sum(axis=1, min_count=1)
    if step is None:
        steps, unit, how_grouped = _parts_without_steps(prompts)
        notes.append(how_grouped)
    else:
        steps = _as_numbers(rows[[step]], "step")[step]
        unit = "steps"
    repeats = pd.Series(0, index=rows.index)
    if unit != "files":  # where it is said that all completions of a prompt are a group
        repeats, how_divided = _repeats(steps, prompts)
        notes.extend(how_divided)
    if len(rewards) > 1:
        notes.append(f"Easy and hard are by the sum of {', '.join(rewards)}. To take one: --reward_column.")
    # With several rewards their weights are not recorded, but TRL's advantages are 0 where weighted totals are equal
    has_advantages = len(rewards) > 1 and "advantage" in rows
    varied = rows["advantage"] if has_advantages else totals
    completions = pd.DataFrame(
        {"step": steps, "prompt_id": prompts, "repeat": repeats, "total": totals, "varied": varied}
    )
    groups = completions.groupby(["step", "prompt_id", "repeat"], sort=False, as_index=False).agg(
        low=("varied", "min"), high=("varied", "max"), best=("total", "max"), size=("total", "size")
    )
    groups = groups[groups["size"] > 1]
    if groups.empty:
        raise _no_groups(prompts, prompt)
    num_left_out = num_rows - groups["size"].sum()
    if num_left_out > 0:
        notes.append(
            f"{num_left_out:,} of {num_rows:,} completions are in no group: they are the only one of their prompt in "
            "a step, or have no prompt or step."
        )
    kinds = _kinds(groups, highest=totals.max(), lowest=totals.min())
    return groups[["step", "prompt_id"]].assign(kind=kinds), unit, tuple(notes)


def _as_numbers(rows: pd.DataFrame, role: str) -> pd.DataFrame:
    """The columns of a role, `"reward"` or `"step"`, as numbers."""
    try:
        return rows.astype(float)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"The {role} is non-numeric in {', '.join(rows.columns)} ({error}). Name another column: --{role}_column."
        ) from error


def _parts_without_steps(prompts: pd.Series) -> tuple[pd.Series, str, str]:
    """
    Divide completions without steps into parts, in each of which those of a prompt are a group.

    Rows of a prompt that follow each other are a part if all such runs are equally long: a prompt that occurs again
    then has another group. If it occurs again at once, its run is a multiple of the most frequent length, and
    [`_repeats`] divides it. Otherwise a file is a part, if every prompt has equally many rows in it, or none occurs
    again.

    Args:
        prompts (`pd.Series` of n rows): the prompts as text. The first level of the index is the number of the file.

    Returns:
        `tuple[pd.Series, str, str]`: the number of each row's part, what it counts, and a sentence that says how the
        groups were found.

    Raises:
        [`UserError`]: prompts occur again after runs of different lengths, so that groups cannot be found.
    """
    files = pd.Series(prompts.index.get_level_values(0), index=prompts.index) + 1
    begins_run = (prompts != prompts.shift()) | (files != files.shift())
    runs = begins_run.cumsum()
    run_sizes = runs.value_counts()
    prompt_sizes = prompts.groupby([files, prompts]).size()
    shortest_run = run_sizes.min()
    longest_run = run_sizes.max()
    occurs_again = len(prompt_sizes) < len(run_sizes)
    group_size = run_sizes.mode().min()
    are_multiples = (run_sizes % group_size == 0).all()
    if group_size > 1 and (shortest_run == longest_run or (occurs_again and are_multiples)):
        how_grouped = (
            f"Without a column of steps, {group_size} completions of a prompt that follow each other are a group. "
            "If groups are larger, name the step: --step_column."
        )
        return runs, "in order", how_grouped
    if occurs_again and prompt_sizes.nunique() > 1:
        raise UserError(
            f"Groups cannot be found without a column of steps: a prompt has {shortest_run} to {longest_run} rows in "
            "succession, and occurs again later. Name the step: --step_column, or give a file for each step."
        )
    how_grouped = (
        f"Without a column of steps, all completions of a prompt in a file (up to {prompt_sizes.max()}) are a group. "
        "If a file has several steps, name the step: --step_column."
    )
    return files, "files", how_grouped


def _repeats(steps: pd.Series, prompts: pd.Series) -> tuple[pd.Series, tuple[str, ...]]:
    """
    Number the groups of a prompt in a step, in which it occurs several times if its text does in the dataset.

    If prompts have the most frequent number of completions, or a multiple of it, that number is the size of a group.
    Which completions of a prompt are together does not matter much: one policy has sampled them.

    Args:
        steps (`pd.Series` of n rows): the step of each completion.
        prompts (`pd.Series` of n rows): its prompt as text.

    Returns:
        `tuple[pd.Series, tuple[str, ...]]`: the number of each completion's group among those of its prompt in its
        step, from 0; and a sentence that says how they were divided, if any were.
    """
    of_prompt = prompts.groupby([steps, prompts])
    sizes = of_prompt.size()
    group_size = sizes.mode().min()
    larger = sizes[sizes > group_size]  # a smaller one was cut off
    if larger.empty or group_size == 1 or (larger % group_size > 0).any():
        return pd.Series(0, index=prompts.index), ()
    how_divided = (
        f"Prompts with a multiple of {group_size} completions at once: {len(larger):,}. Each {group_size} of these "
        "completions are a group."
    )
    return of_prompt.cumcount() // group_size, (how_divided,)


def _no_groups(prompts: pd.Series, column: str) -> UserError:
    """Return the error for completions without groups."""
    if prompts.empty:
        return UserError(f"No row has a prompt (column {column!r}). Name the column: --prompt_column.")
    if prompts.is_unique:
        return UserError(
            f"All {len(prompts):,} prompts (column {column!r}) are different: this gives no groups. Name "
            "the column that holds the prompt alone: --prompt_column."
        )
    return UserError(
        "No prompt has several completions in a step: this gives no groups. Name the step: --step_column."
    )


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


def _audit_groups(groups: pd.DataFrame, source: str, notes: tuple[str, ...] = (), unit: str = "steps") -> Audit:
    """The audit of a table with a group a row: `step`, which counts a `unit`, `prompt_id` and `kind`."""
    is_kind = {kind: groups["kind"] == kind for kind in KINDS}
    return _summarize(groups.assign(**is_kind), source, notes, unit)


def _audit_logs(path: Path) -> Audit:
    """
    The audit of a TRL run without logged completions, whose logs have the share of zero-variance groups.

    Args:
        path (`Path`): its `output_dir`, or a `trainer_state.json`.
    """
    if not read_logs(path):
        raise UserError(
            f"{path} has nothing that `audit` reads. A run of this package has `{GROUPS_FILE}`; one of TRL has "
            f"`{COMPLETIONS}` if it logged completions, and logs in the `{STATE_FILE}` of a checkpoint."
            f"{_hint_of_tables(path)}"
        )
    run = read_run(path)
    steps, zero_variance = run.series("frac_reward_zero_std")
    if len(steps) == 0:
        raise UserError(
            f"{path} has neither completions nor logs of `frac_reward_zero_std`. Train with `log_completions=True`."
        )
    logs = pd.DataFrame({"step": steps, "effective": 1 - zero_variance})
    logs = logs.assign(prompt_id=math.nan, easy=math.nan, hard=math.nan)
    source = f"the logs in {path}, which count batches in the place of groups if rewards are scaled by batch"
    return _summarize(logs, source, _note_of_selection(run.about))


def _hint_of_tables(folder: Path) -> str:
    """Say how to audit a folder of files with completions; empty if it has none."""
    for ending in ("jsonl", "parquet"):
        num_files = len(list(folder.glob(f"*.{ending}")))
        if num_files > 0:
            return f" It has {num_files} .{ending} files: if they hold completions, give {folder}/*.{ending}."
    return ""


def _summarize(table: pd.DataFrame, source: str, notes: tuple[str, ...] = (), unit: str = "steps") -> Audit:
    """
    Compute the shares of a run.

    Args:
        table (`pd.DataFrame`): `step`, `prompt_id` and a share of each kind in each row, which stands for a group or
            for all groups of a log. The `prompt_id` is -1 or NaN where it is not known.
        source (`str`): what was read.
        notes (`tuple[str, ...]`, *optional*): see [`Audit`].
        unit (`str`, *optional*, defaults to `"steps"`): what `step` counts.

    Returns:
        [`Audit`]: shares of groups.
    """
    table = table.sort_values("step", kind="stable")
    steps = table["step"].unique()
    periods = np.array_split(steps, min(PERIODS, len(steps)))
    parts = [table[table["step"].isin(period)] for period in periods]
    if len(parts) > 1:
        parts.append(table)
    shares = pd.DataFrame([_shares_of(part) for part in parts])
    again, after_effective = _followed(table)
    return Audit(source, shares.rename(columns={"steps": unit}), again, after_effective, notes)


def _shares_of(part: pd.DataFrame) -> dict[str, float | str]:
    """A row of `Audit.shares`, of a part of the table."""
    num_groups = part["prompt_id"].count()
    first = f"{part['step'].min():.0f}"
    last = f"{part['step'].max():.0f}"
    return {
        "steps": first if first == last else f"{first}-{last}",
        "groups": num_groups if num_groups else math.nan,
        **part[list(KINDS)].mean(),
    }


def _followed(table: pd.DataFrame) -> tuple[Followed, Followed]:
    """
    How often groups have zero variance, by the group of their prompt in the last step before that had one.

    Args:
        table (`pd.DataFrame`): see [`_summarize`], in the order of steps.

    Returns:
        `tuple[Followed, Followed]`: after a group with zero variance, and after an effective one.
    """
    prompts = table["prompt_id"].where(table["prompt_id"] != -1)
    rows = pd.DataFrame({"step": table["step"], "prompt": prompts, "has_zero_variance": table["effective"] == 0})
    # Of a prompt that comes several times in a step, the last group stands for the step
    rows = rows.dropna(subset="prompt").drop_duplicates(["step", "prompt"], keep="last")
    before = rows.groupby("prompt")["has_zero_variance"].shift()  # NaN for the first group of each prompt
    followed = []
    for had_zero_variance in (True, False):
        has_zero_variance = rows["has_zero_variance"][before == had_zero_variance]
        followed.append(Followed(len(has_zero_variance), float(has_zero_variance.mean())))
    return followed[0], followed[1]
