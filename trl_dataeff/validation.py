"""What this package needs of configuration, dataset and trainer, before anything is generated, and the notice of what is on."""

from __future__ import annotations

import math
from typing import Any

from datasets import Dataset
from transformers.utils import logging

from trl_dataeff.config import AUTO_SELECTION, DataEfficientGRPOConfig
from trl_dataeff.replay.buffer import replay_groups
from trl_dataeff.replay.correction import has_dropout
from trl_dataeff.rollouts.checks import check_prompts
from trl_dataeff.rollouts.distributed import Processes
from trl_dataeff.selection import Selector, UniformSelector, make_selector
from trl_dataeff.selection.base import uses_references
from trl_dataeff.tracking.card import selection_title
from trl_dataeff.utils import UserError


logger = logging.get_logger(__name__)


def resolve_selector(
    args: DataEfficientGRPOConfig,
    selector: Selector | None = None,
    reason: str | None = None,
    cannot_embed: bool = False,
    processes: int = 1,
) -> Selector:
    """
    The selector of a run, not bound yet: the instance that was given, or the one that `selection` names. Raises a `TypeError` or a
    `ValueError` for one that cannot be made or used. An earlier call, before the model is loaded, does so without the last three
    arguments: see [`unsupported_reason`]; whether the policy is sharded so that it cannot embed; and how many processes there are.
    """
    if selector is None:
        selector = _named_selector(args, reason, cannot_embed)
    elif not isinstance(selector, Selector):
        raise TypeError(f"`selector` is {selector!r}; it takes an instance of `trl_dataeff.Selector`.")
    elif args.selection != "auto" or args.selector_args:
        raise ValueError(
            f"`selector={type(selector).__name__}(...)` is given beside `selection={args.selection!r}` and `selector_args="
            f"{args.selector_args!r}`, which make a selector by its name. Leave these two out, or `selector`."
        )
    if uses_references(selector) and reason is not None:
        raise ValueError(
            f"{type(selector).__name__} needs reference rollouts, not possible with {reason}. Use `selection='dots'`."
        )
    size = getattr(selector, "reference_size", processes)
    if size < processes:
        raise ValueError(f"`reference_size` is {size}; give at least one prompt for each of {processes} processes.")
    return selector


def _named_selector(args: DataEfficientGRPOConfig, reason: str | None, cannot_embed: bool) -> Selector:
    name, arguments = args.selection, dict(args.selector_args or {})  # type: ignore[arg-type]  # no text any more
    if name == "auto":  # what it falls back to does not take the arguments of DOTS
        name = AUTO_SELECTION
        if reason is not None:
            name, arguments = "uniform", {}
        elif cannot_embed and args.prompt_embedding == "policy":
            name, arguments = "greso", {}
    if name == "uniform":
        arguments.setdefault("shuffle", args.shuffle_dataset)
    return make_selector(name, arguments)


def unsupported_reason(dataset: Any, environments: bool, tool_images: bool) -> str | None:
    """
    Why rounds cannot be generated, and replayed, outside of TRL's pass over a batch; `None` if they can. TRL prepares environments
    in that pass, and neither the images of tools nor the rows of a stream can be read again.
    """
    if environments:
        return "prompts that are prepared by an environment"
    if not isinstance(dataset, Dataset):
        return "a streaming (iterable) dataset"
    return "tools that may answer with images" if tool_images else None


def check_dataset(
    args: DataEfficientGRPOConfig, dataset: Any, environment_factory: Any, selector: Selector | None = None
) -> None:
    """Raise a [`UserError`] that says what is wrong with the training dataset, and how to fix it."""
    if not isinstance(dataset, Dataset):
        if selector is not None or args.selection not in ("auto", "uniform") or args.max_rollout_rounds > 1:
            raise UserError(
                f"`train_dataset` is of type {type(dataset).__name__}; a selector and `max_rollout_rounds` above 1 need a map-style "
                "dataset. Load one split (`split='train'`) without streaming, or use `selection='uniform'` and `max_rollout_rounds=1`."
            )
        return  # TRL rejects other types, and `None` without an environment
    prompts = args.generation_batch_size // args.num_generations
    if len(dataset) < prompts:
        raise UserError(
            f"`train_dataset` has {len(dataset)} prompts, and each batch takes {prompts} different ones (`generation_batch_size` "
            f"{args.generation_batch_size} / `num_generations` {args.num_generations}). Use more prompts, or a smaller "
            "`per_device_train_batch_size` x `steps_per_generation`."
        )
    if environment_factory is not None:
        return  # it may make prompts of empty ones
    if "prompt" not in dataset[0]:  # a transform may make it
        raise UserError(
            f"`train_dataset` has no column `prompt`; its columns are {dataset.column_names}. Rename the column that holds the prompts: "
            "`dataset.rename_column('question', 'prompt')`."
        )
    check_prompts(dataset)


