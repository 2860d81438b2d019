"""
What a run prints: a row for each log, and in a terminal a progress bar below the rows. No row is longer than a line of
the terminal. All metrics go to trackers and to files.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from fnmatch import fnmatch
from typing import Any, NamedTuple

from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainerState

from trl_dataeff.callback import DataEfficientCallback
from trl_dataeff.utils import PREFIX, is_number, terminal_width


REPEAT_HEADER = 20  # rows
#: Whose loggers write to the console
PACKAGES = ("trl_dataeff", "trl", "transformers", "peft", "accelerate", "datasets", "huggingface_hub")


class Column(NamedTuple):
    """
    A column of the table.

    Attributes:
        title (`str`): its title.
        width (`int`): its width in characters.
        form (`str`): format of its numbers.
        rank (`int`): its place by importance, from 1. In a narrow terminal the last ones are left out.
    """

    title: str
    width: int
    form: str
    rank: int


#: Columns of the table by their metrics' names in the logs. In 80 characters there is room for eight
COLUMNS = {
    "loss": Column("loss", 9, ".3g", rank=11),  # "-1.23e-05"; says little in GRPO
    "reward": Column("reward", 7, ".4g", rank=1),
    PREFIX + "success_rate": Column("success", 7, ".0%", rank=12),  # often the reward on another scale
    PREFIX + "effective_ratio": Column("effective", 9, ".0%", rank=2),
    PREFIX + "rollouts_generated": Column("rollouts", 9, ",.0f", rank=8),
    PREFIX + "rollouts_replayed": Column("replayed", 9, ",.0f", rank=6),
    "completions/mean_length": Column("length", 6, ",.0f", rank=9),
    "completions/clipped_ratio": Column("cut off", 7, ".0%", rank=3),
    "entropy": Column("entropy", 7, ".3g", rank=5),
    "kl": Column("kl", 8, ".3g", rank=10),
    "grad_norm": Column("grad norm", 9, ".3g", rank=4),
    "learning_rate": Column("lr", 8, ".3g", rank=13),
    "step_time": Column("s/step", 6, ".3g", rank=7),
}
#: Means of single reward functions, which say nothing new if there is one function
REWARD_MEANS = "eval_rewards/*/mean"
#: What is shown of an evaluation and of the end of training, the most important first; everything is in the trackers.
#: With several held-out datasets, their names stand in the name of the time
SUMMARIES = (
    "eval_reward",
    REWARD_MEANS,
    "eval_*runtime",
    "eval_completions/mean_length",
    "eval_loss",
    "train_runtime",
    "train_steps_per_second",
    "train_loss",
)


class TableCallback(TrainerCallback):
    """Prints what the Trainer logs as rows of a table. A column appears with the first log that has its metric."""

    def __init__(self) -> None:
        self._known: list[str] = []  # metrics of `COLUMNS` so far
        self._shown: list[str] = []  # those of the last header
        self._rows = 0  # since the last header

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
            `list[str]`: One line, and before a row the header where it is due.
        """
        if "loss" in logs:
            return self._row(logs, state)
        return [_line(logs, state.global_step)]

    def _row(self, logs: Mapping[str, Any], state: TrainerState) -> list[str]:
        longest_step = f"{state.max_steps}/{state.max_steps}"
        width_of_step = max(6, len(longest_step))
        self._known = [name for name in COLUMNS if name in self._known or name in logs]
        shown = _that_fit(self._known, width_of_step)
        needs_header = shown != self._shown or self._rows % REPEAT_HEADER == 0
        self._shown = shown
        if needs_header:
            self._rows = 0
        self._rows += 1

        titles = ["step"]
        cells = [f"{state.global_step}/{state.max_steps}"]
        widths = [width_of_step]
        for name in shown:
            column = COLUMNS[name]
            titles.append(column.title)
            cells.append(_cell(logs.get(name), column.form))
            widths.append(column.width)
        rows = [titles, cells] if needs_header else [cells]
        return [" ".join(map(str.rjust, row, widths)) for row in rows]


