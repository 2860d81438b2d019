"""
Completions as columns of numbers, from the files of several frameworks.

    TRL 1.16     completions/completions_00010.parquet: `step`, `prompt`, `completion`, a column per reward function, those
                 of `log_extra`, and `advantage` (`GRPOTrainer.log`, with `log_completions=True`)
    verl         `trainer.rollout_data_dir`/10.jsonl: `input`, `output`, `gts`, `score`, `step`
                 (`RayPPOTrainer._dump_generations`)
    prime-rl     rollouts/step_10/train_rollouts.jsonl: `example_id`, `prompt`, `completion`, `reward`, ...
                 (`save_rollouts`, verifiers' `RolloutOutput`)
    OpenRLHF     `input`, `output`, `reward` (`openrlhf.cli.batch_inference`); its trainers write no rollouts
    open-instruct  `prompt_idx`, `reward`, `step`, `response_tokens` (`RolloutRecord`)

Other names are given by the user. A prompt is known by a hash of its text, its messages, or its number.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq


class UnreadableRollouts(ValueError):
    """What is wrong with a file of rollouts, in one sentence. `damaged`: it is one, but cannot be read."""

    def __init__(self, message: str, damaged: bool = False):
        super().__init__(message)
        self.damaged = damaged


@dataclass(frozen=True)
class Format:
    """A framework's names for `prompt`, `completion`, `reward`, `step` and `tokens`, and what tells it from others."""

    name: str
    marks: tuple[str, ...]
    columns: Mapping[str, str]


FORMATS = (
    Format("TRL completion tables", ("step", "prompt", "completion", "advantage"), {"prompt": "prompt", "completion": "completion", "step": "step"}),
    Format("verl rollouts", ("input", "output", "score"), {"prompt": "input", "completion": "output", "reward": "score", "step": "step"}),
    Format("prime-rl rollouts", ("example_id", "reward"), {"prompt": "prompt", "completion": "completion", "reward": "reward", "step": "step"}),
    Format("OpenRLHF rollouts", ("input", "output", "reward"), {"prompt": "input", "completion": "output", "reward": "reward", "step": "step"}),
    Format("open-instruct rollouts", ("prompt_idx", "reward"), {"prompt": "prompt_idx", "tokens": "response_tokens", "reward": "reward", "step": "step"}),
)  # fmt: skip
#: Names that are tried in files of no known framework
USUAL = {
    "prompt": ("prompt", "input", "question", "query", "problem", "prompt_id", "example_id"),
    "completion": ("completion", "output", "response", "completions", "outputs", "responses"),
    "reward": ("reward", "score", "rewards", "scores", "total_reward"),
    "step": ("step", "global_step", "training_step", "iteration", "train_step"),
    "tokens": ("tokens", "completion_tokens", "response_tokens", "completion_length", "response_length", "completion_ids"),
}  # fmt: skip
ROLES = tuple(USUAL)
TEXTS, TEXT_LENGTH = 4096, 2000  # prompts whose text is kept, and how much of it
CHUNK = 50_000  # rows
BAD_LINES = 0.01  # share of lines that may be unreadable
SHOWN = 8  # columns, in a message


