"""
From the configuration to what a trainer does and to its collector: the one place where fields become plain arguments.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import trl_dataeff.validation as validation
from trl_dataeff.collector.buffer import ReplayBuffer
from trl_dataeff.collector.collector import RolloutCollector
from trl_dataeff.collector.rounds import RoundSizes
from trl_dataeff.compat import overrides_rewards
from trl_dataeff.config import DataEfficientGRPOConfig
from trl_dataeff.difficulty import PREDICTORS
from trl_dataeff.generation.trl_state import has_tool_images, tokenizer_of
from trl_dataeff.rollouts.checks import check_reward_arguments, first_row, warn_of_changing_rewards, warn_of_raw_text
from trl_dataeff.rollouts.classification import GroupClassifier
from trl_dataeff.rollouts.distributed import Processes, all_gather
from trl_dataeff.selection import Selector, UniformSelector
from trl_dataeff.selection.base import CheckedSelector, uses_references
from trl_dataeff.tracking.groups import RunLogs
from trl_dataeff.update.compaction import can_skip_rows
from trl_dataeff.update.correction import LossOptions
from trl_dataeff.utils import UserError, hash_prompts


#: Fields of `GRPOConfig` by which processes decide what is generated, trained on and waited for. Others may differ
#: between processes: names of folders and runs, trackers, progress bars
FIELDS_OF_ALL_PROCESSES = (
    "seed",
    "max_steps",
    "num_train_epochs",
    "learning_rate",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "generation_batch_size",
    "steps_per_generation",
    "num_iterations",
    "num_generations",
    "num_generations_eval",
    "max_completion_length",
    "shuffle_dataset",
    "remove_unused_columns",
    "beta",
    "loss_type",
    "importance_sampling_level",
    "multi_objective_aggregation",
    "scale_rewards",
    "mask_truncated_completions",
    "off_policy_mask_threshold",
    "top_entropy_quantile",
    "use_vllm",
    "vllm_mode",
    "vllm_importance_sampling_correction",
    "gradient_checkpointing",
    "bf16",
    "fp16",
    "logging_strategy",
    "logging_steps",
    "eval_strategy",
    "eval_steps",
    "save_strategy",
    "save_steps",
    "save_only_model",
)


@dataclass(frozen=True)
class Plan:
    """
    What a trainer does in its runs. It differs from the configuration where that asks for what the trainer cannot do.

    Attributes:
        selector ([`Selector`]): not bound yet.
        selects (`bool`): whether it proposes the prompts; if not, they come from TRL's dataloader.
        max_rounds (`int`): rounds of rollouts per generation batch.
        replays (`bool`): whether groups are stored and replayed.
        reserved (`int`): places of a generation batch that stored groups get in any case.
        generates_before_trl (`bool`): whether groups are generated before TRL's pass over them.
        can_take_trls_rows (`bool`): whether the rows of TRL's dataloader may be trained on, as a subclass has changed
            them: no prompts are selected, no group is replaced, and none is trained on again.
        compacts (`bool`): whether the update leaves out what does not change the gradient.
        requires_scores (`bool`): whether completions without any score, from the start of training, are an error:
            selection, several rounds and replay need scores. Without these three, all that TRL accepts is accepted.
    """

    selector: Selector
    selects: bool
    max_rounds: int
    replays: bool
    reserved: int
    generates_before_trl: bool
    can_take_trls_rows: bool
    compacts: bool
    requires_scores: bool


def plan_runs(
    trainer: GRPOTrainer,
    selector: Selector | None,
    *,
    is_map_style: bool,
    corrects_loss: bool,
    replaces_generation: bool,
) -> Plan:
    """
    Decide what a trainer does in its runs, once TRL's `__init__` has run, and log it. What it cannot do is off, with a
    warning.

    Args:
        trainer ([`~trl.GRPOTrainer`]): whose `args` are a [`DataEfficientGRPOConfig`].
        selector ([`Selector`], *optional*): that was given to the trainer.
        is_map_style (`bool`): whether the prompts come from a map-style dataset that was given.
        corrects_loss (`bool`): see [`corrects_loss`].
        replaces_generation (`bool`): see [`replaces_generation`].

    Raises:
        `ValueError` or `TypeError`: the configuration, the selector, the dataset or a reward function does not fit.
    """
    config = cast(DataEfficientGRPOConfig, trainer.args)
    processes = Processes.of(trainer.accelerator)
    world_size = processes.world_size
    dataset = trainer.train_dataset if isinstance(trainer.train_dataset, Dataset) else None
    has_environments = trainer.environment_factories is not None
    reason = validation.unsupported_reason(dataset, has_environments, has_tool_images(trainer), replaces_generation)

    validation.warn_of_ignored_options(config, processes, selector)
    validation.warn_of_unsupported_parts(config, reason, corrects_loss, processes)
    reuses = reason is None and corrects_loss
    max_rounds = config.max_rollout_rounds if reuses else 1
    replays = reuses and validation.replays(config, world_size)
    reserved = validation.reserved_places(config, world_size) if reuses else 0
    compacts = config.compact_update and corrects_loss
    skips_rows = compacts and can_skip_rows(trainer)

    selector = validation.resolve_selector(config, selector, reason, world_size)
    trains_on_other_groups = replays or uses_references(selector)
    validation.check_steps(config, trains_on_other_groups, max_rounds)
    is_uniform = isinstance(selector, UniformSelector)
    needs_groups_first = max_rounds > 1 or trains_on_other_groups
    trains_on_trls_groups = is_uniform and not (reason is None and needs_groups_first)
    has_whole_groups = not is_map_style or validation.holds_whole_groups(config, world_size, trains_on_trls_groups)
    if skips_rows and has_whole_groups:
        # The pass for old log-probs leaves out rows by their rewards, which TRL has only afterwards
        needs_groups_first = True
    generates_before_trl = reason is None and needs_groups_first
    if replaces_generation and not is_uniform:
        raise UserError(
            f"{type(selector).__name__} cannot select prompts, because {type(trainer).__name__} has a "
            "`_generate_and_score_completions` that does not call `super()`. Let it call it, or set "
            "`selection='uniform'`."
        )
    selects = is_map_style and has_whole_groups
    selects_by_rewards = selects and not is_uniform

    if dataset is not None and _trl_calls_reward_functions(trainer):
        check_reward_arguments(trainer.reward_funcs, first_row(dataset))
    if dataset is not None and not has_environments and trainer.rollout_func is None and processes.is_main:
        warn_of_raw_text(first_row(dataset)["prompt"], tokenizer_of(trainer), trainer.eos_token_ids)
    validation.announce(
        config,
        selector,
        processes,
        num_prompts=None if dataset is None else len(dataset),
        model=trainer.model,
        max_rounds=max_rounds,
        replays=replays,
        reserved=reserved,
    )
    if selects and not is_uniform:
        validation.warn_of_small_batches(config, processes)
    if (replays or max_rounds > 1) and processes.is_main:
        warn_of_changing_rewards(trainer.reward_funcs)
    if replays:
        validation.warn_of_replayed_sequences(LossOptions.of(trainer), config.replay_clip, processes)
    return Plan(
        selector=selector,
        selects=selects,
        max_rounds=max_rounds,
        replays=replays,
        reserved=reserved,
        generates_before_trl=generates_before_trl,
        can_take_trls_rows=is_uniform and max_rounds == 1 and not trains_on_other_groups,
        compacts=compacts,
        requires_scores=selects_by_rewards or max_rounds > 1 or replays,
    )


def _trl_calls_reward_functions(trainer: GRPOTrainer) -> bool:
    """Whether reward functions get the dataset's columns, and nothing else, as TRL passes them."""
    config = cast(DataEfficientGRPOConfig, trainer.args)
    has_other_columns = trainer.environment_factories is not None or trainer.rollout_func is not None
    return not (overrides_rewards(type(trainer)) or has_other_columns or config.remove_unused_columns)


