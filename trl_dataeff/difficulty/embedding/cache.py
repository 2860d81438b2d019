"""
Embeddings on disk: `<key>-<suffix>.npy`, float16 `(N, h)`, and `<key>.json`, which names the array and its identity.

The array is written first and the JSON last, each completely or not at all. An array that does not match its JSON is
never used. The identity of embeddings is that of their prompts and of their model: hashes of weights in memory, or of a
model's folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tokenize
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.lib.format import open_memmap
from transformers.utils import logging

from trl_dataeff.checkpoint.files import write_atomically
from trl_dataeff.checkpoint.hashing import hash_json, hash_rows
from trl_dataeff.difficulty.embedding.tokenize import EmbeddingError
from trl_dataeff.version import FORMAT, __version__


logger = logging.get_logger(__name__)

ENVIRONMENT = "TRL_DATAEFF_CACHE"
_OTHER_SETTINGS = ("_name_or_path", "transformers_version", "use_cache")
_LORA_FACTOR = re.compile(r"(lora_(?:embedding_)?)([AB])(?=\.|$)")
_SAMPLED_VALUES = 64
_SAMPLED_BLOCKS, _BLOCK = 256, 4096
_MODEL_FILES = {".json", ".txt", ".model", ".jinja", ".safetensors", ".bin", ".py"}


@dataclass
class CachedEmbeddings:
    """
    Attributes:
        embeddings (`np.ndarray` of shape `(N, h)`): float16; a read-only memory map, unless it is kept in memory.
        truncated (`int`): number of prompts that were cut to `limit` tokens.
        limit (`int` or `None`): maximum number of tokens of a prompt; `None` for no limit.
        checksum (`str`): hash of up to 1024 rows, evenly spread.
    """

    embeddings: np.ndarray
    truncated: int
    limit: int | None
    checksum: str


def default_folder() -> Path | None:
    """`$TRL_DATAEFF_CACHE/embeddings`, or `~/.cache/trl_dataeff/embeddings`; `None` if there is no home folder."""
    try:
        return Path(os.environ.get(ENVIRONMENT) or "~/.cache/trl_dataeff").expanduser() / "embeddings"
    except RuntimeError:
        return None


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
        self.key = hash_json(self.identity)
        self.path = folder / f"{self.key}.json"
        self._corrupt: Path | None = None  # an array that was found corrupt

    def read(self) -> CachedEmbeddings | None:
        """Stored embeddings, or `None` if there are none. A corrupt cache is ignored with a warning."""
        try:
            return self._read() if self.path.exists() else None
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
        self._corrupt = path = self.folder / Path(stored["file"]).name
        embeddings = open_memmap(path, mode="r")
        if list(embeddings.shape) != stored["shape"] or embeddings.dtype != np.float16:
            raise ValueError(f"{embeddings.dtype} {embeddings.shape} where float16 {stored['shape']} was written")
        if hash_rows(embeddings) != stored["checksum"]:
            raise ValueError("its rows are not those that were written")
        self._corrupt = None
        return CachedEmbeddings(embeddings, stored["truncated"], stored["limit"], stored["checksum"])

    def why_not_writable(self, size: int) -> str | None:
        """
        Why embeddings cannot be written here; `None` if they can.

        Args:
            size (`int`): their bytes; 0 if unknown.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / f".{uuid.uuid4().hex}.tmp"
            probe.touch()
            probe.unlink()
            free = shutil.disk_usage(self.folder).free
        except OSError as error:
            return f"{self.folder}: {error}"
        if size > free:
            return f"{self.folder}: {free / 1e9:.1f} GB free of the {size / 1e9:.1f} GB needed"
        return None

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
            "checksum": hash_rows(embeddings),
        }
        write_atomically(self.path, lambda temporary: temporary.write_text(json.dumps(stored, indent=2)))
        if self._corrupt is not None:
            self._corrupt.unlink(missing_ok=True)


def in_memory(
    results: Iterable[tuple[np.ndarray, np.ndarray]], n: int, *, truncated: int, limit: int | None
) -> CachedEmbeddings:
    """The same as [`EmbeddingCache.write`] where no folder can be written."""
    out: np.ndarray | None = None
    for ids, values in results:
        if out is None:
            out = np.empty((n, values.shape[1]), dtype=np.float16)
        out[ids] = values
    assert out is not None
    return CachedEmbeddings(out, truncated, limit, hash_rows(out))


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


def weights_identity(model: Any) -> str:
    """
    Hash of a model's configuration and weights. Of each tensor it takes the sum of all bits, so that any single changed
    value is noticed, and 64 values: copying and hashing a GPU's weights in full would take minutes for a large model. A
    LoRA pair of which one factor is zero changes nothing and is left out, so that adapters that start from different
    seeds have the same identity.

    Args:
        model ([`~transformers.PreTrainedModel`]): the model, with all its weights in this process.
    """
    digest = xxhash.xxh3_128(type(model).__name__.encode())
    config = {key: value for key, value in model.config.to_dict().items() if key not in _OTHER_SETTINGS}
    digest.update(hash_json(config).encode())
    tensors = {k: v.detach() for k, v in model.state_dict().items() if isinstance(v, torch.Tensor)}
    adapted = False
    for name, tensor in tensors.items():
        partner = tensors.get(_LORA_FACTOR.sub(lambda m: m[1] + {"A": "B", "B": "A"}[m[2]], name))
        if partner is not None and partner is not tensor:
            if not (tensor.any() and partner.any()):
                continue
            adapted = True
        digest.update(f"{name.replace('.base_layer', '')} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(_tensor_identity(tensor))
    if adapted:
        layers = {n: m for n, m in model.named_modules() if isinstance(getattr(m, "scaling", None), dict)}
        digest.update(
            repr([(n, m.scaling, m.active_adapters, m.disable_adapters) for n, m in layers.items()]).encode()
        )
    return digest.hexdigest()


def _tensor_identity(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32}.get(tensor.element_size(), torch.int64)
    bits = tensor.contiguous().view(-1).view(width)
    samples = torch.linspace(0, bits.numel() - 1, min(bits.numel(), _SAMPLED_VALUES), dtype=torch.float64).long()
    values = bits[samples.to(bits.device)].long().cpu().numpy()
    return bits.sum(dtype=torch.int64).cpu().numpy().tobytes() + values.tobytes()


def folder_identity(folder: Path) -> str:
    """
    Hash of a model folder's files: name, size, modification time, and up to 256 blocks of 4 KiB of each. Reading all of
    a large model's weights at each start would take as long as loading it.

    Args:
        folder (`Path`): a folder that `save_pretrained` wrote.
    """
    digest = xxhash.xxh3_128()
    for path in sorted(folder.iterdir()):
        if path.suffix in _MODEL_FILES and path.is_file():
            stat = path.stat()
            digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}".encode())
            with open(path, "rb") as file:
                for start in np.linspace(0, max(0, stat.st_size - _BLOCK), _SAMPLED_BLOCKS).astype(int):
                    file.seek(start)
                    digest.update(file.read(_BLOCK))
    return digest.hexdigest()
