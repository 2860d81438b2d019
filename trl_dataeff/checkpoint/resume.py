"""
Which run and which checkpoint a call of `train` continues, and which older checkpoints are deleted.

The folder of a checkpoint that is written again (a run that was resumed from an earlier one reaches the same step) is
first renamed, to `replaced-checkpoint-N`, so that there is always a complete one. Incomplete ones are renamed to
`_incomplete-checkpoint-N` if a run starts again because there are no others.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers.trainer_utils import sort_checkpoints
from transformers.utils import logging

from trl_dataeff.checkpoint.manifest import check_checkpoint, is_complete
from trl_dataeff.checkpoint.runs import (
    Run,
    checkpoints,
    is_of_another_trainer,
    latest_run,
    new_id,
    of_other_runs,
    run_of,
)
from trl_dataeff.checkpoint.state import CheckpointError
from trl_dataeff.rollouts.distributed import Processes, all_gather


logger = logging.get_logger(__name__)
_REPLACED = "replaced-"
_INCOMPLETE = "_incomplete-"  # an underscore keeps it from being pushed to the Hub


def resolve_run(
    wanted: bool | str | os.PathLike[str] | None,
    output_dir: str | os.PathLike[str],
    processes: Processes = Processes(),  # noqa: B008 (immutable)
    checks: bool = True,
) -> Run:
    """
    The run that a call of `train` starts or resumes. Every file of the checkpoint that it resumes from has been compared
    with what was written. A collective if there are several processes: all get the same run, or raise the same error.

    Args:
        wanted (`bool`, `str` or `None`): a checkpoint's folder; `True` for the latest complete one of the run that
            `output_dir` was used for last, or for a new run if that one has none; `False` or `None` for a new run.
        output_dir (`str`): folder of the run.
        processes ([`Processes`], *optional*): of the run; by default a single one. The main one logs and cleans up.
        checks (`bool`, *optional*, defaults to `True`): whether this process reads the files.

    Raises:
        `CheckpointError`: the checkpoint that `wanted` names, or every complete one of the run, is corrupt or cannot be
            resumed from.
    """
    gather: Callable[[Any], list[Any]] = all_gather if processes.world_size > 1 else lambda value: [value]
    folder = os.fspath(output_dir)
    known, fresh = gather((latest_run(folder) if processes.is_main else None, new_id()))[0]
    if wanted is None or wanted is False:
        if processes.is_main:
            _warn_of_other_runs(folder)
        return Run(fresh, folder)
    candidates = gather(_own_checkpoints(folder, known) if wanted is True else [Path(wanted)])[0]
    rejected: list[str] = []
    for candidate in candidates:
        manifest, problem = _check(candidate) if checks else (None, None)
        problems = [p for p in gather(problem) if p is not None]
        if not problems:
            run = (manifest or {}).get("run") or known or fresh
            if processes.is_main:
                _report(candidate, manifest, rejected, of_other_runs(folder, run), processes.world_size)
                candidate = _move_back(candidate)
            run, path = gather((run, str(candidate)))[0]
            return Run(run, folder, path)
        if wanted is not True:
            raise CheckpointError(problems[0])
        rejected.append(problems[0])
    if gather(any(is_complete(path) or is_of_another_trainer(path) for path in candidates))[0]:
        raise CheckpointError("\n- ".join([f"No checkpoint in {folder} can be resumed from:", *rejected]))
    if processes.is_main:
        _start_again(folder, known, candidates)
    return Run(fresh, folder)


@contextmanager
def failure_notes(run: Run, prompt_ids: Callable[[], Sequence[int]], flush: Callable[[], None]) -> Iterator[None]:
    """
    Within this context, an exception gets notes that say which prompts were in use, and where to resume.

    Args:
        run ([`Run`]): the run.
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
        _add_notes(error, run, prompt_ids())
        raise


def _add_notes(error: BaseException, run: Run, prompt_ids: Sequence[int]) -> None:
    if len(prompt_ids) and isinstance(error, Exception):
        more = "" if len(prompt_ids) <= 16 else f" and {len(prompt_ids) - 16} more"
        error.add_note(f"The last prompts of this process were the dataset's rows {list(prompt_ids[:16])}{more}.")
    how = run.how_to_resume("After fixing the cause, resume")
    if how and not isinstance(error, CheckpointError):
        error.add_note(how)


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


