"""`StepTimer`: how the seconds of an optimizer step are spent."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StepTimer:
    """Splits the time of a step into selection, generation (with scoring), and training, which is the rest."""

    def __init__(self) -> None:
        self._selection = self._generation = 0.0

    @contextmanager
    def selection(self) -> Iterator[None]:
        """Times what is done in this context, without the generation in it."""
        started = time.perf_counter() - self._generation
        yield
        self._selection += time.perf_counter() - self._generation - started

    def add_generation(self, seconds: float) -> None:
        """Enter the seconds of a round of rollouts."""
        self._generation += seconds

    def step(self, seconds: float) -> dict[str, float]:
        """Metrics of an optimizer step that took `seconds`; the next one starts at 0."""
        selection, generation = self._selection, self._generation
        self._selection = self._generation = 0.0
        return {
            "time/selection_s": selection,
            "time/generation_s": generation,
            "time/training_s": seconds - selection - generation,
        }
