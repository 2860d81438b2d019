"""What wandb, TensorBoard and trackio get beside the scalars that every tracker gets: axes, groups, histograms and figures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback
from transformers.utils import logging

from trl_dataeff.tracking.drawing import FiguresMissing, check_library, pixels
from trl_dataeff.tracking.figures import plots_of
from trl_dataeff.tracking.metrics import PREFIX
from trl_dataeff.tracking.recorded import NoRunError, read_run


logger = logging.get_logger(__name__)
EVERY = 50  # optimizer steps between two tables
MOST_ROWS = 1000  # of a table
AXES = ("rollouts_generated", "tokens_generated")
COLUMNS = ("step", "prompt_id", "predicted", "success_rate", "kind", "origin", "disposition")
TABLE, HISTOGRAM, FIGURES = PREFIX + "groups", PREFIX + "success_rates", PREFIX + "figures/"
DRAWN = ("progress-rollouts", "kinds", "flow", "heat", "calibration", "replay")


class TrackerCallback(TrainerCallback):
    """
    Adds the rollouts and tokens generated so far to logs of evaluations, so that they work as an x axis for held-out accuracy, and
    sends groups to trackers every `EVERY` steps and at the end of training, and then the figures `DRAWN`. It has to be called before the trackers' own callbacks.

    Args:
        counts (`Callable`): the values of `AXES`, by name.
        groups (`Callable`): optimizer step -> the groups generated since then.
        callbacks (`Sequence`): all callbacks of the trainer, now or later.
    """

    def __init__(
        self,
        counts: Callable[[], dict[str, int]],
        groups: Callable[[int], pa.Table],
        callbacks: Sequence[TrainerCallback],
    ):
        self._counts, self._groups, self._callbacks = counts, groups, callbacks
        self._training = False
        self._sent = 0

    @classmethod
    def install(
        cls,
        callbacks: list[TrainerCallback],
        counts: Callable[[], dict[str, int]],
        groups: Callable[[int], pa.Table],
    ) -> None:
        """Put it before all `callbacks` of a trainer."""
        callbacks.insert(0, cls(counts, groups, callbacks))

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
            self._send_figures(args, state)
        self._training = False

    def _send(self, state: TrainerState) -> None:
        since, self._sent = self._sent, state.global_step
        if state.is_world_process_zero and self._trackers():
            self._each("groups", 0, self._groups(since), state.global_step)

    def _send_figures(self, args: TrainingArguments, state: TrainerState) -> None:
        """Of the whole run, if matplotlib is installed."""
        if not (state.is_world_process_zero and self._trackers()):
            return
        try:
            check_library()
            run = read_run(str(args.output_dir))
            run.groups = self._groups(0)  # some are not written yet
            pictures = {FIGURES + plot.name: pixels(plot) for plot in plots_of(run) if plot.name in DRAWN}
        except (FiguresMissing, NoRunError):
            return
        except Exception as error:  # training does not depend on it
            logger.warning(f"Figures for trackers could not be drawn ({type(error).__name__}: {error}).")
            return
        self._each("figures", 1, pictures, state.global_step)

    def _trackers(self) -> list[tuple[TrainerCallback, tuple[Callable[..., None], Callable[..., None]]]]:
        return [
            (one, senders) for one in self._callbacks for kind, senders in SENDERS.items() if isinstance(one, kind)
        ]

    def _each(self, what: str, which: int, values: Any, step: int) -> None:
        for callback, senders in self._trackers():
            try:
                senders[which](callback, values, step)
            except Exception as error:  # of a tracker: training does not depend on it
                logger.warning(f"{type(callback).__name__} did not take the {what} ({type(error).__name__}: {error}).")


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


def _figures_to_wandb(callback: Any, pictures: dict[str, np.ndarray], step: int) -> None:
    wandb = sys.modules["wandb"]
    if wandb.run is not None:
        images = {name: wandb.Image(picture) for name, picture in pictures.items()}
        wandb.log({**images, "train/global_step": step})


def _to_tensorboard(callback: Any, groups: pa.Table, step: int) -> None:
    if callback.tb_writer is not None and len(_rates(groups)):
        callback.tb_writer.add_histogram(HISTOGRAM, _rates(groups), step, bins=20)
        callback.tb_writer.flush()


def _figures_to_tensorboard(callback: Any, pictures: dict[str, np.ndarray], step: int) -> None:
    if callback.tb_writer is not None:
        for name, picture in pictures.items():
            callback.tb_writer.add_image(name, picture, step, dataformats="HWC")
        callback.tb_writer.flush()


def _to_trackio(callback: Any, groups: pa.Table, step: int) -> None:
    trackio = sys.modules["trackio"]
    import pandas as pd

    entry = {TABLE: trackio.Table(dataframe=pd.DataFrame(_rows(groups), columns=list(COLUMNS)))}
    if len(_rates(groups)):
        entry[HISTOGRAM] = trackio.Histogram(_rates(groups), num_bins=20)
    trackio.log(entry, step=step)


def _figures_to_trackio(callback: Any, pictures: dict[str, np.ndarray], step: int) -> None:
    trackio = sys.modules["trackio"]
    trackio.log({name: trackio.Image(picture) for name, picture in pictures.items()}, step=step)


#: By callback of a tracker: what sends groups, and what sends figures
SENDERS: dict[type[TrainerCallback], tuple[Callable[..., None], Callable[..., None]]] = {
    WandbCallback: (_to_wandb, _figures_to_wandb),
    TensorBoardCallback: (_to_tensorboard, _figures_to_tensorboard),
    TrackioCallback: (_to_trackio, _figures_to_trackio),
}
