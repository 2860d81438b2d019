"""
Content hashes: of a dataset's prompts, arrays, JSON values and files.

Every hash is xxh3_128, as 32 hexadecimal digits. It detects changes and is not a protection against forgery.

[`hash_prompts`] reads stored Arrow data column by column. Each column is reduced to streams that do not depend on how
Arrow lays it out: lengths, bytes and positions of nulls, each with a digest of its own. What is deliberately not here:
hashes of models (`difficulty/embedding/cache.py`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat
import torch
import xxhash


if TYPE_CHECKING:
    from datasets import Dataset

_PIECE = 16 * 2**20  # bytes of a file that are read at a time
_TAKEN_ROWS, _TAKEN_BYTES = 65_536, 64 * 2**20  # of a dataset with an indices mapping, gathered at a time
_TRANSFORMED_ROWS = 1024


def hash_bytes(*parts: bytes) -> str:
    """Hash of byte strings; where one ends and the next begins counts."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def hash_json(value: Any) -> str:
    """Hash of a JSON value. The order of keys does not count; what JSON does not know is written as `str(value)`."""
    return hash_bytes(json.dumps(value, sort_keys=True, default=str).encode())


def hash_array(array: np.ndarray | torch.Tensor) -> str:
    """Hash of an array or a tensor: dtype, shape and all values. Memory layout and device do not count."""
    if isinstance(array, torch.Tensor):
        name = str(array.dtype).removeprefix("torch.")
        shape, array = tuple(array.shape), array.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    else:
        name, shape = array.dtype.name, array.shape
    return hash_bytes(f"{name} {list(shape)}".encode(), np.ascontiguousarray(array).tobytes())


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
    return hash_bytes(str(list(array.shape)).encode(), hash_array(array[rows]).encode())


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
    with open(path, "rb", buffering=0) as file:
        if sync:
            os.fsync(file.fileno())
        while read := file.readinto(piece):
            digest.update(piece[:read])
            size += read
    return size, digest.hexdigest()


def hash_prompts(dataset: Dataset, column: str = "prompt", *, transformed: bool = False) -> str:
    """
    Hash of all prompts of a dataset, in order. It identifies the dataset of a checkpoint or of an embedding cache.

    Stored Arrow data is read, so that no transform runs and no image is decoded. If there is no such column, because a
    transform makes the prompts, whole rows are hashed. The hash does not depend on Arrow's chunks, on whether `select`
    or `shuffle` has copied the rows, on 32-bit or 64-bit offsets, on the order of a message's keys or on other columns.

    Args:
        dataset ([`~datasets.Dataset`]): N rows.
        column (`str`, *optional*, defaults to `"prompt"`): column of the prompts.
        transformed (`bool`, *optional*, defaults to `False`): if the dataset has a transform
            ([`~datasets.Dataset.set_transform`]), run it on every row and hash the prompts that it makes. This notices
            a change in the transform, and is slow. A missing column raises `KeyError`.

    Returns:
        `str`: 32 hexadecimal digits.
    """
    streams = _Streams()
    if transformed and dataset.format["type"] == "custom":
        for prompts in _transformed(dataset, column):
            streams.add("", pa.array(prompts, pa.large_string()))
    else:
        names = [column] if column in dataset.column_names else sorted(dataset.column_names)
        for name in names:
            for chunk in _stored(dataset, name):
                streams.add("" if name == column else f".{name}", chunk)
    return streams.hexdigest(len(dataset))


def _transformed(dataset: Dataset, column: str) -> Iterator[list[str]]:
    for start in range(0, len(dataset), _TRANSFORMED_ROWS):
        prompts = dataset[start : start + _TRANSFORMED_ROWS][column]
        yield [p if isinstance(p, str) else json.dumps(p, sort_keys=True, default=str) for p in prompts]


