"""What calls cost."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple


class Cost(NamedTuple):
    """Seconds on the clock, and seconds that all threads of the process computed."""

    seconds: float
    cpu_seconds: float

    @classmethod
    def median(cls, costs: Iterable[Cost]) -> Cost:
        return cls(*map(statistics.median, zip(*costs, strict=True)))


def timed(call: Callable[[], object]) -> Cost:
    """Cost of a call."""
    seconds, cpu_seconds = time.perf_counter(), time.process_time()
    call()
    return Cost(time.perf_counter() - seconds, time.process_time() - cpu_seconds)
