"""Errors that only the user can fix, files that are complete or absent, and content hashes."""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash


if TYPE_CHECKING:
    from datasets import Dataset

_PIECE = 16 * 2**20  # bytes of a file that are read at a time
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


# Files


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """
    Let `write(temporary_path)` write a file, and rename it to `path`. A process that is killed in between leaves the former
    `path` unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Process ids are not unique where nodes share a folder
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        write(temporary)
        with open(temporary, "r+b") as handle:  # Windows syncs only what can be written
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Sync the names in a folder to the disk. Does nothing on Windows, where a folder cannot be opened."""
    if sys.platform == "win32":
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def use_file_of_run(path: Path, written_by: str | None, run: str) -> None:
    """
    Make `path` the file of `run`: that of another run is renamed to `STEM-RUN.SUFFIX`, and back when that run is resumed.

    Args:
        path (`Path`): the file, present or not.
        written_by (`str` or `None`): id of the run that wrote it; `None` if it is not there.
        run (`str`): id of the present run.
    """
    if written_by == run:
        return
    if written_by is not None:
        path.replace(_aside(path, written_by))
    if _aside(path, run).exists():
        _aside(path, run).replace(path)


def _aside(path: Path, run: str) -> Path:
    return path.with_name(f"{path.stem}-{run}{path.suffix}")


# Hashes. Each is xxh3_128, as 32 hexadecimal digits: it detects changes, and does not protect against forgery


def hash_bytes(parts: Iterable[bytes | memoryview]) -> str:
    """Hash of byte strings, and of where each ends."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def hash_json(*values: Any) -> str:
    """Hash of JSON values. The order of keys does not count; other values are hashed as `str(value)`."""
    return hash_each(values)


def hash_each(values: Iterable[Any]) -> str:
    """The same as [`hash_json`], of values that are read one at a time."""
    return hash_bytes(json.dumps(value, sort_keys=True, default=str).encode() for value in values)


def hash_array(array: np.ndarray) -> str:
    """Hash of an array: dtype, shape and values. The memory layout does not count."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return hash_bytes([f"{array.dtype.name} {list(array.shape)}".encode(), data.data])


def hash_rows(array: np.ndarray, at_most: int = 1024) -> str:
    """
    Hash of the shape of an array and of a sample of its rows. For arrays that are too large to read whole, such as
    memory-mapped embeddings: 10^7 rows take 20 GB.

    Args:
        array (`np.ndarray` of shape `(N, ...)`): the array.
        at_most (`int`, *optional*, defaults to `1024`): rows that are read, evenly spread, first and last included.
    """
    n = len(array)
    rows = np.unique(np.linspace(0, n - 1, min(n, at_most)).astype(np.int64)) if n else np.empty(0, np.int64)
    return hash_bytes([str(list(array.shape)).encode(), hash_array(array[rows]).encode()])


def hash_file(path: str | Path, *, sync: bool = False) -> tuple[int, str]:
    """
    Size in bytes and hash of a file. Releases the interpreter lock, so that threads can hash several files at once.

    Args:
        path (`str` or `Path`): the file.
        sync (`bool`, *optional*, defaults to `False`): whether to fsync the file first.

    Raises:
        OSError: it cannot be read.
    """
    digest, size = xxhash.xxh3_128(), 0
    piece = memoryview(bytearray(min(_PIECE, os.stat(path).st_size + 1)))
    with open(path, "r+b" if sync else "rb", buffering=0) as file:
        if sync:
            os.fsync(file.fileno())
        while read := file.readinto(piece):
            digest.update(piece[:read])
            size += read
    return size, digest.hexdigest()


def hash_prompts(dataset: Dataset, column: str = "prompt") -> str:
    """
    Hash of all prompts of a dataset, in order. It identifies the dataset of a checkpoint.

    Reads stored values: no transform runs, and no image is decoded. Without that column, because a transform makes the
    prompts, hashes whole rows. The storage of the rows, the order of a message's keys and other columns do not count.

    Args:
        dataset ([`~datasets.Dataset`]): N rows.
        column (`str`, *optional*, defaults to `"prompt"`): column of the prompts.
    """
    found = column in dataset.column_names
    stored = dataset.with_format("arrow", columns=[column] if found else dataset.column_names)
    chunks = (stored[start : start + _ROWS] for start in range(0, len(stored), _ROWS))
    return hash_each(chunk[column].to_pylist() if found else chunk.to_pylist() for chunk in chunks)
