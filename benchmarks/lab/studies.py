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


SIXTY = {"steps": 60}


def all_methods(steps: int, parts: Mapping[str, float]) -> dict[str, Mapping[str, float]]:
    """Plain GRPO for so many steps, and the others for at most as many rollouts, or for 60 steps; `parts`: of the default."""
    rollouts = 128 * steps
    return {
        "uniform": {"steps": steps},
        "default": parts,
        "selection": parts,
        "fill": parts,
        "share": {**parts, "steps": 100},  # which generates half as many a step
        "oracle": SIXTY,
        "skip": {"steps": steps},
        "uniform_half": {"steps": 2 * steps, "eval_every": 10},
        "uniform_twice": {"steps": steps // 2},
        "dynamic": {"steps": 40, "max_rollouts": rollouts},
        "greso": {"steps": steps},
        "dots_paper": {"steps": max(60, steps), "max_rollouts": rollouts},
    }


#: Where selection or replay might not help, by name: the pool, and fields of the specs. Each is trained for as many rollouts
CONDITIONS: dict[str, tuple[str, dict[str, float]]] = {
    "the usual setting": ("first", {}),
    "half the learning rate": ("first", {"learning_rate": 5e-5}),
    "twice the learning rate": ("first", {"learning_rate": 2e-4}),
    "four times the learning rate": ("first", {"learning_rate": 4e-4}),
    "groups of 4 instead of 8": ("first", {"group_size": 4, "prompts": 32}),
    "groups of 16": ("first", {"group_size": 16, "prompts": 8}),
    "one group a step": ("first", {"prompts": 1, "steps": 640, "eval_every": 80, "learning_rate": 2.5e-5}),
    "64 prompts": ("tiny", {}),
    "a tenth of the rewards is wrong": ("noisy", {}),
    "all prompts learnable": ("learnable", {}),
}
AT_BEST = ("uniform", "default", "selection", "oracle", "dots_paper", "greso")
HALF = {"learning_rate": 5e-5}
STUDIES: dict[str, tuple[Part, ...]] = {
    "methods": (Part(("first",), range(52, 62), all_methods(100, {"steps": 100, "max_rollouts": 5_000})),),
    # At other rates: 1e-4 was chosen on seed 0
    "best": (
        Part(("first",), range(52, 62), {method: {"steps": 100, **HALF} for method in AT_BEST}),
        Part(("first",), range(52, 62), {"uniform": {"steps": 100, "learning_rate": 2.5e-5}}),
        Part(("second", "third"), range(30, 33), {method: {"steps": 100, **HALF} for method in AT_BEST[:2]}),
        Part(("graded", "learnable"), range(30, 33), {method: {"steps": 50, **HALF} for method in AT_BEST[:2]}),
    ),
    "pools": (
        Part(("second", "third"), range(30, 40), all_methods(100, SIXTY)),
        Part(("graded", "learnable"), range(30, 40), all_methods(50, SIXTY)),
    ),
    # Where it might not help: at equal rollouts and steps
    "conditions": tuple(
        Part((pool,), range(40, 43), {method: {"steps": 40, **fields} for method in ("uniform", "default")})
        for pool, fields in CONDITIONS.values()
    ),
    # What selection does if a prompt's text says nothing about it
    "text": (Part(("first",), range(46, 51), {name: {} for name in ("uniform", "greso", "shuffled", "default")}),),
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
