"""
Groups of a run from what it left behind: TRL's completion tables, other frameworks' rollout files, our `groups.parquet`.

A file of completions is read as columns (see `completion_files.py`), and its completions are joined to groups here: those
of one prompt in one step. What cannot be read, or is not there, is left out and said in `notes`.

What is deliberately not here: torch, and the texts of completions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trl_dataeff.rollouts.classification import RewardScale, kinds_of
from trl_dataeff.rollouts.group import KINDS
from trl_dataeff.tracking.completion_columns import TRL, Prompts, Rows, UnreadableRollouts, shown
from trl_dataeff.tracking.completion_files import read_rows
from trl_dataeff.tracking.group_table import RUN, UnreadableTable, read_group_table


GROUP_COLUMNS = ("step", "prompt_id", "success_rate", "kind")
NOT_ROLLOUTS = r"\.|(eval|val|validation|metrics)([_.-]|\d)"  # names of files that a search passes over
MOST_COMPLETIONS = 64  # of a group, where their number is inferred from success rates
ZERO_ADVANTAGE = 1e-3  # equal rewards leave up to rounding / (0 + 1e-4), TRL's denominator
CHARACTERS_PER_TOKEN = 4.0


@dataclass(frozen=True)
class RecordedGroups:
    """
    The groups of a run, in the order of their steps. Arrays are `(M,)`.

    Attributes:
        step: optimizer step, int64; the position in the file where no step is recorded.
        prompt: number of the prompt, from 0, int64.
        success: success rate in [0, 1], NaN if no completion was scored.
        kind: codes of [`KINDS`], int8.
        tokens: of its completions, NaN if not known. seconds: that its generation took, NaN if not known.
        group_size: completions of a group; 0 if not known. sizes: of each group, int64; `None`: all have `group_size`.
        texts: of the first prompts, for predictions from them.
        format: what the files are, in words. files: how many.
        has_steps: whether steps are recorded.
        estimated_tokens: whether tokens are characters divided by four.
        step_seconds: mean duration of an optimizer step, NaN if not known.
        methods: what the run used that plain GRPO does not have, in words.
        notes: what was left out, or assumed, a sentence each.
    """

    step: np.ndarray
    prompt: np.ndarray
    success: np.ndarray
    kind: np.ndarray
    tokens: np.ndarray
    seconds: np.ndarray
    group_size: int
    sizes: np.ndarray | None = None
    texts: tuple[str, ...] = ()
    format: str = ""
    files: int = 1
    has_steps: bool = True
    estimated_tokens: bool = False
    step_seconds: float = float("nan")
    methods: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.step)


def read_groups(
    paths: Sequence[str | Path],
    columns: Mapping[str, str] | None = None,
    *,
    reward_range: tuple[float, float] | None = None,
    group_size: int | None = None,
) -> RecordedGroups:
    """
    Read the groups of one run.

    Args:
        paths: files, or folders that are searched for `groups.parquet`, completion tables, or JSON lines, in this order.
        columns (`Mapping[str, str]`, *optional*): column of a `prompt`, `reward`, `step`, `completion` or `tokens`, where
            it has an unusual name.
        reward_range (`tuple[float, float]`, *optional*): lowest and highest total reward; by default those that occur.
        group_size (`int`, *optional*): completions of a group; by default the most frequent number.

    Raises:
        [`UnreadableRollouts`]: there is nothing to read, or it is not rollouts of one run.
    """
    found = [file for path in paths for file in find_files(path)]
    files = list({file.resolve(): file for file in found}.values())
    ours = [file for file in files if _is_group_log(file)]
    if ours and len(files) > 1:
        raise UnreadableRollouts(
            f"{len(files)} files are given, {ours[0]} among them, which is a whole run. Audit one run at a time."
        )
    if ours and (columns or reward_range is not None):
        raise UnreadableRollouts(
            f"{ours[0]} is this package's table of groups, whose columns are known and whose rewards are classified already. Leave "
            "out --map and --reward_range, or give the completions of the run."
        )
    groups = (
        _read_group_log(ours[0], group_size)
        if ours
        else _read_completions(files, columns or {}, reward_range, group_size)
    )
    roots = {path if path.is_dir() else path.parent for path in map(Path, paths)}
    return replace(groups, step_seconds=_step_seconds(roots))


def find_files(path: str | Path) -> list[Path]:
    """The files of a run at `path`, in the order of the numbers in their names."""
    path = Path(path).expanduser()
    if path.is_file():
        return [path]
    if not path.exists():
        raise UnreadableRollouts(f"{path} does not exist. Give a run's folder, or its files of completions.")
    for pattern in (
        *("groups.parquet", "dataeff/groups.parquet", "completions/completions_*.parquet", "*.parquet"),
        *("*.jsonl*", "*.ndjson", "**/*rollouts*.jsonl*", "**/*.jsonl*"),
    ):
        found = [file for file in path.glob(pattern) if not re.match(NOT_ROLLOUTS, file.name)]
        if found:
            return sorted(found, key=_natural)
    raise UnreadableRollouts(
        f"{path} holds no rollouts: no groups.parquet, no completions/*.parquet and no *.jsonl. TRL writes completions with "
        "`log_completions=True` and `logging_steps=1`."
    )


def _natural(path: Path) -> list[tuple[int, str]]:
    """For sorting: `9.jsonl` before `10.jsonl`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(path)) if part]


