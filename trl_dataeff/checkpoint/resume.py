"""Which checkpoint a call of `train` continues, how one is written, and which older ones are deleted."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers.utils import logging

from trl_dataeff.checkpoint.manifest import MANIFEST, check_checkpoint, is_complete, write_manifest, written_at
from trl_dataeff.checkpoint.state import FOLDER, CheckpointError
from trl_dataeff.rollouts.distributed import Processes, all_gather


logger = logging.get_logger(__name__)
_WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)  # what `torch.save` and safetensors raise on a full disk


@dataclass
class Run:
    """The run of a call of `train`: the latest checkpoint to resume it from, which the call has read or written."""

    checkpoint: str | None = None

    def how_to_resume(self, resume: str = "Resume") -> str:
        """Names the latest checkpoint, in Python and on the command line; empty without one. `resume` begins the sentence."""
        if self.checkpoint is None or not is_complete(Path(self.checkpoint)):
            return ""
        return (
            f"The latest complete checkpoint of this run is {self.checkpoint}. {resume} with `trainer.train(resume_from_checkpoint="
            f"{self.checkpoint!r})`, or `--resume_from_checkpoint {self.checkpoint}` on the command line."
        )


def resolve_run(
    wanted: bool | str | os.PathLike[str] | None,
    output_dir: str | os.PathLike[str],
    processes: Processes = Processes(),  # noqa: B008 (immutable)
    checks: bool = True,
) -> Run:
    """
    The run that a call of `train` starts or resumes in the folder `output_dir`. A collective: all processes get the same run, or
    raise the same `CheckpointError`, if the checkpoint that is wanted, or every one in the folder, cannot be resumed from.

    Args:
        wanted (`bool`, `str` or `None`): a checkpoint's folder; `True` for the one in `output_dir` that was completed last, or
            for a new run if there is none; `False` or `None` for a new run.
        checks (`bool`, *optional*, defaults to `True`): whether this process reads the files.
    """
    folder = os.fspath(output_dir)
    present = all_gather(checkpoints(folder))[0]
    names = ", ".join(path.name for path in present)
    if wanted is None or wanted is False:
        if present and processes.is_main:
            logger.warning(
                f"{folder} holds checkpoints of another run ({names}). A new run starts, which replaces those of the same "
                "step: set another `output_dir` to keep them, or `resume_from_checkpoint=True` to continue that run."
            )
        return Run()
    rejected: list[str] = []
    for candidate in present if wanted is True else [Path(wanted)]:
        manifest, problem = None, None
        try:
            manifest = check_checkpoint(candidate) if checks else None
        except CheckpointError as error:
            problem = str(error)
        problems = list(filter(None, all_gather(problem)))
        if not problems:
            if processes.is_main and manifest is not None:
                _report(candidate, manifest, rejected, processes.world_size)
            return Run(str(candidate))
        rejected.append(problems[0])
    if wanted is not True:
        raise CheckpointError(rejected[0])
    usable = [path for path in present if is_complete(path) or not (path / FOLDER).exists()]
    if all_gather(bool(usable))[0]:  # starting again would replace what another trainer wrote, or what may be repaired
        raise CheckpointError("\n- ".join([f"No checkpoint in {folder} can be resumed from:", *rejected]))
    if processes.is_main:
        incomplete = f" Incomplete ones are replaced: {names}." if present else ""
        logger.warning(f"There is no complete checkpoint in {folder}: training starts from step 0.{incomplete}")
    return Run()


def checkpoints(output_dir: str | os.PathLike[str]) -> list[Path]:
    """Folders of checkpoints, complete or not, those that were completed last first."""
    paths = Path(output_dir).iterdir() if os.path.isdir(output_dir) else ()  # one that cannot be read is an error
    found = [path for path in paths if re.fullmatch(r"checkpoint-\d+", path.name) and path.is_dir()]
    return sorted(found, key=lambda path: (written_at(path), int(path.name.split("-")[1])), reverse=True)


@contextmanager
def failure_notes(run: Run, prompt_ids: Sequence[int], flush: Callable[[], None]) -> Iterator[None]:
    """Adds notes to an exception in this context: its prompts (`prompt_ids`, as they are then), and where to resume. Calls `flush`."""
    try:
        yield
    except BaseException as error:
        flush()
        if len(prompt_ids) and isinstance(error, Exception):
            more = "" if len(prompt_ids) <= 16 else f" and {len(prompt_ids) - 16} more"
            error.add_note(f"The last prompts of this process were the dataset's rows {list(prompt_ids[:16])}{more}.")
        how = run.how_to_resume("After fixing the cause, resume")
        if how and not isinstance(error, CheckpointError):
            error.add_note(how)
        raise


@contextmanager
def complete_checkpoint(
    run: Run, checkpoint: Path, step: int, resumable: bool, writes: bool, processes: Processes
) -> Iterator[None]:
    """
    Within this context, all processes write the files of a checkpoint, whose folder is removed first. Then its manifest is written
    (see [`write_manifest`]), and a `resumable` one becomes the run's latest. If that fails, the folder is removed, and a
    `CheckpointError` says what to resume from. `writes`: whether this process writes what all share.
    """
    try:
        if writes:
            _remove(checkpoint)
            (checkpoint / FOLDER).mkdir(parents=True)  # tells it from one that another trainer wrote
        processes.wait()
        yield
        processes.wait()
        if writes:
            write_manifest(checkpoint, step=step, processes=processes.world_size, resumable=resumable)
    except _WRITE_ERRORS as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        if writes:
            _remove(checkpoint)
        raise CheckpointError(
            f"The checkpoint {checkpoint} could not be written ({type(error).__name__}: {error}), and its files were removed. Make "
            f"room. {run.how_to_resume('Then resume') or 'Then start the run again.'}"
        ) from error
    processes.wait()
    if resumable:
        run.checkpoint = str(checkpoint)


def remove_older(checkpoint: Path, limit: int | None, keep: Iterable[str | os.PathLike[str] | None]) -> None:
    """
    Delete the checkpoints beyond `limit` (`save_total_limit`) that were completed first, except those in `keep` and `checkpoint`,
    which was just written: the Trainer would delete it where the folder has some of later steps.
    """
    if limit is None or limit < 1:
        return
    protected = {os.path.realpath(path) for path in (checkpoint, *keep) if path is not None}
    present = checkpoints(checkpoint.parent)
    others = [path for path in present if os.path.realpath(path) not in protected]
    for path in others[max(0, limit - (len(present) - len(others))) :]:
        _remove(path)


def _remove(checkpoint: Path) -> None:
    """Delete a checkpoint, its manifest first: if this is interrupted, it is incomplete."""
    with suppress(OSError):
        (checkpoint / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def _report(checkpoint: Path, manifest: dict[str, Any], rejected: list[str], processes: int) -> None:
    if rejected:
        logger.warning("\n- ".join([f"Resuming from {checkpoint}. Rejected:", *rejected]))
    pairs = [(f"{name} {then}", f"{name} {version(name)}") for name, then in manifest["versions"].items()]
    pairs.append((f"{manifest['processes']} processes", f"{processes} processes"))
    changed = "; ".join(f"{then}, now {now}" for then, now in pairs if then != now)
    if changed:
        logger.warning(
            f"{checkpoint} was written with {changed}. The run continues, but not to the last bit as it would have there."
        )
