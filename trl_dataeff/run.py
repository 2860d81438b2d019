"""The state of one call of `train`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trl_dataeff.checkpoint.resume import ResumedRun


@dataclass
class TrainingRun:
    """
    What belongs to one call of `train`, and is made anew for the next.

    Attributes:
        resumed: the checkpoint to resume from, which the call has read or written.
        begins_late: whether the selector has yet to be bound, because embedding needs the policy on its device.
        loop: where a checkpoint's training loop was, until the Trainer has begun its own; `None` for a new run.
        was_read: whether the state of the checkpoint was looked for.
        logs_completions_again: whether the table of completions is to be switched on with the next generation batch.
    """

    resumed: ResumedRun
    begins_late: bool = False
    loop: dict[str, Any] | None = None
    was_read: bool = False
    logs_completions_again: bool = False
