"""The dataset of a run: loaded from the Hub, a folder or a file, given the shape of a prompt dataset, and checked."""

from __future__ import annotations

import json
import re
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict, load_dataset
from datasets.exceptions import DatasetGenerationError, DatasetsError
from transformers.utils import logging
from trl import DatasetMixtureConfig, get_dataset

from trl_dataeff.cli.arguments import DataEfficientGRPOScriptArguments, GRPOArguments
from trl_dataeff.cli.errors import UserError, closest, listed


logger = logging.get_logger(__name__)

#: File name endings that can be loaded, and the loader of 🤗 Datasets for each.
LOADERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}

#: What 🤗 Datasets raises for data that it cannot load; `StopIteration` for a .jsonl file without a line.
LOADING_ERRORS = (OSError, ValueError, TypeError, DatasetsError, StopIteration)
#: What it says of files without rows.
NO_DATA = ("corresponds to no data", "pass `features` or at least one example")

AnyDataset: TypeAlias = Dataset | IterableDataset
AnyDatasetDict: TypeAlias = DatasetDict | IterableDatasetDict


class Source(NamedTuple):
    """What `datasets.load_dataset` loads: `path` is a Hub id, a folder or a loader, `files` are those of a loader."""

    path: str
    files: dict[str, Any] | None = None


def load_data(arguments: GRPOArguments) -> tuple[AnyDataset, AnyDataset | None]:
    """
    Load the training and, if the run evaluates, the evaluation dataset, in the shape that the trainer wants.

    Args:
        arguments ([`GRPOArguments`]):
            Which dataset, and how it is shaped.

    Returns:
        `tuple`:
            Training dataset, and evaluation dataset or `None`.
    """
    script = arguments.script
    splits = _load_splits(script, arguments.dataset)
    given, train_split, test_split = "The dataset mixture (`datasets`)", "train", "test"
    if not arguments.dataset.datasets:
        given = f"The dataset {script.dataset_name!r}"
        train_split, test_split = script.dataset_train_split, script.dataset_test_split
    train = prepare(_split(splits, train_split, "dataset_train_split", given), script, given)
    if arguments.training.eval_strategy == "no":
        return train, None
    return train, prepare(_split(splits, test_split, "dataset_test_split", given), script, given)


def load_prompts(script: DataEfficientGRPOScriptArguments) -> Dataset:
    """
    Load the training split alone, in the shape that the trainer wants.

    Args:
        script ([`DataEfficientGRPOScriptArguments`]):
            Which dataset, and how it is shaped.
    """
    given = f"The dataset {script.dataset_name!r}"
    splits = _load_splits(script, DatasetMixtureConfig())
    train = _split(splits, script.dataset_train_split, "dataset_train_split", given)
    return cast(Dataset, prepare(train, script, given))  # nothing is streamed here


def find_source(path: str, data_files: Any = None) -> Source:
    """
    Say how a dataset given by `path` is loaded.

    Args:
        path (`str`):
            Hub id, loader, folder or file.
        data_files (`str`, `list` or `dict`, *optional*):
            Files inside it; if given, `path` is left as it is.
    """
    if data_files is not None:
        return Source(path, data_files)
    local = Path(path).expanduser()
    if local.is_dir():
        return _folder_source(local)
    loader = LOADERS.get(local.suffix.lower())
    if local.is_file():
        if loader is None:
            raise UserError(f"The dataset file {path!r} has none of the endings {listed(LOADERS)}. Convert it to one.")
        return Source(loader, {"train": [str(local)]})
    if loader is not None or path.startswith((".", "/", "~")) or path.count("/") > 1:
        siblings = [p.name for p in local.parent.iterdir()] if local.parent.is_dir() else []
        raise UserError(
            f"The dataset {path!r} does not exist: there is no such file or folder (looked for {local.absolute()})."
            f"{closest(local.name, siblings)}"
        )
    return Source(path)


