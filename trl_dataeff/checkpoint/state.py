"""
What a checkpoint holds of data selection, in the folder `dataeff/` of each `checkpoint-N`:

    state            the collector and its parts, the dataset, settings, TRL's micro-step and logging interval
    batch-<rank>     what that process has yet to train on of a half-used generation batch
    manifest.json    what was written, and that it was written to the end (see `manifest.py`)

Each of the first two is a nested state in two files: JSON values in `.json`, arrays in `.safetensors`. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
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
#: Settings on which parts of a checkpoint depend; a half-used generation batch on all but the learning rate
SELECTION = ("selector", "predictor")
ROLLOUTS = ("num_generations", "reward_functions", "use_vllm")


class CheckpointError(UserError):
    """The selection state of a checkpoint is missing, corrupt, or belongs to another run."""


def save_run(
    checkpoint: Path, state: Mapping[str, Any], micro_batches: list[dict[str, Any]] | None, rank: int, writes: bool
) -> None:
    """
    Write what decides the next generation batches to the folder `checkpoint`, on every process: a nested `state`, if this process
    `writes` what all share, and the micro-batches of a half-used generation batch that it has yet to train on.
    """
    if micro_batches is not None:
        save_state(checkpoint, f"batch-{rank}", {str(i): batch for i, batch in enumerate(micro_batches)})
    if writes:
        save_state(checkpoint, "state", {**state, "half_used": micro_batches is not None})


def load_run(checkpoint: Path, processes: Processes) -> tuple[dict[str, Any], list[dict[str, Any]] | None]:
    """The inverse of [`save_run`]: the state, and the micro-batches of this process. Raises a `CheckpointError`."""
    state = load_state(checkpoint, "state")
    if not state["half_used"]:
        return state, None
    batches = load_state(checkpoint, f"batch-{processes.rank}", processes.device)
    return state, [batches[str(i)] for i in range(len(batches))]


def save_state(checkpoint: Path, name: str, state: Mapping[str, Any]) -> None:
    """Write a nested state of JSON values, NumPy arrays and tensors."""
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_take_arrays(state, "", tensors), indent=2)
    path = checkpoint / FOLDER / name
    write_atomically(path.with_suffix(".safetensors"), lambda temporary: save_file(tensors, temporary))
    write_atomically(path.with_suffix(".json"), lambda temporary: temporary.write_text(text))


def _take_arrays(state: Mapping[str, Any], path: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The state without its arrays, which are entered under their paths."""
    rest: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Mapping):
            rest[name] = _take_arrays(value, f"{path}{name}/", tensors)
        elif isinstance(value, (np.ndarray, torch.Tensor)):
            # Micro-batches may share tensors; safetensors requires that each owns its memory
            tensors[path + name] = torch.as_tensor(value).detach().cpu().contiguous().clone()
        else:
            rest[name] = value
    return rest


def load_state(checkpoint: Path, name: str, device: torch.device | None = None) -> dict[str, Any]:
    """The inverse of [`save_state`], with tensors on a device or, without one, NumPy arrays. Raises a `CheckpointError`."""
    path = checkpoint / FOLDER / name
    try:
        state: dict[str, Any] = json.loads(path.with_suffix(".json").read_text())
        for place, tensor in load_file(path.with_suffix(".safetensors")).items():
            *parents, last = place.split("/")
            part = state
            for parent in parents:
                part = part[parent]
            part[last] = tensor.numpy() if device is None else tensor.to(device)
    except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"The selection state {path} cannot be read ({type(error).__name__}: {error}). Resume with as many processes as wrote "
            "it, or from another checkpoint."
        ) from error
    return state


def check_agreement(state: Mapping[str, Any], processes: Processes, own: Collection[str] = ()) -> None:
    """
    Raise a `RuntimeError` that names the parts in which the states of processes differ, and those processes. Parts in `own` may
    differ. A collective if there are several.
    """
    if processes.world_size == 1:
        return
    first, *others = all_gather({part: hash_json(value) for part, value in state.items() if part not in own})
    differ = {part: [rank for rank, sums in enumerate(others, 1) if sums[part] != first[part]] for part in first}
    listed = "; ".join(f"{part} (of {', '.join(map(str, ranks))})" for part, ranks in differ.items() if ranks)
    if listed:
        raise RuntimeError(
            f"The selection state of processes differs from that of process 0: {listed}. Look for a callback or a selector of your "
            "own that changes this state on some processes only; the last checkpoint is not affected."
        )


def check_fits(checkpoint: Path, settings: dict[str, Any], num_prompts: int, dataset_hash: str, is_main: bool) -> None:
    """
    Raise a `CheckpointError` if the run that is to resume has another dataset than its checkpoint (the hash is empty where prompts
    are not known by row), or `settings` that do not fit. The main process warns of another learning rate.
    """
    saved = load_state(checkpoint, "state")
    then, advice = saved["dataset"], "or start a new run with this checkpoint's weights as the model."
    if dataset_hash and then["hash"] != dataset_hash:
        raise CheckpointError(
            f"{checkpoint} was written for a dataset of {then['size']} prompts with the content hash {then['hash']}; this one has "
            f"{num_prompts} prompts and {dataset_hash}. Prompts are known by their row: resume with the same dataset, {advice}"
        )
    parts: dict[str, Collection[str]] = {"the selection state": SELECTION}
    parts |= {"rollouts": ROLLOUTS} if saved["holds_rollouts"] else {}
    everything = [name for name in settings if name != "learning_rate"]
    parts |= {"a half-used generation batch": everything} if saved["half_used"] else {}
    for what, names in parts.items():
        for name in names:
            before, now = saved["settings"][name], settings[name]
            if before != now:
                raise CheckpointError(
                    f"{checkpoint} holds {what} of a run with {name} = {before!r}, not {now!r}. Resume with the former value, {advice}"
                )
    rate, now = saved["settings"]["learning_rate"], settings["learning_rate"]
    if rate != now and is_main:
        logger.warning(
            f"`learning_rate` is {now}, but {rate} applies, with which {checkpoint} was written: it is part of the schedule's state. To "
            "train with another one, start a new run with this checkpoint's weights as the model."
        )