def remove_older(
    checkpoint: Path, limit: int | None, keep: Iterable[str | os.PathLike[str] | None], run: str | None = None
) -> None:
    """
    Delete what a complete checkpoint supersedes: the one it replaces, and the oldest ones beyond `limit`.

    Unlike the Trainer's own rotation, this never deletes the checkpoint that was just written, though the folder may
    hold corrupt ones of later steps.

    Args:
        checkpoint (`Path`): the complete one.
        limit (`int` or `None`): `save_total_limit`; `None` or less than 1 for no limit.
        keep (`Iterable`): further checkpoints not to delete; `None` among them is ignored.
        run (`str`, *optional*): id of the run. Checkpoints of other runs are neither counted nor deleted.
    """
    shutil.rmtree(checkpoint.with_name(_REPLACED + checkpoint.name), ignore_errors=True)
    if limit is None or limit < 1:
        return
    protected = {os.path.realpath(path) for path in (checkpoint, *keep) if path is not None}
    present = sort_checkpoints(str(checkpoint.parent), use_mtime=True)
    if run is not None:
        others_runs = set(map(os.path.realpath, of_other_runs(checkpoint.parent, run)))
        present = [path for path in present if os.path.realpath(path) not in others_runs]
    others = [path for path in present if os.path.realpath(path) not in protected]
    excess = len(present) - max(limit, len(present) - len(others))
    for path in others[: max(excess, 0)]:
        shutil.rmtree(path, ignore_errors=True)


def _check(checkpoint: Path) -> tuple[dict[str, Any] | None, str | None]:
    try:
        return check_checkpoint(checkpoint), None
    except CheckpointError as error:
        return None, str(error)


def _own_checkpoints(folder: str, run: str | None) -> list[Path]:
    """Those in a folder that may be of `run`; all if it is not known. Incomplete ones name no run."""
    if run is None:
        return checkpoints(folder)
    return [p for p in checkpoints(folder) if run_of(p) in (None, run) and not is_of_another_trainer(p)]


def _warn_of_other_runs(folder: str) -> None:
    others = of_other_runs(folder, None)
    if others:
        logger.warning(
            f"{folder} holds checkpoints of another run ({_names(others)}), and a new run starts there. Its checkpoints "
            "replace those of the same step; with `save_total_limit=1` and `load_best_model_at_end` the Trainer deletes the others "
            "too when training ends. To keep both runs, set another `output_dir`; to continue the other run, pass "
            f"its checkpoint: `resume_from_checkpoint={str(others[0])!r}`."
        )


def _start_again(folder: str, run: str | None, incomplete: list[Path]) -> None:
    """Set aside the incomplete checkpoints of a run that has no others."""
    aside = []
    for path in incomplete:
        renamed = path.with_name(_INCOMPLETE + path.name)
        shutil.rmtree(renamed, ignore_errors=True)
        os.rename(path, renamed)
        aside.append(renamed)
    message = f"There is no complete checkpoint of {'this' if run is None else 'the last'} run in {folder}: training starts from step 0."
    if aside:
        message += f" Incomplete ones were renamed, and can be deleted: {_names(aside)}."
    others = of_other_runs(folder, run)
    if others:
        message += (
            f" Checkpoints of other runs are not used: {_names(others)}. To continue one of these runs, pass its path: "
            f"`resume_from_checkpoint={str(others[0])!r}`."
        )
    logger.warning(message)


def _names(paths: Sequence[Path]) -> str:
    return ", ".join(path.name for path in paths)


def _report(
    checkpoint: Path, manifest: dict[str, Any] | None, rejected: list[str], others: Sequence[Path], processes: int
) -> None:
    if rejected:
        logger.warning("\n- ".join([f"Resuming from {checkpoint}. Rejected:", *rejected]))
    if others:
        logger.warning(
            f"Resuming from {checkpoint}. {others[0].parent} also holds checkpoints of other runs ({_names(others)}): "
            "they are not used, and those of a step that this run reaches are replaced."
        )
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