def require_dataset(script: DataEfficientGRPOScriptArguments, mixture: DatasetMixtureConfig) -> None:
    """Raise a [`UserError`] if no dataset is given."""
    if not script.dataset_name and not mixture.datasets:
        raise UserError(
            "No dataset: set `dataset_name` to a Hub id, a folder or a file (.parquet, .jsonl, .json, .csv), or give "
            "a mixture under `datasets`."
        )


def prepare(dataset: AnyDataset, script: DataEfficientGRPOScriptArguments, given: str) -> AnyDataset:
    """
    Give a dataset the columns `prompt`, `answer` and `solution` that the script arguments ask for, and check it.

    Args:
        dataset (`Dataset` or `IterableDataset`):
            Dataset as it was loaded.
        script ([`DataEfficientGRPOScriptArguments`]):
            `prompt_column`, `prompt_template`, `prompt_as_chat`, `system_prompt` and `answer_column`.
        given (`str`):
            The dataset in words, for messages.
    """
    first = next(iter(dataset), None)
    if first is None:
        raise _empty(given)
    columns = list(first)
    _check_columns(columns, script, given)
    shapes = (script.prompt_column, script.prompt_template, script.system_prompt, script.answer_column)
    if any(shape is not None for shape in shapes) or script.prompt_as_chat:
        dataset = dataset.map(shape_row, fn_kwargs={"script": script})
    _check_prompts(dataset, given)
    return dataset


def shape_row(row: dict[str, Any], script: DataEfficientGRPOScriptArguments) -> dict[str, Any]:
    """Return the columns of a row that `prepare` adds or replaces."""
    prompt = row[script.prompt_column or "prompt"] if script.prompt_template is None else _fill(script, row)
    if script.prompt_as_chat or script.system_prompt is not None:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if script.system_prompt is not None:
            messages = [{"role": "system", "content": script.system_prompt}, *messages]
        prompt = messages
    shaped = {"prompt": prompt}
    if script.answer_column is not None:
        shaped |= {"answer": row[script.answer_column], "solution": row[script.answer_column]}
    return shaped


def _fill(script: DataEfficientGRPOScriptArguments, row: dict[str, Any]) -> str:
    assert script.prompt_template is not None
    names = "|".join(re.escape(name) for name in row)
    return re.sub(rf"\{{({names})\}}", lambda match: str(row[match[1]]), script.prompt_template)


def _load_splits(script: DataEfficientGRPOScriptArguments, mixture: DatasetMixtureConfig) -> AnyDatasetDict:
    if mixture.datasets:
        if script.dataset_name:
            logger.warning("Both `datasets` and `dataset_name` are given: `dataset_name` is ignored.")
        return _load_mixture(mixture)
    require_dataset(script, mixture)
    assert script.dataset_name is not None
    source = find_source(script.dataset_name)
    try:
        splits: AnyDatasetDict = load_dataset(  # type: ignore[call-overload]  # overloaded for True and False alone
            source.path, name=script.dataset_config, data_files=source.files, streaming=script.dataset_streaming
        )
        return splits
    except LOADING_ERRORS as error:
        raise _not_loaded(script.dataset_name, source, error) from error


def _load_mixture(mixture: DatasetMixtureConfig) -> AnyDatasetDict:
    local = copy(mixture)
    local.datasets = []
    for entry in mixture.datasets:
        source = find_source(entry.path, entry.data_files)
        resolved = copy(entry)
        resolved.path, resolved.data_files = source.path, source.files
        local.datasets.append(resolved)
    try:
        return get_dataset(local)
    except LOADING_ERRORS as error:
        paths = " + ".join(entry.path for entry in mixture.datasets)
        sources = [find_source(entry.path, entry.data_files) for entry in mixture.datasets]
        broken = next((s for s in sources if _bad_line(s) is not None), sources[0])
        raise _not_loaded(paths, broken, error) from error


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


