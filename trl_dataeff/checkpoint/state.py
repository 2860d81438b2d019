"""
What a checkpoint holds of data selection, in the folder `dataeff/` of each `checkpoint-N`:

    state            the collector and its parts, the dataset, settings, TRL's micro-step and logging interval
    batch-<rank>     what that process has yet to train on of a half-used generation batch
    manifest.json    what was written, and that it was written to the end (see `manifest.py`)

Each of the first two is a nested state in two files: JSON values in `.json`, arrays in `.safetensors`. Nothing is
pickled.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from trl_dataeff.rollouts.distributed import Processes, all_gather
from trl_dataeff.utils import UserError, hash_json, write_atomically


logger = logging.get_logger(__name__)
FOLDER = "dataeff"
#: Settings on which every state of a selector depends
SELECTION = ("selector", "predictor", "success_rate_column", "stratify_by")
#: Settings on which stored rollouts depend
ROLLOUTS = ("num_generations", "reward_functions", "use_vllm")
_NEW_RUN = "or start a new run with this checkpoint's weights as the model."


class CheckpointError(UserError):
    """The selection state of a checkpoint is missing, corrupt, or belongs to another run."""


def save_run(
    checkpoint: Path, state: Mapping[str, Any], micro_batches: list[dict[str, Any]] | None, rank: int, writes: bool
) -> None:
    """
    Write what decides the next generation batches. Every process calls this.

    Args:
        checkpoint (`Path`): folder of the checkpoint.
        state (`Mapping`): nested state of the run, the same on all processes.
        micro_batches (`list[dict]` or `None`): what this process has yet to train on of a half-used generation batch;
            `None` if no generation batch is half-used.
        rank (`int`): number of this process.
        writes (`bool`): whether this process writes what all processes share.
    """
    if micro_batches is not None:
        by_place = {str(place): batch for place, batch in enumerate(micro_batches)}
        save_state(checkpoint, f"batch-{rank}", by_place)
    if writes:
        save_state(checkpoint, "state", {**state, "half_used": micro_batches is not None})


def unwritable_names(micro_batches: list[dict[str, Any]]) -> list[str]:
    """Names of what [`save_run`] cannot write of micro-batches: it is neither a tensor nor a JSON value."""
    found: dict[str, None] = {}
    for micro_batch in micro_batches:
        for name, value in micro_batch.items():
            try:
                json.dumps(_separate({name: value}, "")[0])
            except (TypeError, ValueError):
                found[name] = None
    return list(found)


def load_run(checkpoint: Path, processes: Processes) -> tuple[dict[str, Any], list[dict[str, Any]] | None]:
    """
    Read what [`save_run`] has written.

    Args:
        checkpoint (`Path`): folder of the checkpoint.
        processes ([`Processes`]): says which process this is, and on which device its micro-batches belong.

    Returns:
        `tuple`: the nested state, and the micro-batches of this process; `None` in their place if no generation batch
        was half-used.

    Raises:
        [`CheckpointError`]: a file is missing or corrupt.
    """
    state = load_state(checkpoint, "state")
    return state, _load_batch(checkpoint, processes) if state["half_used"] else None


def _load_batch(checkpoint: Path, processes: Processes) -> list[dict[str, Any]]:
    """What a process has yet to train on of a half-used generation batch."""
    by_place = load_state(checkpoint, f"batch-{processes.rank}", processes.device)
    return [by_place[str(place)] for place in range(len(by_place))]


def load_fitting_run(
    checkpoint: Path, processes: Processes, settings: Mapping[str, Any]
) -> tuple[dict[str, Any], list[dict[str, Any]] | None] | None:
    """
    Read what [`save_run`] has written, for a run that resumes without it, too. A collective.

    Args:
        checkpoint (`Path`): folder of the checkpoint.
        processes ([`Processes`]): of the run.
        settings (`Mapping`): the run's settings on which the content of a checkpoint depends.

    Returns:
        `tuple`, *optional*: see [`load_run`]. `None` if nothing was written, or, with a warning, if the state cannot
        be read. A half-used batch that cannot be read, or depends on other settings, is left out with a warning.
    """
    state: dict[str, Any] = {}
    batch = None
    problem = None
    problem_of_batch = None
    if (checkpoint / FOLDER / "state.json").exists():
        try:
            state = load_state(checkpoint, "state")
        except CheckpointError as error:
            problem = str(error)
    if state.get("half_used"):
        try:
            _check_batch(checkpoint, state["settings"], settings)
            batch = _load_batch(checkpoint, processes)
        except CheckpointError as error:
            problem_of_batch = str(error)
    problem, problem_of_batch = map(_first, zip(*all_gather((problem, problem_of_batch)), strict=True))
    if processes.is_main:
        if problem is not None:
            logger.warning(
                "The run resumes as with `GRPOTrainer`: a generation batch begins, and rollouts are counted from 0. "
                f"{problem}"
            )
        elif problem_of_batch is not None:
            logger.warning(
                f"A generation batch begins, and what is left of the last one is dropped. {problem_of_batch}"
            )
        if state and problem is None:
            _warn_of_rate(checkpoint, state["settings"], settings)
    if not state or problem is not None:
        return None
    return state, batch if problem_of_batch is None else None


def _first(problems: Iterable[str | None]) -> str | None:
    """The first of the processes' problems; `None` if no process has one."""
    return next((problem for problem in problems if problem is not None), None)


