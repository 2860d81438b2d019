"""
Content hashes: of arrays, JSON values, files, and a dataset's prompts.

Every hash is xxh3_128, as 32 hexadecimal digits. It detects changes and is not a protection against forgery.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash


if TYPE_CHECKING:
    from datasets import Dataset

_PIECE = 16 * 2**20  # bytes of a file that are read at a time
_ROWS = 1024  # of a dataset that are read at a time


def hash_bytes(parts: Iterable[bytes | memoryview]) -> str:
    """Hash of byte strings; where one ends and the next begins counts."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def hash_json(*values: Any) -> str:
    """Hash of JSON values. The order of keys does not count; what JSON does not know is written as `str(value)`."""
    return hash_each(values)


def hash_each(values: Iterable[Any]) -> str:
    """The same as [`hash_json`], of values that are read one at a time."""
    return hash_bytes(json.dumps(value, sort_keys=True, default=str).encode() for value in values)


def hash_array(array: np.ndarray | torch.Tensor) -> str:
    """Hash of an array or a tensor: dtype, shape and all values. Memory layout and device do not count."""
    if isinstance(array, torch.Tensor):
        name = str(array.dtype).removeprefix("torch.")
        data = array.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    else:
        name, data = array.dtype.name, np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return hash_bytes([f"{name} {list(array.shape)}".encode(), data.data])


def hash_rows(array: np.ndarray | torch.Tensor, at_most: int = 1024) -> str:
    """
    Hash of the shape of an array and of a sample of its rows. For arrays that are too large to read whole, such as
    memory-mapped embeddings: 10^7 rows take 20 GB.

    Args:
        array (`np.ndarray` or `torch.Tensor` of shape `(N, ...)`): the array.
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

    Stored values are read, so that no transform runs and no image is decoded. If there is no such column, because a
    transform makes the prompts, whole rows are hashed. The hash does not depend on how the values are stored, on
    whether `select` or `shuffle` has copied the rows, on the order of a message's keys or on other columns.

    Args:
        dataset ([`~datasets.Dataset`]): N rows.
        column (`str`, *optional*, defaults to `"prompt"`): column of the prompts.

    Returns:
        `str`: 32 hexadecimal digits.
    """
    found = column in dataset.column_names
    stored = dataset.with_format("arrow", columns=[column] if found else dataset.column_names)
    chunks = (stored[start : start + _ROWS] for start in range(0, len(stored), _ROWS))
    return hash_each(chunk[column].to_pylist() if found else chunk.to_pylist() for chunk in chunks)
