"""The dataset of a run: loaded from the Hub, a folder or a file, given the shape of a prompt dataset, and checked."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict, load_dataset
from datasets.exceptions import DatasetGenerationError, DatasetsError
from transformers.utils import logging
from trl import DatasetMixtureConfig, get_dataset
from trl.scripts.utils import DatasetConfig

from trl_dataeff.cli.arguments import DataEfficientGRPOScriptArguments, GRPOArguments
from trl_dataeff.cli.sources import find_source
from trl_dataeff.utils import UserError, closest, listed
from trl_dataeff.validation import check_prompts


logger = logging.get_logger(__name__)

#: What 🤗 Datasets raises for data that it cannot load; `StopIteration` for a .jsonl file without a line.
LOADING_ERRORS = (OSError, ValueError, TypeError, DatasetsError, StopIteration)
#: What it says of files without rows.
NO_DATA = ("corresponds to no data", "pass `features` or at least one example")


def load_data(arguments: GRPOArguments) -> tuple[Any, Any]:
    """Return the training and, if the run evaluates, the evaluation dataset or `None`, in the shape that the trainer wants."""
    script, mixture = arguments.script, arguments.dataset
    evaluates = arguments.training.eval_strategy != "no"
    names = ["train", "test"] if mixture.datasets else [script.dataset_train_split, script.dataset_test_split]
    names = names if evaluates else names[:1]
    train, *evaluation = load_splits(script, mixture, names)
    return train, evaluation[0] if evaluation else None


def load_splits(
    script: DataEfficientGRPOScriptArguments,
    mixture: DatasetMixtureConfig,
    names: list[str],
    fields: Sequence[str] = ("dataset_train_split", "dataset_test_split"),
) -> list[Dataset | IterableDataset]:
    """
    Return the splits `names`, the one for training first, in the shape that the trainer wants. `fields` are the options that name
    them.
    """
    given = "The dataset mixture (`datasets`)" if mixture.datasets else f"The dataset {script.dataset_name!r}"
    splits = _load(script, mixture)
    for name, field in zip(names, fields, strict=False):
        if name not in splits:
            raise UserError(
                f"{given} has no split `{name}`; it has {listed(map(str, splits))}. Name one of them as `{field}`"
                + (", or set `eval_strategy` to 'no'." if field == "dataset_test_split" else ".")
            )
    return [prepare(splits[name], script, given) for name in names]


def prepare(
    dataset: Dataset | IterableDataset, script: DataEfficientGRPOScriptArguments, given: str
) -> Dataset | IterableDataset:
    """
    Give a dataset the columns `prompt`, `answer` and `solution` that the script arguments ask for, and check it. `given` is
    the dataset in words, for messages.
    """
    first = next(iter(dataset), None)
    if first is None:
        raise _empty(given)
    _check_columns(list(first), script, given)
    shapes = ("prompt_column", "prompt_template", "prompt_as_chat", "system_prompt", "answer_column")
    if any(getattr(script, shape) not in (None, False) for shape in shapes):
        dataset = dataset.map(shape_row, fn_kwargs={"script": script})
    _check_prompts(dataset, given)
    return dataset


def shape_row(row: dict[str, Any], script: DataEfficientGRPOScriptArguments) -> dict[str, Any]:
    """Return the columns of a row that `prepare` adds or replaces; a row without a prompt stays one, and is rejected."""
    if script.prompt_template is None:
        prompt = row[script.prompt_column or "prompt"]
    else:
        names = "|".join(re.escape(name) for name in row)
        columns = re.findall(rf"\{{({names})\}}", script.prompt_template)
        prompt = re.sub(rf"\{{({names})\}}", lambda match: str(row[match[1]]), script.prompt_template)
        if any(row[name] is None for name in columns):
            prompt = None
    if script.prompt_as_chat or script.system_prompt is not None:
        prompt = [{"role": "user", "content": prompt}] if prompt and isinstance(prompt, str) else prompt or None
    if script.system_prompt is not None and isinstance(prompt, list):
        prompt = [{"role": "system", "content": script.system_prompt}, *prompt]
    answer = {} if script.answer_column is None else dict.fromkeys(("answer", "solution"), row[script.answer_column])
    return {"prompt": prompt, **answer}


def _load(
    script: DataEfficientGRPOScriptArguments, mixture: DatasetMixtureConfig
) -> DatasetDict | IterableDatasetDict:
    if mixture.datasets and script.dataset_name:
        logger.warning("Both `datasets` and `dataset_name` are given: `dataset_name` is ignored.")
    entries = mixture.datasets or [DatasetConfig(str(script.dataset_name), script.dataset_config)]
    sources = [find_source(entry) for entry in entries]
    try:
        if mixture.datasets:
            return get_dataset(replace(mixture, datasets=sources))
        source = sources[0]
        splits: DatasetDict | IterableDatasetDict = load_dataset(  # type: ignore[call-overload]  # for True and False alone
            source.path, source.name, data_files=source.data_files, streaming=script.dataset_streaming
        )
        return splits
    except LOADING_ERRORS as error:
        raise _not_loaded(" + ".join(entry.path for entry in entries), sources, error) from error


def _check_columns(columns: list[str], script: DataEfficientGRPOScriptArguments, given: str) -> None:
    has = f"{given} has the columns {listed(columns)}"
    for field in ("prompt_column", "answer_column"):
        name = getattr(script, field)
        if name is not None and name not in columns:
            raise UserError(f"`{field}` is {name!r}. {has}.{closest(name, columns)}")
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


def _check_prompts(dataset: Dataset | IterableDataset, given: str) -> None:
    """The first prompt is text or a conversation, and no row is without one."""
    prompt = next(iter(dataset))["prompt"]
    keys = {"role", "content"}
    is_chat = isinstance(prompt, list) and prompt and all(isinstance(m, dict) and keys <= set(m) for m in prompt)
    if prompt is not None and not isinstance(prompt, str) and not is_chat:
        raise UserError(
            f"{given} has prompts such as {str(prompt)[:60]!r} ({type(prompt).__name__}). A prompt is text, or a "
            "conversation: a list of messages with `role` and `content`."
        )
    if isinstance(dataset, Dataset):
        check_prompts(dataset, given)


def _empty(given: str) -> UserError:
    return UserError(f"{given} is empty: it has no rows. Training takes a different prompt for each group of a batch.")


def _not_loaded(name: str, sources: list[DatasetConfig], error: Exception) -> UserError:
    """Say why a dataset was not loaded: the line of a file that cannot be parsed, or what the loader says."""
    if bad := next(filter(None, map(_bad_line, sources)), None):
        return UserError(f"The dataset {name!r} cannot be parsed: {bad}")
    cause = error.__cause__ if isinstance(error, DatasetGenerationError) and error.__cause__ else error
    reason = str(cause).strip().rstrip(".!")
    if isinstance(error, StopIteration) or any(text in reason for text in NO_DATA):
        return _empty(f"The dataset {name!r}")
    if sources[0].data_files is None and not Path(sources[0].path).exists():
        return UserError(
            f"The dataset {name!r} could not be loaded from the Hub: {reason}. It is not a file or folder here either; "
            "check the name, `dataset_config`, the connection, and `hf auth login` for a private or gated dataset."
        )
    return UserError(f"The dataset {name!r} cannot be loaded: {type(cause).__name__}: {reason}.")


def _bad_line(source: DatasetConfig) -> str | None:
    """File, line and reason of the first line that is not a JSON object, if `source` is a .jsonl file with one."""
    given = source.data_files if source.path == "json" else []
    names = [given] if isinstance(given, str) else given.values() if isinstance(given, dict) else given or []
    files = [file for name in names for file in ([name] if isinstance(name, str) else name)]
    for file in [file for file in files if file.endswith(".jsonl") and Path(file).is_file()]:
        for number, line in enumerate(Path(file).read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            try:
                if line.strip() and not isinstance(json.loads(line), dict):
                    return f"{file}:{number}: {line[:40]!r} is not a JSON object. Each line must be one."
            except json.JSONDecodeError as error:
                return f"{file}:{number}: {error.msg}. Each line holds one JSON object."
    return None
