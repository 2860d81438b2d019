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


def with_fields(methods: Mapping[str, Fields], fields: Fields) -> dict[str, Fields]:
    """The methods, each with these fields too."""
    return {name: {**own, **fields} for name, own in methods.items()}


def same_fields(methods: Iterable[str], fields: Fields) -> dict[str, Fields]:
    """Each of the methods with the same fields."""
    return dict.fromkeys(methods, fields)


BOTH = ("uniform", "fill")
#: Plain GRPO's best rate on the first pool
PLAIN_RATE = {"learning_rate": 5e-5}
#: That of the methods that select
SELECTION_RATE = {"learning_rate": 1e-4}
#: Where selection or replay might not help, by name: the pool, and fields of the specs
CONDITIONS: dict[str, tuple[str, dict[str, float]]] = {
    "the usual setting": ("first", PLAIN_RATE),
    "half the rate": ("first", {"learning_rate": 2.5e-5}),
    "twice the rate": ("first", {"learning_rate": 1e-4}),
    "four times the rate": ("first", {"learning_rate": 2e-4}),
    "groups of 4": ("first", {"group_size": 4, "prompts": 32, **PLAIN_RATE}),
    "groups of 16": ("first", {"group_size": 16, "prompts": 8, **PLAIN_RATE}),
    "one group a step": ("first", {"prompts": 1, "steps": 640, "eval_every": 80, "learning_rate": 2.5e-5}),
    "64 prompts": ("tiny", PLAIN_RATE),
    "a tenth of the rewards is wrong": ("noisy", PLAIN_RATE),
    "all prompts learnable": ("learnable", {}),
}
#: By which each method's learning rate was chosen. `compact` stands for plain GRPO, too: its weights are the same but
#: for rounding
TRIED_METHODS: dict[str, Fields] = {"compact": {}, "selection": {}, "fill": {}, "share": {"steps": 200}}
TRIED_RATES = (2.5e-5, 5e-5, 1e-4, 2e-4)
#: Completions of a group, and groups of a step, with equally many rollouts in it
GROUP_SIZES = {2: 64, 4: 32, 16: 8}
STUDIES: dict[str, tuple[Part, ...]] = {
    "trials": tuple(
        Part(("first",), (48, 49), with_fields(TRIED_METHODS, {"learning_rate": rate})) for rate in TRIED_RATES
    ),
    # Time and rollouts to plain GRPO's end, each method at its best rate; selection and replay at plain GRPO's, too
    "time": (
        Part(
            ("first",),
            range(62, 72),
            {
                "uniform": PLAIN_RATE,
                "compact": PLAIN_RATE,
                "selection": SELECTION_RATE,
                "fill": SELECTION_RATE,
                "share": {"steps": 200, **SELECTION_RATE},
            },
        ),
        Part(("first",), range(62, 72), {"fill": PLAIN_RATE}),
    ),
    # Two of these seeds with the present selection
    "again": (
        Part(
            ("first",),
            (62, 63),
            {
                "uniform": PLAIN_RATE,
                "selection": SELECTION_RATE,
                "fill": SELECTION_RATE,
                "share": {"steps": 200, **SELECTION_RATE},
            },
        ),
        Part(("first",), (62, 63), {"fill": PLAIN_RATE}),
    ),
    "groups": tuple(
        Part(
            ("first",),
            range(62, 67),
            {
                "uniform": {"group_size": size, "prompts": groups, **PLAIN_RATE},
                "fill": {"group_size": size, "prompts": groups, **SELECTION_RATE},
            },
        )
        for size, groups in GROUP_SIZES.items()
    ),
    # Where it might not help: at equal rollouts and steps
    "conditions": tuple(
        Part((pool,), range(40, 45), same_fields(BOTH, {"steps": 40, **fields}))
        for pool, fields in CONDITIONS.values()
    ),
    # What selection does if a prompt's text says nothing about it
    "text": (Part(("first",), range(46, 51), same_fields(("uniform", "greso", "shuffled", "fill"), PLAIN_RATE)),),
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
