"""The version, errors that only the user can fix, atomic files, and content hashes."""

from __future__ import annotations

import difflib
import json
import math
import os
import sys
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash


if TYPE_CHECKING:
    import torch
    from datasets import Dataset

__version__ = "0.1.0"
#: Version of every file format that this package writes: checkpoints, embedding caches and saved predictors.
FORMAT = 2
_ROWS = 1024  # of a dataset that are read at a time


class UserError(ValueError):
    """
    Something that only the user can fix. The command prints it without a traceback; other exceptions keep theirs.

    Args:
        *messages (`str`): one per problem. Each says what was given, what is allowed, and the fix.
        exit_code (`int`, *optional*, defaults to `2`): exit code of the command.
    """

    def __init__(self, *messages: str, exit_code: int = 2):
        super().__init__("\n".join(messages))
        self.messages = messages
        self.exit_code = exit_code


def closest(name: str, known: Iterable[str]) -> str:
    """Return `" Did you mean `x`?"` for the known names nearest to `name`, or an empty string if none is near."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    matches = [by_lower[match] for match in difflib.get_close_matches(name.lower(), list(by_lower), n=2, cutoff=0.6)]
    return f" Did you mean {' or '.join(f'`{match}`' for match in matches)}?" if matches else ""


def listed(names: Iterable[str]) -> str:
    """Return the names in backquotes, separated by commas."""
    return ", ".join(f"`{name}`" for name in names)


def is_number(value: Any) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def check_number(name: str, value: Any, interval: str, *, integer: bool = False, none: bool = False) -> None:
    """
    Raise a `ValueError` that says what an argument takes, unless its value is a number (an `integer`, or `None`, if these are
    set) in an interval such as `"(0, 1]"` or `"[1, inf)"`, where a parenthesis excludes the bound.
    """
    if none and value is None:
        return
    low, high = map(float, interval[1:-1].split(","))
    excluded = [bound for bound, bracket in ((low, interval[0]), (high, interval[-1])) if bracket in "()"]
    fits = isinstance(value, int if integer else (int, float)) and not isinstance(value, bool)
    if not fits or not low <= value <= high or value in excluded:
        takes = f"{'an integer' if integer else 'a number'} in {interval}{' or None' if none else ''}"
        raise ValueError(f"`{name}` is {value!r}; it takes {takes}.")


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Raise a `ValueError` that says what an argument takes, unless its value is one of `choices`; 1 is not `True`."""
    if repr(value) not in map(repr, choices):
        raise ValueError(
            f"`{name}` is {value!r}; it takes {' or '.join(map(repr, choices))}.{closest(str(value), map(str, choices))}"
        )


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """
    Let `write(temporary_path)` write a file and move it to `path`. A process that is killed in between leaves the
    former `path`, whole.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Process ids are not unique where nodes share a folder; `np.save` keeps no other suffix than that of `path`
    temporary = path.with_name(f".{path.stem}.{uuid.uuid4().hex[:12]}.tmp{path.suffix}")
    try:
        write(temporary)
        with open(temporary, "r+b") as handle:  # Windows syncs only what can be written
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Bring the names in a folder to the disk. On Windows, where a folder cannot be opened, nothing is done."""
    if sys.platform == "win32":
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def hash_bytes(parts: Iterable[bytes | memoryview]) -> str:
    """Hash of byte strings; where one ends and the next begins counts."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def hash_json(*values: Any) -> str:
    """Hash of JSON values and arrays. The order of keys does not count; what JSON does not know is written as `str(value)`."""
    return hash_each(values)


def hash_each(values: Iterable[Any]) -> str:
    """The same as [`hash_json`], of values that are read one at a time."""
    return hash_bytes(json.dumps(value, sort_keys=True, default=_as_json).encode() for value in values)


def _as_json(value: Any) -> str:
    return hash_array(value) if isinstance(value, np.ndarray) else str(value)


def hash_array(array: np.ndarray | torch.Tensor) -> str:
    """Hash of an array, or of a tensor on the CPU: dtype, shape and all values. Memory layout does not count."""
    values = np.asarray(array)
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return hash_bytes([f"{values.dtype.name} {list(values.shape)}".encode(), data.data])


def hash_rows(array: np.ndarray | torch.Tensor, at_most: int = 1024) -> str:
    """
    Hash of the shape of an array `(N, ...)` and of `at_most` of its rows, evenly spread, first and last included: memory-mapped
    embeddings are too large to read whole.
    """
    n = len(array)
    rows = np.unique(np.linspace(0, n - 1, min(n, at_most)).astype(np.int64)) if n else np.empty(0, np.int64)
    return hash_bytes([str(list(array.shape)).encode(), hash_array(array[rows]).encode()])


def hash_prompts(dataset: Dataset, column: str = "prompt") -> str:
    """
    Hash of all prompts of a dataset, in order, 32 hexadecimal digits: of the stored values, so that no transform runs and no
    image is decoded, and of whole rows if a transform makes the prompts. It does not depend on how the values are stored, on
    whether `select` or `shuffle` has copied the rows, on the order of a message's keys or on other columns.
    """
    found = column in dataset.column_names
    stored = dataset.with_format("arrow", columns=[column] if found else dataset.column_names)
    chunks = (stored[start : start + _ROWS] for start in range(0, len(stored), _ROWS))
    return hash_each(chunk[column].to_pylist() if found else chunk.to_pylist() for chunk in chunks)
