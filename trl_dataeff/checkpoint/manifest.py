"""
The manifest of a checkpoint, `dataeff/manifest.json`: every file with its size and hash, written as the last thing.

Its presence says that the checkpoint is complete: it is the one completeness marker. What it lists proves that the files
are still what was written.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trl_dataeff.checkpoint.state import FOLDER, CheckpointError
from trl_dataeff.utils import hash_file, hash_json, sync_folder, write_atomically
from trl_dataeff.version import FORMAT, __version__


MANIFEST = f"{FOLDER}/manifest.json"
PACKAGES = ("torch", "transformers", "trl")
_THREADS = 4  # reading and hashing both leave the interpreter to others
_EARLIER = "Resume from an earlier checkpoint."


def write_manifest(checkpoint: Path, *, run: str, step: int, processes: int, resumable: bool) -> None:
    """
    Bring all files of a checkpoint to the disk and list them. Call it when every process has written its own.

    Args:
        checkpoint (`Path`): the `checkpoint-N` folder.
        run (`str`): id of the run.
        step (`int`): optimizer steps done.
        processes (`int`): number of processes that wrote it.
        resumable (`bool`): whether it holds more than the model.
    """
    names = sorted(str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file())
    names = [name for name in names if name != MANIFEST]
    hashes = _in_threads(lambda name: hash_file(checkpoint / name, sync=True), names)
    for folder in [checkpoint, *(path for path in checkpoint.rglob("*") if path.is_dir())]:
        sync_folder(folder)
    content = {
        "format": FORMAT,
        "trl_dataeff": __version__,
        "versions": {name: version(name) for name in PACKAGES},
        "run": run,
        "step": step,
        "processes": processes,
        "resumable": resumable,
        "files": {
            name: {"size": size, "xxh3_128": digest} for name, (size, digest) in zip(names, hashes, strict=True)
        },
    }
    text = json.dumps(content | {"xxh3_128": hash_json(content)}, indent=2)
    write_atomically(checkpoint / MANIFEST, lambda path: path.write_text(text))
    sync_folder(checkpoint.parent)


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint was written to the end. Fast: looks only for its manifest."""
    return (checkpoint / MANIFEST).is_file()


def read_unchecked(checkpoint: Path) -> dict[str, Any] | None:
    """The manifest, of which nothing is checked; `None` if there is none or it cannot be read."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return manifest if isinstance(manifest, dict) else None


def check_checkpoint(checkpoint: Path) -> dict[str, Any]:
    """
    Read every file of a checkpoint and compare it with the manifest, which is returned. Files that the manifest does not
    list are not looked at.

    Raises:
        `CheckpointError`: it is incomplete, corrupt, or cannot be resumed from. The message says which and what to do.
    """
    manifest = _read(checkpoint)
    for name, entry in manifest["files"].items():
        _check_size(checkpoint, name, entry["size"])
    names = list(manifest["files"])
    try:
        hashes = _in_threads(lambda name: hash_file(checkpoint / name), names)
    except OSError as error:
        raise CheckpointError(f"{checkpoint} is corrupt: a file cannot be read ({error}). {_EARLIER}") from error
    for name, (_, digest) in zip(names, hashes, strict=True):
        if digest != manifest["files"][name]["xxh3_128"]:
            raise CheckpointError(f"{checkpoint} is corrupt: {name} is not what was written. {_EARLIER}")
    if not manifest["resumable"]:
        raise CheckpointError(
            f"{checkpoint} was written with `save_only_model=True`: it holds the model, but neither the optimizer nor "
            "the selection state, so no run can resume from it. Start a new run with it as the model."
        )
    return manifest


def _read(checkpoint: Path) -> dict[str, Any]:
    if not checkpoint.is_dir():
        raise CheckpointError(f"There is no checkpoint {checkpoint}: no such folder.")
    path = checkpoint / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        written = manifest.pop("xxh3_128")
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{checkpoint} is incomplete: it has no {MANIFEST}, which is written last. (Or it was not written by "
            f"DataEfficientGRPOTrainer at all.) {_EARLIER} To use its weights, start a new run with it as the model."
        ) from error
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{checkpoint} is corrupt: {MANIFEST} cannot be read ({type(error).__name__}: {error}). {_EARLIER}"
        ) from error
    if written != hash_json(manifest):
        raise CheckpointError(f"{checkpoint} is corrupt: {MANIFEST} is not what was written. {_EARLIER}")
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest['format']}, written by trl_dataeff {manifest['trl_dataeff']}; this is "
            f"trl_dataeff {__version__}, which reads format {FORMAT}. Resume with that version."
        )
    return manifest


def _check_size(checkpoint: Path, name: str, size: int) -> None:
    try:
        present = (checkpoint / name).stat().st_size
    except OSError as error:
        raise CheckpointError(f"{checkpoint} is corrupt: {name} is missing ({error.strerror}). {_EARLIER}") from error
    if present != size:
        raise CheckpointError(f"{checkpoint} is corrupt: {name} has {present} bytes instead of {size}. {_EARLIER}")


def _in_threads(function: Callable[[str], tuple[int, str]], names: list[str]) -> list[tuple[int, str]]:
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(function, names))
