"""`SelectionCallback`: what data selection does at the Trainer's own moments."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from transformers import TrainerCallback


if TYPE_CHECKING:
    from trl_dataeff.trainer import DataEfficientGRPOTrainer


class SelectionCallback(TrainerCallback):
    """Times steps, saves the selection state with every checkpoint, and completes `groups.parquet`."""

    def __init__(self, trainer: DataEfficientGRPOTrainer):
        self.trainer = trainer
        self._step_began = 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        self._step_began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.record_step_time(time.perf_counter() - self._step_began)

    def on_save(self, args, state, control, **kwargs):
        self.trainer.save_selection_state()

    def on_train_end(self, args, state, control, **kwargs):
        if self.trainer.ledger.group_log is not None:
            self.trainer.ledger.group_log.flush(force=True)