def _split(splits: AnyDatasetDict, name: str, field: str, given: str) -> AnyDataset:
    if name not in splits:
        raise UserError(
            f"{given} has no split `{name}`; it has {listed(map(str, splits))}. Name one of them as `{field}`"
            + (", or set `eval_strategy` to 'no'." if field == "dataset_test_split" else ".")
        )
    return splits[name]


def _check_columns(columns: list[str], script: DataEfficientGRPOScriptArguments, given: str) -> None:
    has = f"{given} has the columns {listed(columns)}"
    for field in ("prompt_column", "answer_column"):
        name = getattr(script, field)
        if name is not None and name not in columns:
            raise UserError(f"`{field}` is {name!r}, but {has[0].lower() + has[1:]}.{closest(name, columns)}")
    if script.prompt_template is not None:
        if not any(f"{{{name}}}" in script.prompt_template for name in columns):
            raise UserError(
                f"`prompt_template` names no column, so that every prompt would be the same. {has}; write one of them "
                f"in braces, as in '{{{columns[0]}}}'."
            )
    elif script.prompt_column is None and "prompt" not in columns:
        likely = [name for name in ("question", "problem", "instruction", "query", "input", "text") if name in columns]
        raise UserError(
            f"{given} has no column `prompt`; it has {listed(columns)}. Name the one that holds the prompts as "
            f"`prompt_column`{f' (`--prompt_column {likely[0]}`)' if likely else ''}, or build one with "
            "`prompt_template`."
        )


def _check_prompts(dataset: AnyDataset, given: str) -> None:
    """The first prompt is text or a conversation, and no row is without one."""
    prompt = next(iter(dataset))["prompt"]
    is_chat = isinstance(prompt, list) and all(isinstance(m, dict) and "role" in m for m in prompt) and prompt
    if prompt is not None and not isinstance(prompt, str) and not is_chat:
        raise UserError(
            f"{given} has prompts such as {str(prompt)[:60]!r} ({type(prompt).__name__}). A prompt is text, or a "
            "conversation: a list of messages with `role` and `content`."
        )
    if isinstance(dataset, Dataset):
        empty = [i for i, value in enumerate(dataset.select_columns("prompt")["prompt"]) if not value]
        if empty:
            raise UserError(f"{given} has {len(empty)} rows without a prompt, the first is row {empty[0]}. Drop them.")


def _empty(given: str) -> UserError:
    return UserError(f"{given} is empty: it has no rows. Training takes a different prompt for each group of a batch.")


def _not_loaded(name: str, source: Source, error: Exception) -> UserError:
    """Say why a dataset was not loaded: the line of a file that cannot be parsed, or what the loader says."""
    bad = _bad_line(source)
    if bad is not None:
        return UserError(f"The dataset {name!r} cannot be parsed: {bad}")
    cause = error.__cause__ if isinstance(error, DatasetGenerationError) and error.__cause__ else error
    reason = str(cause).strip().rstrip(".!")
    if isinstance(error, StopIteration) or any(text in reason for text in NO_DATA):
        return _empty(f"The dataset {name!r}")
    if source.files is None and not Path(source.path).exists():
        return UserError(
            f"The dataset {name!r} could not be loaded from the Hub: {reason}. It is not a file or folder here either; "
            "check the name, `dataset_config`, the connection, and `hf auth login` for a private or gated dataset."
        )
    return UserError(f"The dataset {name!r} cannot be loaded: {type(cause).__name__}: {reason}.")


def _bad_line(source: Source) -> str | None:
    """Return file, line and reason of the first line that is not JSON, if `source` is a .jsonl file with one."""
    if source.path != "json" or not isinstance(source.files, dict):
        return None
    for file in [file for files in source.files.values() for file in files if file.endswith(".jsonl")]:
        for number, line in enumerate(Path(file).read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            try:
                row = json.loads(line) if line.strip() else {}
            except json.JSONDecodeError as error:
                return f"{file}:{number}: {error.msg}. Each line holds one JSON object."
            if not isinstance(row, dict):
                return f"{file}:{number}: {line[:40]!r} is no JSON object. Each line holds one."
    return None
