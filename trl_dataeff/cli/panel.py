"""A live panel in the terminal while `trl-dataeff grpo` trains. Anything else that is printed appears above it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainerState

from trl_dataeff.cli.console import faults, is_number, print_table
from trl_dataeff.tracking.drawing import count, duration
from trl_dataeff.tracking.metrics import PREFIX


BARS = "▁▂▃▄▅▆▇█"
POINTS = 32  # of a sparkline
ASSUMPTION = "if all that was trained on had been generated, as plain GRPO does"


def sparkline(values: list[float]) -> str:
    """The course of some numbers, a character each."""
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)


class PanelCallback(TrainerCallback):
    """In the place of [`~transformers.ProgressCallback`], until `stop` is called; shown in the terminal by default."""

    def __init__(self, console: Console | None = None):
        self._console = console or Console()
        self._live: Live | None = None
        self._logs: dict[str, Any] = {}
        self._rewards: deque[float] = deque(maxlen=POINTS)
        self._held_out = ""
        self._began, self._first_step = 0.0, 0

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._began, self._first_step = time.monotonic(), state.global_step
            self._live = Live(console=self._console, get_renderable=lambda: self.render(args, state))
            self._live.start()

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        logs = logs or {}
        if is_number(logs.get("eval_reward")):
            self._held_out = f"   held out {logs['eval_reward']:.3f} at step {state.global_step}"
        elif "loss" in logs:
            self._logs = dict(logs)
            if is_number(logs.get("reward")):
                self._rewards.append(logs["reward"])

    def stop(self) -> None:
        """Leave the panel as it is, and give the terminal back."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def render(self, args: Any, state: TrainerState) -> Panel:
        """The panel as it is now. `rich` asks for it four times a second."""
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim", no_wrap=True)
        rows.add_column(overflow="fold")
        for name, text in self._rows(state):
            rows.add_row(name, text)
        bar = ProgressBar(total=max(state.max_steps, 1), completed=state.global_step)
        title = Text(f"step {state.global_step:,} of {state.max_steps:,}")
        content = Table.grid(expand=True)
        content.add_row(bar)
        content.add_row(rows)
        return Panel(content, title=title, subtitle=Text(str(args.output_dir)), padding=(0, 1))

    def _rows(self, state: TrainerState) -> Iterator[tuple[str, Text]]:
        if self._rewards:
            yield "reward", Text(f"{self._rewards[-1]:.3f} {sparkline(list(self._rewards))}{self._held_out}")
        if shares := self._own("effective_ratio", "easy_ratio", "hard_ratio"):
            yield "effective", Text("{:.0%} of the groups (easy {:.0%}, hard {:.0%})".format(*shares))
        if numbers := self._own("rollouts_generated", "rollouts_trained", "tokens_generated"):
            generated, trained, tokens = numbers
            yield "rollouts", Text(f"{generated:,.0f} generated, {count(tokens)} tokens")
            difference = trained - generated
            verb = "saved so far" if difference >= 0 else "more so far"
            yield "", Text(f"{abs(difference):,.0f} {verb} ({ASSUMPTION})", style="green" if difference > 0 else "")
        if found := faults({name: value for name, value in self._logs.items() if value}):
            yield "faults", Text(", ".join(found), style="bold red")
        steps = state.global_step - self._first_step
        if steps > 0:
            elapsed = time.monotonic() - self._began
            left = elapsed / steps * (state.max_steps - state.global_step)
            yield "time", Text(f"{duration(elapsed)} so far, about {duration(left)} left")

    def _own(self, *names: str) -> list[Any]:
        """The package's metrics of these names, if the last log has all of them as numbers."""
        values = [self._logs.get(PREFIX + name) for name in names]
        return values if all(map(is_number, values)) else []


@contextmanager
def progress_shown(trainer: Trainer, plain: bool, console: Console | None = None) -> Iterator[None]:
    """
    Within this context a trainer shows the panel in a terminal; elsewhere, with `plain` or without progress bars, it prints lines.
    What prints in another way (a notebook's callback) stays.
    """
    console = console or Console()
    kinds = {type(callback) for callback in trainer.callback_handler.callbacks}
    if plain or not console.is_terminal or ProgressCallback not in kinds:
        print_table(trainer)
        yield
        return
    panel = PanelCallback(console)
    trainer.pop_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(panel)
    try:
        yield
    finally:
        panel.stop()
