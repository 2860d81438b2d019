"""`MetricsLog`: a line for each log of the Trainer, in `<output_dir>/dataeff/metrics.jsonl`."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers.utils import logging

from trl_dataeff.utils import use_file_of_run, write_atomically


logger = logging.get_logger(__name__)
END = "train_runtime"  # in the last log of a call of `train`


class MetricsLog:
    """
    Appends what the Trainer logs, evaluations too. A line is a JSON object of numbers with, besides the metrics:

    - `run`: id of the run;
    - `step`: optimizer steps done;
    - `rollouts`, `tokens`: generated so far;
    - `seconds`: of training so far, without the time between a stop and a resume;
    - `time`: when it was logged, in seconds since 1970.

    Args:
        path (`Path`): the file.
    """

    def __init__(self, path: Path):
        self.path = path
        self._run = ""
        self._waiting: list[str] = []
        self._began, self._before = time.monotonic(), 0.0
        self._warned = False

    def begin(self, run: str, step: int) -> None:
        """
        Continue the run `run` at optimizer step `step`: its lines up to that step are kept. The file of another run is
        renamed.
        """
        self._run, self._began, self._before = run, time.monotonic(), 0.0
        try:
            first = next(read_lines(self.path), {"run": "unknown"}) if self.path.exists() else None
            use_file_of_run(self.path, None if first is None else str(first.get("run", "unknown")), run)
            if not self.path.exists():
                return
            kept = [line for line in read_lines(self.path) if line.get("step", 0) <= step and END not in line]
            self._before = max((line.get("seconds", 0.0) for line in kept), default=0.0)
            text = "".join(json.dumps(line) + "\n" for line in kept)
            write_atomically(self.path, lambda path: path.write_text(text))
        except OSError as error:
            self._warn_once(error)

    def add(self, logs: Mapping[str, Any], *, step: int, rollouts: int, tokens: int) -> None:
        """Write a line. What is not a number is left out; a number that is not finite is null."""
        line = {
            "run": self._run,
            "step": step,
            "rollouts": rollouts,
            "tokens": tokens,
            "seconds": round(self._before + time.monotonic() - self._began, 3),
            "time": round(time.time(), 3),
            **{name: v if math.isfinite(v) else None for name, v in logs.items() if isinstance(v, (int, float))},
        }
        self._waiting.append(json.dumps(line) + "\n")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a") as file:
                file.write("".join(self._waiting))
        except OSError as error:
            self._warn_once(error)
        else:
            self._waiting, self._warned = [], False

    def _warn_once(self, error: OSError) -> None:
        if not self._warned:
            logger.warning(
                f"{self.path} could not be written ({error}). Training continues; the lines are kept in memory and written "
                "when there is room. This warning is shown once."
            )
        self._warned = True


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """
    The lines of such a file. What is not a JSON object (the last line of a process that was killed while it wrote) is left
    out.
    """
    with open(path, errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if isinstance(line, dict):
                yield line
