"""
The manifest of a checkpoint, `dataeff/manifest.json`. It lists every file with its size, and those that are not large
with a hash. It is written last: a checkpoint with a manifest is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xxhash
from transformers.utils import logging

from trl_dataeff.checkpoint.state import FOLDER, CheckpointError
from trl_dataeff.utils import FORMAT, __version__, hash_json, sync_folder, write_atomically


logger = logging.get_logger(__name__)
MANIFEST = f"{FOLDER}/manifest.json"
PACKAGES = ("torch", "transformers", "trl")
HASHED = 2**26  # bytes; a larger file is compared by its size
#: Files of the Trainer without which it resumes: what they hold then begins anew
OPTIONAL = ("optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "rng_state*.pth")
#: Files that decide how a run continues. All others, such as the tokenizer's, are not read when it resumes
DECISIVE = (
    *OPTIONAL,
    "trainer_state.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model.bin.index.json",
    "adapter_model.bin",
    "*.distcp",
    "latest",
)
#: Beginnings of the names of folders in which DeepSpeed and FSDP keep shards
_SHARDS = ("global_step", "pytorch_model_fsdp", "optimizer_")
_ANOTHER = "Resume from another checkpoint; `True` takes the latest complete one."


def write_manifest(checkpoint: Path, *, step: int, processes: int, resumable: bool) -> None:
    """
    Bring all files of a checkpoint to the disk and list them in its manifest.

    Args:
        checkpoint (`Path`): its folder, in which everything else has been written.
        step (`int`): optimizer steps after which it was written.
        processes (`int`): number of processes of the run.
        resumable (`bool`): whether it holds more than the model.
    """
    others = [path for path in checkpoint.parent.glob("checkpoint-*") if path != checkpoint]
    paths = sorted(checkpoint.rglob("*"))
    files = [path for path in paths if path.is_file()]
    folders = [path for path in paths if path.is_dir()]
    _sync(files, [checkpoint, *folders])
    sizes = {path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in files}
    hashes = {}
    for path in files:
        if path.parent == checkpoint / FOLDER or path.stat().st_size <= HASHED:
            hashes[path.relative_to(checkpoint).as_posix()] = _hash(path)
    content = {
        "format": FORMAT,
        "trl_dataeff": __version__,
        "versions": {name: version(name) for name in PACKAGES},
        "written": time.time(),
        "order": 1 + max((completion_order(path)[0] for path in others), default=0),
        "step": step,
        "processes": processes,
        "resumable": resumable,
        "sizes": sizes,
        "hashes": hashes,
    }
    text = json.dumps(content | {"hash": hash_json(content)}, indent=2)
    write_atomically(checkpoint / MANIFEST, lambda temporary: temporary.write_text(text))
    sync_folder(checkpoint.parent)


def _sync(files: list[Path], folders: list[Path]) -> None:
    """Have the system write files, and the names in folders, to the disk."""
    for path in files:
        # On Windows, `fsync` needs a file that is open for writing. On other systems, a file may be read-only
        with open(path, "r+b" if os.name == "nt" else "rb") as file:
            os.fsync(file.fileno())
    for folder in folders:
        sync_folder(folder)


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint was written to the end."""
    return (checkpoint / MANIFEST).is_file()


def completion_order(checkpoint: Path) -> tuple[int, float]:
    """
    When a checkpoint was completed, among those of its folder: its number, which only grows, whereas the clock may be
    set back; and the time in seconds since 1970, for checkpoints of an earlier version, which have no number. Both are
    0 if the manifest is missing or cannot be read.
    """
    try:
        manifest = _read(checkpoint)
    except CheckpointError:
        return 0, 0.0
    return int(manifest.get("order", 0)), float(manifest["written"])


def check_checkpoint(checkpoint: Path, *, needs_all: bool = True, needs_state: bool = True) -> dict[str, Any]:
    """
    Compare a checkpoint with its manifest. Of files that do not decide how a run continues, a difference is a warning:
    a callback may have changed them when the checkpoint was saved.

    Args:
        checkpoint (`Path`): its folder.
        needs_all (`bool`, *optional*, defaults to `True`): whether it must have the files without which the Trainer
            resumes, such as `optimizer.pt`. If not, a missing one is a warning.
        needs_state (`bool`, *optional*, defaults to `True`): whether it must hold more than the model.

    Returns:
        `dict`: the manifest.

    Raises:
        [`CheckpointError`]: it is incomplete, corrupt, or holds the model alone.
    """
    manifest = _read(checkpoint)
    changed = []
    for name, size in manifest["sizes"].items():
        problem = _difference(checkpoint, name, size, manifest["hashes"].get(name))
        if problem is None:
            continue
        if _decides(name) and (needs_all or not _is_left_out(checkpoint, name)):
            raise CheckpointError(f"{checkpoint} is corrupt: {problem}. {_ANOTHER}")
        changed.append(problem)
    if needs_state and not manifest["resumable"]:
        raise CheckpointError(
            f"{checkpoint} was written with `save_only_model=True`, so no run can resume from it. Start a new run "
            "with it as the model."
        )
    if changed:
        logger.warning(f"{checkpoint} was changed after it was written: {'; '.join(changed)}. The run continues.")
    return manifest


def _decides(name: str) -> bool:
    """Whether a file of a checkpoint, by its path within it, decides how a run continues."""
    folder, _, file = name.rpartition("/")
    if folder == FOLDER or folder.startswith(_SHARDS):
        return True
    return any(fnmatch(file, pattern) for pattern in DECISIVE)


def _is_left_out(checkpoint: Path, name: str) -> bool:
    """Whether a file without which the Trainer resumes was removed."""
    is_optional = any(fnmatch(name, pattern) for pattern in OPTIONAL)
    return is_optional and not os.path.lexists(checkpoint / name)


def _difference(checkpoint: Path, name: str, size: int, digest: str | None) -> str | None:
    """How a file differs from its size in bytes and, if `digest` is given, its hash; `None` if it does not."""
    path = checkpoint / name
    try:
        present_size = path.stat().st_size
        if present_size != size:
            return f"{name} has {present_size} bytes instead of {size}"
        if digest is not None and _hash(path) != digest:
            return f"{name} is not what was written"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error})"
    return None


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
            f"did not write it. {_ANOTHER} To use its weights, start a new run with it as the model."
        ) from error
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{checkpoint} is corrupt: {MANIFEST} cannot be read ({type(error).__name__}: {error}). {_ANOTHER}"
        ) from error
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest['format']}, written by trl_dataeff {manifest['trl_dataeff']}; this is "
            f"trl_dataeff {__version__}, which reads format {FORMAT}. Resume with that version."
        )
    return manifest
