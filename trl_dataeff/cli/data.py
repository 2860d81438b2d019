"""What a run learns from: its dataset, in the shape of a prompt dataset, and its reward functions."""

from __future__ import annotations

import glob
import importlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import (
    Dataset,
    DatasetDict,
    IterableDataset,
    IterableDatasetDict,
    ReadInstruction,
    concatenate_datasets,
    load_dataset,
)
from datasets.exceptions import DatasetGenerationError, DatasetsError
from trl import DatasetMixtureConfig, get_dataset
from trl.import_utils import is_math_verify_available
from trl.scripts.grpo import GRPOScriptArguments
from trl.scripts.utils import DatasetConfig

import trl_dataeff.rewards as our_rewards
from trl_dataeff.rollouts.checks import check_prompts
from trl_dataeff.utils import UserError, closest, listed


#: File name endings that can be loaded, and the loader of 🤗 Datasets for each.
LOADERS = {
    ".parquet": "parquet",
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
}
#: What 🤗 Datasets raises for data that it cannot load: `StopIteration` for a .jsonl file without a line, `IndexError`
#: for the path `/`
LOADING_ERRORS = (OSError, ValueError, TypeError, IndexError, DatasetsError, StopIteration)

#: Rewards of TRL that compare with the column `solution`.
_OF_SOLUTION = (
    "accuracy_reward",
    "reasoning_accuracy_reward",
)
_OF_TRL = (
    *_OF_SOLUTION,
    "think_format_reward",
    "get_soft_overlong_punishment",
)
#: Reward functions that can be given by name, and their paths.
REWARDS = {
    **{name: f"trl_dataeff.rewards.{name}" for name in our_rewards.__all__},
    **{name: f"trl.rewards.{name}" for name in _OF_TRL},
}


@dataclass
class DataEfficientGRPOScriptArguments(GRPOScriptArguments):
    """Script arguments of `trl-dataeff grpo`: every argument of TRL's GRPO script, and those below."""

    prompt_column: str | None = field(
        default=None, metadata={"help": "Column that becomes `prompt`, e.g. `question` of GSM8K."}
    )
    prompt_as_chat: bool = field(
        default=False,
        metadata={
            "help": "Turn a text prompt into the user's message of a conversation, so that the model's chat template "
            "is applied; use it for instruct models."
        },
    )
    system_prompt: str | None = field(
        default=None, metadata={"help": "System message before every prompt; implies `prompt_as_chat`."}
    )
    answer_column: str | None = field(
        default=None, metadata={"help": "Column that is passed to reward functions as `answer` and as `solution`."}
    )


def load_data(
    script: DataEfficientGRPOScriptArguments, mixture: DatasetMixtureConfig, evaluates: bool
) -> tuple[Any, Any]:
    """
    Load the datasets of a run, in the shape that the trainer wants.

    Args:
        script ([`DataEfficientGRPOScriptArguments`]):
            Names of the dataset, its splits and its columns.
        mixture (`DatasetMixtureConfig`):
            Datasets that are mixed. If it has any, the dataset's name and splits in `script` are ignored.
        evaluates (`bool`):
            Whether the run evaluates.

    Returns:
        `tuple[Any, Any]`: The training dataset and the evaluation dataset, `None` if the run does not evaluate.

    Raises:
        UserError: If a dataset or a split cannot be loaded, or a dataset has not what the run needs.
    """
    if mixture.datasets:
        given = "The dataset mixture (`datasets`)"
        names = ["train", "test"]
    else:
        given = f"The dataset {script.dataset_name!r}"
        names = [script.dataset_train_split, script.dataset_test_split]
    if not evaluates:
        names = names[:1]
    splits = _load(script, mixture)
    parts = []
    for name in names:
        part = split_of(splits, name)
        if part is None:
            advice = "Name another one as `dataset_train_split`."
            if evaluates and name == names[1]:
                advice = _how_to_evaluate(script, mixture)
            if "[" in name:
                advice += " A slice, as in `test[:200]`, is for datasets that are not streamed."
            raise UserError(f"{given} has no split `{name}`; it has {listed(map(str, splits))}. {advice}")
        parts.append(part)
    prepared = [prepare(part, script, given) for part in parts]
    train = prepared[0]
    evaluation = prepared[1] if evaluates else None
    return train, evaluation


