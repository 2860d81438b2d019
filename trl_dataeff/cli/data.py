"""What a run learns from: its dataset, in the shape of a prompt dataset, and its reward functions."""

from __future__ import annotations

import glob
import importlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict, load_dataset
from datasets.exceptions import DatasetGenerationError, DatasetsError
from trl import DatasetMixtureConfig, get_dataset
from trl.import_utils import is_math_verify_available
from trl.scripts.utils import DatasetConfig

import trl_dataeff.rewards as our_rewards
from trl_dataeff.rollouts.checks import check_prompts
from trl_dataeff.utils import UserError, closest, listed


if TYPE_CHECKING:
    from trl_dataeff.cli.parser import DataEfficientGRPOScriptArguments

#: File name endings that can be loaded, and the loader of 🤗 Datasets for each.
LOADERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}
#: What 🤗 Datasets raises for data that it cannot load; `StopIteration` for a .jsonl file without a line.
LOADING_ERRORS = (OSError, ValueError, TypeError, DatasetsError, StopIteration)

_OF_SOLUTION = ("accuracy_reward", "reasoning_accuracy_reward")  # TRL's, which compare with the column `solution`
_OF_TRL = (*_OF_SOLUTION, "think_format_reward", "get_soft_overlong_punishment")
#: Reward functions that can be given by name, and their paths.
REWARDS = {
    **{name: f"trl_dataeff.rewards.{name}" for name in our_rewards.__all__},
    **{name: f"trl.rewards.{name}" for name in _OF_TRL},
}


def load_data(
    script: DataEfficientGRPOScriptArguments, mixture: DatasetMixtureConfig, evaluates: bool
) -> tuple[Any, Any]:
    """Return the training and, if the run evaluates, the evaluation dataset or `None`, in the shape that the trainer wants."""
    names = ["train", "test"] if mixture.datasets else [script.dataset_train_split, script.dataset_test_split]
    names = names if evaluates else names[:1]
    given = "The dataset mixture (`datasets`)" if mixture.datasets else f"The dataset {script.dataset_name!r}"
    splits = _load(script, mixture)
    for name in names:
        if name not in splits:
            raise UserError(
                f"{given} has no split `{name}`; it has {listed(map(str, splits))}. Name them as `dataset_train_split` and "
                "`dataset_test_split` (a mixture has `test_split_size`), or set `eval_strategy` to 'no' to train without the second."
            )
    train, *evaluation = [prepare(splits[name], script, given) for name in names]
    return train, evaluation[0] if evaluation else None


def prepare(
    dataset: Dataset | IterableDataset, script: DataEfficientGRPOScriptArguments, given: str
) -> Dataset | IterableDataset:
    """
    Give a dataset the columns `prompt`, `answer` and `solution` that the script arguments ask for, and check that every row has
    a prompt. `given` is the dataset in words, for messages.
    """
    if isinstance(dataset, Dataset):
        try:
            dataset.data.table.validate(full=True)
        except pa.ArrowInvalid as error:
            raise UserError(f"{given} is not UTF-8 text: {error}. Convert its files to UTF-8.") from error
    first = next(iter(dataset), None)
    if first is None:
        raise UserError(f"{given} is empty: it has no rows.")
    _check_columns(list(first), script, given)
    if script.prompt_column or script.prompt_as_chat or script.system_prompt is not None or script.answer_column:
        dataset = dataset.map(shape_row, fn_kwargs={"script": script})
    prompt = next(iter(dataset))["prompt"]
    messages = prompt if isinstance(prompt, list) else []
    is_chat = messages and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages)
    if prompt is not None and not isinstance(prompt, str) and not is_chat:
        raise UserError(
            f"{given} has prompts such as {str(prompt)[:60]!r} ({type(prompt).__name__}). A prompt is text, or a "
            "conversation: a list of messages with `role` and `content`."
        )
    if isinstance(dataset, Dataset):
        check_prompts(dataset, given)
    return dataset


def shape_row(row: dict[str, Any], script: DataEfficientGRPOScriptArguments) -> dict[str, Any]:
    """Return the columns of a row that `prepare` adds or replaces; the prompt is `None` or empty if the row has none."""
    prompt = row.get(script.prompt_column or "prompt")
    if script.prompt_as_chat or script.system_prompt is not None:
        prompt = [{"role": "user", "content": prompt}] if prompt and isinstance(prompt, str) else prompt or None
    if script.system_prompt is not None and isinstance(prompt, list):
        prompt = [{"role": "system", "content": script.system_prompt}, *prompt]
    answer = {} if script.answer_column is None else dict.fromkeys(("answer", "solution"), row[script.answer_column])
    return {"prompt": prompt, **answer}


def _check_columns(columns: list[str], script: DataEfficientGRPOScriptArguments, given: str) -> None:
    for option, name in (("prompt_column", script.prompt_column or "prompt"), ("answer_column", script.answer_column)):
        if name is not None and name not in columns:
            raise UserError(
                f"{given} has the columns {listed(columns)}, and no column {name!r}.{closest(name, columns)} Name one of them "
                f"as `{option}`."
            )


