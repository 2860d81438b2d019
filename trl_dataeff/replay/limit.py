"""`ReplayLimit`: fewer replayed groups while the policy moves away from them too fast."""

from __future__ import annotations

import math


FADE = 0.5  # of what earlier generation batches showed, with each further one


class ReplayLimit:
    """
    How many groups a generation batch replays: `most` while no more than `clipped` of what could move in replayed groups has
    been clipped, and from there on in proportion fewer, down to `least` at one and a half times as much.

    What is clipped has no gradient. Where most of it is clipped, the policy has moved far within a step or two, or
    has little entropy left. Replay, which makes more steps of the same rollouts, then moves it further than its data can tell.

    Args:
        most (`int`), least (`int`): groups per generation batch; `least` keeps the measurement going.
        clipped (`float`, *optional*): of the metric `replay/clipped_mass`, above 0; `None`: always `most`.
    """

    def __init__(self, most: int, least: int, clipped: float | None):
        self.most, self.least, self.clipped = most, min(least, most), clipped
        self.measured = math.nan  # running mean, by generation batch
        self._sum, self._count = 0.0, 0

    def observe(self, clipped: float) -> None:
        """Enter the clipped mass of a micro-batch, of all processes; NaN, where nothing was replayed, is left out."""
        if not math.isnan(clipped):
            self._sum, self._count = self._sum + clipped, self._count + 1

    def next(self) -> int:
        """Groups to replay in the generation batch that begins."""
        if self._count:
            new = self._sum / self._count
            self.measured = new if math.isnan(self.measured) else FADE * self.measured + (1 - FADE) * new
            self._sum, self._count = 0.0, 0
        if self.clipped is None or math.isnan(self.measured):
            return self.most
        wanted = self.most * (3 - 2 * self.measured / self.clipped)
        return min(max(math.floor(wanted / self.least + 0.5) * self.least, self.least), self.most) if self.most else 0

    def state_dict(self) -> list[float | None]:
        """JSON values."""
        return [None if math.isnan(self.measured) else self.measured, self._sum, self._count]

    def load_state_dict(self, state: list[float | None]) -> None:
        measured, total, count = state
        self.measured = math.nan if measured is None else measured
        self._sum, self._count = total or 0.0, int(count or 0)