def split_of(splits: DatasetDict | IterableDatasetDict, name: str) -> Dataset | IterableDataset | None:
    """
    Return a split by its name, or a part of it.

    Args:
        splits (`DatasetDict` or `IterableDatasetDict`):
            The splits of a dataset.
        name (`str`):
            Name of a split, or a slice as 🤗 Datasets writes it, such as `test[:200]`. A stream has no slices.

    Returns:
        `Dataset`, `IterableDataset` or `None`: The rows; `None` if there is no such split.
    """
    if name in splits:
        return splits[name]
    if isinstance(splits, IterableDatasetDict):
        return None
    lengths = {str(split): len(rows) for split, rows in splits.items()}
    try:
        slices = ReadInstruction.from_spec(name).to_absolute(lengths)
    except ValueError:  # neither a slice nor a split of this dataset
        return None
    return concatenate_datasets([splits[part.splitname].select(range(part.from_, part.to)) for part in slices])


def _how_to_evaluate(script: DataEfficientGRPOScriptArguments, mixture: DatasetMixtureConfig) -> str:
    """Return the ways out for a run that evaluates, and has no split of prompts to evaluate on."""
    train_only = "To train without evaluation, set `eval_strategy` to 'no'."
    if mixture.datasets:
        return f"To hold out a tenth of its rows, set `test_split_size` to 0.1. {train_only}"
    path = Path(str(script.dataset_name))
    another = "Name another one as `dataset_test_split`."
    if path.expanduser().is_file():
        another = (
            f"To evaluate on another file, put both into a folder, as train{path.suffix} and test{path.suffix}, and "
            "give the folder as `dataset_name`."
        )
    return (
        f"{another} To hold out a tenth of its rows, give it in a recipe as a mixture, `datasets: [{{path: {path}}}]` "
        f"and `test_split_size: 0.1`. {train_only}"
    )


