"""Reads a file of completions, parquet or JSON lines, as columns of numbers (see `completion_columns.py`)."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pandas.util import hash_array

from trl_dataeff.tracking.completion_columns import (
    TRL,
    Prompts,
    Rows,
    UnreadableRollouts,
    listed_columns,
    no_rows,
    resolve,
    terms_of,
    with_steps,
)


CHUNK = 50_000  # rows
BAD_LINES = 0.01  # share of lines that may be unreadable


def read_rows(file: Path, columns: Mapping[str, str], prompts: Prompts, folders: int) -> Rows:
    """
    Read the completions of a file.

    Args:
        file (`Path`): parquet, or JSON lines, which may be compressed with gzip.
        columns (`Mapping[str, str]`): the user's names, by role; `reward` may be a sum, as `accuracy+0.5*format`.
        prompts ([`Prompts`]): gets those that are new.
        folders (`int`): in how many folders the run's files are, if there are several files: where no column has the step, it is a
            number in the path. 0 for a single file.

    Raises:
        [`UnreadableRollouts`]: the file is corrupt, or lacks a column.
    """
    if file.suffix == ".parquet":
        return _read_parquet(file, columns, prompts, folders)
    if re.search(r"\.(jsonl|ndjson|json)(\.gz)?$", file.name):
        return _read_lines(file, columns, prompts, folders)
    raise UnreadableRollouts(
        f"{file} is neither .parquet nor .jsonl (or .jsonl.gz). Convert it, a row per completion."
    )


def _read_parquet(file: Path, given: Mapping[str, str], prompts: Prompts, folders: int) -> Rows:
    try:
        table = pq.ParquetFile(file)
        names = table.schema_arrow.names
        kind, columns = resolve(file, names, given)
        numeric = [f.name for f in table.schema_arrow if pa.types.is_floating(f.type) or pa.types.is_integer(f.type)]
        weights = terms_of(columns.get("reward", ""))
        if not weights:  # TRL's: a column per reward function
            weights = {n: 1.0 for n in numeric if n not in ("advantage", *columns.values()) and n[:2] != "__"}
        if not weights:
            raise UnreadableRollouts(f"{file} has no column of numbers for the reward. Name it: --map reward=COLUMN.")
        wanted = [columns[role] for role in ("prompt", "completion", "step", "tokens") if role in columns]
        advantage = ["advantage"] if "advantage" in numeric else []
        parts = []
        for batch in table.iter_batches(CHUNK, columns=list(dict.fromkeys([*wanted, *weights, *advantage]))):
            n = batch.num_rows
            parts.append(
                Rows(
                    step=_steps(_numbers(batch, columns["step"], "step"), file)
                    if "step" in columns
                    else np.zeros(n, np.int64),
                    prompt=_numbered(batch[columns["prompt"]], prompts),
                    reward=_total([_numbers(batch, name) * weight for name, weight in weights.items()]),
                    advantage=_numbers(batch, "advantage") if advantage else np.full(n, np.nan),
                    tokens=_lengths(batch[columns["tokens"]]) if "tokens" in columns else np.full(n, np.nan),
                    characters=_characters(batch[columns["completion"]]) if "completion" in columns else np.zeros(n),
                    content=_hashes(batch[columns["completion"]]) if kind == TRL.name else np.zeros(n),
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
    rows = Rows.joined(parts) if parts else no_rows(file, kind)
    return with_steps(replace(rows, has_steps=True), file, "step" in columns, folders)


def _weights_note(weights: Mapping[str, float], given: Mapping[str, str]) -> tuple[str, ...]:
    if len(weights) < 2 or "reward" in given:
        return ()
    return (
        f"The reward is taken as {' + '.join(weights)}; other weights: --map reward={'+'.join(f'1*{n}' for n in weights)}.",
    )


def _steps(values: np.ndarray, file: Path) -> np.ndarray:
    if not (np.abs(values) < 2**53).all():  # NaN, too
        raise UnreadableRollouts(
            f"{file}: some rows have no step. Leave these rows out, or name another column: --map step=COLUMN."
        )
    return values.astype(np.int64)


def _numbers(batch: pa.RecordBatch, name: str, role: str = "reward") -> np.ndarray:
    try:
        return np.asarray(pc.cast(batch[name], pa.float64()).to_numpy(zero_copy_only=False))
    except pa.ArrowException as error:
        raise UnreadableRollouts(
            f"Column {name!r} is not one of numbers. Name another: --map {role}=COLUMN."
        ) from error


def _total(parts: list[np.ndarray]) -> np.ndarray:
    """The sum of reward functions, those without a score left out; NaN if none has one."""
    total: np.ndarray = np.nansum(parts, axis=0)
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
    return np.asarray(numbers[encoded.indices.to_numpy()])


def _characters(column: pa.Array) -> np.ndarray:
    return np.asarray(pc.fill_null(pc.utf8_length(_texts(column)), 0).to_numpy(zero_copy_only=False), dtype=np.float64)


def _hashes(column: pa.Array) -> np.ndarray:
    """Of texts, as numbers that a float64 holds."""
    texts = pc.fill_null(_texts(column), "").to_numpy(zero_copy_only=False)
    return np.asarray(hash_array(texts) >> 11, dtype=np.float64)


def _lengths(column: pa.Array) -> np.ndarray:
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        column = pc.list_value_length(column)
    return np.asarray(pc.cast(column, pa.float64()).to_numpy(zero_copy_only=False))


def _text(value: Any) -> str:
    """A prompt or a completion as text: messages are those of their contents."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(v, dict) and isinstance(v.get("content"), str) for v in value):
        return "\n".join(v["content"] for v in value)
    return json.dumps(value, sort_keys=True, default=str)


