"""
The manifest of a checkpoint, `dataeff/manifest.json`: every file with its size, and ours with a hash. It is written last, so that
its presence says that the checkpoint is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xxhash

from trl_dataeff.checkpoint.state import FOLDER, CheckpointError
from trl_dataeff.utils import FORMAT, __version__, hash_json, sync_folder, write_atomically


MANIFEST = f"{FOLDER}/manifest.json"
PACKAGES = ("torch", "transformers", "trl")
_EARLIER = "Resume from an earlier checkpoint, such as out/checkpoint-100."


def write_manifest(checkpoint: Path, *, step: int, processes: int, resumable: bool) -> None:
    """
    Bring all files of a checkpoint of `processes` processes after optimizer step `step`, all written by now, to the disk and list
    them. `resumable`: whether it holds more than the model.
    """
    paths = sorted(checkpoint.rglob("*"))
    files = [path for path in paths if path.is_file()]
    for path in files:
        with open(path, "r+b") as file:
            os.fsync(file.fileno())
    for folder in [checkpoint, *(path for path in paths if path.is_dir())]:
        sync_folder(folder)
    content = {
        "format": FORMAT,
        "trl_dataeff": __version__,
        "versions": {name: version(name) for name in PACKAGES},
        "written": time.time(),
        "step": step,
        "processes": processes,
        "resumable": resumable,
        "sizes": {path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in files},
        "hashes": {f"{FOLDER}/{path.name}": _hash(path) for path in files if path.parent == checkpoint / FOLDER},
    }
    text = json.dumps(content | {"hash": hash_json(content)}, indent=2)
    write_atomically(checkpoint / MANIFEST, lambda path: path.write_text(text))
    sync_folder(checkpoint.parent)


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint was written to the end."""
    return (checkpoint / MANIFEST).is_file()


def written_at(checkpoint: Path) -> float:
    """When a checkpoint was completed, in seconds since 1970; 0 if it does not say."""
    try:
        return float(_read(checkpoint)["written"])
    except CheckpointError:
        return 0.0


def check_checkpoint(checkpoint: Path) -> dict[str, Any]:
    """
    Compare a checkpoint with its manifest, which is returned: the sizes of all files, and the content of ours. Raises a
    `CheckpointError` if it is incomplete, corrupt, or cannot be resumed from.
    """
    manifest = _read(checkpoint)
    for name, size in manifest["sizes"].items():
        try:
            present = (checkpoint / name).stat().st_size
            digest = manifest["hashes"].get(name)
            same = digest is None or digest == _hash(checkpoint / name)
        except OSError as error:
            raise CheckpointError(f"{checkpoint} is corrupt: {name} cannot be read ({error}). {_EARLIER}") from error
        if present != size or not same:
            differs = f"has {present} bytes instead of {size}" if present != size else "is not what was written"
            raise CheckpointError(f"{checkpoint} is corrupt: {name} {differs}. {_EARLIER}")
    if not manifest["resumable"]:
        raise CheckpointError(
            f"{checkpoint} was written with `save_only_model=True`, so no run can resume from it. Start a new run with it as the model."
        )
    return manifest


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _read(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        if manifest.pop("hash") != hash_json(manifest):
            raise ValueError("it is not what was written")
    except FileNotFoundError as error:
        if not checkpoint.is_dir():
            raise CheckpointError(
                f"The checkpoint {checkpoint} does not exist. Give one (`out/checkpoint-100`), or `True` for the latest."
            ) from error
        raise CheckpointError(
            f"{checkpoint} has no {MANIFEST}, which is written last: it is incomplete, or DataEfficientGRPOTrainer did not write "
            f"it. {_EARLIER} To use its weights, start a new run with it as the model."
        ) from error
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{checkpoint} is corrupt: {MANIFEST} cannot be read ({type(error).__name__}: {error}). {_EARLIER}"
        ) from error
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest['format']}, written by trl_dataeff {manifest['trl_dataeff']}; this is "
            f"trl_dataeff {__version__}, which reads format {FORMAT}. Resume with that version."
        )
    return manifest
