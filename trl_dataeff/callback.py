"""`DataEfficientCallback`: what this package does at the Trainer's events."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.utils import logging

from trl_dataeff.tracking.metrics import PREFIX


logger = logging.get_logger(__name__)


class DataEfficientCallback(TrainerCallback):
    """
    Times steps, writes the run's logs, and stops a run after a signal. `on_begin` is called after the Trainer's own preparations,
    `on_log` with what is logged during training.

    Args:
        received_signal (`Callable`): the signal that a process has received, the same on all processes, or `None`.
        how_to_resume (`Callable`): says how to resume the run; empty if it cannot be.

    Attributes:
        training (`bool`): whether `train` is running.
        stopped_by (`signal.Signals` or `None`): the signal that ended training early.
    """

    def __init__(
        self,
        *,
        on_begin: Callable[[], None],
        on_step: Callable[[], None],
        on_log: Callable[[dict[str, Any]], None],
        on_end: Callable[[], None],
        received_signal: Callable[[], signal.Signals | None],
        how_to_resume: Callable[[], str],
    ):
        self._on_begin, self._on_step, self._on_log, self._on_end = on_begin, on_step, on_log, on_end
        self._received_signal, self._how_to_resume = received_signal, how_to_resume
        self.training = False
        self._saved_at = -1
        self.stopped_by: signal.Signals | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.training, self._saved_at = True, -1
        self._on_begin()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._on_step()
        self._stop_if_signalled(state, control)

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.training and logs:
            self._on_log(logs)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.training:
            self._stop_if_signalled(state, control)

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._saved_at = state.global_step
        self._stop_if_signalled(state, control)
        control.should_save = False

    def _stop_if_signalled(self, state: TrainerState, control: TrainerControl) -> None:
        """Save and stop, if a process has received a signal: after a step, an evaluation or a checkpoint."""
        received = self._received_signal() if self.stopped_by is None else None
        if received is not None and state.global_step < state.max_steps:
            self.stopped_by = received
            control.should_save = control.should_training_stop = True

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.stopped_by is not None:  # within the epoch; with `save_strategy="best"` there may be no checkpoint yet
            control.should_save = 0 < state.global_step != self._saved_at
            control.should_evaluate = False

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.training = False
        self._on_end()
        if self.stopped_by is not None and state.is_world_process_zero:
            reason = " (`save_only_model=True` keeps the model alone)" if args.save_only_model else ""
            how = self._how_to_resume() or f"This run has no checkpoint to resume from{reason}."
            logger.warning(
                f"Stopped by {self.stopped_by.name} after step {state.global_step} of {state.max_steps}. {how}"
            )


class RolloutsAxis(TrainerCallback):
    """
    Adds the rollouts generated so far to logs of evaluations, so that trackers can show held-out reward over them. `rollouts`
    says how many there are, or `None` outside of training. It has to be called before the trackers.
    """

    def __init__(self, rollouts: Callable[[], int | None]):
        self._rollouts = rollouts

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        rollouts = self._rollouts()
        if rollouts is not None and any(name.startswith("eval_") for name in logs or ()):
            logs[f"{PREFIX}rollouts_generated"] = rollouts
