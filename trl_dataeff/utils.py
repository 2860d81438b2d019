"""
The version, errors that only the user can fix, the terminal, parameters of methods, checks of arguments, atomic files,
and content hashes.
"""

from __future__ import annotations

import difflib
import inspect
import json
import math
import os
import re
import reprlib
import shutil
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

import numpy as np
import xxhash


if TYPE_CHECKING:
    import torch
    from datasets import Dataset

__version__ = "0.1.0"
#: What the names of this package's metrics begin with, in logs and in files
PREFIX = "dataeff/"
#: Version of every file format that this package writes: checkpoints, embedding caches and saved predictors
FORMAT = 5
#: Rows of a dataset that are read and hashed at a time. Another number gives other hashes
_ROWS = 1024
_P = ParamSpec("_P")


# Errors, and what they say


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
    """
    Suggest what a user may have meant.

    Args:
        name (`str`): an unknown name.
        known (`Iterable[str]`): the known names.

    Returns:
        `str`: `" Did you mean `x`?"` with up to two known names near to `name`, or an empty string if none is near.
    """
    by_lower_case = {candidate.lower(): candidate for candidate in known}
    matches = difflib.get_close_matches(name.lower(), list(by_lower_case), n=2, cutoff=0.6)
    if not matches:
        return ""
    names = [f"`{by_lower_case[match]}`" for match in matches]
    return f" Did you mean {' or '.join(names)}?"


def listed(names: Iterable[str]) -> str:
    """Return the names in backquotes, separated by commas."""
    return ", ".join(f"`{name}`" for name in names)


def terminal_width() -> int | None:
    """Columns of the terminal, or those that the variable `COLUMNS` says; `None` if a file or a program reads."""
    return shutil.get_terminal_size(fallback=(0, 0)).columns or None


# Parameters of methods


def with_parameters_of(method: Callable[_P, None]) -> Callable[[Callable[..., None]], Callable[_P, None]]:
    """
    Decorate a method of `*args` and `**kwargs` that passes them on: type checkers, editors and `inspect.signature` see
    the parameters of the method that gets them, whatever they are in the version that is installed.

    Args:
        method (`Callable`): the method that gets them.
    """

    def decorate(own: Callable[..., None]) -> Callable[_P, None]:
        own.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
        return own

    return decorate


# Checks of values


def is_number(value: Any) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def check_number(name: str, value: Any, interval: str, *, integer: bool = False, none: bool = False) -> None:
    """
    Check that an argument is a number in an interval.

    Args:
        name (`str`): name of the argument.
        value (`Any`): its value.
        interval (`str`): such as `"(0, 1]"` or `"[1, inf)"`, where a parenthesis excludes the bound.
        integer (`bool`, *optional*, defaults to `False`): whether it must be an integer.
        none (`bool`, *optional*, defaults to `False`): whether it may be `None`.

    Raises:
        `ValueError`: it is something else; the message says what the argument takes.
    """
    problem = number_problem(name, value, interval, integer=integer, none=none)
    if problem is not None:
        raise ValueError(problem)


def number_problem(name: str, value: Any, interval: str, *, integer: bool = False, none: bool = False) -> str | None:
    """The message with which [`check_number`] refuses a value; `None` if it accepts it."""
    if none and value is None:
        return None
    low, high = (float(bound) for bound in interval[1:-1].split(","))
    numbers = int if integer else (int, float)
    is_valid = isinstance(value, numbers) and not isinstance(value, bool) and low <= value <= high
    if is_valid and interval.startswith("("):
        is_valid = value != low
    if is_valid and interval.endswith(")"):
        is_valid = value != high
    if is_valid:
        return None
    kind = "an integer" if integer else "a number"
    or_none = " or None" if none else ""
    return f"`{name}` is {reprlib.repr(value)}; it takes {kind} in {interval}{or_none}."


def choice_problem(name: str, value: Any, choices: Sequence[Any]) -> str | None:
    """
    Check that an argument is one of some values; 1 is not `True`.

    Args:
        name (`str`): name of the argument.
        value (`Any`): its value.
        choices (`Sequence`): the values that it may have.

    Returns:
        `str` or `None`: what the argument takes, if it has another value.
    """
    allowed = [repr(choice) for choice in choices]
    if repr(value) in allowed:
        return None
    hint = closest(str(value), [str(choice) for choice in choices])
    return f"`{name}` is {value!r}; it takes {' or '.join(allowed)}.{hint}"


# Atomic files

