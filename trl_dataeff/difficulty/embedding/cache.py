"""
Embeddings on disk: `<key>.safetensors`, float16 `(N, h)`, whose metadata names what they are of.

A file is written completely or not at all. One that does not match its metadata is never used.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from transformers.utils import logging

from trl_dataeff.utils import hash_json, hash_rows, write_atomically
from trl_dataeff.version import FORMAT, __version__


logger = logging.get_logger(__name__)

ENVIRONMENT = "TRL_DATAEFF_CACHE"


def default_folder() -> Path | None:
    """`$TRL_DATAEFF_CACHE/embeddings`, or `~/.cache/trl_dataeff/embeddings`; `None` if there is no home folder."""
    try:
        return Path(os.environ.get(ENVIRONMENT) or "~/.cache/trl_dataeff").expanduser() / "embeddings"
    except RuntimeError:
        return None


class EmbeddingCache:
    """The cache in `folder` of the embeddings of one dataset by one model, which `identity` names."""

    def __init__(self, folder: Path, identity: dict[str, Any]):
        self.folder = folder
        self.identity = {"format": FORMAT, **identity}
        self.path = folder / f"{hash_json(self.identity)}.safetensors"

    def read(self) -> np.ndarray | None:
        """Stored embeddings as a read-only memory map, or `None` if there are none. A corrupt cache is ignored with a warning."""
        try:
            if not self.path.exists():
                return None
            with safe_open(self.path, "pt") as file:  # with "np" all values would be read into memory
                stored = {key: json.loads(value) for key, value in (file.metadata() or {}).items()}
                values: np.ndarray = file.get_tensor("embeddings").numpy()
            if hash_json(stored["identity"]) != self.path.stem:
                raise ValueError("it is of another dataset or model")
            if hash_rows(values) != stored["checksum"]:
                raise ValueError("its rows are not those that were written")
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            logger.warning(
                f"The embeddings of {self.path} cannot be used ({type(error).__name__}: {error}): the prompts are "
                "embedded again."
            )
            return None
        values.setflags(write=False)
        return values

    def write(self, embeddings: np.ndarray) -> str | None:
        """Write embeddings in place of what there is. Returns why they cannot be written, or `None` if they were."""
        stored = {"identity": self.identity, "trl_dataeff": __version__, "checksum": hash_rows(embeddings)}
        metadata = {key: json.dumps(value) for key, value in stored.items()}
        try:
            write_atomically(self.path, lambda path: save_file({"embeddings": embeddings}, path, metadata))
        except (OSError, SafetensorError) as error:
            return f"{self.folder}: {error}"
        return None
