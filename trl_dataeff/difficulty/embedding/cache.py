"""
Embeddings on disk: `<key>-<suffix>.npy`, float16 `(N, h)`, and `<key>.json`, which names it and says what it is of.

The array is written first and the json last, each whole or absent. What does not fit its json is never used.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tokenize
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap
from transformers.utils import logging

from trl_dataeff.checkpoint.files import write_atomically
from trl_dataeff.difficulty.embedding.tokenize import EmbeddingError
from trl_dataeff.version import __version__


logger = logging.get_logger(__name__)

FORMAT = 1
ENVIRONMENT = "TRL_DATAEFF_CACHE"
_CHECKED_ROWS = 1024


@dataclass
class CachedEmbeddings:
    """
    Attributes:
        embeddings: float16 `(N, h)`, read-only.
        truncated: how many prompts were cut to `limit` tokens.
        checksum: of up to 1024 rows spread over the array.
    """

    embeddings: np.memmap
    truncated: int
    limit: int | None
    checksum: str


def default_folder() -> Path:
    """`$TRL_DATAEFF_CACHE/embeddings`, or `~/.cache/trl_dataeff/embeddings`."""
    return Path(os.environ.get(ENVIRONMENT) or "~/.cache/trl_dataeff").expanduser() / "embeddings"


class EmbeddingCache:
    """
    The cache of one dataset under one model.

    Args:
        folder (`Path`): where caches lie.
        identity (`dict`): what the embeddings are of: dataset, model, pooling.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]):
        self.folder = folder
        self.identity = {"format": FORMAT, **identity}
        text = json.dumps(self.identity, sort_keys=True)
        self.key = hashlib.sha256(text.encode()).hexdigest()[:32]
        self.path = folder / f"{self.key}.json"
        self._damaged: Path | None = None  # an array that was found damaged

    def read(self) -> CachedEmbeddings | None:
        """What is stored, or `None` if there is nothing. A damaged cache counts as nothing, with a warning."""
        if not self.path.exists():
            return None
        try:
            return self._read()
        except (OSError, ValueError, KeyError, TypeError, EOFError, tokenize.TokenError) as error:
            logger.warning(
                f"The embeddings of {self.path} cannot be used ({type(error).__name__}: {error}): the prompts are "
                "embedded again."
            )
            return None

    def _read(self) -> CachedEmbeddings:
        stored = json.loads(self.path.read_text())
        if stored["identity"] != self.identity:
            raise ValueError("it is of another dataset or model")
        self._damaged = path = self.folder / Path(stored["file"]).name
        embeddings = open_memmap(path, mode="r")
        if list(embeddings.shape) != stored["shape"] or embeddings.dtype != np.float16:
            raise ValueError(f"{embeddings.dtype} {embeddings.shape} where float16 {stored['shape']} was written")
        if checksum(embeddings) != stored["checksum"]:
            raise ValueError("its rows are not those that were written")
        self._damaged = None
        return CachedEmbeddings(embeddings, stored["truncated"], stored["limit"], stored["checksum"])

    def check_writable(self) -> None:
        """Raise `EmbeddingError` now rather than after the prompts are embedded."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / f".{uuid.uuid4().hex}.tmp"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise EmbeddingError(
                f"Embeddings cannot be written to {self.folder} ({error}). Set the environment variable {ENVIRONMENT} "
                "to a folder that can be written."
            ) from error

    def write(
        self, results: Iterable[tuple[np.ndarray, np.ndarray]], n: int, *, truncated: int, limit: int | None
    ) -> None:
        """
        Write the embeddings of n prompts as they come, in place of what there is.

        Args:
            results (`Iterable`): pairs of prompt ids `(b,)` and their embeddings, float16 `(b, h)`; each id once.
            n (`int`): number of prompts, N.
            truncated (`int`), limit (`int` or `None`): see [`CachedEmbeddings`].
        """
        # A name of its own: processes of other nodes or runs may write the same embeddings at the same time
        path = self.folder / f"{self.key}-{uuid.uuid4().hex[:8]}.npy"
        write_atomically(path, lambda temporary: _fill(temporary, results, n))
        embeddings = open_memmap(path, mode="r")
        stored = {
            "identity": self.identity,
            "trl_dataeff": __version__,
            "file": path.name,
            "shape": list(embeddings.shape),
            "truncated": truncated,
            "limit": limit,
            "checksum": checksum(embeddings),
        }
        write_atomically(self.path, lambda temporary: temporary.write_text(json.dumps(stored, indent=2)))
        if self._damaged is not None:
            self._damaged.unlink(missing_ok=True)


def _fill(path: Path, results: Iterable[tuple[np.ndarray, np.ndarray]], n: int) -> None:
    out: np.memmap | None = None
    for ids, values in results:
        if out is None:
            needed, free = 2 * n * values.shape[1], shutil.disk_usage(path.parent).free
            if needed > free:  # a memory map that cannot grow kills the process
                raise EmbeddingError(
                    f"The embeddings of {n} prompts take {needed / 1e9:.1f} GB and {path.parent} has "
                    f"{free / 1e9:.1f} GB free. Set the environment variable {ENVIRONMENT} to a folder with more."
                )
            out = open_memmap(path, mode="w+", dtype=np.float16, shape=(n, values.shape[1]))
        out[ids] = values
    assert out is not None
    out.flush()


def checksum(embeddings: np.ndarray) -> str:
    """A hash of up to 1024 rows spread over the array, the first and the last among them."""
    rows = np.unique(np.linspace(0, len(embeddings) - 1, min(len(embeddings), _CHECKED_ROWS)).astype(np.int64))
    return hashlib.sha256(embeddings[rows].tobytes()).hexdigest()
