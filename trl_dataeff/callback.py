"""`SelectionCallback`: what data selection does at the Trainer's own moments."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from trl_dataeff.checkpoint.state import load_state, load_window, save_state, save_window
from trl_dataeff.reliability.logs import pending_logs, restore_pending_logs


if TYPE_CHECKING:
    from trl_dataeff.trainer import DataEfficientGRPOTrainer


class SelectionCallback(TrainerCallback):
    """Times steps, saves and loads the selection state with every checkpoint, and completes `groups.parquet`."""

    def __init__(self, trainer: DataEfficientGRPOTrainer):
        self.trainer = trainer
        self._step_began = 0.0
        self._pending: dict[str, Any] | None = None  # what a checkpoint holds of a logging interval

    def on_train_begin(self, args, state, control, **kwargs):
        if self._pending is not None:  # the Trainer has just begun a new interval
            restore_pending_logs(self.trainer, self._pending)
            self._pending = None

    def on_step_begin(self, args, state, control, **kwargs):
        self._step_began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.record_step_time(time.perf_counter() - self._step_began)
        self.trainer.stop_if_asked(control)

    def on_epoch_end(self, args, state, control, **kwargs):
        if self.trainer.stopped_by is not None:  # in the middle of it, and the checkpoint is there
            control.should_save = control.should_evaluate = False

    def on_train_end(self, args, state, control, **kwargs):
        if self.trainer.ledger.group_log is not None:
            self.trainer.ledger.group_log.flush(force=True)

    def save(self, checkpoint: Path) -> None:
        """
        Write what decides the next batches. The trainer calls it before it writes a checkpoint's other files, so that a
        checkpoint that is complete for the Trainer, pushed to the Hub or seen by other callbacks, has it.
        """
        trainer = self.trainer
        half_used = trainer._step % (trainer.args.steps_per_generation * trainer.num_iterations) != 0
        if half_used:
            save_window(checkpoint, trainer.accelerator.process_index, trainer._buffered_inputs)
        trainer.accelerator.wait_for_everyone()  # what is written last says that the rest is there
        scalars, files = trainer.ledger.state_dict()
        scalars |= {"micro_step": trainer._step, "half_used_window": half_used, "logs": pending_logs(trainer)}
        if trainer.args.should_save:
            save_state(checkpoint, scalars, files)
        if trainer.ledger.group_log is not None:
            trainer.ledger.group_log.flush(force=True)

    def load(self, checkpoint: Path) -> None:
        """Go on from a checkpoint. The Trainer has no callback for this moment either."""
        trainer = self.trainer
        scalars, files = load_state(checkpoint)
        trainer.ledger.load_state_dict(scalars, files, trainer.state.global_step, checkpoint)
        trainer._step = scalars["micro_step"]
        self._pending = scalars["logs"]
        if scalars["half_used_window"]:
            accelerator = trainer.accelerator
            trainer._buffered_inputs = load_window(checkpoint, accelerator.process_index, accelerator.device)