def _is_group_log(file: Path) -> bool:
    try:
        return file.suffix == ".parquet" and set(GROUP_COLUMNS) <= set(pq.read_schema(file).names)
    except (OSError, pa.ArrowException):
        return False


def _read_group_log(file: Path, group_size: int | None) -> RecordedGroups:
    """`groups.parquet` of this package's trainer: a row is a group."""
    try:
        table, left_out = read_group_table(file, GROUP_COLUMNS)
    except UnreadableTable as error:
        raise UnreadableRollouts(f"{file} {error}. Leave it out, or give the completions of the run.") from error
    names = table.column_names
    if "origin" in names:
        table = table.filter(pc.is_in(table["origin"], pa.array(["fresh", "reference"])))
    known = len(table)
    table = table.filter(pc.greater_equal(table["prompt_id"], 0)).sort_by("step")
    if not len(table):
        reason = (
            "its prompts are not known by row, as with a streaming dataset: give the completions of the run (`log_completions=True`)"
            if known
            else "audit a run that has made a step"
        )
        raise UnreadableRollouts(f"{file} holds no group of a known prompt; {reason}.")

    def numbers(name: str) -> np.ndarray:
        if name not in names:
            return np.full(len(table), np.nan)
        return np.asarray(table[name].to_numpy(), dtype=np.float64)

    success, sizes = numbers("success_rate"), numbers("completions")
    if not np.isnan(sizes).any():  # logs of earlier versions lack the column
        group_size = int(sizes.max())  # groups that were stopped have fewer
    kinds = pc.index_in(table["kind"], pa.array(KINDS)).to_numpy().astype(np.int8)
    _, prompt = np.unique(table["prompt_id"].to_numpy(), return_inverse=True)
    return RecordedGroups(
        step=table["step"].to_numpy().astype(np.int64),
        prompt=prompt.astype(np.int64),
        success=success,
        kind=kinds,
        tokens=numbers("tokens"),
        seconds=numbers("seconds"),
        group_size=group_size or _size_of_rates(success),
        sizes=None if np.isnan(sizes).any() else sizes.astype(np.int64),
        format="groups.parquet of trl-dataeff",
        methods=_methods(file, table),
        notes=(f"{left_out:,} rows have no step, prompt or kind and are left out.",) if left_out else (),
    )


def _methods(file: Path, table: pa.Table) -> tuple[str, ...]:
    """What sets a run apart from plain GRPO: by its `run.json` beside the table or, without it, by what the table shows."""
    names = table.column_names
    found = ["predictions"] if "predicted" in names and table["predicted"].null_count < len(table) else []
    dropped = "disposition" in names and bool(pc.any(pc.equal(table["disposition"], "dropped")).as_py())
    try:
        about = json.loads((file.parent / "run.json").read_bytes())
        own = (table.schema.metadata or {}).get(RUN, b"").decode() in ("", about["run"])  # and not of a later run
        arguments, settings = (about["arguments"], about["settings"]) if own else ({}, {})
        selector = settings.get("selector")
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        arguments, settings, selector = {}, {}, None
    if not found and selector not in (None, "NoneType", "UniformSelector"):
        found.append(str(selector))
    # Earlier versions wrote what was asked for, and not whether it was possible
    if settings.get("replays", bool(arguments.get("replay_fraction"))):
        found.append("replay")
    if settings.get("dynamic sampling", arguments.get("dynamic_sampling", dropped)):
        found.append("dynamic sampling")
    if settings.get("sequential rollouts", arguments.get("sequential_rollouts", False)):
        found.append("sequential rollouts")
    return tuple(found)


