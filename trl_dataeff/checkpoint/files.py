"""Files that are whole or absent: written under a temporary name, synced, then renamed."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable
from pathlib import Path


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """
    Let `write(temporary_path)` write a file and move it to `path`. A process that is killed in between leaves the
    former `path`, whole.
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
    """Bring the names in a folder to the disk. On Windows, where a folder cannot be opened, nothing is done."""
    if sys.platform == "win32":
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
