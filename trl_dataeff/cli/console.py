"""What a run prints: a row for each log, and in a terminal a progress bar below them. All metrics go to trackers and to files."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainerState

from trl_dataeff.tracking.metrics import PREFIX
from trl_dataeff.utils import is_number


REPEAT_HEADER = 20  # rows
#: Columns of the table by their metrics' names in the logs: title, width, format
COLUMNS = {
    "loss": ("loss", 9, ".3g"),  # "-1.23e-05"
    "reward": ("reward", 7, ".4g"),
    PREFIX + "success_rate": ("success", 7, ".0%"),
    PREFIX + "effective_ratio": ("effective", 9, ".0%"),
    PREFIX + "rollouts_generated": ("rollouts", 9, ",.0f"),
    PREFIX + "rollouts_replayed": ("replayed", 9, ",.0f"),
    "completions/mean_length": ("length", 6, ",.0f"),
    "completions/clipped_ratio": ("cut off", 7, ".0%"),
    "entropy": ("entropy", 7, ".3g"),
    "kl": ("kl", 8, ".3g"),
    "grad_norm": ("grad norm", 9, ".3g"),
    "learning_rate": ("lr", 8, ".3g"),
    "step_time": ("s/step", 6, ".3g"),
}
#: What is shown of an evaluation and of the end of training; everything is in the trackers
SUMMARIES = (
    *("eval_loss", "eval_reward", "eval_rewards/*/mean", "eval_completions/mean_length", "eval_runtime"),
    *("train_loss", "train_runtime", "train_steps_per_second"),
)


class TableCallback(TrainerCallback):
    """Prints what the Trainer logs as rows of a table. A column appears with the first log that has its metric."""

    _shown: Sequence[str] = ()  # columns so far
    _rows = 0  # since the last header

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs:
            tqdm.write("\n".join(self.lines(logs, state)))  # above the bar, if there is one
            sys.stdout.flush()

    def lines(self, logs: Mapping[str, Any], state: TrainerState) -> list[str]:
        """The lines of one log, the header among them where it is due."""
        if "loss" in logs:
            return self._row(logs, state)
        shown = [name for name in logs if any(fnmatch(name, pattern) for pattern in SUMMARIES)]
        pairs = [f"{name} {_cell(logs[name], '.4g')}" for name in shown or logs]  # all of a callback's
        return [f"step {state.global_step}: {', '.join(pairs)}"]

    def _row(self, logs: Mapping[str, Any], state: TrainerState) -> list[str]:
        shown = [name for name in COLUMNS if name in self._shown or name in logs]
        header = shown != self._shown or self._rows % REPEAT_HEADER == 0
        self._shown, self._rows = shown, 1 if header else self._rows + 1
        columns = [COLUMNS[name] for name in shown]
        widths = [max(6, 2 * len(str(state.max_steps)) + 1), *(width for _, width, _ in columns)]
        cells = [_cell(logs.get(name), form) for name, (_, _, form) in zip(shown, columns, strict=True)]
        rows = [["step", *(title for title, _, _ in columns)]] if header else []
        rows.append([f"{state.global_step}/{state.max_steps}", *cells])
        return [" ".join(map(str.rjust, row, widths)) for row in rows]


def _cell(value: Any, form: str) -> str:
    return format(value, form) if is_number(value) else "-" if value is None else str(value)


class BarCallback(ProgressCallback):
    """The bar of [`~transformers.ProgressCallback`], without its logs."""

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        pass


def show_progress(trainer: Trainer) -> None:
    """Let a trainer print rows, and in a terminal the progress bar unless `disable_tqdm` is set. A notebook's callback stays."""
    former = {type(callback) for callback in trainer.callback_handler.callbacks} & {PrinterCallback, ProgressCallback}
    for kind in former:
        trainer.remove_callback(kind)
        trainer.add_callback(TableCallback())
    if ProgressCallback in former and sys.stderr.isatty():
        trainer.add_callback(BarCallback())
