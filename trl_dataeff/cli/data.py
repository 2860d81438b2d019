"""The dataset of a run: loaded from the Hub, a folder or a file, given the shape of a prompt dataset, and checked."""

from __future__ import annotations

import glob
import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict, load_dataset
from datasets.exceptions import DatasetGenerationError, DatasetsError
from transformers.utils import logging
from trl import DatasetMixtureConfig, get_dataset
from trl.scripts.grpo import GRPOScriptArguments
from trl.scripts.utils import DatasetConfig

from trl_dataeff.rollouts.prompts import check_prompts
from trl_dataeff.utils import UserError, closest, listed


logger = logging.get_logger(__name__)

#: File name endings that can be loaded, and the loader of 🤗 Datasets for each.
LOADERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}
#: What 🤗 Datasets raises for data that it cannot load; `StopIteration` for a .jsonl file without a line.
LOADING_ERRORS = (OSError, ValueError, TypeError, DatasetsError, StopIteration)
EMPTY = "{} is empty: it has no rows. Training takes a different prompt for each group of a batch."
#: What it says of files without rows.
NO_DATA = ("corresponds to no data", "pass `features` or at least one example")


@dataclass
class DataEfficientGRPOScriptArguments(GRPOScriptArguments):
    """Script arguments of `trl-dataeff grpo`: every argument of TRL's GRPO script, and those below."""

    dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "Hub id, local folder (of data files, or from `save_to_disk`), or local .parquet, .jsonl, .json or "
            ".csv file; ignored if `datasets` is given."
        },
    )
    reward_funcs: list[str] | None = field(
        default=None,
        metadata={
            "help": "Reward functions: `exact_answer_reward`, `numeric_answer_reward`, `math_verify_reward`, TRL's "
            "`accuracy_reward`, `reasoning_accuracy_reward`, `think_format_reward`, `get_soft_overlong_punishment` "
            "(`max_completion_len=1280`, `soft_punish_cache=256`), or any dotted path (`my_rewards.brevity`, looked "
            "up from the current folder)."
        },
    )
    prompt_column: str | None = field(
        default=None, metadata={"help": "Column that becomes `prompt`, e.g. `question` of GSM8K."}
    )
    prompt_template: str | None = field(
        default=None,
        metadata={
            "help": "Text of the prompt; `{column}` stands for that column of the row, e.g. '{question} Answer with a "
            "number.'; other braces stay as they are."
        },
    )
    prompt_as_chat: bool = field(
        default=False,
        metadata={
            "help": "Turn a text prompt into the user's message of a conversation, so that the model's chat template is "
            "applied; use it for instruct models."
        },
    )
    system_prompt: str | None = field(
        default=None,
        metadata={"help": "System message before every prompt; implies `prompt_as_chat`."},
    )
    answer_column: str | None = field(
        default=None,
        metadata={"help": "Column that is passed to reward functions as `answer` and as `solution`."},
    )
    plain: bool = field(
        default=False, metadata={"help": "Print one line per log instead of the live panel, also in a terminal."}
    )


def load_data(
    script: DataEfficientGRPOScriptArguments, mixture: DatasetMixtureConfig, evaluates: bool
) -> tuple[Any, Any]:
    """Return the training and, if the run evaluates, the evaluation dataset or `None`, in the shape that the trainer wants."""
    names = ["train", "test"] if mixture.datasets else [script.dataset_train_split, script.dataset_test_split]
    names = names if evaluates else names[:1]
    given = "The dataset mixture (`datasets`)" if mixture.datasets else f"The dataset {script.dataset_name!r}"
    splits = _load(script, mixture)
    for name, option in zip(names, ("dataset_train_split", "dataset_test_split"), strict=False):
        if name not in splits:
            raise UserError(
                f"{given} has no split `{name}`; it has {listed(map(str, splits))}. Name one of them as `{option}`"
                + (", or set `eval_strategy` to 'no'." if option == "dataset_test_split" else ".")
            )
    train, *evaluation = [prepare(splits[name], script, given) for name in names]
    return train, evaluation[0] if evaluation else None


def prepare(
    dataset: Dataset | IterableDataset, script: DataEfficientGRPOScriptArguments, given: str
) -> Dataset | IterableDataset:
    """
    Give a dataset the columns `prompt`, `answer` and `solution` that the script arguments ask for, and check it. `given` is
    the dataset in words, for messages.
    """
    if isinstance(dataset, Dataset):
        try:
            dataset.data.table.validate(full=True)
        except pa.ArrowInvalid as error:
            raise UserError(f"{given} is not UTF-8 text: {error}. Convert its files to UTF-8.") from error
    first = next(iter(dataset), None)
    if first is None:
        raise UserError(EMPTY.format(given))
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
        return load_dataset(  # type: ignore[call-overload, no-any-return]  # overloads are for True and False alone
            source.path, source.name, data_files=source.data_files, streaming=script.dataset_streaming
        )
    except LOADING_ERRORS as error:
        raise _not_loaded(" + ".join(entry.path for entry in entries), sources, error) from error


def _check_columns(columns: list[str], script: DataEfficientGRPOScriptArguments, given: str) -> None:
    has = f"{given} has the columns {listed(columns)}"
    for option in ("prompt_column", "answer_column"):
        name = getattr(script, option)
        if name is not None and name not in columns:
            raise UserError(f"`{option}` is {name!r}. {has}.{closest(name, columns)}")
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


def _not_loaded(name: str, sources: list[DatasetConfig], error: Exception) -> UserError:
    """Say why a dataset was not loaded: the line of a file that cannot be parsed, or what the loader says."""
    if bad := next(filter(None, map(_bad_line, sources)), None):
        return UserError(f"The dataset {name!r} cannot be parsed: {bad}")
    cause = error.__cause__ if isinstance(error, DatasetGenerationError) and error.__cause__ else error
    reason = str(cause).strip().rstrip(".!")
    if isinstance(error, StopIteration) or any(text in reason for text in NO_DATA):
        return UserError(EMPTY.format(f"The dataset {name!r}"))
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
    if loader is not None or path.startswith((".", "/", "~")):
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
