"""
What this package needs of configuration, dataset and trainer, before anything is generated, and the notice of what is
on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers.utils import logging
from trl import GRPOTrainer

from trl_dataeff.compact.exact import has_own_method
from trl_dataeff.config import DataEfficientGRPOConfig
from trl_dataeff.generation.trl_state import tokenizer_of
from trl_dataeff.replay.correction import UNCLIPPED_LOSSES, LossOptions
from trl_dataeff.rollouts.checks import check_images, check_prompts, first_row, warn_of_raw_text
from trl_dataeff.rollouts.columns import read_kinds, read_success_rates
from trl_dataeff.rollouts.distributed import Processes
from trl_dataeff.selection import GresoSelector, PaperDotsSelector, Selector, UniformSelector
from trl_dataeff.tracking.methods import selection_title
from trl_dataeff.utils import UserError, listed


logger = logging.get_logger(__name__)
FEW_GROUPS = 8  # of a batch, below which a selector has little choice
# `epsilon` of ratios of sequences: between GSPO's, 3e-4, and TRL's default for tokens, 0.2
NARROW_CLIP = 0.01
#: Methods that decide which rows TRL's dataloader gives, and in which order
_ORDER_METHODS = ("get_train_dataloader", "_get_train_sampler", "get_batch_samples")


# What is not possible


def is_switched_on(config: DataEfficientGRPOConfig, selector: Selector | None) -> bool:
    """Whether a configuration asks for selection, replay or several rounds."""
    return (
        selector is not None
        or config.selection != "uniform"
        or config.replay != "off"
        or config.max_rollout_rounds > 1
    )


def unsupported_reason(dataset: Any, has_environments: bool, has_tool_images: bool) -> str | None:
    """
    Why rounds cannot be generated, and replayed, outside of TRL's pass over a batch; `None` if they can. TRL prepares
    environments in that pass, and neither the images of tools nor the rows of a stream can be read again.
    """
    if has_environments:
        return "prompts that are prepared by an environment"
    if not isinstance(dataset, Dataset):
        return "a streaming (iterable) dataset"
    if has_tool_images:
        return "tools that may answer with images"
    return None


def check_unchanged(fields_of_init: Mapping[str, Any], args: Any) -> None:
    """
    Check that the fields of this package are those with which the trainer was made, when a run or a generation batch
    begins.

    Args:
        fields_of_init (`Mapping`): values of the fields when the trainer was made, by name.
        args ([`~trl.GRPOConfig`]): the configuration now, which need not have these fields.

    Raises:
        `UserError`: names the fields that have changed.
    """
    changed = {}
    for name, value in fields_of_init.items():
        value_now = getattr(args, name, value)
        if value_now != value:
            changed[name] = value_now
    if changed:
        now = ", ".join(f"`{name}={value!r}`" for name, value in changed.items())
        before = ", ".join(repr(fields_of_init[name]) for name in changed)
        raise UserError(
            f"{now} would have no effect: the trainer was made with {before}. Change fields of this package before "
            "the trainer is made. TRL's own fields may change until training begins."
        )


def warn_of_prompts(trainer: GRPOTrainer, processes: Processes) -> None:
    """Warn, on the main process, if an instruct model gets prompts of plain text. No transform runs."""
    dataset = trainer.train_dataset
    makes_prompts = trainer.environment_factories is not None or trainer.rollout_func is not None
    if makes_prompts or not processes.is_main or not isinstance(dataset, Dataset):
        return
    if "prompt" not in dataset.column_names or len(dataset) == 0:
        return
    stored = dataset.with_format(None).select_columns(["prompt"])
    warn_of_raw_text(stored[0]["prompt"], tokenizer_of(trainer), trainer.eos_token_ids)


def check_dataset(
    args: DataEfficientGRPOConfig, dataset: Any, environment_factory: Any, selector: Selector | None = None
) -> None:
    """
    Check the training dataset.

    Args:
        args ([`DataEfficientGRPOConfig`]): the configuration.
        dataset: the `train_dataset` that was given.
        environment_factory: the one that was given; environments may make prompts of empty ones.
        selector ([`Selector`], *optional*): that was given to the trainer.

    Raises:
        `UserError`: says what is wrong, and how to fix it.
    """
    if not isinstance(dataset, Dataset):
        needs_rows = selector is not None or args.selection != "uniform" or args.max_rollout_rounds > 1
        if needs_rows:
            raise UserError(
                f"`train_dataset` is of type {type(dataset).__name__}; a selector and `max_rollout_rounds` above 1 "
                "need a map-style dataset. Load one split (`split='train'`) without streaming, or use "
                "`selection='uniform'` and `max_rollout_rounds=1`."
            )
        return  # TRL rejects other types, and `None` without an environment
    if len(dataset) == 0:
        raise UserError("`train_dataset` has 0 prompts. Give at least as many as a generation batch takes.")
    known_columns(args, dataset, selector)
    if environment_factory is not None:
        return
    row = first_row(dataset)
    if "prompt" not in row:  # a transform may make it
        raise UserError(
            f"`train_dataset` has no column `prompt`; its columns are {dataset.column_names}. Rename the column that "
            "holds the prompts: `dataset.rename_column('question', 'prompt')`."
        )
    check_images([row])
    check_prompts(dataset)


def known_columns(
    args: DataEfficientGRPOConfig, dataset: Dataset, selector: Selector | None = None
) -> dict[str, np.ndarray | None]:
    """
    Read what the dataset says about its prompts, for a selector that may use it.

    Args:
        args ([`DataEfficientGRPOConfig`]): the configuration.
        dataset ([`~datasets.Dataset`]): the training dataset.
        selector ([`Selector`], *optional*): that was given to the trainer.

    Returns:
        `dict[str, np.ndarray | None]`: `known_rates` and `kinds` of [`SelectorContext`].

    Raises:
        `UserError`: a column is missing, or has other values than it should.
    """
    is_used = reads_columns(args, selector)
    rates = args.success_rate_column if is_used else None
    kinds = args.stratify_by if is_used else None
    return {
        "known_rates": None if rates is None else read_success_rates(dataset, rates),
        "kinds": None if kinds is None else read_kinds(dataset, kinds),
    }


def reads_columns(args: DataEfficientGRPOConfig, selector: Selector | None) -> bool:
    """Whether the selector may use what the dataset says about its prompts: one of the user's own, or DOTS."""
    if selector is None:
        return args.selection not in ("uniform", "greso", "dots_paper")
    return type(selector) not in (UniformSelector, GresoSelector, PaperDotsSelector)


