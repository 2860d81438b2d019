"""
What a checkpoint holds of data selection, in the folder `dataeff/` of each `checkpoint-N`:

    state.json               the dataset, settings, TRL's micro-step, the logging interval, and what is not an array of:
    state.safetensors        the state of the collector and its parts: selector, replay buffer, leftover groups, random states
    batch-<rank>.safetensors what that process has buffered of a half-used generation batch
    manifest.json            what was written, and that it was written to the end (see `manifest.py`)
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file as save_tensors
from transformers.utils import logging

from trl_dataeff.rollouts.distributed import Processes, all_gather
from trl_dataeff.utils import UserError, hash_array, hash_json, write_atomically


logger = logging.get_logger(__name__)
FOLDER = "dataeff"
_LIST = "list:"
_SELECTION = ("selector", "predictor")  # settings on which the selection state depends
_ROLLOUTS = ("num_generations", "reward_functions", "use_vllm")
_BATCH = (
    *("number of processes", "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"),
    "num_iterations",
)


class CheckpointError(UserError):
    """The selection state of a checkpoint is missing, corrupt, or belongs to another run."""


def save_run(
    checkpoint: Path, state: Mapping[str, Any], micro_batches: list[dict[str, Any]] | None, rank: int, writes: bool
) -> None:
    """
    Write what decides the next generation batches, on every process.

    Args:
        checkpoint (`Path`): the `checkpoint-N` folder.
        state (`Mapping`): see [`save_state`].
        micro_batches (`list[dict]`, *optional*): what this process has yet to train on of a half-used generation batch.
        rank (`int`): of this process.
        writes (`bool`): whether this process writes what all share.
    """
    if micro_batches is not None:
        save_generation_batch(checkpoint, rank, micro_batches)
    if writes:
        save_state(checkpoint, {**state, "half_used": micro_batches is not None})


def load_run(checkpoint: Path, processes: Processes) -> tuple[dict[str, Any], list[dict[str, Any]] | None]:
    """The inverse of [`save_run`]: the state, and the micro-batches of this process. Raises a `CheckpointError`."""
    state = load_state(checkpoint)
    half_used = state["half_used"]
    return state, load_generation_batch(checkpoint, processes.rank, processes.device) if half_used else None


def save_state(checkpoint: Path, state: Mapping[str, Any]) -> None:
    """
    Write the state that all processes share. Call it on the main process.

    Args:
        checkpoint (`Path`): the `checkpoint-N` folder.
        state (`Mapping`): nested, of JSON values and NumPy arrays.
    """
    arrays: dict[str, np.ndarray] = {}
    text = json.dumps(_take_arrays(state, "", arrays), indent=2)
    folder = checkpoint / FOLDER
    write_atomically(folder / "state.safetensors", lambda path: save_arrays(arrays, path))
    write_atomically(folder / "state.json", lambda path: path.write_text(text))


def _take_arrays(state: Mapping[str, Any], path: str, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """The state without its arrays, which are entered under their paths."""
    scalars: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Mapping):
            scalars[name] = _take_arrays(value, f"{path}{name}/", arrays)
        elif isinstance(value, np.ndarray):
            arrays[f"{path}{name}"] = np.asarray(value, order="C")
        else:
            scalars[name] = value
    return scalars


def load_state(checkpoint: Path) -> dict[str, Any]:
    """The inverse of [`save_state`], of a checkpoint whose manifest was checked. Raises a `CheckpointError` if it cannot be read."""
    state = load_scalars(checkpoint)
    with _readable(checkpoint):
        for path, array in load_arrays(checkpoint / FOLDER / "state.safetensors").items():
            *parts, name = path.split("/")
            part = state
            for parent in parts:
                part = part[parent]
            part[name] = array
    return state


def load_scalars(checkpoint: Path) -> dict[str, Any]:
    """What [`save_state`] wrote, without arrays. Raises a `CheckpointError` if it cannot be read."""
    with _readable(checkpoint):
        scalars: dict[str, Any] = json.loads((checkpoint / FOLDER / "state.json").read_text())
        return dict(scalars)


@contextmanager
def _readable(checkpoint: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError, SafetensorError) as error:
        raise CheckpointError(
            f"The selection state in {checkpoint / FOLDER} cannot be read ({type(error).__name__}: {error}). Resume from an "
            "earlier checkpoint."
        ) from error


def check_agreement(state: Mapping[str, Any], processes: Processes, own: Collection[str] = ()) -> None:
    """
    Compare the processes' states by part, except the parts in `own`, which may differ. A collective if there are several.

    Raises:
        `RuntimeError`: they differ. It names the parts, and the processes that disagree with process 0.
    """
    if processes.world_size == 1:
        return
    first, *others = all_gather({part: _hash(value) for part, value in state.items() if part not in own})
    differ = {
        part: [rank for rank, sums in enumerate(others, 1) if sums[part] != first[part]]
        for part in first
        if any(sums[part] != first[part] for sums in others)
    }
    if differ:
        listed = "; ".join(f"{part} (of {', '.join(map(str, ranks))})" for part, ranks in differ.items())
        raise RuntimeError(
            f"The selection state of processes differs from that of process 0: {listed}. They would train on different "
            "generation batches. Reward functions get the same rewards everywhere from TRL, so look for a callback or a "
            "selector of your own that changes this state on some processes only; the last checkpoint is not affected."
        )


def _hash(value: Any) -> str:
    if isinstance(value, Mapping):
        return hash_json({name: _hash(part) for name, part in value.items()})
    return hash_array(value) if isinstance(value, np.ndarray) else hash_json(value)


def check_fits(checkpoint: Path, settings: dict[str, Any], dataset: dict[str, Any] | None, is_main: bool) -> None:
    """
    Compare a checkpoint with the run that is to resume from it, before anything is computed for that run.

    Args:
        checkpoint (`Path`): a checkpoint whose manifest was checked.
        settings (`dict`): of the run.
        dataset (`dict`, *optional*): its `size` and `hash`; `None` where prompts are not known by row.
        is_main (`bool`): whether this process warns of another learning rate.

    Raises:
        `CheckpointError`: it was written with another dataset or with settings that do not fit.
    """
    scalars = load_scalars(checkpoint)
    saved, then = scalars["settings"], scalars["dataset"]
    if dataset is not None and then["hash"] != dataset["hash"]:
        raise CheckpointError(
            f"{checkpoint} was written for a dataset of {then['size']} prompts with the content hash {then['hash']}; this one "
            f"has {dataset['size']} prompts and {dataset['hash']}. Prompts are known by their row: resume with the same "
            "dataset, or start a new run with this checkpoint's weights as the model."
        )
    _check_settings(checkpoint, saved, settings, _SELECTION, "the selection state")
    if scalars["holds_rollouts"]:
        _check_settings(checkpoint, saved, settings, _ROLLOUTS, "rollouts")
    if scalars["half_used"]:
        _check_settings(checkpoint, saved, settings, [*_ROLLOUTS, *_BATCH], "a half-used generation batch")
    if saved["learning_rate"] != settings["learning_rate"] and is_main:
        logger.warning(
            f"`learning_rate` is {settings['learning_rate']}, and {checkpoint} was written with {saved['learning_rate']}, which "
            "applies: the Trainer restores the schedule of the checkpoint. To train with another one, start a new run with this "
            "checkpoint's weights as the model."
        )


def _check_settings(
    checkpoint: Path, saved: dict[str, Any], present: dict[str, Any], names: Sequence[str], what: str
) -> None:
    for name in names:
        if saved.get(name) != present.get(name):
            raise CheckpointError(
                f"{checkpoint} holds {what} of a run with {name} = {saved.get(name)!r}; now it is {present.get(name)!r}. Resume "
                "with the former value, or start a new run with this checkpoint's weights as the model."
            )


def save_generation_batch(checkpoint: Path, rank: int, micro_batches: list[dict[str, Any]]) -> None:
    """Write what process `rank` has buffered: the micro-batches of a generation batch."""
    tensors = {}
    for i, batch in enumerate(micro_batches):
        for key, value in batch.items():
            if isinstance(value, torch.Tensor):
                # Micro-batches may share scalars; safetensors requires that each tensor owns its memory
                tensors[f"{i}.{key}"] = value.detach().cpu().contiguous().clone()
            elif value is not None:  # images or tiles per row, as a list of integers
                tensors[f"{i}.{_LIST}{key}"] = torch.tensor(value)
    write_atomically(checkpoint / FOLDER / f"batch-{rank}.safetensors", lambda path: save_tensors(tensors, path))


def load_generation_batch(checkpoint: Path, rank: int, device: torch.device) -> list[dict[str, Any]]:
    """The inverse of [`save_generation_batch`]."""
    path = checkpoint / FOLDER / f"batch-{rank}.safetensors"
    try:
        tensors = load_tensors(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"The checkpoint was written within a generation batch, and {path} cannot be read ({error}). Resume with as "
            "many processes as wrote it, or from another checkpoint."
        ) from error
    batches: dict[int, dict[str, Any]] = {}
    for name, value in tensors.items():
        i, key = name.split(".", 1)
        batch = batches.setdefault(int(i), {})
        if key.startswith(_LIST):
            batch[key.removeprefix(_LIST)] = value.tolist()
        else:
            batch[key] = value.to(device)
    return [batches[i] for i in sorted(batches)]
