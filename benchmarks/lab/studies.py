"""The studies whose tables are committed: which methods, for how long, over which seeds.

A study is run with one command, which goes on where an earlier call stopped: runs that are in its committed table are not
made again, and the table grows by those that are finished. Methods of other packages are run in environments of their own with `lab run`; their files, moved to the study's, join it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .train import LEARNING_RATE, RunSpec


@dataclass(frozen=True)
class Study:
    """
    `pools`: one name, or several with a space between them. `methods`: by name, fields of their specs (`steps`,
    `max_rollouts`, ..., or `seeds` and `pools`) that differ from `shared`.
    """

    what: str
    pools: str
    methods: Mapping[str, Mapping]
    seeds: Sequence[int] = range(10, 15)  # settings were chosen on 0 to 4
    rates: Sequence[float] = (LEARNING_RATE,)
    shared: Mapping = field(default_factory=dict)

    def specs(self, start: str) -> list[RunSpec]:
        """All runs, interleaved: all methods of the first seed on each pool, then of the second, ..."""
        specs = []
        seeds = sorted({*self.seeds, *(seed for own in self.methods.values() for seed in own.get("seeds", ()))})
        for seed, pool, rate in itertools.product(seeds, self.pools.split(), self.rates):
            for method, own in self.methods.items():
                options = {"learning_rate": rate, **self.shared, **own}
                if seed in options.pop("seeds", self.seeds) and pool in options.pop("pools", self.pools).split():
                    specs.append(RunSpec(method, seed, pool, start, **options))
        return specs


STEPS = {"steps": 100}
#: Until 12,800 rollouts, about; half of a batch is replayed as long as there is enough to replay
LONGER = {"steps": 200, "max_rollouts": 13_000}
#: One and a half rollouts for each of uniform's, and no more
DYNAMIC = {"steps": 100, "max_rollouts": 19_200}
#: The defaults that the search began with: each batch is drawn anew
BEFORE = "independent_draws"


def _with(*changes: str, base: str = BEFORE, **fields) -> dict[str, Mapping]:
    return {",".join([base, *([change] * bool(change))]): fields for change in changes}


#: Until uniform sampling has learned a third of what it learns
SEARCH = {"steps": 200, "max_rollouts": 3_000, "eval_every": 4}
SEQUENTIAL = "sequential_rollouts=true"
MORE_REPLAY = "replay_fraction=0.65,replay_max_age=10"

#: Evidence is out of date sooner; at three times the rate uniform falls back, at four it learns nothing (docs/lab.md)
FAST_RATE = 2 * LEARNING_RATE

STUDIES = {
    "first": Study(
        "the methods on the first pool",
        "first",
        {
            "uniform": {"steps": 300},
            "default": STEPS,
            "dots": STEPS,
            "dots_paper": STEPS,
            "greso": STEPS,
            "dynamic": DYNAMIC,
            "greso_dynamic": {**DYNAMIC, "seeds": range(10, 12)},
            "replay50": {**STEPS, "seeds": range(10, 12)},
            "oracle": STEPS,
            "uniform_half": {"steps": 200, "max_rollouts": 9_600, "seeds": range(10, 12)},
            "cgrpo": {**STEPS, "seeds": [10]},
        },
    ),
    "second": Study(
        "half of the pool dead",
        "second",
        {"uniform": STEPS, "default": STEPS, "oracle": STEPS},
        seeds=range(10, 12),
    ),
    "third": Study(
        "graded rewards",
        "third",
        {"uniform": STEPS, "default": STEPS, "oracle": STEPS},
        seeds=range(10, 12),
    ),
    "graded": Study(
        "two-part rewards: most prompts are never solved, and have the format's half of the reward for ever",
        "graded",
        {"uniform": {}, "default": {}, "dots": {}},
        seeds=range(10, 13),
        shared={"steps": 100, "max_rollouts": 6_400},
    ),
    "continuum": Study(
        "kinds of all difficulties that interfere, with a policy that moves slowly and one that moves fast",
        "continuum",
        {"uniform": {}, "default": {}, "dots": {}, "replay50": {}, "dots_paper": {}},
        seeds=range(10, 13),
        rates=(LEARNING_RATE, FAST_RATE),
        shared={"steps": 100, "max_rollouts": 5_120, "eval_every": 4},  # 40 steps of uniform
    ),
    "halving": Study(
        "what saves rollouts beyond the defaults, by successive halving: all on one or two seeds, the best on more",
        "first",
        {
            **_with(
                "replay_weight=1",
                "replay_fraction=0.75,replay_max_age=10,replay_weight=1",
                "per_device_train_batch_size=64",
                "per_device_train_batch_size=64,replay_fraction=0.75,replay_max_age=10",
                "per_device_train_batch_size=64,replay_fraction=0.75,replay_max_age=20,replay_weight=1",
                "num_generations=4",
                "learning_rate=0.0002",
                "learning_rate=0.00005",
                f"{SEQUENTIAL},replay_weight=1",
                f"{SEQUENTIAL},replay_fraction=0.75,replay_max_age=10",
                f"{SEQUENTIAL},num_generations=4",
                f"{SEQUENTIAL},learning_rate=0.00015",
                f"{SEQUENTIAL},sharpness=4",
                f"{SEQUENTIAL},{MORE_REPLAY},sharpness=4",
                "coverage=0.5",
                "coverage=0.7",
                "sharpness=2,coverage=0.5",
                "sharpness=4,coverage=0.5",
                f"{SEQUENTIAL},sharpness=2,coverage=0.5",
                f"{SEQUENTIAL},sharpness=4,coverage=0.5",
                f"{SEQUENTIAL},{MORE_REPLAY},sharpness=2,coverage=0.5",
                f"{SEQUENTIAL},{MORE_REPLAY},sharpness=4,coverage=0.5",
            ),
            **_with(
                "sharpness=2,coverage=0.7",
                "sharpness=4,coverage=0.85",
                "sharpness=8,coverage=0.5",
                "sharpness=8,coverage=0.85",
                "sharpness=16,coverage=0.7",
                f"{SEQUENTIAL},{MORE_REPLAY},sharpness=8,coverage=0.7",
                seeds=range(1),
            ),
            **_with("sharpness=8,coverage=0.7", seeds=range(3)),
            **_with(
                "",
                MORE_REPLAY,
                "replay_fraction=0.75,replay_max_age=10",
                SEQUENTIAL,
                "sharpness=4",
                f"{SEQUENTIAL},sharpness=2",
                f"{SEQUENTIAL},{MORE_REPLAY}",
                f"{SEQUENTIAL},{MORE_REPLAY},sharpness=2",
                "sharpness=4,coverage=0.7",
                f"{SEQUENTIAL},{MORE_REPLAY},sharpness=4,coverage=0.7",
                seeds=range(5),
            ),
            **_with("", base="default", seeds=range(5)),
            **_with(
                "sharpness=6,threshold=0.35",
                "coverage=0.9",
                f"{SEQUENTIAL},{MORE_REPLAY}",
                base="default",
            ),
        },
        seeds=range(2),
        shared=SEARCH,
    ),
    "proof": Study(
        "the settings that the search chose, on seeds that chose nothing",
        "first second third",
        {
            "uniform": {"steps": 100},
            "default": {"steps": 100, "max_rollouts": 5_000},
            "fewest_rollouts": {"steps": 150, "max_rollouts": 4_000},
            BEFORE: {"steps": 100, "max_rollouts": 5_000},
            "sharp_selection": {"steps": 100, "max_rollouts": 5_000},
            f"sharp_selection,{SEQUENTIAL},{MORE_REPLAY}": {"steps": 150, "max_rollouts": 4_000},
        },
        seeds=range(20, 30),
    ),
    "proof_rest": Study(
        "other methods on the first pool of the proof",
        "first",
        {
            f"{BEFORE},{SEQUENTIAL},{MORE_REPLAY}": {"steps": 150, "max_rollouts": 4_000, "seeds": range(20, 30)},
            f"{BEFORE},{SEQUENTIAL}": {"steps": 120, "max_rollouts": 5_000},
            f"{BEFORE},replay_fraction=0": {"steps": 60},
            "dots": {"steps": 60},
            "oracle": {"steps": 60},
            "replay50": {"steps": 200, "max_rollouts": 12_800},
            "dynamic": {"steps": 40, "max_rollouts": 12_800},
            "greso": STEPS,
        },
        seeds=range(20, 25),
    ),
    "proof_long": Study(
        "no collapse: three times as many rollouts as in the proof",
        "first",
        {
            "default": {"steps": 200, "max_rollouts": 12_800},
            "fewest_rollouts": {"steps": 400, "max_rollouts": 12_800},
            BEFORE: {"steps": 200, "max_rollouts": 12_800},
            f"{BEFORE},{SEQUENTIAL},{MORE_REPLAY}": {"steps": 400, "max_rollouts": 12_800},
            "sharp_selection": {"steps": 200, "max_rollouts": 12_800},
            f"sharp_selection,{SEQUENTIAL},{MORE_REPLAY}": {"steps": 400, "max_rollouts": 12_800},
        },
        seeds=range(20, 22),
    ),
    "proof_half": Study(
        "the same for half as long, where there is less to save",
        "graded learnable",
        {
            "uniform": {"steps": 50},
            "default": {"steps": 150, "max_rollouts": 7_000},
            "fewest_rollouts": {"steps": 220, "max_rollouts": 7_000},
            BEFORE: {"steps": 150, "max_rollouts": 7_000},
            "sharp_selection": {"steps": 150, "max_rollouts": 7_000},
            f"sharp_selection,{SEQUENTIAL},{MORE_REPLAY}": {"steps": 220, "max_rollouts": 7_000},
        },
        seeds=range(20, 30),
    ),
    "long": Study(
        "the defaults for as many rollouts as uniform has",
        "first",
        {"default": LONGER},
        seeds=[11],
    ),
    "rates": Study(
        "is a method held back by its learning rate",
        "first",
        {
            "uniform": {"max_rollouts": 3_900, "seeds": [0]},
            "dots": {"max_rollouts": 3_900, "seeds": [0]},
        },
        seeds=range(2),
        rates=(LEARNING_RATE, LEARNING_RATE / 2, LEARNING_RATE * 2),
        shared={"steps": 110},
    ),
}
