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
#: Ctrl-C reaches the processes of a run from the terminal and from the launcher: within this time it is one signal
_SAME_SECONDS = 2.0


class StopSignals:
    """
    While this context is entered, records SIGINT and SIGTERM instead of ending the process. The main process says on
    stderr that a signal was received. A second signal ends the process; with several processes, one that comes within
    two seconds counts as the first.

    - Signals for which the program has a handler of its own, or which it ignores, are left to it.
    - Processes that the program forks outlive SIGINT, which a terminal sends to them too, and end by SIGTERM, as those
      who fork them expect.
    - Outside of the main thread nothing is changed: Python delivers signals to that thread alone.

    Args:
        processes ([`Processes`], *optional*): the processes of the run.

    Attributes:
        received (`signal.Signals` or `None`): the first signal.
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
        own = 0 if self.received is None else int(self.received)
        numbers = self._processes.gather(torch.tensor([own], dtype=torch.int64, device=self._processes.device))
        number = int(numbers.max())
        return signal.Signals(number) if number else None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        is_forked = os.getpid() != self._pid
        records = not is_forked or number == signal.SIGINT
        if self.received is None and records:
            self.received = signal.Signals(number)
            self._received_at = now
            if self._processes.is_main and not is_forked:
                self._announce(self.received)
            return
        several = self._processes.world_size > 1
        is_same_signal = several and now - self._received_at < _SAME_SECONDS
        if not is_same_signal:
            self._restore()
            signal.raise_signal(number)

    def _announce(self, received: signal.Signals) -> None:
        text = f"\n{received.name}: ending after this step, with a checkpoint. Again to end at once.\n"
        # Logging and `print` may be what was interrupted, and cannot be entered again
        os.write(2, text.encode())


def exception_of(number: signal.Signals) -> BaseException:
    """
    What a signal raises in a program without handlers.

    Args:
        number (`signal.Signals`): SIGINT or SIGTERM.

    Returns:
        `BaseException`: `KeyboardInterrupt` for SIGINT, otherwise `SystemExit` with 128 + the signal's number.
    """
    if number is signal.SIGINT:
        return KeyboardInterrupt()
    return SystemExit(128 + number)