def _length(tokens: Any) -> float:
    """Of tokens, or of their number; NaN if neither is given."""
    return float(len(tokens)) if isinstance(tokens, list) else _number(tokens)


def _size_and_hash(completion: Any) -> tuple[float, float]:
    """Characters of a completion, and a hash of it; 0 and 0 without one."""
    if completion is None:
        return 0.0, 0.0
    text = _text(completion)
    return float(len(text)), float(zlib.crc32(text.encode("utf-8", "replace")))


def _read_lines(file: Path, given: Mapping[str, str], prompts: Prompts, folders: int) -> Rows:
    """JSON lines. A line is a completion; or a group, where its reward is a list."""
    bad: list[int] = []
    lines = _objects(file, bad)
    first = next(lines, None)
    if first is None:
        if bad:
            raise UnreadableRollouts(
                f"{file}: line {bad[0]} is no JSON object. A file of rollouts has one on each line.", True
            )
        return no_rows(file, "rollouts")
    kind, columns = resolve(file, list(first), given)
    weights = terms_of(columns["reward"]) if "reward" in columns else {}
    if not weights:
        raise UnreadableRollouts(
            f"{file} has no column for the reward; it has {listed_columns(list(first))}. Name it: --map reward=COLUMN."
        )
    prompt, completion, step, tokens = (columns.get(role, "") for role in ("prompt", "completion", "step", "tokens"))
    out: list[tuple[float, ...]] = []
    blocks: list[np.ndarray] = []
    count = 0
    for line in _chained(first, lines):
        count += 1
        number = prompts.number(_text(line.get(prompt)))
        at = _number(line.get(step)) if step else 0.0
        rewards = [line.get(name) for name in weights]
        answers, lengths = line.get(completion), line.get(tokens)
        if of_group := [reward for reward in rewards if isinstance(reward, list)]:  # a group on a line
            many = len(of_group[0])
            rewards = [reward if isinstance(reward, list) else [reward] * many for reward in rewards]
            answers, lengths = (
                each if isinstance(each, list) and len(each) == many else [None] * many for each in (answers, lengths)
            )
            out += [
                (at, number, _sum(entry, weights), _length(n), *_size_and_hash(a))
                for entry, a, n in zip(zip(*rewards, strict=False), answers, lengths, strict=False)
            ]
        else:
            out.append(
                (
                    at,
                    number,
                    _sum(rewards, weights),
                    _length(lengths),
                    *_size_and_hash(answers),
                )
            )
        if len(out) >= CHUNK:
            blocks.append(np.array(out, dtype=np.float64))
            out = []
    if len(bad) > max(1, BAD_LINES * count):
        raise UnreadableRollouts(f"{file}: {len(bad)} lines are no JSON objects, the first is line {bad[0]}.", True)
    data = np.concatenate([*blocks, np.array(out, dtype=np.float64).reshape(-1, 6)])
    rows = Rows(
        step=_steps(data[:, 0], file),
        prompt=data[:, 1].astype(np.int64),
        reward=data[:, 2],
        advantage=np.full(len(data), np.nan),
        tokens=data[:, 3],
        characters=data[:, 4],
        content=data[:, 5],
        file=file,
        format=kind,
        reward_columns=" + ".join(weights),
        several_rewards=len(weights) > 1,
        notes=(f"Unreadable lines were left out, the first is line {bad[0]} of {file.name}.",) if bad else (),
    )
    return with_steps(rows, file, bool(step), folders)


def _chained(first: dict[str, Any], rest: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
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
    except (TypeError, ValueError, OverflowError):
        return float("nan")


def _objects(file: Path, bad: list[int]) -> Iterator[dict[str, Any]]:
    """The objects of a file, a line each; the numbers of lines that are none go to `bad`."""
    number = 0
    try:
        with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.isspace():
                    continue
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError):
                    value = None
                if isinstance(value, dict):
                    yield value
                else:
                    bad.append(number)
    except (EOFError, zlib.error):  # half-written, compressed
        bad.append(number + 1)
    except OSError as error:
        raise UnreadableRollouts(f"{file} cannot be read ({error}).", True) from error