def check_size(args: DataEfficientGRPOConfig, dataset: Dataset) -> None:
    """
    Check that the training dataset has enough prompts for a generation batch. A trainer that only evaluates needs
    none.

    Args:
        args ([`DataEfficientGRPOConfig`]): the configuration.
        dataset ([`~datasets.Dataset`]): the training dataset.

    Raises:
        `UserError`: it has too few.
    """
    batch_groups = args.generation_batch_size // args.num_generations
    if len(dataset) < batch_groups:
        raise UserError(
            f"`train_dataset` has {len(dataset)} prompts, and each batch takes {batch_groups} different ones "
            f"(`generation_batch_size` {args.generation_batch_size} / `num_generations` {args.num_generations}). Use "
            "more prompts, or a smaller `per_device_train_batch_size` x `steps_per_generation`."
        )


def check_steps(config: DataEfficientGRPOConfig, trains_on_other_groups: bool, max_rounds: int) -> None:
    """
    Check that an optimizer step takes whole generation batches or lies within one, where that is needed.

    Args:
        config ([`DataEfficientGRPOConfig`]): the configuration.
        trains_on_other_groups (`bool`): whether other groups are trained on than are generated for the batch: replayed
            ones are added, or reference rollouts are left out.
        max_rounds (`int`): rounds of rollouts per generation batch.

    Raises:
        `UserError`: an optimizer step trains on parts of two generation batches.
    """
    accumulated = config.gradient_accumulation_steps
    passes = config.steps_per_generation * config.num_iterations
    fits = passes % accumulated == 0 or accumulated % passes == 0
    if fits or not (trains_on_other_groups or max_rounds > 1):
        return
    rows = config.per_device_train_batch_size
    works = math.lcm(accumulated * rows, config.num_generations) // rows
    raise UserError(
        f"With `gradient_accumulation_steps={accumulated}`, `steps_per_generation={config.steps_per_generation}` and "
        f"`num_iterations={config.num_iterations}`, an optimizer step trains on parts of two generation batches, "
        f"which replay (`replay` is {config.replay!r}), several rounds (`max_rollout_rounds` is "
        f"{config.max_rollout_rounds}) and reference rollouts do not allow. Set `steps_per_generation={works}`, or "
        "turn these off."
    )