def make_collector(trainer: GRPOTrainer, plan: Plan, processes: Processes) -> RolloutCollector:
    """The collector of a trainer."""
    config = cast(DataEfficientGRPOConfig, trainer.args)
    reward_names = trainer.reward_func_names
    selector = plan.selector if plan.selects else None
    buffer = None
    if plan.replays:
        buffer = ReplayBuffer(
            config.replay_capacity,
            config.replay_max_age,
            rank=processes.rank,
            world_size=processes.world_size,
            newest_first=config.replay_order == "newest",
        )
    classifier = GroupClassifier(
        trainer.reward_weights.numpy(),
        reward_range=config.reward_range,
        aggregation=config.multi_objective_aggregation,
        masks_truncated=config.mask_truncated_completions,
    )
    return RolloutCollector(
        classifier=classifier,
        group_size=config.num_generations,
        batch_groups=config.generation_batch_size // config.num_generations,
        reward_names=reward_names,
        selector=None if selector is None else CheckedSelector(selector, processes),
        settings=run_settings(config, selector, reward_names, processes.world_size),
        round_sizes=RoundSizes(plan.max_rounds, config.rollout_margin),
        buffer=buffer,
        reserved=plan.reserved,
        generates_before_trl=plan.generates_before_trl,
        max_unscored=config.max_unscored_completions if plan.requires_scores else None,
        logs=RunLogs(config.output_dir) if processes.is_main else None,
        seed=config.seed,
        processes=processes,
    )


