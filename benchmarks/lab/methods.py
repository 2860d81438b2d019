"""The methods that can be compared: a trainer class, a config and a part of the pool each. A new one is a line.

A variation needs none: `fill,replay_max_age=10` is the method `fill` with that field of its config changed, and
`fill,sharpness=4` with that argument of its selector.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from .pools import LEARNABLE


OUR_TRAINER = "trl_dataeff:DataEfficientGRPOTrainer"
OUR_CONFIG = "trl_dataeff:DataEfficientGRPOConfig"


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

    def settings(self) -> dict[str, Any]:
        """
        What decides the method beside TRL's own fields: its options, and this package's defaults where it uses them.
        """
        settings = {}
        if self.config == OUR_CONFIG:
            settings.update(_own_defaults())
        settings.update(self.options)
        if settings.get("selection") == "dots":
            given = settings["selector_args"] or {}
            settings["selector_args"] = {**_arguments("dots"), **given}
        return settings


def _own_defaults() -> dict[str, Any]:
    """The fields that this package adds to TRL's, with their defaults."""
    from trl import GRPOConfig

    inherited = {field.name for field in fields(GRPOConfig)}
    return {field.name: field.default for field in fields(_load(OUR_CONFIG)) if field.name not in inherited}


def _arguments(selection: str) -> dict[str, Any]:
    """The arguments of a selector, with their defaults."""
    from trl_dataeff.selection import make_selector

    selector_class = type(make_selector(selection, {}))
    parameters = inspect.signature(selector_class).parameters
    return {name: parameter.default for name, parameter in parameters.items()}


def _load(path: str) -> Any:
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


def _ours(what: str, **options: Any) -> Method:
    return Method(what, OUR_TRAINER, OUR_CONFIG, options)


METHODS = {
    "uniform": Method("GRPOTrainer: shuffled passes over the whole pool"),
    "compact": _ours("the package as it comes: GRPOTrainer, whose update computes only what has a gradient"),
    "selection": _ours("DOTS selection alone", selection="dots"),
    "fill": _ours("DOTS selection, and replay fills the batch", selection="dots", replay="fill"),
    "share": _ours("DOTS selection, and half of each batch replayed", selection="dots", replay="share"),
    "shuffled": _ours(
        "DOTS selection with the embedding of another prompt for each, and replay fills the batch",
        selection="benchmarks.lab.shuffled.ShuffledDots",
        replay="fill",
    ),
    "replay": _ours("replay fills the batch, with uniform selection", replay="fill"),
    "dynamic": _ours("zero-variance groups dropped, batch refilled", max_rollout_rounds=4),
    "greso": _ours("prompts with repeated zero-variance groups are skipped", selection="greso"),
    "greso_fill": _ours("GRESO, and replay fills the batch", selection="greso", replay="fill"),
    "greso_dynamic": _ours(
        "GRESO as published: skipping, and zero-variance groups dropped and refilled with a margin of 1.25",
        selection="greso",
        max_rollout_rounds=4,
        rollout_margin=1.25,
    ),
    "dots_paper": _ours(
        "DOTS as published (half a batch of references every 2 steps, a buffer of one batch, no age limit, no cap), "
        "with our predictor, which is fitted in the run",
        selection="dots_paper",
        selector_args={"reference_size": 8, "predictor": "logistic"},  # half a batch
        replay="share",
        replay_capacity=16,  # a batch
        replay_order="random",
        replay_max_age=None,
        replay_clip="proximal",  # as in the authors' code
        replay_ratio_cap=None,
    ),
    "oracle": Method("GRPOTrainer on the learnable prompts alone, drawn uniformly", only=(LEARNABLE,)),
}


def find(name: str) -> Method:
    """Find a method by its name.

    Args:
        name (`str`): One of `METHODS`, which may carry changes of its config and of its selector's arguments:
            `default,replay=off,sharpness=4`.

    Raises:
        ValueError: If there is no such method, or a change is not `name=value` with a field of its config or an
            argument of its selector.
    """
    base, *changes = name.split(",")
    if base not in METHODS:
        raise ValueError(f"{base!r} is not one of {', '.join(METHODS)}")
    method = METHODS[base]
    if not changes:
        return method

    _, config_class = method.classes()
    config_fields = {field.name for field in fields(config_class)}
    selector_arguments: set[str] = set()
    if "selector_args" in config_fields:
        selector_arguments = set(_arguments(method.options.get("selection", "dots")))
    options = dict(method.options)
    for change in changes:
        key, equals, text = change.partition("=")
        value = _value(text)
        if not equals or key not in config_fields | selector_arguments:
            raise ValueError(
                f"{change!r} in {name!r} is not name=value with a field of {method.config} or an argument of its "
                "selector"
            )
        if key in config_fields:
            options[key] = value
        else:
            options["selector_args"] = {**options.get("selector_args", {}), key: value}
    return replace(method, what=f"{method.what}; {', '.join(changes)}", options=options)


def _value(text: str) -> Any:
    """As in JSON; what is no JSON is a string."""
    try:
        return json.loads(text)
    except ValueError:
        return text
