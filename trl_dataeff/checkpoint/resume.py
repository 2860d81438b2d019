"""
Which checkpoint a run goes on from, and which older ones are deleted.

The folder of a checkpoint that is written again (a run that was resumed from an earlier one reaches the same step) is
first renamed, to `replaced-checkpoint-N`, so that there is always a complete one.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers.trainer_utils import sort_checkpoints
from transformers.utils import logging

from trl_dataeff.checkpoint.manifest import check_checkpoint, is_complete
from trl_dataeff.checkpoint.state import CheckpointError
from trl_dataeff.rollouts.distributed import Processes, all_gather


logger = logging.get_logger(__name__)
_FOLDER = re.compile(r"(replaced-)?checkpoint-(\d+)")
_REPLACED = "replaced-"


def resolve_checkpoint(
    wanted: bool | str | os.PathLike | None,
    output_dir: str | os.PathLike,
    processes: Processes = Processes(),  # noqa: B008 (immutable)
    *,
    checks: bool = True,
) -> str | None:
    """
    The checkpoint to resume from, every file of which has been compared with what was written. A collective if there are
    several processes: all get the same one, or raise the same error.

    Args:
        wanted (`bool`, `str` or `None`): a checkpoint's folder; `True` for the latest complete one in `output_dir`; `False`
            or `None` for a new run.
        output_dir (`str`): folder of the run.
        processes ([`Processes`], *optional*): of the run; by default a single one. The main one logs and cleans up.
        checks (`bool`, *optional*, defaults to `True`): whether this process reads the files.

    Returns:
        `str` or `None`: path of the checkpoint; `None` for a new run.

    Raises:
        `CheckpointError`: the checkpoint, or every one in `output_dir`, is incomplete, corrupt, or cannot be resumed from.
    """
    if wanted is None or wanted is False:
        return None
    gather: Callable[[Any], list[Any]] = all_gather if processes.world_size > 1 else lambda value: [value]
    candidates = gather(checkpoints(output_dir) if wanted is True else [Path(wanted)])[0]
    rejected: list[str] = []
    for candidate in candidates:
        manifest, problem = _check(candidate) if checks else (None, None)
        problems = [p for p in gather(problem) if p is not None]
        if not problems:
            if processes.is_main:
                _report(candidate, manifest, rejected, processes.world_size)
                candidate = _move_back(candidate)
            return gather(str(candidate))[0]
        if wanted is not True:
            raise CheckpointError(problems[0])
        rejected.append(problems[0])
    if not rejected:
        raise CheckpointError(
            f"There is no checkpoint in {output_dir}, so there is no run to resume. Start a new run."
        )
    raise CheckpointError("\n- ".join([f"No checkpoint in {output_dir} can be resumed from:", *rejected]))


def checkpoints(output_dir: str | os.PathLike) -> list[Path]:
    """Folders of checkpoints, complete or not, the one of the latest step first."""
    if not os.path.isdir(output_dir):
        return []
    found = [(_FOLDER.fullmatch(path.name), path) for path in Path(output_dir).iterdir() if path.is_dir()]
    keyed = [(int(match[2]), match[1] is None, path) for match, path in found if match]
    return [path for *_, path in sorted(keyed, reverse=True)]


def latest_complete(output_dir: str | os.PathLike) -> Path | None:
    """The latest checkpoint that is complete, if any. Its files are not read."""
    return next((path for path in checkpoints(output_dir) if is_complete(path)), None)


@contextmanager
def failure_notes(
    output_dir: str | os.PathLike, prompt_ids: Callable[[], Sequence[int]], flush: Callable[[], None]
) -> Iterator[None]:
    """
    Within this context, an exception gets notes that say which prompts were in use, and where to resume.

    Args:
        output_dir (`str`): folder of the run.
        prompt_ids (`Callable`): rows of the dataset that this process used last.
        flush (`Callable`): keeps what can be kept of a run that fails; may raise an `OSError`.
    """
    try:
        yield
    except BaseException as error:
        try:
            flush()
        except OSError as second:
            error.add_note(f"The last rows of groups.parquet could not be written either: {second}")
        _add_notes(error, output_dir, prompt_ids())
        raise


def _add_notes(error: BaseException, output_dir: str | os.PathLike, prompt_ids: Sequence[int]) -> None:
    if len(prompt_ids) and isinstance(error, Exception):
        more = "" if len(prompt_ids) <= 16 else f" and {len(prompt_ids) - 16} more"
        error.add_note(f"The last prompts of this process were the dataset's rows {list(prompt_ids[:16])}{more}.")
    latest = latest_complete(output_dir)
    if latest is not None and not isinstance(error, CheckpointError):
        error.add_note(
            f"The latest complete checkpoint of this run is {latest}. After fixing the cause, resume with "
            "`trainer.train(resume_from_checkpoint=True)`, or `--resume_from_checkpoint last` on the command line."
        )


def set_aside(checkpoint: Path) -> None:
    """Make room for a checkpoint that is about to be written. A complete one of that name is renamed, not deleted."""
    if is_complete(checkpoint):
        replaced = checkpoint.with_name(_REPLACED + checkpoint.name)
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(checkpoint, replaced)
    elif checkpoint.exists():
        shutil.rmtree(checkpoint)


def discard(checkpoint: Path) -> None:
    """Remove a checkpoint that could not be completed, and restore the one that it was to replace."""
    shutil.rmtree(checkpoint, ignore_errors=True)
    replaced = checkpoint.with_name(_REPLACED + checkpoint.name)
    if replaced.exists():
        os.rename(replaced, checkpoint)


def remove_older(checkpoint: Path, limit: int | None, keep: Iterable[str | os.PathLike | None]) -> None:
    """
    Delete what a complete checkpoint supersedes: the one it replaces, and the oldest ones beyond `limit`.

    Unlike the Trainer's own rotation, this never deletes the checkpoint that was just written, though the folder may
    hold corrupt ones of later steps.

    Args:
        checkpoint (`Path`): the complete one.
        limit (`int` or `None`): `save_total_limit`; `None` or less than 1 for no limit.
        keep (`Iterable`): further checkpoints not to delete; `None` among them is ignored.
    """
    shutil.rmtree(checkpoint.with_name(_REPLACED + checkpoint.name), ignore_errors=True)
    if limit is None or limit < 1:
        return
    protected = {os.path.realpath(path) for path in (checkpoint, *keep) if path is not None}
    present = sort_checkpoints(str(checkpoint.parent), use_mtime=True)
    others = [path for path in present if os.path.realpath(path) not in protected]
    excess = len(present) - max(limit, len(present) - len(others))
    for path in others[: max(excess, 0)]:
        shutil.rmtree(path, ignore_errors=True)


def _check(checkpoint: Path) -> tuple[dict[str, Any] | None, str | None]:
    try:
        return check_checkpoint(checkpoint), None
    except CheckpointError as error:
        return None, str(error)


def _report(checkpoint: Path, manifest: dict[str, Any] | None, rejected: list[str], processes: int) -> None:
    if rejected:
        logger.warning("\n- ".join([f"Resuming from {checkpoint}. Rejected:", *rejected]))
    if manifest is None:
        return
    changed = [
        f"{name} {written}, now {version(name)}"
        for name, written in manifest["versions"].items()
        if written != version(name)
    ]
    if manifest["processes"] != processes:
        changed.append(f"{manifest['processes']} processes, now {processes}")
    if changed:
        logger.warning(
            f"{checkpoint} was written with {'; '.join(changed)}. The run continues, but not to the last bit as it "
            "would have there."
        )


def _move_back(checkpoint: Path) -> Path:
    """A checkpoint that was about to be replaced gets its name back."""
    if not checkpoint.name.startswith(_REPLACED):
        return checkpoint
    original = checkpoint.with_name(checkpoint.name.removeprefix(_REPLACED))
    shutil.rmtree(original, ignore_errors=True)
    os.rename(checkpoint, original)
    return original
