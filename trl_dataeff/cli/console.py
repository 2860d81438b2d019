"""What a run prints: a line for each log, and in a terminal a panel below them. All metrics go to trackers and to files."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from typing import Any, NamedTuple

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainerState

from trl_dataeff.tracking.metrics import METRICS, PREFIX
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


class LogTable:
    """Turns what the Trainer logs into lines. A column appears with the first log that has its metric."""

    def __init__(self) -> None:
        self._shown: tuple[Column, ...] = ()
        self._rows = 0

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
        line = "  ".join([_aligned(cells, widths), *faults(logs)])
        return [_aligned(["step", *(column.title for column in shown)], widths), line] if header else [line]


def faults(logs: Mapping[str, Any]) -> list[str]:
    """The faults that a log counts, in words: `"reward faults 3"`."""
    names = [name for name, metric in METRICS.items() if metric.fault and PREFIX + name in logs]
    return [f"{name.replace('_', ' ')} {logs[PREFIX + name]:,.0f}" for name in names]


def _aligned(cells: list[str], widths: list[int]) -> str:
    return " ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def _cell(value: Any, form: str) -> str:
    return format(value, form) if is_number(value) else "-" if value is None else str(value)


def _pairs(logs: Mapping[str, Any], titles: Mapping[str, str]) -> str:
    return ", ".join(f"{title} {_cell(logs[name], '.4g')}" for name, title in titles.items() if name in logs)


class TableCallback(TrainerCallback):
    """Prints the table, in the place of [`~transformers.PrinterCallback`] and [`~transformers.ProgressCallback`]."""

    def __init__(self) -> None:
        super().__init__()
        self._table = LogTable()

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs:
            print("\n".join(self._table.lines(logs, state)))
            sys.stdout.flush()


class PanelCallback(TrainerCallback):
    """Shows a panel in a terminal: the last reward, where rollouts went, and the time that is left."""

    def __init__(self, console: Console):
        self._console = console
        self._live: Live | None = None
        self._logs: dict[str, Any] = {}
        self._began, self._first_step = 0.0, 0

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._began, self._first_step = time.monotonic(), state.global_step
            self._live = Live(console=self._console, get_renderable=lambda: self.render(args, state))
            self._live.start()

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self._logs.update({name: value for name, value in (logs or {}).items() if is_number(value)})

    def stop(self) -> None:
        """Leave the panel as it is, and give the terminal back."""
        if self._live is not None:
            self._live.stop()

    def render(self, args: Any, state: TrainerState) -> Panel:
        """The panel as it is now. `rich` asks for it four times a second."""
        own = {name: self._logs[PREFIX + name] for name in METRICS if PREFIX + name in self._logs}
        lines = []
        if "reward" in self._logs:
            held_out = f", held out {self._logs['eval_reward']:.3f}" if "eval_reward" in self._logs else ""
            lines.append(f"reward     {self._logs['reward']:.3f}{held_out}")
        if {"effective_ratio", "easy_ratio", "hard_ratio"} <= own.keys():
            shares = "{effective_ratio:.0%} of the groups (easy {easy_ratio:.0%}, hard {hard_ratio:.0%})".format(**own)
            lines.append(f"effective  {shares}")
        if "rollouts_generated" in own:
            replayed = f", {own['rollouts_replayed']:,.0f} replayed" if "rollouts_replayed" in own else ""
            lines.append(f"rollouts   {own['rollouts_generated']:,.0f} generated{replayed}")
        lines += [f"faults     {fault}" for fault in faults(self._logs)]
        steps, elapsed = state.global_step - self._first_step, time.monotonic() - self._began
        if steps > 0:
            left = elapsed / steps * (state.max_steps - state.global_step)
            lines.append(f"time       {elapsed / 60:,.1f} min, about {left / 60:,.1f} min left")
        title = f"step {state.global_step:,} of {state.max_steps:,}"
        return Panel(Text("\n".join(lines)), title=title, subtitle=Text(str(args.output_dir)), padding=(0, 1))


@contextmanager
def progress_shown(trainer: Trainer, plain: bool, console: Console | None = None) -> Iterator[None]:
    """
    Within this context a trainer prints lines, and in a terminal shows the panel below them, unless `plain` is set or progress
    bars are off. What prints in another way (a notebook's callback) stays.
    """
    console = console or Console()
    kinds = {type(callback) for callback in trainer.callback_handler.callbacks}
    if not kinds & {PrinterCallback, ProgressCallback}:
        yield
        return
    for kind in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(kind)
    trainer.add_callback(TableCallback())
    panel = PanelCallback(console)
    if console.is_terminal and not plain and ProgressCallback in kinds:
        trainer.add_callback(panel)
    try:
        yield
    finally:
        panel.stop()
