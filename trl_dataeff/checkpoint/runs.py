"""
The run of a folder, `<output_dir>/dataeff/run.json`.

A run gets an id when it starts, and keeps it when it is resumed. Manifests and the table of groups name it, so that runs
that share an `output_dir` are not mixed. The file is written when training begins: a run that fails before changes nothing.
"""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers.utils import logging

from trl_dataeff.checkpoint.manifest import PACKAGES, is_complete, read_unchecked
from trl_dataeff.checkpoint.state import FOLDER
from trl_dataeff.utils import write_atomically
from trl_dataeff.version import FORMAT, __version__


logger = logging.get_logger(__name__)
RUN_FILE = f"{FOLDER}/run.json"
_CHECKPOINT = re.compile(r"(replaced-)?checkpoint-(\d+)")
_TRAINER_STATE = "trainer_state.json"  # of the Trainer, among the last files of its checkpoints


@dataclass
class Run:
    """
    A run, from one call of `train` on.

    Attributes:
        id (`str`): the same for all processes, and for the run when it is resumed.
        output_dir (`str`): its folder.
        checkpoint (`str` or `None`): its latest checkpoint that it can be resumed from: the one that this call of `train`
            resumed from or, later, wrote.
    """

    id: str
    output_dir: str
    checkpoint: str | None = None

    def how_to_resume(self, resume: str = "Resume") -> str:
        """
        Names the latest checkpoint, in Python and on the command line; empty without one.

        Args:
            resume (`str`, *optional*, defaults to `"Resume"`): beginning of the sentence that says how.
        """
        if self.checkpoint is None or not is_complete(Path(self.checkpoint)):
            return ""
        return (
            f"The latest complete checkpoint of this run is {self.checkpoint}. {resume} with "
            f"`trainer.train(resume_from_checkpoint={self.checkpoint!r})`, or `--resume_from_checkpoint "
            f"{self.checkpoint}` on the command line."
        )


def new_id() -> str:
    """The time, to read and to sort by, and four random digits."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"


def latest_run(output_dir: str | os.PathLike[str]) -> str | None:
    """Id of the run that a folder was used for last, if it says so."""
    return _read(Path(output_dir) / RUN_FILE).get("run")


def write_run(run: Run, about: dict[str, Any]) -> None:
    """
    Write `run.json`. A folder that cannot be written is only warned of: the first checkpoint will say so.

    Args:
        run ([`Run`]): the run.
        about (`dict`): what else is to be noted of it: JSON values.
    """
    path = Path(run.output_dir) / RUN_FILE
    present = _read(path)
    same, now = present.get("run") == run.id, time.strftime("%Y-%m-%dT%H:%M:%S%z")
    resumed = [{"time": now, "checkpoint": run.checkpoint}] if run.checkpoint is not None else []
    content = {
        "format": FORMAT,
        "run": run.id,
        "started": present["started"] if same else now if not resumed else None,
        "resumed": [*(present["resumed"] if same else []), *resumed],
        "trl_dataeff": __version__,
        "versions": {name: version(name) for name in PACKAGES},
        **about,
    }
    try:
        write_atomically(path, lambda temporary: temporary.write_text(json.dumps(content, indent=2)))
    except OSError as error:
        logger.warning(f"{path} could not be written ({error}). Training continues; checkpoints need this folder.")


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
        return {"run": str(content["run"]), "started": content["started"], "resumed": list(content["resumed"])}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        logger.warning(f"{path} cannot be read ({type(error).__name__}: {error}) and is ignored.")
        return {}


def checkpoints(output_dir: str | os.PathLike[str]) -> list[Path]:
    """Folders of checkpoints, complete or not, the one of the latest step first."""
    if not os.path.isdir(output_dir):
        return []
    found = [(_CHECKPOINT.fullmatch(path.name), path) for path in Path(output_dir).iterdir() if path.is_dir()]
    keyed = [(int(match[2]), match[1] is None, path) for match, path in found if match]
    return [path for *_, path in sorted(keyed, reverse=True)]


def run_of(checkpoint: Path) -> str | None:
    """Id of the run that wrote a checkpoint; `None` if it does not say."""
    return (read_unchecked(checkpoint) or {}).get("run")


def is_of_another_trainer(checkpoint: Path) -> bool:
    """Whether `GRPOTrainer` or another trainer wrote it: ours makes the folder `dataeff` first."""
    return (checkpoint / _TRAINER_STATE).is_file() and not (checkpoint / FOLDER).exists()


def of_other_runs(output_dir: str | os.PathLike[str], run: str | None) -> list[Path]:
    """Complete checkpoints in a folder that are not those of `run`."""
    return [
        path
        for path in checkpoints(output_dir)
        if (is_complete(path) and (run is None or run_of(path) not in (None, run))) or is_of_another_trainer(path)
    ]
