"""
What a checkpoint holds of data selection, in the folder `dataeff/` of each `checkpoint-N`:

    state.json               format, versions, dataset, counters, TRL's micro-step; written last, so that its presence
                             says that the folder is whole
    arrays.safetensors       history of the pool, the selector, the random state
    surplus.safetensors      effective groups that wait for the next window
    replay.safetensors       the replay buffer
    window-R.safetensors     what process R has yet to train on of a half-used window

Each file is written under a temporary name, synced and renamed. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file as save_tensors

from trl_dataeff.checkpoint.files import write_atomically
from trl_dataeff.version import FORMAT, __version__


FOLDER = "dataeff"
_LIST = "list:"


class CheckpointError(ValueError):
    """The selection state of a checkpoint is missing, damaged, or belongs to another run."""


def save_state(checkpoint: Path, scalars: dict[str, Any], arrays: dict[str, dict[str, np.ndarray]]) -> None:
    """
    Write the state that all processes share. Call it on the main process, after the windows of all processes.

    Args:
        checkpoint (`Path`): the `checkpoint-N` folder.
        scalars (`dict`): values for `state.json`.
        arrays (`dict`): by file name without suffix, named arrays.
    """
    folder = checkpoint / FOLDER
    for name, values in arrays.items():
        contiguous = {key: np.ascontiguousarray(value) for key, value in values.items()}
        write_atomically(folder / f"{name}.safetensors", partial(save_arrays, contiguous))
    text = json.dumps({"format": FORMAT, "trl_dataeff": __version__, "files": sorted(arrays), **scalars}, indent=2)
    write_atomically(folder / "state.json", lambda path: path.write_text(text))


def load_state(checkpoint: Path) -> tuple[dict[str, Any], dict[str, dict[str, np.ndarray]]]:
    """The inverse of [`save_state`]. Raises [`CheckpointError`] if anything is missing or damaged."""
    path = checkpoint / FOLDER / "state.json"
    if not path.exists():
        raise CheckpointError(
            f"{checkpoint} has no {FOLDER}/state.json: it was not written by DataEfficientGRPOTrainer, or not to the "
            "end. Resume from another checkpoint, or start a new run with this checkpoint's weights as the model."
        )
    try:
        scalars = json.loads(path.read_text())
        files = scalars["files"]
        if scalars["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {scalars['format']}, written by trl_dataeff {scalars['trl_dataeff']}; this is "
                f"trl_dataeff {__version__}, which reads format {FORMAT}. Resume with that version."
            )
        arrays = {name: load_arrays(checkpoint / FOLDER / f"{name}.safetensors") for name in files}
    except (OSError, KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError, SafetensorError) as error:
        raise CheckpointError(
            f"The selection state in {path.parent} is damaged ({type(error).__name__}: {error}). Resume from an "
            "earlier checkpoint."
        ) from error
    return scalars, arrays


def check_layout(path: Path, saved: dict[str, Any], present: dict[str, Any], names: Sequence[str], what: str) -> None:
    """Raise [`CheckpointError`] if one of the settings `names`, on which `what` depends, is not what it was."""
    for name in names:
        if saved[name] != present[name]:
            raise CheckpointError(
                f"{path} holds {what} of a run with {name} = {saved[name]!r}; it is {present[name]!r} now. Resume with "
                "the former value, or start a new run with this checkpoint's weights as the model."
            )


def check_fingerprint(path: Path, saved: str, present: str, saved_size: int, present_size: int) -> None:
    """Raise [`CheckpointError`] if the checkpoint was made with another dataset."""
    if saved != present:
        raise CheckpointError(
            f"{path} was written for a dataset of {saved_size} prompts with fingerprint {saved}; the present one has "
            f"{present_size} prompts and fingerprint {present}. Prompts are known by their row, so resume with the "
            "same dataset, or start a new run with this checkpoint's weights as the model."
        )


def save_window(checkpoint: Path, rank: int, batches: list[dict[str, Any]]) -> None:
    """Write what process `rank` has buffered: the micro-batches of a window."""
    tensors = {}
    for i, batch in enumerate(batches):
        for key, value in batch.items():
            if isinstance(value, torch.Tensor):
                # Micro-batches may share scalars; safetensors wants each tensor to own its memory
                tensors[f"{i}.{key}"] = value.detach().cpu().contiguous().clone()
            elif value is not None:  # images or tiles per row, as a list of integers
                tensors[f"{i}.{_LIST}{key}"] = torch.tensor(value)
    write_atomically(checkpoint / FOLDER / f"window-{rank}.safetensors", lambda path: save_tensors(tensors, path))


def load_window(checkpoint: Path, rank: int, device: torch.device) -> list[dict[str, Any]]:
    """The inverse of [`save_window`]."""
    path = checkpoint / FOLDER / f"window-{rank}.safetensors"
    try:
        tensors = load_tensors(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"The checkpoint was written in the middle of a window, and {path} cannot be read ({error}). Resume with "
            "as many processes as wrote it, or from another checkpoint."
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