#: Names of temporary files
TEMPORARY = re.compile(r"\..+\.[0-9a-f]{12}\.tmp(\.\w+)?")


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """
    Write a file so that it is complete or absent: a process that is killed meanwhile leaves the former file, whole.

    Args:
        path (`Path`): the file, whose folder is made if there is none.
        write (`Callable`): called with the path of a temporary file, writes that file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Process ids are not unique where nodes share a folder; `np.save` keeps no other suffix than that of `path`
    temporary = path.with_name(f".{path.stem}.{uuid.uuid4().hex[:12]}.tmp{path.suffix}")  # as TEMPORARY
    try:
        write(temporary)
        with open(temporary, "r+b") as file:  # Windows syncs only what can be written
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def remove_temporary_files(folder: Path) -> None:
    """
    Remove what [`write_atomically`] has left in a folder, in processes that were killed. No process may be writing
    there now.
    """
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if TEMPORARY.fullmatch(path.name):
            path.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Bring the names in a folder to the disk. On Windows, where a folder cannot be opened, nothing is done."""
    if sys.platform == "win32":
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


# Content hashes, of 32 hexadecimal digits


def hash_bytes(parts: Iterable[bytes | memoryview]) -> str:
    """Hash byte strings. Where one ends and the next begins counts."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def hash_json(*values: Any) -> str:
    """
    Hash JSON values and arrays. The order of keys does not count.

    Args:
        *values (`Any`): the values. What JSON does not know is hashed as `str(value)`.

    Returns:
        `str`: the hash.
    """
    return hash_each(values)


def hash_each(values: Iterable[Any]) -> str:
    """The same as [`hash_json`], for values that are read one at a time."""
    return hash_bytes(json.dumps(value, sort_keys=True, default=_as_json).encode() for value in values)


def _as_json(value: Any) -> str:
    return hash_array(value) if isinstance(value, np.ndarray) else str(value)


def hash_array(array: np.ndarray | torch.Tensor) -> str:
    """
    Hash an array: dtype, shape and all values. Memory layout does not count.

    Args:
        array (`np.ndarray` or `torch.Tensor`): of any shape; a tensor must be on the CPU.

    Returns:
        `str`: the hash.
    """
    values = np.asarray(array)
    header = f"{values.dtype.name} {list(values.shape)}"
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return hash_bytes([header.encode(), data.data])


def hash_rows(array: np.ndarray | torch.Tensor, at_most: int = 1024) -> str:
    """
    Hash the shape of an array and some of its rows: memory-mapped embeddings are too large to read whole.

    Args:
        array (`np.ndarray` or `torch.Tensor` of shape `(N, ...)`): the array.
        at_most (`int`, *optional*, defaults to `1024`): number of rows, which are evenly spread, the first and the
            last included. With fewer in the array, all are hashed.

    Returns:
        `str`: the hash.
    """
    n = len(array)
    num_rows = min(n, at_most)
    evenly_spread = np.linspace(0, max(n - 1, 0), num_rows).astype(np.int64)
    rows = np.unique(evenly_spread)
    shape = str(list(array.shape))
    return hash_bytes([shape.encode(), hash_array(array[rows]).encode()])


def hash_prompts(dataset: Dataset, column: str = "prompt") -> str:
    """
    Hash all prompts of a dataset, in order. How the values are stored does not count, nor whether `select` or
    `shuffle` has copied the rows, nor the order of a message's keys, nor other columns.

    Args:
        dataset (`Dataset`): the dataset. Its stored values are hashed: no transform runs, and no image is decoded.
        column (`str`, *optional*, defaults to `"prompt"`): column of the prompts. Where a transform makes the prompts,
            there is no such column, and whole rows are hashed.

    Returns:
        `str`: the hash.
    """
    return hash_each(_stored_prompts(dataset, column))


def number_by_content(prompt: Any) -> int:
    """A number of 62 bits that tells a prompt from others by its content, where no row is known."""
    return int(hash_json(prompt), 16) >> 66


def number_prompts(dataset: Dataset, column: str = "prompt") -> np.ndarray:
    """
    Number the prompts of a dataset by their content.

    Args:
        dataset (`Dataset`): N rows. Its stored values count, see [`hash_prompts`].
        column (`str`, *optional*, defaults to `"prompt"`): column of the prompts.

    Returns:
        `np.ndarray` of shape `(N,)`: int64, equal for equal prompts, see [`number_by_content`].
    """
    numbers = [number_by_content(prompt) for prompts in _stored_prompts(dataset, column) for prompt in prompts]
    return np.array(numbers, dtype=np.int64)


def _stored_prompts(dataset: Dataset, column: str) -> Iterator[list[Any]]:
    """The stored prompts of a dataset, or whole rows if it has no such column, `_ROWS` at a time."""
    has_column = column in dataset.column_names
    columns = [column] if has_column else dataset.column_names
    stored = dataset.with_format("arrow", columns=columns)
    for start in range(0, len(stored), _ROWS):
        table = stored[start : start + _ROWS]
        values = table[column] if has_column else table
        yield values.to_pylist()