def check_steps(config: DataEfficientGRPOConfig, replays: bool, rounds: int) -> None:
    """Raise a [`UserError`] if an optimizer step neither takes whole generation batches nor lies within one."""
    accumulated, steps = config.gradient_accumulation_steps, config.steps_per_generation
    passes = steps * config.num_iterations
    if not (replays or rounds > 1) or passes % accumulated == 0 or accumulated % passes == 0:
        return
    rows = config.per_device_train_batch_size
    works = math.lcm(accumulated * rows, config.num_generations) // rows
    raise UserError(
        f"With `gradient_accumulation_steps={accumulated}`, `steps_per_generation={steps}` and `num_iterations="
        f"{config.num_iterations}`, an optimizer step trains on parts of two generation batches, which replay (`replay` is "
        f"{config.replay!r}), several rounds (`max_rollout_rounds` is {config.max_rollout_rounds}) and reference rollouts do not "
        f"allow. Set `steps_per_generation={works}`, or turn these off."
    )


def holds_whole_groups(config: DataEfficientGRPOConfig, world_size: int, off: bool) -> bool:
    """Whether each process trains on whole groups. Raises a [`UserError`] if not, unless everything is `off`, where TRL allows it."""
    completions, group_size = config.generation_batch_size // world_size, config.num_generations
    if completions % group_size == 0:
        return True
    if off:
        return False
    raise UserError(
        f"Each of {world_size} processes trains on {completions} completions of a generation batch, which are not whole groups of "
        f"{group_size}. Make `per_device_train_batch_size` x `steps_per_generation` a multiple of it (`num_generations`)."
    )


def replays(args: DataEfficientGRPOConfig, world_size: int) -> bool:
    """Whether groups can be replayed: not with a share that rounds to no group."""
    return args.replay == "fill" or reserved_places(args, world_size) > 0


def reserved_places(args: DataEfficientGRPOConfig, world_size: int) -> int:
    """Places of a generation batch that `replay="share"` keeps for stored groups; 0 with other values."""
    groups = args.generation_batch_size // args.num_generations
    return replay_groups(args.replay_fraction, groups, world_size) if args.replay == "share" else 0


def turn_off_reuse(config: DataEfficientGRPOConfig, reason: str | None, corrects_loss: bool, is_main: bool) -> None:
    """Turn off, with a warning, rounds and replay if there is a `reason` against them, and what needs our `_compute_loss` if it is not used."""
    if reason is None and corrects_loss:
        return
    is_auto = reason is not None and config.selection == "auto"
    if is_main and (config.replay != "off" or config.max_rollout_rounds > 1 or is_auto):
        overridden = (
            "Rollouts of an earlier policy cannot be corrected, because a subclass or Unsloth overrides the loss without calling "
            "`DataEfficientGRPOTrainer._compute_loss` (let it call `super()`, or import `trl_dataeff.trainer` before `unsloth`): "
        )
        uniform = "`selection='auto'` is 'uniform', and " if is_auto else ""
        why = overridden if reason is None else f"With {reason}, {uniform}"
        logger.warning(f"{why}each batch is one round of rollouts without replay.")
    config.replay, config.max_rollout_rounds = "off", 1
    config.skip_zero_advantage = config.skip_zero_advantage and corrects_loss


def announce(
    args: DataEfficientGRPOConfig, selector: Selector, processes: Processes, num_prompts: int | None, model: Any
) -> None:
    """Log on the main process what is on in a run, and dropout: as warnings, the lowest level that a script shows."""
    if not processes.is_main:
        return
    replay, reserved = replays(args, processes.world_size), reserved_places(args, processes.world_size)
    rounds = args.max_rollout_rounds
    parts = {
        selection_title(type(selector).__name__): not isinstance(selector, UniformSelector),
        f"up to {rounds} rounds a batch": rounds > 1,
        f"replay has {reserved} places of each batch" if reserved else "replay fills the batch": replay,
    }
    if any(parts.values()):
        size = "" if num_prompts is None else f"; {num_prompts:,} prompts"
        logger.warning(", ".join(text for text, is_on in parts.items() if is_on) + size)
    if not args.shuffle_dataset and not isinstance(selector, UniformSelector):
        logger.warning("`shuffle_dataset=False` is left to the selector; `selection='uniform'` keeps the order.")
    if (replay or rounds > 1) and not args.use_vllm and has_dropout(model):
        logger.warning(
            "The model has dropout, which adds noise to the loss of rollouts that are trained on again. Set `lora_dropout` to 0, or "
            "`disable_dropout=True`; `attention_dropout` needs `model_init_kwargs={'attention_dropout': 0.0}`."
        )


def warn_of_ignored_options(args: DataEfficientGRPOConfig, processes: Processes) -> None:
    """Warn, on the main process, of a share or a margin of rollouts that has no effect beside the other options."""
    if not processes.is_main:
        return
    if args.replay == "share" and not replays(args, processes.world_size):
        logger.warning(
            f"`replay_fraction={args.replay_fraction}` of each process's groups rounds to no group: nothing is replayed. Raise it, "
            "`per_device_train_batch_size` or `gradient_accumulation_steps`, or use `replay='fill'`."
        )
    if args.replay != "share" and args.replay_fraction != DataEfficientGRPOConfig.replay_fraction:
        logger.warning(f"`replay_fraction={args.replay_fraction}` has no effect without `replay='share'`.")
    if args.max_rollout_rounds == 1 and args.rollout_margin != DataEfficientGRPOConfig.rollout_margin:
        logger.warning(f"`rollout_margin={args.rollout_margin}` has no effect without `max_rollout_rounds` above 1.")