class Prompts:
    """Numbers of prompts, in the order in which they occur; the texts of the first ones are kept."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self.texts: list[str] = []

    def number(self, text: str) -> int:
        """The number of a prompt."""
        key = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=12).digest()
        found = self._numbers.setdefault(key, len(self._numbers))
        if found == len(self.texts) < TEXTS:
            self.texts.append(text[:TEXT_LENGTH])
        return found


@dataclass(frozen=True)
class Rows:
    """Completions as columns `(n,)`; NaN where something is not known. `reward_columns` is what `reward` is the sum of."""

    step: np.ndarray
    prompt: np.ndarray
    reward: np.ndarray
    advantage: np.ndarray
    tokens: np.ndarray
    characters: np.ndarray
    file: Path
    format: str
    reward_columns: str
    several_rewards: bool = False
    has_steps: bool = True
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.step)

    def take(self, chosen: np.ndarray) -> Rows:
        """The chosen rows, by a mask or by positions."""
        return replace(self, **{name: getattr(self, name)[chosen] for name in ARRAYS})

    @classmethod
    def joined(cls, parts: list[Rows]) -> Rows:
        """The rows of several files, one after the other."""
        columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ARRAYS}
        notes = tuple(dict.fromkeys(note for part in parts for note in part.notes))
        has_steps = all(part.has_steps for part in parts)
        if not has_steps and len(parts) > 1:  # a file is a step
            columns["step"] = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        return replace(parts[0], **columns, notes=notes, has_steps=has_steps or len(parts) > 1)


ARRAYS = tuple(f.name for f in fields(Rows) if f.type == "np.ndarray")


def read_rows(file: Path, columns: Mapping[str, str], prompts: Prompts) -> Rows:
    """
    Read the completions of a file.

    Args:
        file (`Path`): parquet, or JSON lines, which may be compressed with gzip.
        columns (`Mapping[str, str]`): the user's names, by role; `reward` may be a sum, as `accuracy+0.5*format`.
        prompts ([`Prompts`]): gets those that are new.

    Raises:
        [`UnreadableRollouts`]: the file is damaged, or lacks a column.
    """
    if file.suffix == ".parquet":
        return _read_parquet(file, columns, prompts)
    if re.search(r"\.(jsonl|ndjson|json)(\.gz)?$", file.name):
        return _read_lines(file, columns, prompts)
    raise UnreadableRollouts(
        f"{file} is neither .parquet nor .jsonl (or .jsonl.gz). Convert it, a row per completion."
    )


def shown(files: list[Path]) -> str:
    return str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more files"


def _resolve(file: Path, names: list[str], given: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """The format of a file with columns `names`, and its columns by role."""
    found = next((f for f in FORMATS if set(f.marks) <= set(names)), None)
    chosen = {role: name for role in ROLES for name in reversed(USUAL[role]) if name in names}
    if found:
        chosen.update({role: name for role, name in found.columns.items() if name in names})
        if "reward" not in found.columns and "reward" not in given:
            chosen.pop("reward", None)
    missing = [name for role, name in given.items() for name in _terms(name) if role != "reward" and name not in names]
    missing += [name for name in _terms(given.get("reward", "")) if name not in names]
    if missing:
        raise UnreadableRollouts(f"{file} has no column {missing[0]!r} (--map). It has {_listed(names)}.")
    chosen.update(given)
    lacking = [
        role for role in ("prompt", "reward") if role not in chosen and not (found and role not in found.columns)
    ]
    if lacking:
        raise UnreadableRollouts(
            f"{file} has no column for the {' and the '.join(lacking)}; it has {_listed(names)}. Name it: "
            f"--map {','.join(f'{role}=COLUMN' for role in lacking)}."
        )
    return found.name if found else "rollouts", chosen


def _listed(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _terms(reward: str) -> dict[str, float]:
    """`"accuracy+0.5*format"` as weights by column."""
    terms = {}
    for term in filter(None, reward.split("+")):
        weight, times, name = term.strip().rpartition("*")
        try:
            terms[name.strip()] = float(weight) if times else 1.0
        except ValueError:
            terms[term.strip()] = 1.0
    return terms


def _step_of_path(file: Path) -> int | None:
    """The step in a path such as `rollouts/step_12/train_rollouts.jsonl`, `12.jsonl` or `completions_00012.parquet`."""
    found = re.search(r"(\d+)\.\w+(\.gz)?$", file.name) or re.search(r"step\D?(\d+)", file.parent.name)
    return int(found.group(1)) if found else None


def _read_parquet(file: Path, given: Mapping[str, str], prompts: Prompts) -> Rows:
    try:
        table = pq.ParquetFile(file)
        names = table.schema_arrow.names
        kind, columns = _resolve(file, names, given)
        numeric = [f.name for f in table.schema_arrow if pa.types.is_floating(f.type) or pa.types.is_integer(f.type)]
        weights = _terms(columns.get("reward", ""))
        if not weights:  # TRL's: a column per reward function
            weights = {name: 1.0 for name in numeric if name not in ("step", "advantage")}
        if not weights:
            raise UnreadableRollouts(f"{file} has no column of numbers for the reward. Name it: --map reward=COLUMN.")
        wanted = [columns[role] for role in ("prompt", "completion", "step", "tokens") if role in columns]
        advantage = ["advantage"] if "advantage" in numeric else []
        parts = []
        for batch in table.iter_batches(CHUNK, columns=list(dict.fromkeys([*wanted, *weights, *advantage]))):
            n = batch.num_rows
            parts.append(
                Rows(
                    step=_steps(_numbers(batch, columns["step"]), file)
                    if "step" in columns
                    else np.zeros(n, np.int64),
                    prompt=_numbered(batch[columns["prompt"]], prompts),
                    reward=_total([_numbers(batch, name) * weight for name, weight in weights.items()]),
                    advantage=_numbers(batch, "advantage") if advantage else np.full(n, np.nan),
                    tokens=_lengths(batch[columns["tokens"]]) if "tokens" in columns else np.full(n, np.nan),
                    characters=_characters(batch[columns["completion"]]) if "completion" in columns else np.zeros(n),
                    file=file,
                    format=kind,
                    reward_columns=" + ".join(weights),
                    several_rewards=len(weights) > 1,
                    notes=_weights_note(weights, given),
                )
            )
    except (OSError, pa.ArrowException) as error:
        reason = str(error).partition("\n")[0]
        raise UnreadableRollouts(
            f"{file} cannot be read as parquet ({reason}): it may be half-written, so wait for the run or leave it out.",
            True,
        ) from error
    rows = Rows.joined(parts) if parts else _empty(file, kind)
    return _with_steps(replace(rows, has_steps=True), file, "step" in columns)


def _weights_note(weights: Mapping[str, float], given: Mapping[str, str]) -> tuple[str, ...]:
    if len(weights) < 2 or "reward" in given:
        return ()
    return (
        f"The reward is taken as {' + '.join(weights)}; other weights: --map reward={'+'.join(f'1*{n}' for n in weights)}.",
    )


def _empty(file: Path, kind: str) -> Rows:
    none = np.empty(0)
    return Rows(none.astype(np.int64), none.astype(np.int64), none, none, none, none, file, kind, "")


def _with_steps(rows: Rows, file: Path, recorded: bool) -> Rows:
    """Steps from the path, where the rows have none."""
    if recorded:
        return rows
    step = _step_of_path(file)
    if step is None:
        return replace(rows, has_steps=False)
    return replace(rows, step=np.full(len(rows), step), has_steps=True)


def _steps(values: np.ndarray, file: Path) -> np.ndarray:
    if np.isnan(values).any():
        raise UnreadableRollouts(
            f"{file}: some rows have no step. Leave these rows out, or name another column: --map step=COLUMN."
        )
    return values.astype(np.int64)


def _numbers(batch: pa.RecordBatch, name: str) -> np.ndarray:
    return pc.cast(batch[name], pa.float64()).to_numpy(zero_copy_only=False)


def _total(parts: list[np.ndarray]) -> np.ndarray:
    """The sum of reward functions, those without a score left out; NaN if none has one."""
    total = np.nansum(parts, axis=0)
    total[np.isnan(parts).all(axis=0)] = np.nan
    return total


def _texts(column: pa.Array) -> pa.Array:
    """Texts, or the contents of messages in one, as strings."""
    if pa.types.is_list(column.type) and pa.types.is_struct(column.type.value_type):
        messages = column.flatten()
        if "content" in [f.name for f in column.type.value_type] and pa.types.is_string(
            messages.field("content").type
        ):
            lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
            offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
            contents = pc.fill_null(messages.field("content"), "")
            return pc.binary_join(pa.ListArray.from_arrays(offsets, contents), "\n")
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return column
    return pa.array([None if value is None else _text(value) for value in column.to_pylist()], pa.string())


def _numbered(column: pa.Array, prompts: Prompts) -> np.ndarray:
    encoded = pc.fill_null(_texts(column), "").dictionary_encode()
    numbers = np.array([prompts.number(text) for text in encoded.dictionary.to_pylist()], dtype=np.int64)
    return numbers[encoded.indices.to_numpy()]


def _characters(column: pa.Array) -> np.ndarray:
    return pc.fill_null(pc.utf8_length(_texts(column)), 0).to_numpy(zero_copy_only=False).astype(np.float64)


def _lengths(column: pa.Array) -> np.ndarray:
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        column = pc.list_value_length(column)
    return pc.cast(column, pa.float64()).to_numpy(zero_copy_only=False)


def _text(value: Any) -> str:
    """A prompt or a completion as text: messages are those of their contents."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(v, dict) and isinstance(v.get("content"), str) for v in value):
        return "\n".join(v["content"] for v in value)
    return json.dumps(value, sort_keys=True, default=str)


