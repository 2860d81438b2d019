"""SIGTERM and Ctrl-C: the first one asks a run to end after the current step, a second one ends it at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)
_SAME_SECONDS = 2.0


class StopSignals:
    """
    While this context is entered, notes SIGINT and SIGTERM instead of dying of them. Signals for which the program has
    set a handler of its own (or which it ignores) are left to it, and outside of the main thread nothing is changed:
    Python delivers signals to that one alone.

    Args:
        speaks (`bool`, *optional*, defaults to `True`): whether to say on stderr that a signal was received.
        delivered_twice (`bool`, *optional*, defaults to `False`): whether a second signal within two seconds is the first
            one once more. Ctrl-C reaches the processes of a launcher from the terminal and from the launcher.

    Attributes:
        received (`signal.Signals` or `None`): the first signal received.
    """

    def __init__(self, speaks: bool = True, delivered_twice: bool = False):
        self.received: signal.Signals | None = None
        self._speaks = speaks
        self._same_seconds = _SAME_SECONDS if delivered_twice else 0.0
        self._received_at = 0.0
        self._former: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) in _DEFAULTS:
                    self._former[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._former.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._received_at = signal.Signals(number), now
            if self._speaks:
                # Logging and `print` may be what was interrupted, and cannot be entered again
                os.write(2, f"\n{self.received.name}: ending after this step. Once more to end at once.\n".encode())
        elif now - self._received_at >= self._same_seconds:
            self._restore()
            signal.raise_signal(number)
