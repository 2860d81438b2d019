"""Which checkpoint a call of `train` continues, how one is written, and which older ones are deleted."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers.utils import logging

from trl_dataeff.checkpoint.manifest import MANIFEST, check_checkpoint, completion_order, is_complete, write_manifest
from trl_dataeff.checkpoint.state import FOLDER, CheckpointError
from trl_dataeff.rollouts.checks import NothingScoredError
from trl_dataeff.rollouts.distributed import Processes, all_gather


logger = logging.get_logger(__name__)
#: What `torch.save` and safetensors raise where they cannot write; the first one raises it for much else as well
_WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)
#: What `torch.save` says then
_OF_TORCH_SAVE = re.compile(r"PytorchStreamWriter|inline_container|unexpected pos|Parent directory .* does not exist")
LITTLE_SPACE = 2**20  # bytes
#: Most prompts that a note of a failure names
_NOTED_PROMPTS = 16


@dataclass
class ResumedRun:
    """
    The run of a call of `train`.

    Attributes:
        checkpoint (`str` or `None`): the latest checkpoint to resume from, which the call has read or written.
    """

    checkpoint: str | None = None

    def how_to_resume(self, resume: str = "Resume") -> str:
        """
        Say how to resume the run, in Python and on the command line.

        Args:
            resume (`str`, *optional*, defaults to `"Resume"`): begins the sentence.

        Returns:
            `str`: two sentences that name the latest checkpoint; empty without a complete one.
        """
        if self.checkpoint is None or not is_complete(Path(self.checkpoint)):
            return ""
        return (
            f"The latest complete checkpoint of this run is {self.checkpoint}. {resume} with "
            f"`trainer.train(resume_from_checkpoint={self.checkpoint!r})`, or "
            f"`--resume_from_checkpoint {self.checkpoint}` on the command line."
        )


# Which checkpoint a call of `train` continues


def resolve_run(
    wanted: bool | str | os.PathLike[str] | None,
    output_dir: str | os.PathLike[str],
    processes: Processes = Processes(),  # noqa: B008 (immutable)
    checks: bool = True,
    needs_state: bool = True,
) -> ResumedRun:
    """
    Decide whether a call of `train` starts a run or resumes one, and from which checkpoint. A collective: all
    processes get the same run, or raise the same error.

    Args:
        wanted (`bool`, `str` or `None`): a checkpoint's folder; `True` for the one in `output_dir` that was completed
            last, or for a new run if there is none; `False` or `None` for a new run.
        output_dir (`str`): the run's folder.
        processes ([`Processes`], *optional*): the processes of the run.
        checks (`bool`, *optional*, defaults to `True`): whether this process reads the files.
        needs_state (`bool`, *optional*, defaults to `True`): whether the run needs what this package has written. If
            not, it resumes from what TRL resumes from: also from a checkpoint that TRL's trainer has written, and from
            one of weights alone.

    Returns:
        [`ResumedRun`]: the run that starts or resumes.

    Raises:
        [`CheckpointError`]: the checkpoint that is wanted cannot be resumed from; with `True`, every one in the
            folder.
    """
    folder = os.fspath(output_dir)
    present = all_gather(checkpoints(folder))[0]
    if wanted is None or wanted is False:
        if present and processes.is_main:
            logger.warning(
                f"{folder} holds checkpoints of another run ({_names(present)}). A new run starts, which replaces "
                "those of the same step: set another `output_dir` to keep them, or `resume_from_checkpoint=True` to "
                "continue that run."
            )
        return ResumedRun()
    rejected: dict[Path, str] = {}  # in the order of the candidates
    if wanted is True:
        ordered = _candidates(present, needs_state)
        # First those with all of their files, then those without a file that the Trainer can do without
        candidates = [(path, True) for path in ordered]
        candidates += [(path, False) for path in ordered]
    else:
        candidates = [(Path(wanted), False)]
    for candidate, needs_all in candidates:
        manifest, problem = _check_on_every_process(candidate, checks, needs_all, needs_state)
        if problem is None:
            if processes.is_main and manifest is not None:
                # In the second pass, the first one has rejected this candidate and those after it, too
                rejected_before = list(rejected)
                if candidate in rejected:
                    rejected_before = rejected_before[: rejected_before.index(candidate)]
                reasons = [rejected[path] for path in rejected_before]
                _report_resumption(candidate, manifest, reasons, processes.world_size)
            return ResumedRun(str(candidate))
        rejected[candidate] = problem
    reasons = list(rejected.values())
    if wanted is not True:
        raise CheckpointError(reasons[0])
    _check_nothing_is_lost(folder, present, reasons)
    if processes.is_main:
        incomplete = f" Incomplete ones are replaced: {_names(present)}." if present else ""
        logger.warning(f"There is no complete checkpoint in {folder}: training starts from step 0.{incomplete}")
    return ResumedRun()


def _candidates(present: Sequence[Path], needs_state: bool) -> list[Path]:
    """The checkpoints of a folder in the order in which a run tries to resume from them. A collective."""
    # Those whose manifest cannot be read may be the latest: they are rejected first, and so they are named
    first = [path for path in present if is_complete(path) and completion_order(path) == (0, 0.0)]
    if not needs_state:
        # TRL's trainer may have continued the run
        last_step = max((_step_of(path) for path in present if is_complete(path)), default=0)
        of_trl = [path for path in present if not (path / FOLDER).exists() and _step_of(path) > last_step]
        first = [*sorted(of_trl, key=_step_of, reverse=True), *first]
    first = all_gather(first)[0]
    return [*first, *(path for path in present if path not in first)]


def _names(paths: Iterable[Path]) -> str:
    return ", ".join(path.name for path in paths)


def _check_on_every_process(
    checkpoint: Path, checks: bool, needs_all: bool, needs_state: bool
) -> tuple[dict[str, Any] | None, str | None]:
    """
    Check a checkpoint on the processes that are to read it. A collective.

    Args:
        checkpoint (`Path`): its folder.
        checks (`bool`): whether this process reads it.
        needs_all (`bool`): see [`check_checkpoint`].
        needs_state (`bool`): see [`resolve_run`].

    Returns:
        `tuple`: the manifest, or `None` if this process has not read it; and what the first process that cannot resume
        from the checkpoint says, or `None` if every process can.
    """
    manifest = None
    own_problem = None
    is_of_trl = not needs_state and checkpoint.is_dir() and not (checkpoint / FOLDER).exists()
    if checks and not is_of_trl:
        try:
            manifest = check_checkpoint(checkpoint, needs_all=needs_all, needs_state=needs_state)
        except CheckpointError as error:
            own_problem = str(error)
    problems = [problem for problem in all_gather(own_problem) if problem is not None]
    return manifest, problems[0] if problems else None


def _check_nothing_is_lost(folder: str, present: Sequence[Path], rejected: Sequence[str]) -> None:
    """
    Raise a `CheckpointError` if a new start would replace a checkpoint of another trainer, or a corrupt one that may
    be repaired. A collective.

    Args:
        folder (`str`): the run's folder.
        present (`Sequence[Path]`): its checkpoints.
        rejected (`Sequence[str]`): why each of them cannot be resumed from.
    """
    valuable = [path for path in present if is_complete(path) or not (path / FOLDER).exists()]
    if all_gather(bool(valuable))[0]:
        raise CheckpointError("\n- ".join([f"No checkpoint in {folder} can be resumed from:", *rejected]))


def _report_resumption(checkpoint: Path, manifest: dict[str, Any], rejected: Sequence[str], processes: int) -> None:
    """
    Warn of later checkpoints that are passed over, and of versions that have changed.

    Args:
        checkpoint (`Path`): the checkpoint from which the run resumes.
        manifest (`dict`): its manifest.
        rejected (`Sequence[str]`): why each later one cannot be resumed from.
        processes (`int`): number of processes now.
    """
    if rejected:
        logger.warning("\n- ".join(["Rejected checkpoints:", *rejected]))
    changed = []
    for name, written_with in manifest["versions"].items():
        installed = version(name)
        if installed != written_with:
            changed.append(f"{name} {written_with}, now {name} {installed}")
    if manifest["processes"] != processes:
        changed.append(f"{manifest['processes']} processes, now {processes} processes")
    if changed:
        logger.warning(
            f"{checkpoint} was written with {'; '.join(changed)}. The run continues, but not to the last bit as it "
            "would have there."
        )


def checkpoints(output_dir: str | os.PathLike[str]) -> list[Path]:
    """
    List the checkpoints in a folder, complete or not.

    Args:
        output_dir (`str`): the folder. If there is none, the list is empty; one that cannot be read is an error.

    Returns:
        `list[Path]`: their folders. The one that was completed last is the first.
    """
    if not os.path.isdir(output_dir):
        return []
    found = []
    for path in Path(output_dir).iterdir():
        if re.fullmatch(r"checkpoint-\d+", path.name) and path.is_dir():
            found.append(path)
    return sorted(found, key=_completion_order, reverse=True)


def _completion_order(checkpoint: Path) -> tuple[int, float, int]:
    """Sort key of a checkpoint: when it was completed, an incomplete one first, and then its step."""
    return *completion_order(checkpoint), _step_of(checkpoint)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[1])


# What a call of `train` that fails says


@contextmanager
def failure_notes(run: ResumedRun, prompt_ids: Sequence[int], flush: Callable[[], None]) -> Iterator[None]:
    """
    Add notes to an exception in this context: the prompts in use, and how to resume.

    Args:
        run ([`ResumedRun`]): the run of the context.
        prompt_ids (`Sequence[int]`): rows of the prompts in use, read when the exception comes.
        flush (`Callable`): called first, so that logs are complete.
    """
    try:
        yield
    except BaseException as error:
        flush()
        if len(prompt_ids) and isinstance(error, Exception):
            named = list(prompt_ids[:_NOTED_PROMPTS])
            others = len(prompt_ids) - len(named)
            more = f" and {others} more" if others else ""
            error.add_note(f"The last prompts of this process were the dataset's rows {named}{more}.")
        is_interrupted = isinstance(error, KeyboardInterrupt)
        how = run.how_to_resume("Resume" if is_interrupted else "After fixing the cause, resume")
        if how and not isinstance(error, (CheckpointError, NothingScoredError)):
            error.add_note(how)
        raise


# How a checkpoint is written, and which older ones are deleted


@contextmanager
def complete_checkpoint(
    run: ResumedRun, checkpoint: Path, step: int, resumable: bool, writes: bool, processes: Processes
) -> Iterator[None]:
    """
    Make a checkpoint of the files that all processes write within this context: it ends complete, or is removed. A
    collective.

    Args:
        run ([`ResumedRun`]): its latest checkpoint becomes this one, if it is `resumable`.
        checkpoint (`Path`): folder of the checkpoint, whose former content is removed first.
        step (`int`): optimizer steps so far.
        resumable (`bool`): whether it holds more than the model.
        writes (`bool`): whether this process writes what all processes share.
        processes ([`Processes`]): the processes of the run.

    Raises:
        [`CheckpointError`]: it could not be written; the message says what to resume from.
        `RuntimeError`: one that has nothing to do with files. The checkpoint stays incomplete.
    """
    try:
        if writes:
            _remove(checkpoint)
            (checkpoint / FOLDER).mkdir(parents=True)  # tells it from one that another trainer wrote
        _wait_for_others(processes, checkpoint, run)
        yield
        _wait_for_others(processes, checkpoint, run)
        if writes:
            write_manifest(checkpoint, step=step, processes=processes.world_size, resumable=resumable)
    except CheckpointError:
        if writes:
            _remove(checkpoint)
        raise
    except _WRITE_ERRORS as error:
        if isinstance(error, RuntimeError) and not _OF_TORCH_SAVE.search(str(error)):
            raise  # it has nothing to do with files
        is_full = _is_disk_full(error, checkpoint.parent)
        if writes:
            _remove(checkpoint)
        advice = "Make room" if is_full else "Fix the cause"
        how = run.how_to_resume("Then resume") or "Then start the run again."
        raise CheckpointError(
            f"The checkpoint {checkpoint} could not be written ({type(error).__name__}: {error}), and its files were "
            f"removed. {advice}. {how}"
        ) from error
    processes.wait()
    if resumable:
        run.checkpoint = str(checkpoint)


def _wait_for_others(processes: Processes, checkpoint: Path, run: ResumedRun) -> None:
    """Wait until every process is here. Raises a `CheckpointError` if one has ended."""
    try:
        processes.wait()
    except RuntimeError as error:
        how = run.how_to_resume("Then resume") or "Then start the run again."
        raise CheckpointError(
            f"The checkpoint {checkpoint} could not be completed, because another process of the run has ended or "
            f"hangs ({error}). Look for the cause in its output. {how}"
        ) from error


def _is_disk_full(error: Exception, folder: Path) -> bool:
    """Whether an error comes from a full disk. What `torch.save` and safetensors raise does not always say so."""
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
        return True
    return folder.is_dir() and shutil.disk_usage(folder).free < LITTLE_SPACE


def remove_older(checkpoint: Path, limit: int | None, keep: Iterable[str | os.PathLike[str] | None]) -> None:
    """
    Delete the checkpoints beyond a limit that were completed first. The Trainer would delete those of the lowest
    steps, and so the one that was just written, where the folder has some of later steps.

    Args:
        checkpoint (`Path`): the checkpoint that was just written, which stays.
        limit (`int` or `None`): `save_total_limit`; `None` or less than 1 for no limit.
        keep (`Iterable`): folders of others that stay; `None` entries are passed over.
    """
    if limit is None or limit < 1:
        return
    protected = {os.path.realpath(path) for path in (checkpoint, *keep) if path is not None}
    present = checkpoints(checkpoint.parent)
    others = [path for path in present if os.path.realpath(path) not in protected]
    num_protected = len(present) - len(others)
    num_others_kept = max(0, limit - num_protected)
    for path in others[num_others_kept:]:
        _remove(path)


def _remove(checkpoint: Path) -> None:
    """
    Delete a checkpoint, its manifest first: if this is interrupted, it is incomplete. Of one that is a symbolic link,
    the link is removed, and what it points to stays.
    """
    if checkpoint.is_symlink():
        checkpoint.unlink()
        return
    if (checkpoint / FOLDER).is_symlink():
        (checkpoint / FOLDER).unlink()
    with suppress(OSError):
        (checkpoint / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)
