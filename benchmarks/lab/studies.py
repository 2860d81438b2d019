"""
The studies whose tables are committed: which methods, for how long, on which pools and seeds. Settings were chosen on seeds 0 to
9.

A study goes on where an earlier call stopped: runs that are in its committed table are not made again, and the table grows by
those that are finished.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .train import RunSpec


@dataclass(frozen=True)
class Part:
    """Runs of each method on each pool with each seed. `methods`: by name, fields of their specs."""

    pools: tuple[str, ...]
    seeds: Iterable[int]
    methods: Mapping[str, Mapping[str, float]]

    def specs(self, start: str) -> list[RunSpec]:
        return [
            RunSpec(method, seed, pool, start, **fields)
            for seed in self.seeds
            for pool in self.pools
            for method, fields in self.methods.items()
        ]


def all_methods(steps: int, short: int) -> dict[str, Mapping[str, float]]:
    """Plain GRPO for so many steps, and the others for at most as many rollouts, or for `short` steps."""
    rollouts = 128 * steps
    return {
        "uniform": {"steps": steps},
        "default": {"steps": short},
        "selection": {"steps": short},
        "fill": {"steps": short},
        "share": {"steps": 100},  # which generates half as many a step
        "oracle": {"steps": short},
        "skip": {"steps": steps},
        "uniform_half": {"steps": 2 * steps, "eval_every": 10},
        "uniform_twice": {"steps": steps // 2},
        "dynamic": {"steps": 40, "max_rollouts": rollouts},
        "greso": {"steps": steps},
        "dots_paper": {"steps": max(60, steps), "max_rollouts": rollouts},
    }


BOTH = ("uniform", "default")
HALF = {"learning_rate": 5e-5}  # plain GRPO's best on the first pool and the third; on the others it is 1e-4
#: On the first pool, where each makes about as many rollouts as plain GRPO
FIRST = {**all_methods(100, 100), "share": {"steps": 200}, "dots_paper": {"steps": 140, "max_rollouts": 12_800}}
#: Where selection or replay might not help, by name: the pool, and fields of the specs. Each is trained for as many rollouts
CONDITIONS: dict[str, tuple[str, dict[str, float]]] = {
    "the usual setting": ("first", HALF),
    "half the rate": ("first", {"learning_rate": 2.5e-5}),
    "twice the rate": ("first", {"learning_rate": 1e-4}),
    "four times the rate": ("first", {"learning_rate": 2e-4}),
    "groups of 4": ("first", {"group_size": 4, "prompts": 32, **HALF}),
    "groups of 16": ("first", {"group_size": 16, "prompts": 8, **HALF}),
    "one group a step": ("first", {"prompts": 1, "steps": 640, "eval_every": 80, "learning_rate": 2.5e-5}),
    "64 prompts": ("tiny", HALF),
    "a tenth of the rewards is wrong": ("noisy", HALF),
    "all prompts learnable": ("learnable", {}),
}
STUDIES: dict[str, tuple[Part, ...]] = {
    "methods": (Part(("first",), range(52, 62), {name: {**fields, **HALF} for name, fields in FIRST.items()}),),
    # Which learning rate is plain GRPO's best
    "best": (
        *(Part(("first",), range(52, 62), {"uniform": {"learning_rate": rate}}) for rate in (2.5e-5, 1e-4)),
        Part(("second",), range(30, 33), dict.fromkeys(BOTH, HALF)),
        Part(("third",), range(30, 40), dict.fromkeys(BOTH, HALF)),
        Part(("graded", "learnable"), range(30, 33), {method: {"steps": 50, **HALF} for method in BOTH}),
    ),
    "pools": (
        Part(("second", "third"), range(30, 40), all_methods(100, 60)),
        Part(("graded", "learnable"), range(30, 40), all_methods(50, 60)),
    ),
    # Where it might not help: at equal rollouts and steps
    "conditions": tuple(
        Part((pool,), range(40, 45), {method: {"steps": 40, **fields} for method in BOTH})
        for pool, fields in CONDITIONS.values()
    ),
    # What selection does if a prompt's text says nothing about it
    "text": (Part(("first",), range(46, 51), dict.fromkeys(("uniform", "greso", "shuffled", "default"), HALF)),),
    # Whether replay costs anything where steps are large
    "rates": tuple(
        Part(
            ("first",),
            range(40, 45),
            {method: {"steps": 40, "learning_rate": rate} for method in ("selection", "default")},
        )
        for rate in (2e-4, 4e-4)
    ),
}


def specs_of(study: str, start: str) -> list[RunSpec]:
    """All runs of a study from the trained start with this key, seed by seed, so that an early table compares like with like."""
    specs = [spec for part in STUDIES[study] for spec in part.specs(start)]
    return sorted(specs, key=lambda spec: spec.seed)
