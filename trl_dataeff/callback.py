"""What this package does at the Trainer's events."""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.utils import logging

from trl_dataeff.checkpoint.resume import ResumedRun
from trl_dataeff.signals import StopSignals
from trl_dataeff.tracking.metrics import END, StepTimer, record
from trl_dataeff.tracking.observer import Observer
from trl_dataeff.utils import PREFIX


logger = logging.get_logger(__name__)


class DataEfficientCallback(TrainerCallback):
    """
    Times steps, writes the run's logs, and stops a run after a signal. Its place is behind the Trainer's own callback,
    which decides when to save, and before the trackers.

    Args:
        observer ([`Observer`]): of the trainer.
        timer ([`StepTimer`]): of the trainer.
        store (`dict`): TRL's metrics of training, by name.
        on_begin (`Callable`): called when training begins, after the Trainer's own preparations.
        on_gradient (`Callable`): called before each optimizer step.
        check_seconds (`Callable`): returns what the update's check of gradients has taken so far.

    Attributes:
        run ([`ResumedRun`]): the run of the present call of `train`.
        signals ([`StopSignals`] or `None`): receives signals in the present call of `train`; `None` without
            `save_on_signal`.
        has_trained (`bool`): whether a call of `train` has begun training.
        stopped_by (`signal.Signals` or `None`): the signal that ended training early.
    """

    def __init__(
        self,
        observer: Observer,
        timer: StepTimer,
        store: defaultdict[str, list[float]],
        on_begin: Callable[[], None],
        on_gradient: Callable[[], None],
        check_seconds: Callable[[], float],
    ):
        self.observer = observer
        self.timer = timer
        self.store = store
        self.on_begin = on_begin
        self.on_gradient = on_gradient
        self.check_seconds = check_seconds
        self.has_trained = False
        self.begin(ResumedRun(), None)

    def begin(self, run: ResumedRun, signals: StopSignals | None) -> None:
        """Prepare for a call of `train`, whose run and signals these are."""
        self.run = run
        self.signals = signals
        self.stopped_by: signal.Signals | None = None
        self._is_training = False
        self._saved_at_step: int | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._is_training = True
        self.has_trained = True
        self.on_begin()

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.on_gradient()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        record(self.store, self.timer.take())
        self._stop_if_signalled(state, control)

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not self._is_training or not logs:
            return
        is_evaluation = any(name.startswith("eval_") for name in logs)
        if is_evaluation:  # so that trackers can show held-out reward over rollouts
            logs[f"{PREFIX}rollouts_generated"] = self.observer.counters["rollouts_generated"]
        self.observer.log(logs, state.global_step)
        if END in logs and self.stopped_by is not None:
            # Next the Trainer would load the best model and delete the last checkpoint, from which the run is to go on
            args.load_best_model_at_end = False
            args.save_total_limit = None

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._is_training:
            self._stop_if_signalled(state, control)

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._saved_at_step = state.global_step
        self._stop_if_signalled(state, control)
        control.should_save = False  # it was just saved

    def _stop_if_signalled(self, state: TrainerState, control: TrainerControl) -> None:
        """Save and stop, if a process has received a signal: after a step, an evaluation or a checkpoint."""
        if self.stopped_by is not None or self.signals is None:
            return
        received = self.signals.agreed()
        if received is not None and state.global_step < state.max_steps:
            self.stopped_by = received
            control.should_save = True
            control.should_training_stop = True

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.stopped_by is None:
            return
        # A signal ends the epoch early; with `save_strategy="best"` there may be no checkpoint of this step yet
        is_saved = state.global_step == self._saved_at_step
        control.should_save = state.global_step > 0 and not is_saved
        control.should_evaluate = False

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._is_training = False
        self.observer.flush_logs()
        if self.stopped_by is None or not state.is_world_process_zero:
            return
        how = self.run.how_to_resume()
        if not how:
            reason = " (`save_only_model=True` keeps the model alone)" if args.save_only_model else ""
            how = f"This run has no checkpoint to resume from{reason}."
        logger.warning(f"Stopped by {self.stopped_by.name} after step {state.global_step} of {state.max_steps}. {how}")
