"""The methods that can be compared: a trainer class, a config and a part of the pool each. A new one is a line."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from .pools import LEARNABLE


@dataclass(frozen=True)
class Method:
    """`trainer` and `config` are `module:Class`, imported when a run starts; `options` go to the config."""

    what: str
    trainer: str = "trl:GRPOTrainer"
    config: str = "trl:GRPOConfig"
    options: Mapping = field(default_factory=dict)
    only: tuple[str, ...] | None = None  # kinds of the pool's prompts that are kept; None: all

    def classes(self) -> tuple[type, type]:
        return _load(self.trainer), _load(self.config)


def _load(path: str) -> type:
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


OURS = {"trainer": "trl_dataeff:DataEfficientGRPOTrainer", "config": "trl_dataeff:DataEfficientGRPOConfig"}

#: Replayed groups of any age, as long as the buffer holds them.
FIFO = {"replay_max_age": None}


def _replay(share: float, what: str, **options) -> Method:
    return Method(what, **OURS, options={**FIFO, "selection": "uniform", "replay_fraction": share, **options})


def _dots(what: str, **options) -> Method:
    return Method(what, **OURS, options={**FIFO, "selection": "dots", "replay_fraction": 0.0, **options})


METHODS = {
    "uniform": Method("GRPOTrainer: shuffled passes over the whole pool"),
    "dynamic": Method(
        "zero-variance groups dropped, batch refilled",
        **OURS,
        options={"selection": "uniform", "replay_fraction": 0.0, "dynamic_sampling": True},
    ),
    "greso": Method(
        "prompts that keep giving nothing are skipped before they are rolled out",
        **OURS,
        options={"selection": "greso", "replay_fraction": 0.0},
    ),
    "greso_dynamic": Method(
        "GRESO as published: skipping, and zero-variance groups dropped and refilled with a margin of 1.25",
        **OURS,
        options={"selection": "greso", "replay_fraction": 0.0, "dynamic_sampling": True, "rollout_margin": 1.25},
    ),
    **{
        f"replay{round(100 * share)}": _replay(share, f"{share:.0%} of each batch replayed from recent rollouts")
        for share in (0.25, 0.5, 0.75)
    },
    "replay50_age20": _replay(0.5, "... that are at most 20 steps old", replay_max_age=20),
    "replay50_behavior": _replay(0.5, "... with the clip centred on the policy that sampled", replay_clip="behavior"),
    "replay50_cap1": _replay(0.5, "... with a ratio of at most 1", replay_ratio_cap=1.0),
    "greso_replay50": _replay(0.5, "GRESO, and half of each batch replayed", selection="greso"),
    "dots": _dots("prompts by predicted success rate"),
    "dots_greso": _dots("... and those that keep giving nothing are skipped", selection="dots+greso"),
    "dots_replay50": _dots("DOTS, and half of each batch replayed", replay_fraction=0.5),
    "dots_greso_replay50": _dots("all three", selection="dots+greso", replay_fraction=0.5),
    "dots_greso_replay25": _dots("all three, a quarter replayed", selection="dots+greso", replay_fraction=0.25),
    "dots_paper": _dots(
        "DOTS and replay as the paper has them: near 0.5 at temperature 1e-3, from 8 reference prompts every 2 steps",
        dots_objective="target",
        dots_reference="paper",
        dots_reference_size=8,
        dots_refresh_windows=2,
        exploration=0.0,
        replay_fraction=0.5,
    ),
    "dots_greso_replay50_age20": _dots(
        "all three, replayed groups at most 20 steps old",
        selection="dots+greso",
        replay_fraction=0.5,
        replay_max_age=20,
    ),
    "dots_replay50_age20": _dots("... at most 20 steps old", replay_fraction=0.5, replay_max_age=20),
    "oracle": Method("GRPOTrainer on the learnable prompts alone: the bound for selection", only=(LEARNABLE,)),
}
