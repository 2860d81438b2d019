"""SIGTERM and Ctrl-C (`save_on_signal`): the first one ends a run after the present step, a second one at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

import torch

from trl_dataeff.rollouts.distributed import Processes


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)
_SAME_SECONDS = 2.0


class StopSignals:
    """
    While this context is entered, records SIGINT and SIGTERM instead of ending the process. Signals for which the program
    has a handler of its own (or which it ignores) are left to it. Processes that it forks outlive SIGINT, which a terminal sends
    to them too, and end by SIGTERM, as those who fork them expect. Outside of the main thread nothing is changed: Python delivers
    signals to that thread alone.

    The main process says on stderr that a signal was received. With several `processes`, a second signal within two seconds is
    the first one once more: Ctrl-C reaches them from the terminal and from the launcher. `received` is the first signal, or
    `None`.
    """

    def __init__(self, processes: Processes = Processes()):  # noqa: B008 (immutable)
        self.received: signal.Signals | None = None
        self._processes = processes
        self._pid = os.getpid()
        self._received_at = 0.0
        self._former: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) in _DEFAULTS:
                    self._former[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._former.clear()

    def agreed(self) -> signal.Signals | None:
        """The signal that a process has received, the same on all processes, or `None`. A collective."""
        own = torch.tensor([int(self.received or 0)], device=self._processes.device)
        number = int(self._processes.gather(own).max())
        return signal.Signals(number) if number else None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None and (os.getpid() == self._pid or number == signal.SIGINT):
            self.received, self._received_at = signal.Signals(number), now
            if self._processes.is_main and os.getpid() == self._pid:
                # Logging and `print` may be what was interrupted, and cannot be entered again
                text = f"\n{self.received.name}: ending after this step, with a checkpoint. Again to end at once.\n"
                os.write(2, text.encode())
        elif now - self._received_at >= (_SAME_SECONDS if self._processes.world_size > 1 else 0):
            self._restore()
            signal.raise_signal(number)


def exception_of(number: signal.Signals) -> BaseException:
    """What a signal raises in a program without handlers: `KeyboardInterrupt`, or `SystemExit` with 128 + its number."""
    return KeyboardInterrupt() if number is signal.SIGINT else SystemExit(128 + number)
