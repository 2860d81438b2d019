"""Where a dataset is: on the Hub, in a folder or a file. Nothing is loaded."""

from __future__ import annotations

import glob
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from trl.scripts.utils import DatasetConfig

from trl_dataeff.utils import UserError, closest, listed


#: File name endings that can be loaded, and the loader of 🤗 Datasets for each.
LOADERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}


def is_local(path: str) -> bool:
    """Whether a path can only be one of this machine, and not a Hub id."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1


def find_source(given: DatasetConfig) -> DatasetConfig:
    """Say how `datasets.load_dataset` loads a Hub id, a folder or a file; with `data_files` it is as it was given."""
    path = given.path
    if given.data_files is not None:
        return given
    local = Path(path).expanduser()
    if local.is_dir():
        folder, files = _folder_source(local)
        return replace(given, path=folder, data_files=files)
    loader = LOADERS.get(local.suffix.lower())
    if local.is_file():
        if loader is None:
            raise UserError(f"The dataset file {path!r} has none of the endings {listed(LOADERS)}. Convert it to one.")
        return replace(given, path=loader, data_files=[glob.escape(str(local))])
    if loader is not None or is_local(path):
        siblings = [p.name for p in local.parent.iterdir()] if local.parent.is_dir() else []
        raise UserError(
            f"The dataset {path!r} does not exist: there is no such file or folder (looked for {local.absolute()})."
            f"{closest(local.name, siblings)}"
        )
    return given


def _folder_source(folder: Path) -> tuple[str, Any]:
    """Path and `data_files` of a folder of data files, or of one from `save_to_disk`: its Arrow files one by one."""
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
        return "arrow", {split: _arrow_files(folder / split) for split in splits}
    if (folder / "state.json").is_file():
        return "arrow", {"train": _arrow_files(folder)}
    if not any(p.is_file() and not p.name.startswith(".") for p in folder.rglob("*")):
        raise UserError(f"The dataset folder {str(folder)!r} has no files. Put files with {listed(LOADERS)} there.")
    if glob.has_magic(str(folder)):
        raise UserError(
            f"The name of the dataset folder {str(folder)!r} has one of the characters *, ? and [, which 🤗 Datasets takes for "
            "a pattern. Rename it, or name a file in it."
        )
    return str(folder), None


def _arrow_files(folder: Path) -> list[str]:
    files = json.loads((folder / "state.json").read_text())["_data_files"]
    return [glob.escape(str(folder / file["filename"])) for file in files]


def unwritable(folder: str | os.PathLike[str]) -> str | None:
    """Why nothing can be written into a folder, which may have to be made first: `"... is a file, not a folder"`; or `None`."""
    path = Path(folder).expanduser().absolute()
    found = next(path for path in (path, *path.parents) if path.exists())  # what will be made, is made in it
    if not found.is_dir():
        return f"{found} is a file, not a folder"
    return None if os.access(found, os.W_OK | os.X_OK) else f"{found} cannot be written"
