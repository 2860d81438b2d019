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
from trl_dataeff.collector.collector import RolloutCollector
from trl_dataeff.collector.rounds import RoundSizes
from trl_dataeff.compact.exact import has_own_method
from trl_dataeff.config import DataEfficientGRPOConfig
from trl_dataeff.difficulty import PREDICTORS
from trl_dataeff.generation.trl_state import has_tool_images
from trl_dataeff.replay.buffer import ReplayBuffer
from trl_dataeff.replay.correction import LossOptions
from trl_dataeff.rollouts.checks import check_reward_arguments, first_row, warn_of_changing_rewards
from trl_dataeff.rollouts.classification import GroupClassifier
from trl_dataeff.rollouts.distributed import Processes, all_gather
from trl_dataeff.selection import Selector, UniformSelector, resolve_selector
from trl_dataeff.selection.base import CheckedSelector, uses_references
from trl_dataeff.utils import hash_prompts


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
    What a trainer does in its runs beyond the update. It differs from the configuration where that asks for what the
    trainer cannot do.

    Attributes:
        selector ([`Selector`]): not bound yet.
        max_rounds (`int`): rounds of rollouts per generation batch.
        replays (`bool`): whether groups are stored and replayed.
        reserved (`int`): places of a generation batch that stored groups get in any case.
    """

    selector: Selector
    max_rounds: int
    replays: bool
    reserved: int

    @property
    def selects(self) -> bool:
        """Whether prompts are selected, and not taken in shuffled passes."""
        return type(self.selector) is not UniformSelector

    @property
    def generates_before_trl(self) -> bool:
        """Whether groups are generated before TRL's pass over them: others may be trained on than are generated."""
        return self.max_rounds > 1 or self.replays or uses_references(self.selector)


def plan_runs(trainer: GRPOTrainer, config: DataEfficientGRPOConfig, selector: Selector | None) -> Plan | None:
    """
    Decide what a trainer does in its runs, once TRL's `__init__` has run. What it cannot do is off, with a warning.

    Args:
        trainer ([`~trl.GRPOTrainer`]): the trainer.
        config ([`DataEfficientGRPOConfig`]): its configuration, with the fields of this package.
        selector ([`Selector`], *optional*): that was given to the trainer.

    Returns:
        [`Plan`], *optional*: `None` if rows, generation and rewards are TRL's.

    Raises:
        `ValueError` or `TypeError`: the configuration, the selector, the dataset or a reward function does not fit.
    """
    processes = Processes.of(trainer.accelerator)
    world_size = processes.world_size
    validation.warn_ignored_options(config, processes, selector)
    if not validation.is_switched_on(config, selector):
        return None
    dataset = trainer.train_dataset if isinstance(trainer.train_dataset, Dataset) else None
    has_environments = trainer.environment_factories is not None
    reason = validation.unsupported_reason(dataset, has_environments, has_tool_images(trainer))
    validation.warn_of_unsupported_parts(config, reason, processes)
    reuses = reason is None
    plan = Plan(
        selector=resolve_selector(config, selector, reason, world_size),
        max_rounds=config.max_rollout_rounds if reuses else 1,
        replays=reuses and validation.replays(config, world_size),
        reserved=validation.reserved_places(config, world_size) if reuses else 0,
    )
    if not (plan.selects or selector is not None or plan.generates_before_trl):
        return None
    validation.check_steps(config, plan.replays or uses_references(plan.selector), plan.max_rounds)
    validation.check_whole_groups(config, world_size)
    return plan


def check_rewards(trainer: GRPOTrainer, config: DataEfficientGRPOConfig) -> None:
    """Reject a reward function that does not take the dataset's columns, where TRL passes these and nothing else."""
    has_other_columns = trainer.environment_factories is not None or trainer.rollout_func is not None
    if config.remove_unused_columns or has_other_columns or has_own_method(trainer, "_calculate_rewards"):
        return
    if isinstance(trainer.train_dataset, Dataset):
        check_reward_arguments(trainer.reward_funcs, first_row(trainer.train_dataset))


def make_classifier(trainer: GRPOTrainer, config: DataEfficientGRPOConfig) -> GroupClassifier:
    """The classifier of a trainer's groups."""
    return GroupClassifier(
        trainer.reward_weights.float().cpu().numpy(),
        reward_range=config.reward_range,
        aggregation=config.multi_objective_aggregation,
        masks_truncated=config.mask_truncated_completions,
    )


