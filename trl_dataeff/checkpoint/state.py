"""
What a checkpoint holds of data selection, in the folder `dataeff/` of each `checkpoint-N`:

    state.json               counters, dataset, settings, TRL's micro-step, the logging interval
    arrays.safetensors       the selector and the random states
    leftover.safetensors     effective groups that wait for the next generation batch
    replay.safetensors       the replay buffer
    batch-R.safetensors      what process R has yet to train on of a half-used generation batch
    manifest.json            all files of the checkpoint; written last, so that its presence says that it is complete

Each file is written under a temporary name, synced and renamed. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file as save_tensors

from trl_dataeff.rollouts.distributed import Processes, all_gather
from trl_dataeff.utils import UserError, write_atomically


if TYPE_CHECKING:
    from trl import GRPOConfig, GRPOTrainer


FOLDER = "dataeff"
_LIST = "list:"


class CheckpointError(UserError):
    """The selection state of a checkpoint is missing, corrupt, or belongs to another run."""


def save_state(checkpoint: Path, scalars: dict[str, Any], arrays: dict[str, dict[str, np.ndarray]]) -> None:
    """
    Write the state that all processes share. Call it on the main process.

    Args:
        checkpoint (`Path`): the `checkpoint-N` folder.
        scalars (`dict`): values for `state.json`.
        arrays (`dict`): by file name without suffix, named arrays.
    """
    folder = checkpoint / FOLDER
    for name, values in arrays.items():
        contiguous = {key: np.asarray(value, order="C") for key, value in values.items()}
        write_atomically(folder / f"{name}.safetensors", partial(save_arrays, contiguous))
    text = json.dumps({"files": sorted(arrays), **scalars}, indent=2)
    write_atomically(folder / "state.json", lambda path: path.write_text(text))


def load_state(checkpoint: Path) -> tuple[dict[str, Any], dict[str, dict[str, np.ndarray]]]:
    """
    The inverse of [`save_state`], of a checkpoint whose manifest was checked.

    Raises:
        `CheckpointError`: a file is missing or cannot be read.
    """
    scalars = load_scalars(checkpoint)
    with _readable(checkpoint):
        files = {name: load_arrays(checkpoint / FOLDER / f"{name}.safetensors") for name in scalars["files"]}
    return scalars, files


def load_scalars(checkpoint: Path) -> dict[str, Any]:
    """The scalars of [`save_state`], with the names of its arrays' files under `files`. Raises `CheckpointError`."""
    with _readable(checkpoint):
        scalars: dict[str, Any] = json.loads((checkpoint / FOLDER / "state.json").read_text())
        scalars["files"] = list(scalars["files"])
    return scalars


@contextmanager
def _readable(checkpoint: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError, SafetensorError) as error:
        raise CheckpointError(
            f"The selection state in {checkpoint / FOLDER} cannot be read ({type(error).__name__}: {error}). Resume from an "
            "earlier checkpoint."
        ) from error


def check_settings(
    checkpoint: Path, saved: dict[str, Any], present: dict[str, Any], names: Sequence[str], what: str
) -> None:
    """
    Raise [`CheckpointError`] if one of the settings `names`, on which `what` depends, has changed.
    """
    for name in names:
        if saved.get(name) != present.get(name):
            raise CheckpointError(
                f"{checkpoint} holds {what} of a run with {name} = {saved.get(name)!r}; now it is {present.get(name)!r}. Resume "
                "with the former value, or start a new run with this checkpoint's weights as the model."
            )


def check_dataset_hash(checkpoint: Path, saved: dict[str, Any], present: dict[str, Any]) -> None:
    """
    Raise [`CheckpointError`] if the checkpoint was made with another dataset.

    Args:
        checkpoint (`Path`): the checkpoint.
        saved (`dict`), present (`dict`): `size` and `hash` of the dataset then and now.
    """
    if saved["hash"] != present["hash"]:
        raise CheckpointError(
            f"{checkpoint} was written for a dataset of {saved['size']} prompts with the content hash {saved['hash']}; "
            f"this one has {present['size']} prompts and {present['hash']}. Prompts are known by their row: resume with "
            "the same dataset, or start a new run with this checkpoint's weights as the model."
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


def loop_state(trainer: GRPOTrainer) -> dict[str, Any]:
    """TRL's micro-step, and what was summed up since the last log, for JSON. A collective."""
    return {
        "micro_step": trainer._step,
        "last_logged": trainer._globalstep_last_logged,
        "loss": all_gather(float(trainer._tr_loss)),
        "metrics": {name: list(map(float, values)) for name, values in trainer._metrics["train"].items()},
    }


def unused_batch(trainer: GRPOTrainer) -> list[dict[str, Any]] | None:
    """The micro-batches of the present generation batch; `None` if all of them have been trained on."""
    steps = cast("GRPOConfig", trainer.args).steps_per_generation
    assert steps is not None  # the config fills it in
    used_up = trainer._step % (steps * trainer.num_iterations) == 0
    return None if used_up else trainer._buffered_inputs


def continue_interval(trainer: GRPOTrainer, loop: dict[str, Any], processes: Processes) -> None:
    """Continue the logging interval of [`loop_state`]. Call it when the Trainer has begun training: it begins one of its own."""
    losses, mean = loop["loss"], sum(loop["loss"]) / len(loop["loss"])
    own = losses[processes.rank] if len(losses) == processes.world_size else mean
    trainer._tr_loss = torch.tensor(own, device=trainer.args.device)
    trainer._total_loss_scalar = -mean  # `train_loss` is about the steps of this call of `train` alone
    trainer._globalstep_last_logged = loop["last_logged"]
    trainer._metrics["train"].update(loop["metrics"])