def _that_fit(names: Sequence[str], width_of_step: int) -> list[str]:
    """
    Leave out the least important columns for which a line of the terminal has no room.

    Args:
        names (`Sequence[str]`): names of `COLUMNS`.
        width_of_step (`int`): characters of the first column.

    Returns:
        `list[str]`: the others, in their order.
    """
    room = terminal_width()
    if room is None:
        return list(names)
    kept = set()
    needed = width_of_step
    for name in sorted(names, key=lambda name: COLUMNS[name].rank):
        needed += 1 + COLUMNS[name].width
        if needed > room:
            break
        kept.add(name)
    return [name for name in names if name in kept]


def _line(logs: Mapping[str, Any], step: int) -> str:
    """
    Show a log that is not a row of the table.

    Args:
        logs (`Mapping`): metrics and their values: of an evaluation, of the end of training, or of a callback.
        step (`int`): the optimizer step.

    Returns:
        `str`: what `SUMMARIES` names, as much as a line of the terminal has room for. A log of which it names nothing
        is shown whole.
    """
    names = [name for pattern in SUMMARIES for name in logs if fnmatch(name, pattern)]
    rewards = [name for name in names if fnmatch(name, REWARD_MEANS)]
    if len(rewards) == 1:
        names.remove(rewards[0])
    room = terminal_width() if names else None
    line = f"step {step}:"
    separator = " "
    for name in names or logs:
        pair = f"{_title(name)} {_cell(logs[name], '.4g')}"
        longer_line = f"{line}{separator}{pair}"
        if room is not None and len(longer_line) > room:
            break
        line = longer_line
        separator = ", "
    return line


def _title(name: str) -> str:
    """The name of a metric; of a mean in an evaluation, that of the reward function alone."""
    if not fnmatch(name, REWARD_MEANS):
        return name
    before, after = REWARD_MEANS.split("*")
    return name.removeprefix(before).removesuffix(after)


def _cell(value: Any, form: str) -> str:
    if is_number(value):
        return format(value, form)
    if value is None:
        return "-"
    return str(value)


class BarCallback(ProgressCallback):
    """
    The bar of [`~transformers.ProgressCallback`], without its logs. Its estimate of the time left counts neither the
    check of gradients, which later steps do not have, nor the steps before a resume.

    Args:
        check_seconds (`Callable`): returns what the check has taken so far.
    """

    def __init__(self, check_seconds: Callable[[], float]):
        super().__init__()
        self._check_seconds = check_seconds

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.current_step = state.global_step
        self._counted = self._check_seconds()
        if state.is_world_process_zero:
            self.training_bar = tqdm(total=state.max_steps, initial=state.global_step, dynamic_ncols=True)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        check_seconds = self._check_seconds()
        if self.training_bar is not None:
            self.training_bar.last_print_t += check_seconds - self._counted  # from which tqdm measures the step
        self._counted = check_seconds
        super().on_step_end(args, state, control, **kwargs)

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        pass


def above_the_bar() -> AbstractContextManager[None]:
    """Within this context, messages of these packages stand above the progress bar, and not behind it."""
    return logging_redirect_tqdm([logging.getLogger(name) for name in PACKAGES])


def show_progress(trainer: Trainer) -> None:
    """
    Let a trainer print rows, and in a terminal the progress bar unless `disable_tqdm` is set.

    A callback that shows the progress in another way, as in a notebook, stays.

    Args:
        trainer ([`DataEfficientGRPOTrainer`]):
            Its callbacks are replaced.
    """
    callbacks = trainer.callback_handler.callbacks
    present = {type(callback) for callback in callbacks}
    replaced = present & {PrinterCallback, ProgressCallback}
    for kind in replaced:
        trainer.remove_callback(kind)
        trainer.add_callback(TableCallback())
    if ProgressCallback in replaced and sys.stderr.isatty():
        own = next(callback for callback in callbacks if isinstance(callback, DataEfficientCallback))
        trainer.add_callback(BarCallback(own.check_seconds))