def make_collector(
    trainer: GRPOTrainer,
    config: DataEfficientGRPOConfig,
    plan: Plan,
    classifier: GroupClassifier,
    processes: Processes,
) -> RolloutCollector:
    """The collector of a trainer."""
    buffer = None
    if plan.replays:
        buffer = ReplayBuffer(
            config.replay_capacity,
            config.replay_max_age,
            rank=processes.rank,
            world_size=processes.world_size,
            newest_first=config.replay_order == "newest",
        )
    return RolloutCollector(
        classifier=classifier,
        group_size=config.num_generations,
        batch_groups=config.generation_batch_size // config.num_generations,
        reward_names=trainer.reward_func_names,
        selector=CheckedSelector(plan.selector, processes),
        round_sizes=RoundSizes(plan.max_rounds, config.rollout_margin),
        buffer=buffer,
        reserved=plan.reserved,
        generates_before_trl=plan.generates_before_trl,
        seed=config.seed,
        processes=processes,
    )


def say_what_is_on(trainer: GRPOTrainer, config: DataEfficientGRPOConfig, plan: Plan, processes: Processes) -> None:
    """Say on the main process what is on in a trainer's runs, and what may go wrong there."""
    num_prompts = len(trainer.train_dataset) if isinstance(trainer.train_dataset, Dataset) else None
    validation.announce(
        config,
        plan.selector,
        processes,
        num_prompts=num_prompts,
        model=trainer.model,
        max_rounds=plan.max_rounds,
        replays=plan.replays,
        reserved=plan.reserved,
    )
    if not processes.is_main:
        return
    if plan.selects:
        validation.warn_of_small_batches(config)
    if plan.replays or plan.max_rounds > 1:
        warn_of_changing_rewards(trainer.reward_funcs)
    if plan.replays:
        validation.warn_of_replayed_sequences(LossOptions.of(trainer), config.replay_clip)


def check_same_settings(
    trainer: GRPOTrainer,
    config: DataEfficientGRPOConfig,
    selector: Selector | None,
    resume_from_checkpoint: Any,
    processes: Processes,
) -> None:
    """
    Check that the settings on which processes have to agree are the same on each: with others, they would wait for
    each other without end. Where none of them selects or replays, TRL decides. A collective if there are several.

    Args:
        trainer ([`~trl.GRPOTrainer`]): the trainer.
        config ([`DataEfficientGRPOConfig`]): with the fields of this package.
        selector ([`Selector`], *optional*): of the run.
        resume_from_checkpoint: the argument of `train`.
        processes ([`Processes`]): of the run.

    Raises:
        `ValueError`: names each setting that differs, with its values.
    """
    if processes.world_size == 1:
        return
    of_trl = {config_field.name for config_field in fields(GRPOConfig)}
    own = [config_field.name for config_field in fields(DataEfficientGRPOConfig) if config_field.name not in of_trl]
    values: dict[str, Any] = {name: getattr(config, name) for name in own}
    values |= {name: getattr(trainer.args, name) for name in FIELDS_OF_ALL_PROCESSES}
    values["selector"] = None if selector is None else type(selector).__name__
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
    any_selects = any(found["selector"] != "null" for found in [first, *others])
    if differences and any_selects:
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
    config: GRPOConfig, selector: Selector | None, reward_names: Sequence[str], world_size: int
) -> dict[str, Any]:
    """The settings on which the content of a checkpoint depends, by name. JSON values."""
    predictor = getattr(selector, "predictor", None)
    if predictor is not None and not isinstance(predictor, str):
        predictor = type(predictor).__name__
    elif predictor not in (None, *PREDICTORS):
        predictor = "a saved predictor"  # its folder may have moved
    # A configuration without these fields has no such selector by name
    reads_columns = selector is not None and validation.reads_columns(cast(Any, config), selector)
    return {
        "selector": None if selector is None else type(selector).__name__,
        "predictor": predictor,
        "success_rate_column": getattr(config, "success_rate_column", None) if reads_columns else None,
        "stratify_by": getattr(config, "stratify_by", None) if reads_columns else None,
        "num_generations": config.num_generations,
        "reward_functions": list(reward_names),
        "use_vllm": config.use_vllm,
        "number of processes": world_size,
        "per_device_train_batch_size": config.per_device_train_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "steps_per_generation": config.steps_per_generation,
        "num_iterations": config.num_iterations,
        "beta above 0": config.beta != 0.0,  # then a batch has reference log-probs
        "vllm_importance_sampling_correction": config.use_vllm and config.vllm_importance_sampling_correction,
        "learning_rate": config.learning_rate,
    }