def _size_of_rates(success: np.ndarray) -> int:
    """The smallest number of completions of which all success rates are shares; 0 if there is none."""
    rates = np.unique(success[~np.isnan(success)])
    for size in range(2, MOST_COMPLETIONS + 1):
        if len(rates) > 2 and np.abs(rates * size - np.round(rates * size)).max() < 1e-3:
            return size
    return 0


def _read_completions(
    files: list[Path], columns: Mapping[str, str], reward_range: tuple[float, float] | None, group_size: int | None
) -> RecordedGroups:
    prompts, parts, notes, failed = Prompts(), [], [], []
    folders = len({file.parent for file in files}) if len(files) > 1 else 0
    for file in files:
        try:
            parts.append(read_rows(file, columns, prompts, folders))
        except UnreadableRollouts as error:
            if len(files) == 1 or not error.corrupt:
                raise
            failed.append(str(error))
    if failed:
        notes.append(f"{len(failed)} of {len(files)} files were left out: {failed[0]}")
    parts = [part for part in parts if len(part)]
    if not parts:
        raise UnreadableRollouts(
            failed[0] if failed else f"{shown(files)}: no completions. Audit a run that has made a step."
        )
    if len(formats := {part.format for part in parts}) > 1:
        raise UnreadableRollouts(f"{shown(files)}: {' and '.join(sorted(formats))}. Audit one run at a time.")
    rows = Rows.joined(parts)
    _check_one_run(files, parts)
    notes += rows.notes
    rows, repeats = _without_repeats(rows)
    if repeats:
        notes.append(
            f"{repeats} steps repeat the completions of the step before, on which they train again; they count once."
        )
    if np.isnan(rows.reward).all():
        raise UnreadableRollouts(
            f"{shown(files)}: no reward is a number in {rows.reward_columns}. Name the column: --map reward=COLUMN."
        )
    unscored = float(np.isnan(rows.reward).mean())
    if unscored:
        notes.append(f"{unscored:.1%} of the completions have no reward (NaN) and are left out of their groups.")
    return replace(
        _grouped(rows, reward_range, group_size, notes, shown(files)), texts=tuple(prompts.texts), files=len(files)
    )


def _check_one_run(files: list[Path], parts: list[Rows]) -> None:
    """Folders with the same steps are different runs: a prompt's history is that of one policy."""
    seen: dict[int, Path] = {}
    for part in parts:
        for step in np.unique(part.step).tolist() if part.has_steps else ():
            other = seen.setdefault(step, part.file.parent)
            if other != part.file.parent:
                raise UnreadableRollouts(
                    f"{other} and {part.file.parent} both have step {step}: they are different runs. Audit one run at a time."
                )


def _without_repeats(rows: Rows) -> tuple[Rows, int]:
    """Leave out steps of TRL's tables whose completions are those of the recorded step before, and count them."""
    if not rows.has_steps or rows.format != TRL.name:  # others log a step as it is generated
        return rows, 0
    order = np.lexsort((rows.content, rows.advantage, rows.reward, rows.prompt, rows.step))
    _, number, counts = np.unique(rows.step, return_inverse=True, return_counts=True)
    columns = np.stack([rows.prompt, rows.reward, rows.advantage, rows.content], axis=1, dtype=np.float64)[order]
    of_step = np.split(columns, np.cumsum(counts)[:-1])
    same = [np.array_equal(before, step, equal_nan=True) for before, step in pairwise(of_step)]
    repeated = np.array([False, *same])
    return rows.take(~repeated[number]), int(repeated.sum())


