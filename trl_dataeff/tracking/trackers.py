"""What wandb, TensorBoard and trackio get beside the scalars that every tracker gets: axes, a table of groups, histograms."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback
from transformers.utils import logging

from trl_dataeff.tracking.metrics import PREFIX


logger = logging.get_logger(__name__)
EVERY = 50  # optimizer steps between two tables
MOST_ROWS = 1000  # of a table
AXES = ("rollouts_generated", "tokens_generated")
COLUMNS = ("step", "prompt_id", "predicted", "success_rate", "kind", "origin", "disposition")
TABLE, HISTOGRAM = PREFIX + "groups", PREFIX + "success_rates"


class TrackerCallback(TrainerCallback):
    """
    Adds the rollouts and tokens generated so far to logs of evaluations, so that they work as an x axis for held-out accuracy, and
    sends groups to trackers every `EVERY` steps and at the end of training. It has to be called before the trackers' own callbacks.

    Args:
        counts (`Callable`): the values of `AXES`, by name.
        groups (`Callable`): optimizer step -> the groups generated since then.
        callbacks (`Callable`): all callbacks of the trainer.
    """

    def __init__(
        self,
        counts: Callable[[], dict[str, int]],
        groups: Callable[[int], pa.Table],
        callbacks: Callable[[], Sequence[TrainerCallback]],
    ):
        self._counts, self._groups, self._callbacks = counts, groups, callbacks
        self._training = False
        self._sent = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._training, self._sent = True, state.global_step

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if self._training and logs and any(name.startswith("eval_") for name in logs):
            logs.update({PREFIX + name: value for name, value in self._counts().items()})

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step - self._sent >= EVERY:
            self._send(state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step > self._sent:
            self._send(state)
        self._training = False

    def _send(self, state: TrainerState) -> None:
        since, self._sent = self._sent, state.global_step
        if not state.is_world_process_zero:
            return
        senders = [(send, one) for one in self._callbacks() for kind, send in SENDERS if isinstance(one, kind)]
        if not senders:
            return
        groups = self._groups(since)
        for send, callback in senders:
            try:
                send(callback, groups, state.global_step)
            except Exception as error:  # of a tracker: training does not depend on it
                logger.warning(f"{type(callback).__name__} did not take the groups ({type(error).__name__}: {error}).")


def _rows(groups: pa.Table) -> list[list[Any]]:
    recent = groups.select(COLUMNS).slice(max(0, len(groups) - MOST_ROWS))
    return [list(row.values()) for row in recent.to_pylist()]


def _rates(groups: pa.Table) -> np.ndarray:
    return np.asarray(groups["success_rate"].drop_null())


def _to_wandb(callback: Any, groups: pa.Table, step: int) -> None:
    wandb = sys.modules["wandb"]  # imported by the callback
    if wandb.run is None:
        return
    for name in AXES:  # as numbers that other metrics can be drawn against; the last value is the run's
        wandb.define_metric(f"train/{PREFIX}{name}", summary="max")
    entry = {TABLE: wandb.Table(columns=list(COLUMNS), data=_rows(groups)), "train/global_step": step}
    if len(_rates(groups)):
        entry[HISTOGRAM] = wandb.Histogram(_rates(groups), num_bins=20)
    wandb.log(entry)


def _to_tensorboard(callback: Any, groups: pa.Table, step: int) -> None:
    if callback.tb_writer is not None and len(_rates(groups)):
        callback.tb_writer.add_histogram(HISTOGRAM, _rates(groups), step, bins=20)
        callback.tb_writer.flush()


def _to_trackio(callback: Any, groups: pa.Table, step: int) -> None:
    trackio = sys.modules["trackio"]
    import pandas as pd

    entry = {TABLE: trackio.Table(dataframe=pd.DataFrame(_rows(groups), columns=list(COLUMNS)))}
    if len(_rates(groups)):
        entry[HISTOGRAM] = trackio.Histogram(_rates(groups), num_bins=20)
    trackio.log(entry, step=step)


SENDERS: tuple[tuple[type[TrainerCallback], Callable[[Any, pa.Table, int], None]], ...] = (
    (WandbCallback, _to_wandb),
    (TensorBoardCallback, _to_tensorboard),
    (TrackioCallback, _to_trackio),
)
