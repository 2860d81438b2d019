"""What a run prints: a table of the numbers that a person reads. All metrics go to trackers and to `trainer.state.log_history`."""

from __future__ import annotations

import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainerState

from trl_dataeff.tracking.metrics import METRICS, PREFIX


#: Whose future warnings are not shown: a user of the command cannot act on them. Those of a reward function's module are.
LIBRARIES = ("accelerate", "datasets", "huggingface_hub", "peft", "torch", "transformers", "trl", "trl_dataeff")
REPEAT_HEADER = 20  # rows


class Column(NamedTuple):
    """A column of the table: its title, the metric's name in the logs, its width, and how a number is written."""

    title: str
    name: str
    width: int
    text: Callable[[float], str]


def _number(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:.{digits}g}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _percent(value: float) -> str:
    return f"{value:.0%}"


COLUMNS = (
    Column("loss", "loss", 9, _number(3)),  # "-1.23e-05"
    Column("reward", "reward", 7, _number(4)),
    Column("success", PREFIX + "success_rate", 7, _percent),
    Column("effective", PREFIX + "effective_ratio", 9, _percent),
    Column("rollouts", PREFIX + "rollouts_generated", 9, _count),
    Column("replayed", PREFIX + "rollouts_replayed", 9, _count),
    Column("length", "completions/mean_length", 6, _count),
    Column("cut off", "completions/clipped_ratio", 7, _percent),
    Column("entropy", "entropy", 7, _number(3)),
    Column("kl", "kl", 8, _number(3)),
    Column("grad norm", "grad_norm", 9, _number(3)),
    Column("lr", "learning_rate", 8, _number(3)),
    Column("s/step", "step_time", 6, _number(3)),
)
EVALUATION = {"loss": "loss", "reward": "reward", "completions/mean_length": "length"}
END = {"train_loss": "mean loss", "train_runtime": "seconds", "train_steps_per_second": "steps per second"}


class LogTable:
    """Turns what the Trainer logs into lines. A column appears with the first log that has its metric."""

    def __init__(self) -> None:
        self._shown: tuple[Column, ...] = ()
        self._rows = 0

    def lines(self, logs: Mapping[str, Any], state: TrainerState) -> list[str]:
        """The lines of one log, the header among them where it is due."""
        if any(name.startswith("eval_") for name in logs):
            return [f"evaluation at step {state.global_step}: {_pairs(_evaluation(logs))}"]
        if "train_runtime" in logs:
            return [f"end at step {state.global_step}: {_pairs(_named(logs, END))}"]
        if "loss" not in logs:  # of a callback
            return [_pairs(logs)]
        return self._row(logs, state)

    def _row(self, logs: Mapping[str, Any], state: TrainerState) -> list[str]:
        shown = tuple(column for column in COLUMNS if column in self._shown or column.name in logs)
        header = shown != self._shown or self._rows % REPEAT_HEADER == 0
        self._shown, self._rows = shown, 1 if header else self._rows + 1
        cells = [f"{state.global_step}/{state.max_steps}", *(_cell(logs.get(c.name), c.text) for c in shown)]
        widths = [max(6, 2 * len(str(state.max_steps)) + 1), *(column.width for column in shown)]
        faults = {name: logs[PREFIX + name] for name, m in METRICS.items() if m.fault and PREFIX + name in logs}
        line = _aligned(cells, widths) + "".join(
            f"  {name.replace('_', ' ')} {_count(n)}" for name, n in faults.items()
        )
        return [_aligned(["step", *(column.title for column in shown)], widths), line] if header else [line]


def _aligned(cells: list[str], widths: list[int]) -> str:
    return " ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def _cell(value: Any, text: Callable[[float], str]) -> str:
    if value is None:
        return "-"
    return text(value) if isinstance(value, (int, float)) and math.isfinite(value) else str(value)


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_cell(value, _number(4))}" for name, value in values.items())


def _named(logs: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {title: logs[name] for name, title in names.items() if name in logs}


def _evaluation(logs: Mapping[str, Any]) -> dict[str, Any]:
    values = {name.removeprefix("eval_"): value for name, value in logs.items()}
    rewards = {name: name for name in values if name.startswith("rewards/") and name.endswith("/mean")}
    return _named(values, {**EVALUATION, **rewards, "runtime": "seconds"})


class TableCallback(TrainerCallback):
    """In the place of [`~transformers.PrinterCallback`]."""

    def __init__(self) -> None:
        self._table = LogTable()

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs:
            print("\n".join(self._table.lines(logs, state)), flush=True)


class ProgressTableCallback(ProgressCallback):
    """In the place of [`~transformers.ProgressCallback`]: its bars, and the table above them."""

    def __init__(self) -> None:
        super().__init__()
        self._table = LogTable()

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs and self.training_bar is not None:
            self.training_bar.write("\n".join(self._table.lines(logs, state)))


def print_table(trainer: Trainer) -> None:
    """Have a trainer print the table. A callback that prints in another way (a notebook's) stays."""
    for replaced, callback in ((PrinterCallback, TableCallback), (ProgressCallback, ProgressTableCallback)):
        if any(type(present) is replaced for present in trainer.callback_handler.callbacks):
            trainer.pop_callback(replaced)
            trainer.add_callback(callback())


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """
    Within this context, no future warnings of libraries and no notices of math-verify. Python's `-W` and
    `PYTHONWARNINGS` win.
    """
    math_verify = logging.getLogger("math_verify")
    level = math_verify.level
    with warnings.catch_warnings():
        if not sys.warnoptions:
            modules = "|".join(LIBRARIES)
            for category in (FutureWarning, DeprecationWarning):
                warnings.filterwarnings("ignore", category=category, module=rf"({modules})(\.|$)")
        math_verify.setLevel(logging.ERROR)
        try:
            yield
        finally:
            math_verify.setLevel(level)