def check_whole_groups(config: DataEfficientGRPOConfig, world_size: int) -> None:
    """
    Check that each process trains on whole groups.

    Args:
        config ([`DataEfficientGRPOConfig`]): the configuration of a run that selects, replays or replaces groups.
        world_size (`int`): number of processes.

    Raises:
        `UserError`: it does not.
    """
    completions = config.generation_batch_size // world_size
    group_size = config.num_generations
    if completions % group_size == 0:
        return
    raise UserError(
        f"Each of {world_size} processes trains on {completions} completions of a generation batch, which are not "
        f"whole groups of {group_size}. Selection, replay and several rounds need whole groups: make "
        "`per_device_train_batch_size` x `steps_per_generation` a multiple of `num_generations`."
    )


# Replay


def replays(args: DataEfficientGRPOConfig, world_size: int) -> bool:
    """Whether a configuration asks for replay: not with a share that rounds to no group."""
    return args.replay == "fill" or reserved_places(args, world_size) > 0


def reserved_places(args: DataEfficientGRPOConfig, world_size: int) -> int:
    """
    Places of a generation batch that `replay="share"` keeps for stored groups; 0 with other values.

    It is `replay_fraction` of the places as a multiple of the number of processes, so that each process generates at
    least one group.
    """
    if args.replay != "share":
        return 0
    places_per_process = args.generation_batch_size // args.num_generations // world_size
    rounded = math.floor(args.replay_fraction * places_per_process + 0.5)
    return min(rounded, places_per_process - 1) * world_size


# Warnings, and the notice of what is on


def warn_ignored_options(
    args: DataEfficientGRPOConfig, processes: Processes, selector: Selector | None = None
) -> None:
    """
    Warn, on the main process, of fields that have no effect beside the others.

    Args:
        args ([`DataEfficientGRPOConfig`]): the configuration.
        processes ([`Processes`]): of the run.
        selector ([`Selector`], *optional*): that was given to the trainer.
    """
    if not processes.is_main:
        return
    if args.replay == "share" and not replays(args, processes.world_size):
        logger.warning(
            f"`replay_fraction={args.replay_fraction}` of each process's groups rounds to no group: nothing is "
            "replayed. Raise it, `per_device_train_batch_size` or `gradient_accumulation_steps`, or use "
            "`replay='fill'`."
        )
    for name, needed in _unused_fields(args, selector):
        value = getattr(args, name)
        if value != getattr(DataEfficientGRPOConfig, name):
            logger.warning(f"`{name}={value!r}` has no effect without {needed}.")


def _unused_fields(args: DataEfficientGRPOConfig, selector: Selector | None) -> Iterator[tuple[str, str]]:
    """Fields that have no effect, whatever their value, and what they need."""
    has_rounds = args.max_rollout_rounds > 1
    if not has_rounds:
        yield "rollout_margin", "`max_rollout_rounds` above 1"
    if selector is None and args.selection in ("uniform", "greso"):
        yield "prompt_embedding", "`selection='dots'`"
    if not reads_columns(args, selector):
        yield "success_rate_column", "`selection='dots'`"
        yield "stratify_by", "`selection='dots'`"
    if selector is None and args.selection == "uniform":
        yield "selector_args", "`selection` of another selector than 'uniform'"
    if args.replay != "share":
        yield "replay_fraction", "`replay='share'`"
    if args.replay == "off":
        replay = "`replay='fill'` or `replay='share'`"
        for name in ("replay_capacity", "replay_max_age", "replay_order"):
            yield name, replay
        # The loss of groups that a round leaves for the next batch is corrected, too
        if not has_rounds:
            yield "replay_clip", replay
            yield "replay_ratio_cap", replay
            if selector is None and args.selection == "uniform":
                yield "max_unscored_completions", "selection, replay or several rounds"


def warn_of_unsupported_parts(config: DataEfficientGRPOConfig, reason: str | None, processes: Processes) -> None:
    """
    Warn, on the main process, of parts that are off though the configuration asks for them.

    Args:
        config ([`DataEfficientGRPOConfig`]): the configuration.
        reason (`str`, *optional*): see [`unsupported_reason`].
        processes ([`Processes`]): of the run.
    """
    asks_for_reuse = config.replay != "off" or config.max_rollout_rounds > 1
    if reason is not None and asks_for_reuse and processes.is_main:
        logger.warning(f"With {reason}, each batch is one round of rollouts without replay.")