def _read_lines(file: Path, given: Mapping[str, str], prompts: Prompts) -> Rows:
    """JSON lines. A line is a completion; or a group, where its reward is a list."""
    bad: list[int] = []
    lines = _objects(file, bad)
    first = next(lines, None)
    if first is None:
        if bad:
            raise UnreadableRollouts(
                f"{file}: line {bad[0]} is no JSON object. A file of rollouts has one on each line.", True
            )
        return _empty(file, "rollouts")
    kind, columns = _resolve(file, list(first), given)
    weights = _terms(columns["reward"]) if "reward" in columns else {}
    if not weights:
        raise UnreadableRollouts(
            f"{file} has no column for the reward; it has {_listed(list(first))}. Name it: --map reward=COLUMN."
        )
    prompt, completion, step, tokens = (columns.get(role) for role in ("prompt", "completion", "step", "tokens"))
    out: list[tuple[float, int, float, float, float]] = []
    blocks: list[np.ndarray] = []
    count = 0
    for line in _chained(first, lines):
        count += 1
        number = prompts.number(_text(line.get(prompt)))
        at = _number(line.get(step)) if step else 0.0
        rewards = [line.get(name) for name in weights]
        answers, lengths = line.get(completion), line.get(tokens)
        if isinstance(rewards[0], list):  # a group on a line
            many = len(rewards[0])
            answers = answers if isinstance(answers, list) and len(answers) == many else [None] * many
            entries = zip(*rewards, strict=False)
            out += [
                (at, number, _sum(entry, weights), np.nan, float(len(_text(a))) if a is not None else 0.0)
                for entry, a in zip(entries, answers, strict=False)
            ]
        else:
            length = float(len(lengths)) if isinstance(lengths, list) else _number(lengths)
            out.append(
                (
                    at,
                    number,
                    _sum(rewards, weights),
                    length,
                    float(len(_text(answers))) if answers is not None else 0.0,
                )
            )
        if len(out) >= CHUNK:
            blocks.append(np.array(out, dtype=np.float64))
            out = []
    if len(bad) > max(1, BAD_LINES * count):
        raise UnreadableRollouts(f"{file}: {len(bad)} lines are no JSON objects, the first is line {bad[0]}.", True)
    data = np.concatenate([*blocks, np.array(out, dtype=np.float64).reshape(-1, 5)])
    rows = Rows(
        step=_steps(data[:, 0], file),
        prompt=data[:, 1].astype(np.int64),
        reward=data[:, 2],
        advantage=np.full(len(data), np.nan),
        tokens=data[:, 3],
        characters=data[:, 4],
        file=file,
        format=kind,
        reward_columns=" + ".join(weights),
        several_rewards=len(weights) > 1,
        notes=(f"Unreadable lines were left out, the first is line {bad[0]} of {file.name}.",) if bad else (),
    )
    return _with_steps(rows, file, step is not None)


def _chained(first: dict, rest: Iterator[dict]) -> Iterator[dict]:
    yield first
    yield from rest


def _sum(rewards: Iterable[Any], weights: Mapping[str, float]) -> float:
    numbers = [_number(reward) * weight for reward, weight in zip(rewards, weights.values(), strict=True)]
    known = [number for number in numbers if number == number]
    return sum(known) if known else float("nan")


def _number(value: Any) -> float:
    """A number, NaN for whatever is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")


def _objects(file: Path, bad: list[int]) -> Iterator[dict]:
    """The objects of a file, a line each; the numbers of lines that are none go to `bad`."""
    number = 0
    try:
        with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.isspace():
                    continue
                try:
                    value = json.loads(line)
                except ValueError:
                    value = None
                if isinstance(value, dict):
                    yield value
                else:
                    bad.append(number)
    except (EOFError, zlib.error):  # half-written, compressed
        bad.append(number + 1)
    except OSError as error:
        raise UnreadableRollouts(f"{file} cannot be read ({error}).", True) from error
