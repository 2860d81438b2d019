"""
Which checkpoint a run goes on from, and which older ones are deleted.

The folder of a checkpoint that is written again (a run that was resumed from an earlier one comes to the same step) is
first renamed, to `replaced-checkpoint-N`, so that there is no moment without a whole one.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers.trainer_utils import sort_checkpoints
from transformers.utils import logging

from trl_dataeff.checkpoint.manifest import check_checkpoint, is_finished
from trl_dataeff.checkpoint.state import CheckpointError


logger = logging.get_logger(__name__)
_FOLDER = re.compile(r"(replaced-)?checkpoint-(\d+)")
_REPLACED = "replaced-"


def resolve_checkpoint(
    wanted: bool | str | os.PathLike | None,
    output_dir: str | os.PathLike,
    *,
    processes: int = 1,
    checks: bool = True,
    speaks: bool = True,
    gather: Callable[[Any], list[Any]] = lambda value: [value],
) -> str | None:
    """
    The checkpoint to resume from, every file of which has been compared with what was written. A collective if there are
    several processes: all come to the same one, or to the same error.

    Args:
        wanted (`bool`, `str` or `None`): a checkpoint's folder; `True` for the newest whole one in `output_dir`; `False`
            or `None` for a new run.
        output_dir (`str`): folder of the run.
        processes (`int`, *optional*, defaults to `1`): number of processes.
        checks (`bool`, *optional*, defaults to `True`): whether this process reads the files.
        speaks (`bool`, *optional*, defaults to `True`): whether this process logs and cleans up.
        gather (`Callable`, *optional*): `value -> values of all processes`.

    Returns:
        `str` or `None`: path of the checkpoint; `None` for a new run.

    Raises:
        `CheckpointError`: the checkpoint, or every one in `output_dir`, is unfinished, damaged or not to be resumed from.
    """
    if wanted is None or wanted is False:
        return None
    candidates = gather(checkpoints(output_dir) if wanted is True else [Path(wanted)])[0]
    passed_over: list[str] = []
    for candidate in candidates:
        manifest, problem = _check(candidate) if checks else (None, None)
        problems = [p for p in gather(problem) if p is not None]
        if not problems:
            if speaks:
                _report(candidate, manifest, passed_over, processes)
                candidate = _move_back(candidate)
            return gather(str(candidate))[0]
        if wanted is not True:
            raise CheckpointError(problems[0])
        passed_over.append(problems[0])
    if not passed_over:
        raise CheckpointError(
            f"There is no checkpoint in {output_dir}, so there is no run to resume. Start a new one."
        )
    raise CheckpointError("\n- ".join([f"No checkpoint in {output_dir} can be resumed from:", *passed_over]))


def checkpoints(output_dir: str | os.PathLike) -> list[Path]:
    """Folders of checkpoints, the newest (the one of the latest step) first, whole or not."""
    if not os.path.isdir(output_dir):
        return []
    found = [(_FOLDER.fullmatch(path.name), path) for path in Path(output_dir).iterdir() if path.is_dir()]
    keyed = [(int(match[2]), match[1] is None, path) for match, path in found if match]
    return [path for *_, path in sorted(keyed, reverse=True)]


def newest_finished(output_dir: str | os.PathLike) -> Path | None:
    """The newest checkpoint that was written to the end, if any. Its files are not read."""
    return next((path for path in checkpoints(output_dir) if is_finished(path)), None)


def set_aside(checkpoint: Path) -> None:
    """Make way for a checkpoint that is about to be written, without giving up a finished one of that name."""
    if is_finished(checkpoint):
        replaced = checkpoint.with_name(_REPLACED + checkpoint.name)
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(checkpoint, replaced)
    elif checkpoint.exists():
        shutil.rmtree(checkpoint)


def give_up(checkpoint: Path) -> None:
    """Remove a checkpoint that could not be written to the end, and bring back the one it was to replace."""
    shutil.rmtree(checkpoint, ignore_errors=True)
    replaced = checkpoint.with_name(_REPLACED + checkpoint.name)
    if replaced.exists():
        os.rename(replaced, checkpoint)


def remove_older(checkpoint: Path, limit: int | None, keep: Iterable[str | os.PathLike | None]) -> None:
    """
    Delete what a finished checkpoint makes superfluous: the one it replaces, and the oldest ones beyond `limit`.

    Unlike the Trainer's own rotation, this never deletes the checkpoint that was just written, though the folder may
    hold damaged ones of later steps.

    Args:
        checkpoint (`Path`): the finished one.
        limit (`int` or `None`): `save_total_limit`; `None` or less than 1 for no limit.
        keep (`Iterable`): further checkpoints not to delete; `None` among them is passed over.
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


def _report(checkpoint: Path, manifest: dict[str, Any] | None, passed_over: list[str], processes: int) -> None:
    if passed_over:
        logger.warning("\n- ".join([f"Resuming from {checkpoint}. Passed over:", *passed_over]))
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
            f"{checkpoint} was written with {'; '.join(changed)}. The run goes on, but not to the last bit as it would "
            "have gone on there."
        )


def _move_back(checkpoint: Path) -> Path:
    """What was about to be replaced gets its name back: others know it by that name."""
    if not checkpoint.name.startswith(_REPLACED):
        return checkpoint
    original = checkpoint.with_name(checkpoint.name.removeprefix(_REPLACED))
    shutil.rmtree(original, ignore_errors=True)
    os.rename(checkpoint, original)
    return original
