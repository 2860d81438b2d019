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
    """`methods`: by name, fields of their specs (`steps`, `max_rollouts`, ..., or `seeds`) that differ from `shared`."""

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
                    options = {"learning_rate": rate, **self.shared, **own}
                    if seed in options.pop("seeds", self.seeds):
                        specs.append(RunSpec(method, seed, self.pool, start, **options))
        return specs


STEPS = {"steps": 100}
#: With half of a batch replayed, 200 steps take the rollouts of 100 without
REPLAYED = {"steps": 200}
#: Two rollouts for each of uniform's, and no more
DYNAMIC = {"steps": 100, "max_rollouts": 25_600}
#: What the ablation gives every variation: uniform has learned a third of what it learns by then
SHORT = {"steps": 110, "max_rollouts": 3_600}
#: Three quarters replayed are stable with the clip centred on the policy that sampled
MORE_REPLAY = "default,replay_fraction=0.75,replay_clip=behavior"
#: What the variations vary: the defaults with the exploration that they began with. The table led to 0.05.
BASE = "default,exploration=0.1"


def _of_base(*changes: str) -> dict[str, Mapping]:
    return {f"{BASE},{change}": {} for change in changes}


STUDIES = {
    "first": Study(
        "the methods on the first pool",
        "first",
        {
            "uniform": {"steps": 300},
            "default": REPLAYED,
            MORE_REPLAY: REPLAYED,
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
    "ablation": Study(
        "each part of the defaults taken away, and each main setting at three values or more",
        "first",
        {
            BASE: {"seeds": range(5)},
            "default,exploration=0.0": {},
            "default,exploration=0.05": {"seeds": range(5)},
            "default,exploration=0.2": {},
            **_of_base(
                "selection=uniform",
                "selection=greso",
                "selection=dots",
                "replay_fraction=0.0",
                "replay_fraction=0.25",
                "replay_fraction=0.75",
                "replay_max_age=5",
                "replay_max_age=10",
                "replay_max_age=40",
                "replay_ratio_cap=1",
                "replay_ratio_cap=4",
                "replay_clip=behavior",
                "dots_sharpness=2",
                "dots_sharpness=8",
                "dots_objective=target,dots_temperature=0.1",
                "history_half_life=5",
                "history_half_life=60",
                "history_prior=1",
                "history_prior=16",
                "dynamic_sampling=true,max_rollout_rounds=1",
            ),
        },
        seeds=range(2),
        shared=SHORT,
    ),
    "beyond": Study(
        "more replay, kept stable or not; less exploration with a sharper weight",
        "first",
        {
            **_of_base(
                "replay_fraction=0.65",
                "replay_fraction=0.75",
                "replay_fraction=0.75,replay_max_age=10",
                "replay_fraction=0.75,replay_ratio_cap=1",
                "replay_fraction=0.75,importance_sampling_level=sequence",
                "replay_fraction=0.75,replay_clip=behavior",
            ),
            "default,replay_fraction=0.75,exploration=0.0": {},
            "default,exploration=0.0,dots_sharpness=8": {},
            BASE: {},
        },
        seeds=range(2),
        shared=SHORT,
    ),
    "rates": Study(
        "is a method held back by its learning rate",
        "first",
        {
            BASE: {},
            f"{BASE},replay_fraction=0.75": {},
            "uniform": {"max_rollouts": 6_400},
            "dynamic": {"max_rollouts": 12_800},
            "dots": {"max_rollouts": 6_400},
            "oracle": {"max_rollouts": 6_400},
        },
        seeds=range(2),
        rates=(LEARNING_RATE, LEARNING_RATE / 2, LEARNING_RATE * 2),
        shared=SHORT,
    ),
}
