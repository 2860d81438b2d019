"""
The notice at the start of a run: which methods are on, how to switch them off, which options have no effect, and whether
dropout disturbs them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from transformers.utils import logging

from trl_dataeff.config import DataEfficientGRPOConfig
from trl_dataeff.replay.buffer import replay_groups
from trl_dataeff.rollouts.distributed import Processes
from trl_dataeff.selection import Selector, UniformSelector


logger = logging.get_logger(__name__)

#: The fields of a built-in selector that are named
MAIN_FIELDS = {
    "dots": ("dots_objective", "dots_embedding", "exploration"),
    "greso": ("greso_target_zero_variance",),
    "dots+greso": ("dots_objective", "dots_embedding", "exploration", "greso_target_zero_variance"),
}
#: The settings with which nothing is on
OFF = "`selection='uniform'`, `replay_fraction=0`, `dynamic_sampling=False`"


def announce_options(
    args: DataEfficientGRPOConfig,
    selector: Selector,
    unsupported_reason: str | None,
    processes: Processes,
    *,
    by_instance: bool = False,
    model: torch.nn.Module | None = None,
) -> None:
    """
    Log, on the main process, what is on in a run, and warn of options that have no effect in it. Nothing is logged if
    everything is off.

    The level is that of warnings: a script shows no lower one, and a run differs from what its `GRPOConfig` meant to TRL.

    Args:
        args ([`DataEfficientGRPOConfig`]): the configuration.
        selector ([`Selector`]): the one that is used.
        unsupported_reason (`str`, *optional*): see [`~validation.unsupported_reason`].
        processes ([`Processes`]): of the run.
        by_instance (`bool`, *optional*, defaults to `False`): whether the trainer was given the selector itself.
        model (`torch.nn.Module`, *optional*): the policy, whose dropout is looked at.
    """
    if not processes.is_main:
        return
    on = _what_is_on(args, selector, unsupported_reason, processes.world_size, by_instance)
    if on:
        without = "Without `selector=`, and with" if by_instance else "With"
        others = {"sequential_rollouts": False, "advantage_baseline": "group"}
        off = OFF + "".join(f", `{k}={v!r}`" for k, v in others.items() if getattr(args, k) != v)
        logger.warning(f"Data efficiency is on: {'; '.join(on)}. {without} {off} training is that of GRPOTrainer.")
    if unsupported_reason is not None:
        _warn_of_unsupported(args, unsupported_reason, by_instance)
        return
    if args.replay_fraction > 0:
        _warn_of_small_batches(args)
    if model is not None and not args.use_vllm and (args.replay_fraction > 0 or args.dynamic_sampling):
        _warn_of_dropout(active_dropout(model))


def _what_is_on(
    args: DataEfficientGRPOConfig,
    selector: Selector,
    unsupported_reason: str | None,
    world_size: int,
    by_instance: bool,
) -> list[str]:
    """The methods that are on, each with its main settings."""
    on = []
    name = type(selector).name
    if by_instance:
        on.append(f"selector={type(selector).__name__}(...)")
    elif not isinstance(selector, UniformSelector):
        extra = ["selector_args"] if args.selector_args else []
        on.append(f"selection={name!r}" + _settings(args, [*MAIN_FIELDS.get(name, ()), *extra]))
    if args.advantage_baseline == "tracked":
        on.append("a tracked baseline" + _settings(args, ["advantage_baseline", "scale_rewards"]))
    if unsupported_reason is not None:
        return on
    groups = args.generation_batch_size // args.num_generations
    replayed = replay_groups(_replayed_share(args), groups, world_size)
    limits = [f"replay_{name}" for name in ("max_movement", "min_ess", "min_unclipped")]
    fields = ["replay_clip", "replay_max_age", "replay_pause_ess", *(name for name in limits if getattr(args, name))]
    if replayed and args.fresh_groups == "adaptive":
        fields = ["effective_target", "replay_max_uses", *fields]
        on.append("replay, with an adaptive number of fresh groups" + _settings(args, fields))
    elif replayed:
        fields = ["replay_fraction", *fields]
        on.append(f"replay of {replayed} of the {groups} groups of a generation batch" + _settings(args, fields))
    if args.dynamic_sampling:
        on.append("dynamic sampling" + _settings(args, ["max_rollout_rounds"]))
    if args.sequential_rollouts:
        on.append(
            f"sequential rollouts ({args.num_generations // 2} of {args.num_generations} completions of each group first)"
        )
    return on


def _replayed_share(args: DataEfficientGRPOConfig) -> float:
    """The largest share of a batch that is replayed."""
    return math.nextafter(1, 0) if args.fresh_groups == "adaptive" else args.replay_fraction


def _settings(args: DataEfficientGRPOConfig, names: Iterable[str]) -> str:
    values = ", ".join(f"{name}={getattr(args, name)!r}" for name in names)
    return f" ({values})" if values else ""


def _warn_of_unsupported(args: DataEfficientGRPOConfig, unsupported_reason: str, by_instance: bool) -> None:
    ignored = []
    if args.selection == "auto" and not by_instance:
        ignored.append("`selection='auto'` is 'uniform'")
    if args.replay_fraction > 0:
        ignored.append(f"`replay_fraction={args.replay_fraction}` does not replay")
    if args.dynamic_sampling:
        ignored.append("`dynamic_sampling=True` does not refill batches")
    if args.sequential_rollouts:
        ignored.append("`sequential_rollouts=True` does not stop groups")
    if args.advantage_baseline == "tracked" and "streaming" in unsupported_reason:
        ignored.append("`advantage_baseline='tracked'` has no predictions, and uses the other completions' mean")
    if not ignored:
        return
    advice = ""
    if "streaming" in unsupported_reason:
        advice = " A dataset that is loaded without streaming can be selected from, replayed and refilled."
    elif "images" in unsupported_reason and args.selection == "auto":
        advice = " `selection='dots'` or 'greso' selects such prompts nevertheless, DOTS by their text."
    listed = " and ".join(filter(None, [", ".join(ignored[:-1]), ignored[-1]]))
    logger.warning(
        f"With {unsupported_reason}, {listed}: each batch is one round of rollouts, and its zero-variance "
        f"groups stay in it.{advice}"
    )


def _warn_of_small_batches(args: DataEfficientGRPOConfig) -> None:
    """Warn if the share of a process's groups that is to be replayed rounds to none, and say which sizes make room."""
    size, steps, group_size = args.per_device_train_batch_size, args.steps_per_generation, args.num_generations
    groups = size * steps // group_size
    share = _replayed_share(args)
    if replay_groups(share, groups, world_size=1):
        return
    enough = max(2, math.ceil(0.5 / share))
    while not replay_groups(share, enough, world_size=1):  # the quotient was rounded down
        enough += 1
    rows = enough * group_size
    given = "fresh_groups='adaptive'" if args.fresh_groups == "adaptive" else f"replay_fraction={args.replay_fraction}"
    logger.warning(
        f"`{given}` of {groups} group{'s' * (groups != 1)} per process rounds to no group: "
        f"nothing is replayed. It takes {enough} groups: a `per_device_train_batch_size` of {_multiple(rows, steps, group_size)} "
        f"(now {size}), or `steps_per_generation` (by default `gradient_accumulation_steps`) of "
        f"{_multiple(rows, size, group_size)} (now {steps})."
    )