def _check_batch(checkpoint: Path, saved: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Check the settings on which a half-used generation batch depends."""
    names = [name for name in settings if name != "learning_rate"]
    check_settings(checkpoint, "a half-used generation batch", saved, settings, names)


def save_state(checkpoint: Path, name: str, state: Mapping[str, Any]) -> None:
    """
    Write a nested state.

    Args:
        checkpoint (`Path`): folder of the checkpoint.
        name (`str`): name of the two files, without their endings.
        state (`Mapping`): JSON values, NumPy arrays and tensors by name, in mappings within mappings. Names have no
            `/`.
    """
    values, tensors = _separate(state, "")
    text = json.dumps(values, indent=2)
    # Micro-batches may share tensors; safetensors requires that each owns its memory
    own = {name: torch.as_tensor(value).detach().cpu().contiguous().clone() for name, value in tensors.items()}
    path = checkpoint / FOLDER / name
    write_atomically(path.with_suffix(".safetensors"), lambda temporary: save_file(own, temporary))
    write_atomically(path.with_suffix(".json"), lambda temporary: temporary.write_text(text))


def _separate(state: Mapping[str, Any], prefix: str) -> tuple[dict[str, Any], dict[str, np.ndarray | torch.Tensor]]:
    """
    Separate the JSON values of a nested state from its arrays.

    Args:
        state (`Mapping`): the state.
        prefix (`str`): path of `state` within the whole, which ends in `/`; empty for the whole.

    Returns:
        `tuple`: the state without its arrays, and the arrays by their paths, such as `"selector/rng"`.
    """
    values: dict[str, Any] = {}
    tensors: dict[str, np.ndarray | torch.Tensor] = {}
    for name, value in state.items():
        path = prefix + name
        if isinstance(value, Mapping):
            inner_values, inner_tensors = _separate(value, f"{path}/")
            values[name] = inner_values
            tensors.update(inner_tensors)
        elif isinstance(value, (np.ndarray, torch.Tensor)):
            tensors[path] = value
        else:
            values[name] = value
    return values, tensors


def load_state(checkpoint: Path, name: str, device: torch.device | None = None) -> dict[str, Any]:
    """
    Read what [`save_state`] has written.

    Args:
        checkpoint (`Path`): folder of the checkpoint.
        name (`str`): name of the two files, without their endings.
        device (`torch.device`, *optional*): device of the arrays, which are tensors then; without it they are NumPy
            arrays.

    Returns:
        `dict`: the nested state.

    Raises:
        [`CheckpointError`]: a file is missing or corrupt.
    """
    path = checkpoint / FOLDER / name
    try:
        state: dict[str, Any] = json.loads(path.with_suffix(".json").read_text())
        tensors = load_file(path.with_suffix(".safetensors"))
        for tensor_path, tensor in tensors.items():
            *parents, last = tensor_path.split("/")
            part = state
            for parent in parents:
                part = part[parent]
            part[last] = tensor.numpy() if device is None else tensor.to(device)
    except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"The selection state {path} cannot be read ({type(error).__name__}: {error}). Resume with as many "
            "processes as wrote it, or from another checkpoint."
        ) from error
    return state


def check_agreement(state: Mapping[str, Any], processes: Processes, own: Collection[str] = ()) -> None:
    """
    Check that all processes have the same state. A collective if there are several.

    Args:
        state (`Mapping`): the parts of this process's state, by name.
        processes ([`Processes`]): the processes of the run.
        own (`Collection[str]`, *optional*): names of parts that may differ.

    Raises:
        `RuntimeError`: the state differs; the message names the parts, and the processes that differ from process 0.
    """
    if processes.world_size == 1:
        return
    hashes = {part: hash_json(value) for part, value in state.items() if part not in own}
    first, *others = all_gather(hashes)
    differences = []
    for part, expected in first.items():
        ranks = [str(rank) for rank, found in enumerate(others, start=1) if found[part] != expected]
        if ranks:
            differences.append(f"{part} (of {', '.join(ranks)})")
    if differences:
        raise RuntimeError(
            f"The selection state of processes differs from that of process 0: {'; '.join(differences)}. Look for a "
            "callback or a selector of your own that changes this state on some processes only; the last checkpoint "
            "is not affected."
        )


def check_fits(checkpoint: Path, settings: dict[str, Any], num_prompts: int, dataset_hash: str, is_main: bool) -> None:
    """
    Check that a run can resume from a checkpoint. The main process warns of another learning rate.

    Args:
        checkpoint (`Path`): folder of the checkpoint.
        settings (`dict`): the run's settings on which the content of a checkpoint depends.
        num_prompts (`int`): number of prompts of the run's dataset.
        dataset_hash (`str`): content hash of these prompts; empty where prompts are not known by row.
        is_main (`bool`): whether this is the main process.

    Raises:
        [`CheckpointError`]: the dataset is another one, or settings do not fit.
    """
    saved = load_state(checkpoint, "state")
    # First: a run of the default has no selector, and does not know its dataset
    check_settings(checkpoint, "the selection state", saved["settings"], settings, SELECTION)
    dataset = saved["dataset"]
    if dataset_hash and dataset["hash"] != dataset_hash:
        raise CheckpointError(
            f"{checkpoint} was written for a dataset of {dataset['size']} prompts with the content hash "
            f"{dataset['hash']}; this one has {num_prompts} prompts and {dataset_hash}. Prompts are known by their "
            "row. A script that splits or shuffles them has to give a seed (`train_test_split(..., seed=0)`, "
            f"`shuffle(seed=0)`). Resume with the same dataset in the same order, {_NEW_RUN}"
        )
    if saved["holds_rollouts"]:
        check_settings(checkpoint, "rollouts", saved["settings"], settings, ROLLOUTS)
    if saved["half_used"]:
        _check_batch(checkpoint, saved["settings"], settings)
    if is_main:
        _warn_of_rate(checkpoint, saved["settings"], settings)


def _warn_of_rate(checkpoint: Path, saved: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Warn if the settings have another learning rate than those that were saved."""
    saved_rate = saved["learning_rate"]
    rate = settings["learning_rate"]
    if rate != saved_rate:
        logger.warning(
            f"`learning_rate` is {rate}, but {saved_rate} applies, with which {checkpoint} was written: it is part of "
            "the schedule's state. To train with another one, start a new run with this checkpoint's weights as the "
            "model."
        )


def check_settings(
    checkpoint: Path, content: str, saved: Mapping[str, Any], settings: Mapping[str, Any], names: Collection[str]
) -> None:
    """
    Check settings on which a part of a checkpoint depends.

    Args:
        checkpoint (`Path`): folder of the checkpoint.
        content (`str`): what depends on them, in words.
        saved (`dict`): settings of the run that wrote the checkpoint.
        settings (`dict`): settings of the run that is to resume.
        names (`Collection[str]`): the settings to compare.

    Raises:
        [`CheckpointError`]: a setting differs.
    """
    for name in names:  # an earlier version has not written all of them
        if name in saved and saved[name] != settings[name]:
            raise CheckpointError(
                f"{checkpoint} holds {content} of a run with {name} = {saved[name]!r}, not {settings[name]!r}. Resume "
                f"with the former value, {_NEW_RUN}"
            )
