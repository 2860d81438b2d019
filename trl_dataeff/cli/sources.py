"""Where a dataset is: on the Hub, in a folder or a file. Nothing is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from trl_dataeff.cli.errors import UserError, closest, listed


#: File name endings that can be loaded, and the loader of 🤗 Datasets for each.
LOADERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}


class Source(NamedTuple):
    """What `datasets.load_dataset` loads: `path` is a Hub id, a folder or a loader, `files` are those of a loader."""

    path: str
    files: Any = None


def is_local(path: str) -> bool:
    """Whether a path can only be one of this machine, and not a Hub id."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1


def find_source(path: str, data_files: Any = None) -> Source:
    """Say how a dataset given by its Hub id, loader, folder or file is loaded; with `data_files`, `path` stays as it is."""
    if data_files is not None:
        return Source(path, data_files)
    local = Path(path).expanduser()
    if local.is_dir():
        return _folder_source(local)
    loader = LOADERS.get(local.suffix.lower())
    if local.is_file():
        if loader is None:
            raise UserError(f"The dataset file {path!r} has none of the endings {listed(LOADERS)}. Convert it to one.")
        return Source(loader, [str(local)])
    if loader is not None or is_local(path):
        siblings = [p.name for p in local.parent.iterdir()] if local.parent.is_dir() else []
        raise UserError(
            f"The dataset {path!r} does not exist: there is no such file or folder (looked for {local.absolute()})."
            f"{closest(local.name, siblings)}"
        )
    return Source(path)


def _folder_source(folder: Path) -> Source:
    """A folder of data files, or one from `save_to_disk`, whose Arrow files are named one by one."""
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
        return Source("arrow", {split: _arrow_files(folder / split) for split in splits})
    if (folder / "state.json").is_file():
        return Source("arrow", {"train": _arrow_files(folder)})
    if not any(p.is_file() and not p.name.startswith(".") for p in folder.rglob("*")):
        raise UserError(f"The dataset folder {str(folder)!r} has no files. Put files with {listed(LOADERS)} there.")
    return Source(str(folder))


def _arrow_files(folder: Path) -> list[str]:
    files = json.loads((folder / "state.json").read_text())["_data_files"]
    return [str(folder / file["filename"]) for file in files]
