"""
The manifest of a checkpoint, `dataeff/manifest.json`. It lists every file with its size, and those of this package
with a hash. It is written last: a checkpoint with a manifest is complete.
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
    Bring all files of a checkpoint to the disk and list them in its manifest.

    Args:
        checkpoint (`Path`): its folder, in which everything else has been written.
        step (`int`): optimizer steps after which it was written.
        processes (`int`): number of processes of the run.
        resumable (`bool`): whether it holds more than the model.
    """
    paths = sorted(checkpoint.rglob("*"))
    files = [path for path in paths if path.is_file()]
    folders = [path for path in paths if path.is_dir()]
    _sync(files, [checkpoint, *folders])
    sizes = {path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in files}
    own_files = [path for path in files if path.parent == checkpoint / FOLDER]
    content = {
        "format": FORMAT,
        "trl_dataeff": __version__,
        "versions": {name: version(name) for name in PACKAGES},
        "written": time.time(),
        "step": step,
        "processes": processes,
        "resumable": resumable,
        "sizes": sizes,
        "hashes": {f"{FOLDER}/{path.name}": _hash(path) for path in own_files},
    }
    text = json.dumps(content | {"hash": hash_json(content)}, indent=2)
    write_atomically(checkpoint / MANIFEST, lambda temporary: temporary.write_text(text))
    sync_folder(checkpoint.parent)


def _sync(files: list[Path], folders: list[Path]) -> None:
    """Have the system write files, and the names in folders, to the disk."""
    for path in files:
        with open(path, "r+b") as file:  # Windows syncs only what can be written
            os.fsync(file.fileno())
    for folder in folders:
        sync_folder(folder)


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint was written to the end."""
    return (checkpoint / MANIFEST).is_file()


def written_at(checkpoint: Path) -> float:
    """When a checkpoint was completed, in seconds since 1970; 0 if its manifest is missing or cannot be read."""
    try:
        return float(_read(checkpoint)["written"])
    except CheckpointError:
        return 0.0


def check_checkpoint(checkpoint: Path) -> dict[str, Any]:
    """
    Compare a checkpoint with its manifest: the sizes of all files, and the content of those of this package.

    Args:
        checkpoint (`Path`): its folder.

    Returns:
        `dict`: the manifest.

    Raises:
        [`CheckpointError`]: it is incomplete, corrupt, or holds the model alone.
    """
    manifest = _read(checkpoint)
    for name, size in manifest["sizes"].items():
        _check_file(checkpoint, name, size, manifest["hashes"].get(name))
    if not manifest["resumable"]:
        raise CheckpointError(
            f"{checkpoint} was written with `save_only_model=True`, so no run can resume from it. Start a new run "
            "with it as the model."
        )
    return manifest


def _check_file(checkpoint: Path, name: str, size: int, digest: str | None) -> None:
    """Raise a `CheckpointError` unless a file has this size in bytes and, if `digest` is given, this hash."""
    path = checkpoint / name
    try:
        present_size = path.stat().st_size
        present_digest = None if digest is None else _hash(path)
    except OSError as error:
        raise CheckpointError(f"{checkpoint} is corrupt: {name} cannot be read ({error}). {_EARLIER}") from error
    if present_size != size:
        raise CheckpointError(
            f"{checkpoint} is corrupt: {name} has {present_size} bytes instead of {size}. {_EARLIER}"
        )
    if present_digest != digest:
        raise CheckpointError(f"{checkpoint} is corrupt: {name} is not what was written. {_EARLIER}")


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _read(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. Raises a `CheckpointError` if it is missing, corrupt, or of another format."""
    path = checkpoint / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        written_hash = manifest.pop("hash")
        if written_hash != hash_json(manifest):
            raise ValueError("it is not what was written")
    except FileNotFoundError as error:
        if not checkpoint.is_dir():
            raise CheckpointError(
                f"The checkpoint {checkpoint} does not exist. Give one (`out/checkpoint-100`), or `True` for the "
                "latest."
            ) from error
        raise CheckpointError(
            f"{checkpoint} has no {MANIFEST}, which is written last: it is incomplete, or DataEfficientGRPOTrainer "
            f"did not write it. {_EARLIER} To use its weights, start a new run with it as the model."
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
