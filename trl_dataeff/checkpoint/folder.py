"""The folder of a run belongs to one run at a time."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from transformers.utils import logging

from trl_dataeff.checkpoint.state import FOLDER
from trl_dataeff.rollouts.distributed import Processes, all_gather
from trl_dataeff.utils import UserError, remove_temporary_files


logger = logging.get_logger(__name__)
LOCK = "_dataeff/lock"  # the underscore keeps a folder from being pushed to the Hub
#: Names the process that holds the lock. A file of its own: a process that tries to lock may empty the lock file
HOLDER = "_dataeff/holder.txt"
#: Folders of this package within that of a run
FOLDERS = (FOLDER, LOCK.partition("/")[0])


@contextmanager
def own_folder(output_dir: str | os.PathLike[str], processes: Processes, is_required: bool = True) -> Iterator[None]:
    """
    Within this context, no other run trains in a folder. What a killed process has left half-written there is removed.
    The system frees the lock of a process that ends, however it ends. A collective.

    Args:
        output_dir (`str`): the run's folder.
        processes ([`Processes`]): the processes of the run.
        is_required (`bool`, *optional*, defaults to `True`): whether another run in the folder is an error. If not,
            it is a warning.

    Raises:
        [`UserError`]: another run trains in the folder.
    """
    lock = FileLock(Path(output_dir, LOCK))
    problem = None
    if processes.is_main:
        try:
            Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
            Path(output_dir, HOLDER).write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
        except Timeout:
            problem = (
                f"Another run trains in {output_dir} now{_holder(output_dir)}. Set another `output_dir`, or wait "
                "until that run has ended."
            )
        except (OSError, NotImplementedError) as error:
            logger.warning(
                f"{output_dir} cannot be locked ({error}): a second run in this folder would not be noticed."
            )
    problem = all_gather(problem)[0]
    if problem is not None and is_required:
        raise UserError(problem)
    if problem is not None and processes.is_main:
        logger.warning(problem)
    try:
        if processes.is_main and problem is None:
            for folder in FOLDERS:
                remove_temporary_files(Path(output_dir, folder))
        yield
    finally:
        lock.release()


def _holder(output_dir: str | os.PathLike[str]) -> str:
    """Say which process holds the lock of a folder, in parentheses; empty if it has not said so yet."""
    path = Path(output_dir, HOLDER)
    if not path.is_file():
        return ""
    return f" ({path.read_text(encoding='utf-8', errors='replace')})"