def prepare(
    dataset: Dataset | IterableDataset, script: DataEfficientGRPOScriptArguments, given: str
) -> Dataset | IterableDataset:
    """
    Give a dataset the columns `prompt`, `answer` and `solution` that the script arguments ask for.

    Args:
        dataset (`Dataset` or `IterableDataset`):
            One split.
        script ([`DataEfficientGRPOScriptArguments`]):
            Which columns become `prompt`, `answer` and `solution`.
        given (`str`):
            The dataset in words, for messages.

    Returns:
        `Dataset` or `IterableDataset`: The dataset with these columns.

    Raises:
        UserError: If the dataset is empty or not UTF-8, lacks a column, or has rows without a prompt. Of a stream,
            only the first row is read.
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
    _check_first_prompt(next(iter(dataset))["prompt"], given)
    if isinstance(dataset, Dataset):
        check_prompts(dataset, given)
    return dataset


def shape_row(row: dict[str, Any], script: DataEfficientGRPOScriptArguments) -> dict[str, Any]:
    """
    Return the columns of a row that [`prepare`] adds or replaces.

    Args:
        row (`dict[str, Any]`):
            Row of the dataset as it was loaded.
        script ([`DataEfficientGRPOScriptArguments`]):
            Which columns become `prompt`, `answer` and `solution`.

    Returns:
        `dict[str, Any]`: The columns and their values. `prompt` is `None` or empty if the row has no prompt.
    """
    prompt = row.get(script.prompt_column or "prompt")
    if script.prompt_as_chat or script.system_prompt is not None:
        if prompt in ("", []):
            prompt = None
        elif isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
    if script.system_prompt is not None and isinstance(prompt, list):
        prompt = [{"role": "system", "content": script.system_prompt}, *prompt]
    columns = {"prompt": prompt}
    if script.answer_column is not None:
        columns["answer"] = row[script.answer_column]
        columns["solution"] = row[script.answer_column]
    return columns


def _check_columns(columns: list[str], script: DataEfficientGRPOScriptArguments, given: str) -> None:
    needed = {"prompt_column": script.prompt_column or "prompt"}
    if script.answer_column is not None:
        needed["answer_column"] = script.answer_column
    for option, name in needed.items():
        if name not in columns:
            raise UserError(
                f"{given} has the columns {listed(columns)}, and no column {name!r}.{closest(name, columns)} Name one "
                f"of them as `{option}`."
            )


def _check_first_prompt(prompt: Any, given: str) -> None:
    """Raise a [`UserError`] unless a prompt is text, a conversation, or missing, which is checked for all rows."""
    if prompt is None or isinstance(prompt, str):
        return
    if not isinstance(prompt, list) or not prompt or not all(_is_message(message) for message in prompt):
        raise UserError(
            f"{given} has prompts such as {str(prompt)[:60]!r} ({type(prompt).__name__}). A prompt is text, or a "
            "conversation: a list of messages with `role` and `content`."
        )


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and "role" in message and "content" in message


def _load(
    script: DataEfficientGRPOScriptArguments, mixture: DatasetMixtureConfig
) -> DatasetDict | IterableDatasetDict:
    entries = datasets_of(script, mixture)
    sources = [find_source(entry) for entry in entries]
    try:
        if mixture.datasets:
            return get_dataset(replace(mixture, datasets=sources))
        source = sources[0]
        return load_dataset(  # type: ignore[call-overload]  # overloads are for True and False alone
            source.path, source.name, data_files=source.data_files, streaming=script.dataset_streaming
        )
    except LOADING_ERRORS as error:
        raise UserError(_why_not_loaded(entries, error)) from error


def datasets_of(script: DataEfficientGRPOScriptArguments, mixture: DatasetMixtureConfig) -> Sequence[DatasetConfig]:
    """Return the datasets of a run as the user names them: a mixture, or one."""
    return mixture.datasets or [DatasetConfig(str(script.dataset_name), script.dataset_config)]


def _why_not_loaded(entries: Sequence[DatasetConfig], error: Exception) -> str:
    """Return why datasets cannot be loaded: the line that cannot be parsed, or what the loader says."""
    paths = [entry.path for entry in entries]
    name = " + ".join(paths)
    for path in paths:
        bad_line = _bad_line(path)
        if bad_line is not None:
            return f"The dataset {name!r} cannot be parsed: {bad_line}"
    cause: BaseException = error
    if isinstance(error, DatasetGenerationError) and error.__cause__ is not None:
        cause = error.__cause__
    reason = str(cause).strip().rstrip(".!") or "it is empty"  # `StopIteration` has no text
    hint = ""
    if "BuilderConfig" in reason:
        hint = " Remove `dataset_config` (of a mixture `name`), or set it to null, for the only configuration."
    return f"The dataset {name!r} cannot be loaded: {type(cause).__name__}: {reason}.{hint}"


def _bad_line(path: str) -> str | None:
    """Return file, line and reason of the first line that is not a JSON object, if this is a .jsonl file with one."""
    file = Path(path).expanduser()
    if file.suffix != ".jsonl" or not file.is_file():
        return None
    with open(file, encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                return f"{path}:{number}: {error.msg}. Each line holds one JSON object."
            if not isinstance(value, dict):
                return f"{path}:{number}: {line[:40]!r} is not a JSON object. Each line must be one."
    return None


def find_source(given: DatasetConfig) -> DatasetConfig:
    """
    Say how `datasets.load_dataset` loads a Hub id, a folder or a file.

    Args:
        given (`DatasetConfig`):
            A dataset as the user names it.

    Returns:
        `DatasetConfig`: The same dataset with the `path` and `data_files` that `load_dataset` takes. Unchanged if it
            has `data_files` already, or is a Hub id.

    Raises:
        UserError: If a file or folder does not exist, or a file has an unknown ending.
    """
    if given.data_files is not None:
        return given
    local = Path(given.path).expanduser()
    loader = LOADERS.get(local.suffix.lower())
    if local.is_dir():
        saved = _saved_splits(local)
        if saved:
            files = {split: f"{glob.escape(str(folder))}/data-*.arrow" for split, folder in saved.items()}
            return replace(given, path="arrow", data_files=files)
        is_current = local == Path()
        folder = local.absolute() if is_current else local  # 🤗 Datasets takes "." for no name
        return replace(given, path=str(folder))
    if local.is_file():
        if loader is None:
            raise UserError(
                f"The dataset file {given.path!r} has none of the endings {listed(LOADERS)}. Convert it to one."
            )
        return replace(given, path=loader, data_files=[glob.escape(str(local))])
    is_hub_id = loader is None and not given.path.startswith((".", "/", "~"))
    if is_hub_id:
        return given
    siblings = [path.name for path in local.parent.iterdir()] if local.parent.is_dir() else []
    raise UserError(
        f"The dataset {given.path!r} does not exist (as a file or folder: {local.absolute()})."
        f"{closest(local.name, siblings)}"
    )


def _saved_splits(folder: Path) -> dict[str, Path]:
    """Return the folders of the splits that `save_to_disk` has written, with a file `state.json` beside the data."""
    if (folder / "state.json").is_file():
        return {"train": folder}
    return {state.parent.name: state.parent for state in sorted(folder.glob("*/state.json"))}


def load_reward(name: str) -> Callable[..., Any]:
    """
    Return a reward function.

    Args:
        name (`str`):
            A name of [`REWARDS`], or the dotted path of a function.

    Returns:
        `Callable`: The reward function.

    Raises:
        UserError: If there is no such function, or what it needs is not installed.
    """
    path = REWARDS.get(name, name)
    module_name, _, function_name = path.rpartition(".")
    if not module_name:
        raise UserError(
            f"The reward function {name!r} is unknown.{closest(name, REWARDS)} Known are {listed(REWARDS)}; any other "
            "is given by its dotted path, as in `my_rewards.brevity`."
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
        others = [other for other in dir(module) if other != function_name]
        raise UserError(f"{wrong}: {module_name!r} has no function {function_name!r}.{closest(function_name, others)}")
    if name == "get_soft_overlong_punishment":
        return function(max_completion_len=1280, soft_punish_cache=256)
    return function


def check_columns(names: list[str] | None, row: dict[str, Any]) -> None:
    """
    Check that the rewards find in the dataset what they read.

    Args:
        names (`list[str]` or `None`):
            Reward functions by name or dotted path. What one given by its path reads is unknown, and not checked.
        row (`dict[str, Any]`):
            Row of the dataset.

    Raises:
        UserError: If a reward reads a column that the row lacks, or conversations where prompts are text.
    """
    for name in names or []:
        if name in _OF_SOLUTION:
            gold_columns = ["solution"]
        elif name in our_rewards.__all__:
            gold_columns = ["answer", "solution"]
        else:
            gold_columns = []
        if gold_columns and not any(column in row for column in gold_columns):
            either = " or ".join(f"`{column}`" for column in gold_columns)
            raise UserError(
                f"`{name}` reads the column {either}, but the dataset has {listed(row)}. Name the column with the "
                "gold answers as `answer_column`."
            )
        reads_conversations = name in _OF_SOLUTION or name == "think_format_reward"
        if reads_conversations and isinstance(row["prompt"], str):
            raise UserError(f"`{name}` reads conversations, but the prompts are plain text. Set `prompt_as_chat`.")