def check_same_settings(
    trainer: GRPOTrainer, selector: Selector, resume_from_checkpoint: Any, processes: Processes
) -> None:
    """
    Check that the settings on which processes have to agree are the same on each: with others, they would wait for
    each other without end. A collective if there are several.

    Args:
        trainer ([`~trl.GRPOTrainer`]): whose `args` are a [`DataEfficientGRPOConfig`].
        selector ([`Selector`]): of the run.
        resume_from_checkpoint: the argument of `train`.
        processes ([`Processes`]): of the run.

    Raises:
        `ValueError`: names each setting that differs, with its values.
    """
    if processes.world_size == 1:
        return
    of_trl = {config_field.name for config_field in fields(GRPOConfig)}
    own = [config_field.name for config_field in fields(DataEfficientGRPOConfig) if config_field.name not in of_trl]
    values: dict[str, Any] = {name: getattr(trainer.args, name) for name in (*own, *FIELDS_OF_ALL_PROCESSES)}
    values["selector"] = type(selector).__name__
    values["reward functions"] = trainer.reward_func_names
    values["reward_weights"] = trainer.reward_weights.tolist()
    values["train_dataset"] = type(trainer.train_dataset).__name__
    # The path may differ: nodes need not share their folders
    is_path = not isinstance(resume_from_checkpoint, (bool, type(None)))
    values["resume_from_checkpoint"] = "a path" if is_path else bool(resume_from_checkpoint)
    # An object that JSON does not know prints its address, which differs
    texts = {name: json.dumps(value, default=lambda other: type(other).__name__) for name, value in values.items()}
    first, *others = all_gather(texts)
    differences = []
    for name, expected in first.items():
        for rank, found in enumerate(others, start=1):
            if found[name] != expected:
                differences.append(f"`{name}` is {expected} on process 0 and {found[name]} on process {rank}")
                break
    if differences:
        raise ValueError(
            f"Settings differ between processes: {'; '.join(differences)}. Give all processes the same configuration: "
            "it must not depend on the rank."
        )


def hash_same_prompts(dataset: Dataset, processes: Processes) -> str:
    """
    Content hash of the prompts of a dataset, which has to be the same on every process, since prompts are known by
    row. A collective if there are several.

    Raises:
        `ValueError`: the prompts of processes differ.
    """
    dataset_hash = hash_prompts(dataset)
    if processes.world_size == 1:
        return dataset_hash
    of_processes = all_gather((len(dataset), dataset_hash))
    differ = [str(rank) for rank, own in enumerate(of_processes) if own != of_processes[0]]
    if differ:
        sizes = ", ".join(str(size) for size, _ in of_processes)
        raise ValueError(
            f"`train_dataset` differs between processes: that of {', '.join(differ)} is not that of process 0 "
            f"(prompts of each: {sizes}). Give all the same prompts in the same order: shuffle with a fixed seed, and "
            "do not split the dataset."
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