def _stored(dataset: Dataset, name: str) -> Iterable[pa.Array]:
    """Arrow data of a column in the order of the dataset's rows, a piece at a time."""
    column = dataset.data.column(name)
    if pat.is_string_view(column.type):  # Arrow has no `take` for views
        column = column.cast(pa.large_string())
    mapping = dataset._indices  # of `select` and `shuffle`; through the public interface each row is an object
    if mapping is None:
        return list(column.chunks)
    row_bytes = max(1, column.get_total_buffer_size() // max(1, len(column)))
    rows = min(_TAKEN_ROWS, max(1, _TAKEN_BYTES // row_bytes))
    indices = mapping.column(0)
    pieces = (column.take(indices.slice(start, rows)) for start in range(0, len(indices), rows))
    return (chunk for piece in pieces for chunk in piece.chunks)


class _Streams:
    """Digests of Arrow arrays that are added piece by piece, by path: `.role` is a field, `[]` a list's elements."""

    def __init__(self) -> None:
        self._digests: dict[str, Any] = {}
        self._rows: dict[str, int] = {}

    def add(self, path: str, array: pa.Array) -> None:
        """Add the next elements of what `path` names."""
        if not len(array):
            return
        while isinstance(array.type, pa.ExtensionType):
            array = array.storage
        self._add_nulls(path, array)
        kind = array.type
        if pat.is_struct(kind):
            for field, values in zip(kind, array.flatten(), strict=True):
                self.add(f"{path}.{field.name}", values)
        elif pat.is_list(kind) or pat.is_large_list(kind) or pat.is_fixed_size_list(kind):
            self._update(f"{path}:length", pc.list_value_length(array).cast(pa.int64()).fill_null(0).to_numpy())
            self.add(f"{path}[]", array.flatten())
        elif pat.is_null(kind):
            pass  # the positions of nulls say all
        elif pat.is_primitive(kind) and kind.bit_width <= 64:
            self._update(f"{path}:{kind}", _values(array))
        else:
            self._add_text(path, array)

    def hexdigest(self, rows: int) -> str:
        """Hash of all that was added."""
        return hash_json([rows, {path: digest.hexdigest() for path, digest in self._digests.items()}])

    def _add_nulls(self, path: str, array: pa.Array) -> None:
        start = self._rows.get(path, 0)
        self._rows[path] = start + len(array)
        if array.null_count:
            self._update(f"{path}:null", np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)) + start)

    def _add_text(self, path: str, array: pa.Array) -> None:
        if pat.is_string(array.type) or pat.is_large_string(array.type):
            kind, array = "text", array.cast(pa.large_string())
        elif pat.is_binary(array.type) or pat.is_large_binary(array.type):
            kind, array = "binary", array.cast(pa.large_binary())
        else:  # maps, decimals, views, ...: rare, and one by one
            kind = str(array.type)
            array = pa.array(
                [json.dumps(v, sort_keys=True, default=str) for v in array.to_pylist()], pa.large_string()
            )
        if array.null_count:
            array = array.fill_null("" if pat.is_large_string(array.type) else b"")
        _, offsets, data = array.buffers()
        ends = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
        self._update(f"{path}:length", np.diff(ends))
        self._update(f"{path}:{kind}", memoryview(data)[ends[0] : ends[-1]] if ends[-1] > ends[0] else b"")

    def _update(self, path: str, data: np.ndarray | memoryview | bytes) -> None:
        digest = self._digests.setdefault(path, xxhash.xxh3_128())
        digest.update(np.ascontiguousarray(data) if isinstance(data, np.ndarray) else data)


def _values(array: pa.Array) -> np.ndarray:
    """Values of a primitive array, nulls as 0 or NaN; dates and times as integers."""
    if pat.is_temporal(array.type):
        array = array.view({4: pa.int32(), 8: pa.int64()}[array.type.bit_width // 8])
    elif pat.is_boolean(array.type):
        array = array.cast(pa.uint8())
    if array.null_count and not pat.is_floating(array.type):
        array = array.fill_null(0)
    values: np.ndarray = array.to_numpy(zero_copy_only=False)
    return values
