"""
What a run prints: a row for each log, and in a terminal a progress bar below the rows. All metrics go to trackers and
to files.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any, NamedTuple

from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainerState

from trl_dataeff.tracking.metrics import END, PREFIX
from trl_dataeff.utils import is_number


REPEAT_HEADER = 20  # rows
TOKENS_SAVED = PREFIX + "update/tokens_saved"


class Column(NamedTuple):
    """Title, width in characters and number format of a column."""

    title: str
    width: int
    form: str


#: Columns of the table by their metrics' names in the logs
COLUMNS = {
    "loss": Column("loss", 9, ".3g"),  # "-1.23e-05"
    "reward": Column("reward", 7, ".4g"),
    PREFIX + "success_rate": Column("success", 7, ".0%"),
    PREFIX + "effective_ratio": Column("effective", 9, ".0%"),
    PREFIX + "rollouts_generated": Column("rollouts", 9, ",.0f"),
    PREFIX + "rollouts_replayed": Column("replayed", 9, ",.0f"),
    "completions/mean_length": Column("length", 6, ",.0f"),
    "completions/clipped_ratio": Column("cut off", 7, ".0%"),
    "entropy": Column("entropy", 7, ".3g"),
    "kl": Column("kl", 8, ".3g"),
    "grad_norm": Column("grad norm", 9, ".3g"),
    "learning_rate": Column("lr", 8, ".3g"),
    "step_time": Column("s/step", 6, ".3g"),
}
#: What is shown of an evaluation and of the end of training; everything is in the trackers
SUMMARIES = (
    "eval_loss",
    "eval_reward",
    "eval_rewards/*/mean",
    "eval_completions/mean_length",
    "eval_runtime",
    "train_loss",
    "train_runtime",
    "train_steps_per_second",
)


class TableCallback(TrainerCallback):
    """Prints what the Trainer logs as rows of a table. A column appears with the first log that has its metric."""

    def __init__(self) -> None:
        self._shown: list[str] = []  # metrics of the columns so far
        self._rows = 0  # since the last header
        self._tokens_saved: list[float] = []  # of the update, by log

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs:
            tqdm.write("\n".join(self.lines(logs, state)))  # above the bar, if there is one
            sys.stdout.flush()

    def lines(self, logs: Mapping[str, Any], state: TrainerState) -> list[str]:
        """
        Return the lines that show one log.

        Args:
            logs (`dict[str, Any]`):
                Metrics and their values. A log with `"loss"` is a row of the table; any other has a line of its own.
            state ([`~transformers.TrainerState`]):
                State of the run.

        Returns:
            `list[str]`: One line, before a row the header where it is due, and at the end what the update saved.
        """
        if "loss" in logs:
            if TOKENS_SAVED in logs:
                self._tokens_saved.append(logs[TOKENS_SAVED])
            return self._row(logs, state)
        summarized = [name for name in logs if any(fnmatch(name, pattern) for pattern in SUMMARIES)]
        shown = summarized or logs  # a callback's own log is shown whole
        pairs = [f"{name} {_cell(logs[name], '.4g')}" for name in shown]
        lines = [f"step {state.global_step}: {', '.join(pairs)}"]
        if END in logs and self._tokens_saved:
            computed = 1 - sum(self._tokens_saved) / len(self._tokens_saved)
            lines.append(f"The update computed {computed:.0%} of the tokens that TRL's would (`compact_update`).")
        return lines

    def _row(self, logs: Mapping[str, Any], state: TrainerState) -> list[str]:
        shown = [name for name in COLUMNS if name in self._shown or name in logs]
        needs_header = shown != self._shown or self._rows % REPEAT_HEADER == 0
        self._shown = shown
        if needs_header:
            self._rows = 0
        self._rows += 1

        titles = ["step"]
        cells = [f"{state.global_step}/{state.max_steps}"]
        longest_step = f"{state.max_steps}/{state.max_steps}"
        widths = [max(6, len(longest_step))]
        for name in shown:
            column = COLUMNS[name]
            titles.append(column.title)
            cells.append(_cell(logs.get(name), column.form))
            widths.append(column.width)
        rows = [titles, cells] if needs_header else [cells]
        return [" ".join(map(str.rjust, row, widths)) for row in rows]


def _cell(value: Any, form: str) -> str:
    if is_number(value):
        return format(value, form)
    if value is None:
        return "-"
    return str(value)


class BarCallback(ProgressCallback):
    """The bar of [`~transformers.ProgressCallback`], without its logs."""

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        pass


def show_progress(trainer: Trainer) -> None:
    """
    Let a trainer print rows, and in a terminal the progress bar unless `disable_tqdm` is set.

    A callback that shows the progress in another way, as in a notebook, stays.

    Args:
        trainer ([`~transformers.Trainer`]):
            Its callbacks are replaced.
    """
    present = {type(callback) for callback in trainer.callback_handler.callbacks}
    replaced = present & {PrinterCallback, ProgressCallback}
    for kind in replaced:
        trainer.remove_callback(kind)
        trainer.add_callback(TableCallback())
    if ProgressCallback in replaced and sys.stderr.isatty():
        trainer.add_callback(BarCallback())