def warn_of_unused_order(trainer: GRPOTrainer) -> None:
    """Warn that a selector chooses the prompts, where a subclass or a script decides their order."""
    names = [name for name in _ORDER_METHODS if has_own_method(trainer, name)]
    if names:
        logger.warning(
            f"{listed(names)} of {type(trainer).__name__} does not decide which prompts are trained on: with "
            "selection, replay or several rounds, the selector does. `selection='uniform'`, `replay='off'` and "
            "`max_rollout_rounds=1` train on the rows that `GRPOTrainer` trains on."
        )


def warn_of_small_batches(config: DataEfficientGRPOConfig) -> None:
    """Warn that a batch has few groups, in a run that selects prompts."""
    batch_groups = config.generation_batch_size // config.num_generations
    if batch_groups >= FEW_GROUPS:
        return
    groups = "1 group" if batch_groups == 1 else f"{batch_groups} groups"
    logger.warning(
        f"{groups} a batch: selection has little choice below {FEW_GROUPS}. Raise `gradient_accumulation_steps`, or "
        "`per_device_train_batch_size`."
    )


def warn_of_replayed_sequences(options: LossOptions, replay_clip: str) -> None:
    """
    Warn of a narrow clip around the ratio of a replayed sequence, which is 1 only as long as the
    policy is the one that sampled it.

    Args:
        options ([`LossOptions`]): of the loss, in a run that replays groups.
        replay_clip (`str`): where the clip of replayed groups is centred.
    """
    is_clipped = replay_clip == "behavior" and options.loss_type not in UNCLIPPED_LOSSES
    narrowest = min(options.epsilon)
    if options.level == "sequence" and is_clipped and narrowest < NARROW_CLIP:
        logger.warning(
            f"With `importance_sampling_level='sequence'` and a clip of {narrowest:g}, most replayed sequences may "
            f"have no gradient: set `replay='off'`, or `epsilon` to {NARROW_CLIP} or more."
        )


def announce(
    args: DataEfficientGRPOConfig,
    selector: Selector,
    processes: Processes,
    *,
    num_prompts: int | None,
    model: Any,
    max_rounds: int,
    replays: bool,
    reserved: int,
) -> None:
    """
    Log on the main process what is on in a run, and dropout: as warnings, the lowest level that a script shows.

    Args:
        args ([`DataEfficientGRPOConfig`]): the configuration.
        selector ([`Selector`]): of the run.
        processes ([`Processes`]): of the run.
        num_prompts (`int`, *optional*): N, prompts of the dataset, if they are known.
        model: the policy.
        max_rounds (`int`): rounds of rollouts per generation batch.
        replays (`bool`): whether groups are replayed.
        reserved (`int`): places that stored groups get in any case.
    """
    if not processes.is_main:
        return
    selects = not isinstance(selector, UniformSelector)
    parts = []
    if selects:
        earlier_run = getattr(selector, "history_from", None)
        title = selection_title(type(selector).__name__)
        parts.append(title if earlier_run is None else f"{title} with the groups of {earlier_run}")
    if max_rounds > 1:
        parts.append(f"up to {max_rounds} rounds a batch")
    if reserved:
        parts.append(f"replay has {reserved} places of each batch")
    elif replays:
        parts.append("replay fills the batch")
    if parts:
        size = "" if num_prompts is None else f"; {num_prompts:,} prompts"
        logger.warning(", ".join(parts) + size)
    if selects and not args.shuffle_dataset:
        logger.warning("`shuffle_dataset=False` is left to the selector; `selection='uniform'` keeps the order.")
    if (replays or max_rounds > 1) and not args.use_vllm and _has_dropout(model):
        logger.warning(
            "The model has dropout, which adds noise to the loss of rollouts that are trained on again. Set "
            "`lora_dropout` to 0, or `disable_dropout=True`; `attention_dropout` needs "
            "`model_init_kwargs={'attention_dropout': 0.0}`."
        )


def _has_dropout(model: torch.nn.Module) -> bool:
    """Whether a model has dropout in training, as a module or as the attribute of one that calls a function."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float) and value > 0:
                return True
    return False
