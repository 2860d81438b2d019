"""What a run prints: a row for each log, and in a terminal a progress bar below them. All metrics go to trackers and to files."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any, NamedTuple

from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainerState

from trl_dataeff.tracking.metrics import PREFIX
from trl_dataeff.utils import is_number


REPEAT_HEADER = 20  # rows


class Column(NamedTuple):
    """A column of the table. `name` is the metric's in the logs."""

    title: str
    name: str
    width: int
    format: str


COLUMNS = (
    Column("loss", "loss", 9, ".3g"),  # "-1.23e-05"
    Column("reward", "reward", 7, ".4g"),
    Column("success", PREFIX + "success_rate", 7, ".0%"),
    Column("effective", PREFIX + "effective_ratio", 9, ".0%"),
    Column("rollouts", PREFIX + "rollouts_generated", 9, ",.0f"),
    Column("replayed", PREFIX + "rollouts_replayed", 9, ",.0f"),
    Column("length", "completions/mean_length", 6, ",.0f"),
    Column("cut off", "completions/clipped_ratio", 7, ".0%"),
    Column("entropy", "entropy", 7, ".3g"),
    Column("kl", "kl", 8, ".3g"),
    Column("grad norm", "grad_norm", 9, ".3g"),
    Column("lr", "learning_rate", 8, ".3g"),
    Column("s/step", "step_time", 6, ".3g"),
)
EVALUATION = {"eval_loss": "loss", "eval_reward": "reward", "eval_completions/mean_length": "length"}
END = {"train_loss": "mean loss", "train_runtime": "seconds", "train_steps_per_second": "steps per second"}


class TableCallback(TrainerCallback):
    """
    Prints what the Trainer logs as rows of a table, in the place of [`~transformers.PrinterCallback`] and
    [`~transformers.ProgressCallback`]. A column appears with the first log that has its metric.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shown: tuple[Column, ...] = ()
        self._rows = 0

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs:
            tqdm.write("\n".join(self.lines(logs, state)))  # above the bar, if there is one
            sys.stdout.flush()

    def lines(self, logs: Mapping[str, Any], state: TrainerState) -> list[str]:
        """The lines of one log, the header among them where it is due."""
        if any(name.startswith("eval_") for name in logs):
            rewards = {n: n.removeprefix("eval_") for n in logs if fnmatch(n, "eval_rewards/*/mean")}
            shown = {**EVALUATION, **rewards, "eval_runtime": "seconds"}
            return [f"evaluation at step {state.global_step}: {_pairs(logs, shown)}"]
        if "train_runtime" in logs:
            return [f"end at step {state.global_step}: {_pairs(logs, END)}"]
        if "loss" not in logs:  # of a callback
            return [_pairs(logs, {name: name for name in logs})]
        return self._row(logs, state)

    def _row(self, logs: Mapping[str, Any], state: TrainerState) -> list[str]:
        shown = tuple(column for column in COLUMNS if column in self._shown or column.name in logs)
        header = shown != self._shown or self._rows % REPEAT_HEADER == 0
        self._shown, self._rows = shown, 1 if header else self._rows + 1
        cells = [f"{state.global_step}/{state.max_steps}", *(_cell(logs.get(c.name), c.format) for c in shown)]
        widths = [max(6, 2 * len(str(state.max_steps)) + 1), *(column.width for column in shown)]
        line = _aligned(cells, widths)
        return [_aligned(["step", *(column.title for column in shown)], widths), line] if header else [line]


def _aligned(cells: list[str], widths: list[int]) -> str:
    return " ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def _cell(value: Any, form: str) -> str:
    return format(value, form) if is_number(value) else "-" if value is None else str(value)


def _pairs(logs: Mapping[str, Any], titles: Mapping[str, str]) -> str:
    return ", ".join(f"{title} {_cell(logs[name], '.4g')}" for name, title in titles.items() if name in logs)


class BarCallback(ProgressCallback):
    """The bar of [`~transformers.ProgressCallback`], without its logs."""

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        pass


def show_progress(trainer: Trainer, plain: bool) -> None:
    """
    Let a trainer print rows, and in a terminal the progress bar below them, unless `plain` is set or progress bars are off.
    What prints in another way (a notebook's callback) stays.
    """
    former = {type(callback) for callback in trainer.callback_handler.callbacks} & {PrinterCallback, ProgressCallback}
    for kind in former:
        trainer.remove_callback(kind)
    if former:
        trainer.add_callback(TableCallback())
    if ProgressCallback in former and sys.stderr.isatty() and not plain:
        trainer.add_callback(BarCallback())
