"""The studies whose runs are committed: which methods, for how long, on which pools and seeds. Settings were chosen
on seeds 0 to 9.

A study goes on where an earlier call stopped: runs that are in its file are not made again, and the file grows by
those that finish.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from .ratios import Curve, curves_of
from .store import read_rows
from .train import RunSpec


RESULTS = Path(__file__).resolve().parents[1] / "results" / "lab"

Fields: TypeAlias = Mapping[str, float]


@dataclass(frozen=True)
class Part:
    """Runs of each method on each pool with each seed. `methods`: by name, fields of their specs."""

    pools: tuple[str, ...]
    seeds: Iterable[int]
    methods: Mapping[str, Fields]

    def specs(self, start: str) -> list[RunSpec]:
        specs = []
        for seed in self.seeds:
            for pool in self.pools:
                for method, fields in self.methods.items():
                    specs.append(RunSpec(method, seed, pool, start, **fields))
        return specs


def all_methods(steps: int, short: int) -> dict[str, Fields]:
    """Plain GRPO for so many steps, and the others for at most as many rollouts, or for `short` steps."""
    rollouts = 128 * steps
    return {
        "uniform": {"steps": steps},
        "default": {"steps": short},
        "selection": {"steps": short},
        "fill": {"steps": short},
        "share": {"steps": 100},  # generates half as many rollouts a step
        "oracle": {"steps": short},
        "compact": {"steps": steps},
        "uniform_half": {"steps": 2 * steps, "eval_every": 10},
        "uniform_twice": {"steps": steps // 2},
        "dynamic": {"steps": 40, "max_rollouts": rollouts},
        "greso": {"steps": steps},
        "dots_paper": {"steps": max(60, steps), "max_rollouts": rollouts},
    }


def with_fields(methods: Mapping[str, Fields], fields: Fields) -> dict[str, Fields]:
    """The methods, each with these fields too."""
    return {name: {**own, **fields} for name, own in methods.items()}


def same_fields(methods: Iterable[str], fields: Fields) -> dict[str, Fields]:
    """Each of the methods with the same fields."""
    return dict.fromkeys(methods, fields)


BOTH = ("uniform", "default")
#: Plain GRPO's best rate on the first pool and the third; on the others it is 1e-4
HALF_RATE = {"learning_rate": 5e-5}
#: On the first pool, where each generates about as many rollouts as plain GRPO
FIRST_POOL = {
    **all_methods(steps=100, short=100),
    "share": {"steps": 200},
    "dots_paper": {"steps": 140, "max_rollouts": 12_800},
}
#: Where selection or replay might not help, by name: the pool, and fields of the specs
CONDITIONS: dict[str, tuple[str, dict[str, float]]] = {
    "the usual setting": ("first", HALF_RATE),
    "half the rate": ("first", {"learning_rate": 2.5e-5}),
    "twice the rate": ("first", {"learning_rate": 1e-4}),
    "four times the rate": ("first", {"learning_rate": 2e-4}),
    "groups of 4": ("first", {"group_size": 4, "prompts": 32, **HALF_RATE}),
    "groups of 16": ("first", {"group_size": 16, "prompts": 8, **HALF_RATE}),
    "one group a step": ("first", {"prompts": 1, "steps": 640, "eval_every": 80, "learning_rate": 2.5e-5}),
    "64 prompts": ("tiny", HALF_RATE),
    "a tenth of the rewards is wrong": ("noisy", HALF_RATE),
    "all prompts learnable": ("learnable", {}),
}
#: By which each method's learning rate was chosen. `compact` stands for plain GRPO, too: its weights are the same but
#: for rounding
TRIED_METHODS: dict[str, Fields] = {"compact": {}, "selection": {}, "default": {}, "share": {"steps": 200}}
TRIED_RATES = (2.5e-5, 5e-5, 1e-4, 2e-4)
#: Plain GRPO's best rate of those, and that of the methods that select
PLAIN_RATE = {"learning_rate": 5e-5}
SELECTION_RATE = {"learning_rate": 1e-4}
#: Completions of a group, and groups of a step, with equally many rollouts in it
GROUP_SIZES = {2: 64, 4: 32, 16: 8}
STUDIES: dict[str, tuple[Part, ...]] = {
    "trials": tuple(
        Part(("first",), (48, 49), with_fields(TRIED_METHODS, {"learning_rate": rate})) for rate in TRIED_RATES
    ),
    # Time and rollouts to plain GRPO's end, each method at its best rate, and the default at plain GRPO's, too
    "time": (
        Part(
            ("first",),
            range(62, 72),
            {
                "uniform": PLAIN_RATE,
                "compact": PLAIN_RATE,
                "selection": SELECTION_RATE,
                "default": SELECTION_RATE,
                "share": {"steps": 200, **SELECTION_RATE},
            },
        ),
        Part(("first",), range(62, 72), {"default": PLAIN_RATE}),
    ),
    "groups": tuple(
        Part(
            ("first",),
            range(62, 67),
            {
                "uniform": {"group_size": size, "prompts": groups, **PLAIN_RATE},
                "default": {"group_size": size, "prompts": groups, **SELECTION_RATE},
            },
        )
        for size, groups in GROUP_SIZES.items()
    ),
    "methods": (Part(("first",), range(52, 62), with_fields(FIRST_POOL, HALF_RATE)),),
    # Which learning rate is plain GRPO's best
    "best": (
        Part(("first",), range(52, 62), {"uniform": {"learning_rate": 2.5e-5}}),
        Part(("first",), range(52, 62), {"uniform": {"learning_rate": 1e-4}}),
        Part(("second",), range(30, 33), same_fields(BOTH, HALF_RATE)),
        Part(("third",), range(30, 40), same_fields(BOTH, HALF_RATE)),
        Part(("graded", "learnable"), range(30, 33), same_fields(BOTH, {"steps": 50, **HALF_RATE})),
    ),
    "pools": (
        Part(("second", "third"), range(30, 40), all_methods(steps=100, short=60)),
        Part(("graded", "learnable"), range(30, 40), all_methods(steps=50, short=60)),
    ),
    # Where it might not help: at equal rollouts and steps
    "conditions": tuple(
        Part((pool,), range(40, 45), same_fields(BOTH, {"steps": 40, **fields}))
        for pool, fields in CONDITIONS.values()
    ),
    # What selection does if a prompt's text says nothing about it
    "text": (Part(("first",), range(46, 51), same_fields(("uniform", "greso", "shuffled", "default"), HALF_RATE)),),
    # Whether replay costs anything where steps are large
    "rates": (
        Part(("first",), range(40, 45), same_fields(("selection", "default"), {"steps": 40, "learning_rate": 2e-4})),
        Part(("first",), range(40, 45), same_fields(("selection", "default"), {"steps": 40, "learning_rate": 4e-4})),
    ),
}


def specs_of(study: str, start: str) -> list[RunSpec]:
    """The runs of a study.

    Args:
        study (`str`): One of `STUDIES`.
        start (`str`): The key of the trained start.

    Returns:
        The runs seed by seed, so that the table of an unfinished study compares like with like.
    """
    specs: list[RunSpec] = []
    for part in STUDIES[study]:
        specs += part.specs(start)
    return sorted(specs, key=lambda spec: spec.seed)


def file_of(study: str, folder: Path = RESULTS) -> Path:
    """Where the runs of a study are kept."""
    return folder / f"{study}.jsonl"


def runs_of_study(study: str) -> list[Curve]:
    """The committed runs of a study.

    Raises:
        ValueError: If two runs have the same seed and the same setting, as far as a row says it.
    """
    curves = curves_of(read_rows(file_of(study)))
    names: dict[tuple, str] = {}
    for curve in curves:
        row = curve.rows[0]
        setting = (curve.pool, curve.method, curve.learning_rate, row["prompts"], row["group_size"], curve.seed)
        other = names.setdefault(setting, row["run"])
        if other != row["run"]:
            raise ValueError(
                f"Runs of the study '{study}' with the same seed, made with other settings: keep one of {other} and "
                f"{row['run']}."
            )
    return curves
