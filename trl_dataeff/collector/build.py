"""From the configuration to what a trainer does and to its collector: the one place where fields become plain arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from datasets import Dataset
from transformers.integrations import is_deepspeed_zero3_enabled
from trl import GRPOTrainer

import trl_dataeff.validation as validation
from trl_dataeff.collector.collector import RolloutCollector
from trl_dataeff.collector.rounds import RoundSizes
from trl_dataeff.config import DataEfficientGRPOConfig
from trl_dataeff.difficulty import PREDICTORS
from trl_dataeff.replay.buffer import ReplayBuffer
from trl_dataeff.rollouts.capture import can_skip_rows, has_tool_images
from trl_dataeff.rollouts.checks import check_reward_arguments
from trl_dataeff.rollouts.classification import GroupClassifier
from trl_dataeff.rollouts.distributed import Processes, all_gather
from trl_dataeff.selection import Selector, UniformSelector
from trl_dataeff.selection.base import CheckedSelector, uses_references
from trl_dataeff.tracking.groups import RunLogs
from trl_dataeff.utils import hash_prompts


class Plan(NamedTuple):
    """
    What a trainer does in its runs.

    Attributes:
        selector ([`Selector`]): not bound yet.
        selects (`bool`): whether it proposes the prompts; if not, they come from TRL's dataloader.
        generates_apart (`bool`): whether groups are generated before TRL's pass over them.
        skips_rows (`bool`): whether rows without a gradient are left out of the loss.
    """

    selector: Selector
    selects: bool
    generates_apart: bool
    skips_rows: bool


def plan_runs(trainer: GRPOTrainer, selector: Selector | None, *, is_map_style: bool, corrects_loss: bool) -> Plan:
    """
    Decide what a trainer does in its runs, once TRL's `__init__` has run, and log it. Turns off, with a warning, what it cannot do.

    Args:
        selector ([`Selector`], *optional*): that was given to the trainer.
        is_map_style (`bool`): whether the prompts come from a map-style dataset that was given.
        corrects_loss (`bool`): see [`corrects_loss`].

    Raises:
        `ValueError` or `TypeError`: the configuration, the selector, the dataset or a reward function does not fit.
    """
    config, processes = cast(DataEfficientGRPOConfig, trainer.args), Processes.of(trainer.accelerator)
    world_size = processes.world_size
    dataset = trainer.train_dataset if isinstance(trainer.train_dataset, Dataset) else None
    environments = trainer.environment_factories is not None
    reason = validation.unsupported_reason(dataset, environments, has_tool_images(trainer))
    validation.warn_of_ignored_options(config, processes)
    validation.turn_off_reuse(config, reason, corrects_loss, processes.is_main)
    is_fsdp1 = trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2
    cannot_embed = is_fsdp1 or is_deepspeed_zero3_enabled()
    selector = validation.resolve_selector(config, selector, reason, cannot_embed, world_size)
    rounds, skips_rows = config.max_rollout_rounds, config.skip_zero_advantage and can_skip_rows(trainer)
    replays = validation.replays(config, world_size) or uses_references(selector)
    validation.check_steps(config, replays, rounds)
    generates_apart = reason is None and (rounds > 1 or replays or skips_rows)
    off = isinstance(selector, UniformSelector) and not generates_apart
    selects = is_map_style and validation.holds_whole_groups(config, world_size, off)
    own_rewards = type(trainer)._calculate_rewards.__module__.partition(".")[0] not in ("trl", "trl_dataeff")
    others_pass = environments or trainer.rollout_func or config.remove_unused_columns or own_rewards
    if dataset is not None and not others_pass:
        check_reward_arguments(trainer.reward_funcs, dataset[0])
    validation.announce(config, selector, processes, None if dataset is None else len(dataset), trainer.model)
    return Plan(selector, selects, generates_apart, skips_rows)


def make_collector(trainer: GRPOTrainer, plan: Plan, processes: Processes) -> RolloutCollector:
    """The collector of a trainer."""
    config, reward_names = cast(DataEfficientGRPOConfig, trainer.args), trainer.reward_func_names
    selector = plan.selector if plan.selects else None
    buffer = ReplayBuffer(
        config.replay_capacity,
        config.replay_max_age,
        rank=processes.rank,
        world_size=processes.world_size,
        newest_first=config.replay_order == "newest",
    )
    return RolloutCollector(
        classifier=GroupClassifier(
            trainer.reward_weights.numpy(),
            reward_range=config.reward_range,
            aggregation=config.multi_objective_aggregation,
            masks_truncated=config.mask_truncated_completions,
        ),
        group_size=config.num_generations,
        batch_groups=config.generation_batch_size // config.num_generations,
        reward_names=reward_names,
        selector=None if selector is None else CheckedSelector(selector, processes),
        settings=run_settings(config, selector, reward_names, processes.world_size),
        round_sizes=RoundSizes(config.max_rollout_rounds, config.rollout_margin),
        buffer=buffer if validation.replays(config, processes.world_size) else None,
        reserved=validation.reserved_places(config, processes.world_size),
        over_batch=config.scale_rewards == "batch" or config.multi_objective_aggregation == "normalize_then_sum",
        generates_apart=plan.generates_apart,
        logs=RunLogs(config.output_dir) if processes.is_main else None,
        seed=config.seed,
        processes=processes,
    )


def hash_same_prompts(dataset: Dataset, processes: Processes) -> str:
    """
    Content hash of the prompts of a dataset. Raises a `ValueError` if those of processes differ, since prompts are known by row. A
    collective if there are several.
    """
    dataset_hash = hash_prompts(dataset)
    if processes.world_size > 1:
        first, *others = all_gather((len(dataset), dataset_hash))
        differ = [str(rank) for rank, own in enumerate(others, 1) if own != first]
        if differ:
            sizes = ", ".join(str(own[0]) for own in [first, *others])
            raise ValueError(
                f"`train_dataset` differs between processes: that of {', '.join(differ)} is not that of process 0 (prompts of each: "
                f"{sizes}). Give all the same prompts in the same order: shuffle with a fixed seed, and do not split the dataset."
            )
    return dataset_hash


def run_settings(
    config: DataEfficientGRPOConfig, selector: Selector | None, reward_names: Sequence[str], world_size: int
) -> dict[str, Any]:
    """The settings on which the content of a checkpoint depends, by name. JSON values."""
    predictor = getattr(selector, "predictor", None)
    if predictor is not None and not isinstance(predictor, str):
        predictor = type(predictor).__name__
    elif predictor not in (None, *PREDICTORS):
        predictor = "a saved predictor"  # its folder may have moved
    return {
        "selector": type(selector).__name__,
        "predictor": predictor,
        "num_generations": config.num_generations,
        "reward_functions": list(reward_names),
        "use_vllm": config.use_vllm,
        "number of processes": world_size,
        "per_device_train_batch_size": config.per_device_train_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "steps_per_generation": config.steps_per_generation,
        "num_iterations": config.num_iterations,
        "learning_rate": config.learning_rate,
    }