def _grouped(
    rows: Rows, reward_range: tuple[float, float] | None, group_size: int | None, notes: list[str], name: str
) -> RecordedGroups:
    """Join completions to groups; what is left out is added to `notes`."""
    rows, size = _whole_groups(rows, group_size, notes, name)
    first = np.arange(0, len(rows), size)
    totals = rows.reward.reshape(-1, size)
    scale = RewardScale.of(reward_range)
    scale.observe(rows.reward)
    success = scale.success_rate(totals)
    estimated = rows.characters / CHARACTERS_PER_TOKEN
    tokens = np.where(np.isnan(rows.tokens), estimated, rows.tokens).reshape(-1, size).sum(axis=1)
    return RecordedGroups(
        step=rows.step[first] if rows.has_steps else np.arange(len(first)),
        prompt=rows.prompt[first],
        success=success,
        kind=kinds_of(_zero_variance(rows, totals), success),
        tokens=np.where(tokens > 0, tokens, np.nan),
        seconds=np.full(len(first), np.nan),
        group_size=size,
        format=rows.format,
        has_steps=rows.has_steps,
        estimated_tokens=bool(np.isnan(rows.tokens).any()),
        notes=tuple(notes),
    )


def _whole_groups(rows: Rows, group_size: int | None, notes: list[str], name: str) -> tuple[Rows, int]:
    """
    The rows of whole groups, in their order, and the size of a group. A prompt that comes up more than once in a step has
    as many groups there, in the order of the rows; groups with fewer completions than the others are left out.
    """
    run = rows.step if rows.has_steps else np.cumsum(np.diff(rows.prompt, prepend=-1) != 0)
    order = np.lexsort((rows.prompt, run))
    rows, run = rows.take(order), run[order]
    begins = np.concatenate([[True], (np.diff(run) != 0) | (np.diff(rows.prompt) != 0)])
    first = np.flatnonzero(begins)
    counts = np.diff(np.append(first, len(rows)))
    size = group_size or int(np.bincount(counts, weights=counts).argmax())
    if size < 2:
        where, how = (
            ("in a step", "log all of them") if rows.has_steps else ("in a row", "name the step: --map step=COLUMN")
        )
        raise UnreadableRollouts(
            f"{name}: most prompts have one completion {where}, so that there are no groups. GRPO samples several of each: {how}."
        )
    position = np.arange(len(rows)) - np.repeat(first, counts)
    first = np.flatnonzero(position % size == 0)
    sizes = np.diff(np.append(first, len(rows)))
    whole = np.repeat(sizes == size, sizes)
    if not whole.any():
        raise UnreadableRollouts(
            f"{name}: no group has {size} completions. Leave --num_generations out, or correct it."
        )
    if not whole.all():
        notes.append(f"{1 - whole.mean():.1%} of the completions are in groups of fewer than {size} and are left out.")
        rows = rows.take(whole)
    return rows, size


def _zero_variance(rows: Rows, totals: np.ndarray) -> np.ndarray:
    """Groups whose total rewards `(M, G)` are equal up to rounding, or infinite: bool `(M,)`."""
    if rows.several_rewards and not np.isnan(rows.advantage).any():  # TRL's own: its weights are not recorded
        return np.asarray(np.abs(rows.advantage).reshape(totals.shape).max(axis=1) <= ZERO_ADVANTAGE)
    low, high = np.fmin.reduce(totals, axis=1), np.fmax.reduce(totals, axis=1)
    rounding = 4 * np.finfo(np.float32).eps if rows.several_rewards else 0.0
    with np.errstate(invalid="ignore"):
        unequal = high - low > rounding * np.fmax.reduce(np.abs(totals), axis=1)
    return np.asarray(~unequal | np.isinf(totals).any(axis=1))


def _step_seconds(roots: set[Path]) -> float:
    """Mean of the `step_time` that TRL logs, from the latest checkpoint beside the files; NaN if there is none."""
    folders = {folder for root in roots for folder in (root, root.parent)}
    states = [state for folder in folders for state in folder.glob("checkpoint-*/trainer_state.json")]
    if not states:
        return float("nan")
    try:
        history = json.loads(max(states, key=_natural).read_text(encoding="utf-8"))["log_history"]
        times = [float(entry["step_time"]) for entry in history if entry.get("step_time") is not None]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return float("nan")
    return float(np.mean(times)) if times else float("nan")
