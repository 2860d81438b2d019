"""The studies whose tables are committed: which methods, for how long, over which seeds.

A study is run with one command, which goes on where an earlier call stopped. Methods of other packages run in
environments of their own: give `--methods` there, with the same `--out`; the table takes all runs that are finished.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .train import LEARNING_RATE, RunSpec


@dataclass(frozen=True)
class Study:
    """`methods`: by name, what differs from `shared` (`steps`, `max_rollouts`, `eval_every`, `seeds`)."""

    what: str
    pool: str
    methods: Mapping[str, Mapping]
    seeds: Sequence[int] = range(5)
    rates: Sequence[float] = (LEARNING_RATE,)
    shared: Mapping = field(default_factory=dict)

    def specs(self, start: str) -> list[RunSpec]:
        """All runs, interleaved: all methods of the first seed, then of the second, ..."""
        specs = []
        for seed in self.seeds:
            for rate in self.rates:
                for method, own in self.methods.items():
                    options = {**self.shared, **own}
                    if seed in options.pop("seeds", self.seeds):
                        specs.append(RunSpec(method, seed, self.pool, start, learning_rate=rate, **options))
        return specs


STEPS = {"steps": 100}
#: With half of a batch replayed, 200 steps take the rollouts of 100 without
REPLAYED = {"steps": 200}
#: Two rollouts for each of uniform's, and no more
DYNAMIC = {"steps": 100, "max_rollouts": 25_600}
#: What the ablation gives every variation: uniform has learned a third of what it learns by then
SHORT = {"steps": 110, "max_rollouts": 3_600}


def _variations(*changes: str) -> dict[str, Mapping]:
    return {",".join(["default", change]) if change else "default": {} for change in changes}


STUDIES = {
    "first": Study(
        "the methods on the first pool",
        "first",
        {
            "uniform": {"steps": 300},
            "default": REPLAYED,
            "dots_greso": STEPS,
            "dots": STEPS,
            "dots_replay50": STEPS,
            "dots_paper": STEPS,
            "greso": STEPS,
            "dynamic": DYNAMIC,
            "greso_dynamic": {**DYNAMIC, "seeds": range(3)},
            "replay50": STEPS,
            "oracle": STEPS,
            "cgrpo": {**STEPS, "seeds": range(3)},
        },
    ),
    "second": Study(
        "half of the pool dead",
        "second",
        {"uniform": STEPS, "default": REPLAYED, "dots_greso": STEPS, "dynamic": DYNAMIC, "oracle": STEPS},
    ),
    "third": Study(
        "graded rewards",
        "third",
        {"uniform": STEPS, "default": REPLAYED, "dots_greso": STEPS, "dynamic": DYNAMIC, "oracle": STEPS},
    ),
}
