"""Writing a checkpoint: complete with its manifest, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from trl_dataeff.checkpoint.manifest import write_manifest
from trl_dataeff.checkpoint.resume import discard, set_aside
from trl_dataeff.checkpoint.runs import Run
from trl_dataeff.checkpoint.state import FOLDER, CheckpointError
from trl_dataeff.rollouts.distributed import Processes


_WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)  # what `torch.save` and safetensors raise on a full disk


@contextmanager
def complete_checkpoint(
    run: Run, checkpoint: Path, step: int, resumable: bool, writes: bool, processes: Processes
) -> Iterator[None]:
    """
    Within this context, all processes write the files of a checkpoint; afterwards its manifest is written. If that
    fails, the folder is removed, and one of that name that was there before is restored.

    Args:
        run ([`Run`]): the run, whose latest checkpoint this becomes if it is resumable.
        checkpoint (`Path`): the `checkpoint-N` folder.
        step (`int`): optimizer steps done.
        resumable (`bool`): whether it holds more than the model.
        writes (`bool`): whether this process writes the files that all share (`should_save`).
        processes ([`Processes`]): of the run.

    Raises:
        `CheckpointError`: it could not be written; the message says what to resume from.
    """
    try:
        if writes:
            set_aside(checkpoint)
            (checkpoint / FOLDER).mkdir(parents=True, exist_ok=True)  # tells it from one that another trainer wrote
        processes.wait()
        yield
        processes.wait()
        if writes:
            count = processes.world_size
            write_manifest(checkpoint, run=run.id, step=step, processes=count, resumable=resumable)
    except _WRITE_ERRORS as error:
        if writes:
            discard(checkpoint)
        advice = (
            "This run has no checkpoint to resume from: make room, and start it again."
            if run.checkpoint is None
            else f"{run.checkpoint} is unchanged: after making room, resume from it."
        )
        raise CheckpointError(
            f"The checkpoint {checkpoint} could not be written ({type(error).__name__}: {error}), and its files were "
            f"removed. {advice}"
        ) from error
    processes.wait()
    if resumable:
        run.checkpoint = str(checkpoint)