def active_dropout(model: torch.nn.Module) -> dict[str, float]:
    """The kinds of dropout that a model has in training, by the names of their modules or attributes: `{"lora_dropout": 0.05}`."""
    found: dict[str, float] = {}
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            # peft has a module for each adapter: `....lora_dropout.default`
            name = "lora_dropout" if ".lora_dropout." in path else path.split(".")[-1]
            found[name] = max(found.get(name, 0.0), module.p)
        value = getattr(module, "attention_dropout", None)  # of attention that calls a function
        if isinstance(value, float):
            found["attention_dropout"] = max(found.get("attention_dropout", 0.0), value)
    return {name: p for name, p in found.items() if p > 0}


def _warn_of_dropout(dropout: dict[str, float]) -> None:
    """Warn if the log-probs that are recorded of rollouts will contain dropout noise, and say how to switch it off."""
    if not dropout:
        return
    remedies = []
    if set(dropout) - {"attention_dropout", "lora_dropout"}:
        remedies.append("`disable_dropout=True`")
    elif "lora_dropout" in dropout:
        remedies.append("`lora_dropout` to 0 (in peft's `LoraConfig`, or in the recipe)")
    if "attention_dropout" in dropout:
        remedies.append("`model_init_kwargs={'attention_dropout': 0.0}`")
    listed = ", ".join(f"{name}={p:g}" for name, p in dropout.items())
    logger.warning(
        f"The model has dropout in training ({listed}). Log-probs of rollouts that are trained on again come from forward "
        "passes in training, so the ratio to the policy that sampled them, which corrects and clips their loss, contains "
        f"its noise. Set {' and '.join(remedies)}."
    )


def _multiple(rows: int, factor: int, group_size: int) -> int:
    """The least number whose product with `factor` is at least `rows`, and makes whole groups."""
    unit = group_size // math.gcd(group_size, factor)
    return -(-rows // (factor * unit)) * unit