def _load(
    script: DataEfficientGRPOScriptArguments, mixture: DatasetMixtureConfig
) -> DatasetDict | IterableDatasetDict:
    entries = mixture.datasets or [DatasetConfig(str(script.dataset_name), script.dataset_config)]
    sources = [find_source(entry) for entry in entries]
    try:
        if mixture.datasets:
            return get_dataset(replace(mixture, datasets=sources))
        source = sources[0]
        return load_dataset(  # type: ignore[call-overload]  # overloads are for True and False alone
            source.path, source.name, data_files=source.data_files, streaming=script.dataset_streaming
        )
    except LOADING_ERRORS as error:
        raise UserError(_why_not_loaded([entry.path for entry in entries], error)) from error


def _why_not_loaded(paths: list[str], error: Exception) -> str:
    """The line of a file that cannot be parsed, or what the loader says."""
    name = " + ".join(paths)
    if bad := next(filter(None, map(_bad_line, paths)), None):
        return f"The dataset {name!r} cannot be parsed: {bad}"
    cause = error.__cause__ if isinstance(error, DatasetGenerationError) and error.__cause__ else error
    reason = str(cause).strip().rstrip(".!") or "it is empty"  # `StopIteration` has no text
    return f"The dataset {name!r} cannot be loaded: {type(cause).__name__}: {reason}."


def _bad_line(path: str) -> str | None:
    """File, line and reason of the first line that is not a JSON object, if this is a .jsonl file with one."""
    file = Path(path).expanduser()
    if file.suffix != ".jsonl" or not file.is_file():
        return None
    with open(file, encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                if line.strip() and not isinstance(json.loads(line), dict):
                    return f"{path}:{number}: {line[:40]!r} is not a JSON object. Each line must be one."
            except json.JSONDecodeError as error:
                return f"{path}:{number}: {error.msg}. Each line holds one JSON object."
    return None


def find_source(given: DatasetConfig) -> DatasetConfig:
    """Say how `datasets.load_dataset` loads a Hub id, a folder or a file; with `data_files` it is as it was given."""
    if given.data_files is not None:
        return given
    local = Path(given.path).expanduser()
    loader = LOADERS.get(local.suffix.lower())
    if local.is_dir():
        # `save_to_disk` leaves a file state.json beside the data of each split
        saved = {path.parent.name: path.parent for path in sorted(local.glob("*/state.json"))}
        saved = {"train": local} if (local / "state.json").is_file() else saved
        if saved:
            files = {split: f"{glob.escape(str(path))}/data-*.arrow" for split, path in saved.items()}
            return replace(given, path="arrow", data_files=files)
        return replace(given, path=str(local))
    if local.is_file():
        if loader is None:
            raise UserError(
                f"The dataset file {given.path!r} has none of the endings {listed(LOADERS)}. Convert it to one."
            )
        return replace(given, path=loader, data_files=[glob.escape(str(local))])
    if loader is not None or given.path.startswith((".", "/", "~")):
        siblings = [p.name for p in local.parent.iterdir()] if local.parent.is_dir() else []
        raise UserError(
            f"The dataset {given.path!r} does not exist (as a file or folder: {local.absolute()})."
            f"{closest(local.name, siblings)}"
        )
    return given


def load_reward(name: str) -> Callable[..., Any]:
    """Return a reward function by its name or dotted path; a name or path that leads to none is a [`UserError`]."""
    module_name, _, function_name = REWARDS.get(name, name).rpartition(".")
    if not module_name:
        raise UserError(
            f"The reward function {name!r} is unknown.{closest(name, REWARDS)} Known are {listed(REWARDS)}; any other is "
            "given by its dotted path, as in `my_rewards.brevity`."
        )
    if name in ("math_verify_reward", *_OF_SOLUTION) and not is_math_verify_available():
        raise UserError(f"`{name}` needs math-verify: pip install math-verify")
    wrong = f"The reward function {name!r} cannot be imported"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:  # any other error is one of the module, and keeps its traceback
        raise UserError(
            f"{wrong}: there is no module {error.name!r}, neither installed nor in {os.getcwd()} nor in PYTHONPATH."
        ) from error
    function: Callable[..., Any] | None = getattr(module, function_name, None)
    if not callable(function):
        raise UserError(
            f"{wrong}: {module_name!r} has no function {function_name!r}.{closest(function_name, {*dir(module)} - {function_name})}"
        )
    if name == "get_soft_overlong_punishment":
        return function(max_completion_len=1280, soft_punish_cache=256)
    return function


def check_columns(names: list[str] | None, row: dict[str, Any]) -> None:
    """Raise a [`UserError`] if a reward function reads what this row of the dataset does not have."""
    for name in names or []:
        columns = {"solution"} if name in _OF_SOLUTION else {"answer", "solution"}
        if (name in _OF_SOLUTION or name in our_rewards.__all__) and not row.keys() & columns:
            raise UserError(
                f"`{name}` reads the column {' or '.join(f'`{c}`' for c in sorted(columns))}, but the dataset has {listed(row)}. "
                "Name the column with the gold answers as `answer_column`."
            )
        if name in (*_OF_SOLUTION, "think_format_reward") and isinstance(row["prompt"], str):
            raise UserError(f"`{name}` reads conversations, but the prompts are plain text. Set `prompt_as_chat`.")
