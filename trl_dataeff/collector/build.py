"""From the configuration to a collector and its parts: the one place where fields become plain arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from datasets import Dataset

import trl_dataeff.validation as validation
from trl_dataeff.collector.collector import RolloutCollector
from trl_dataeff.collector.rounds import RoundSizes
from trl_dataeff.config import DataEfficientGRPOConfig
from trl_dataeff.difficulty import PREDICTORS
from trl_dataeff.replay.buffer import ReplayBuffer
from trl_dataeff.rollouts.classification import GroupClassifier
from trl_dataeff.rollouts.distributed import Processes, all_gather
from trl_dataeff.selection.base import Selector
from trl_dataeff.tracking.groups import RunLogs
from trl_dataeff.utils import hash_prompts


def make_collector(
    config: DataEfficientGRPOConfig,
    *,
    selector: Selector | None,
    reward_names: Sequence[str],
    reward_weights: np.ndarray,
    generates_apart: bool,
    processes: Processes,
) -> RolloutCollector:
    """The collector of a trainer. See [`RolloutCollector`] for the arguments."""
    buffer = ReplayBuffer(
        config.replay_capacity,
        config.replay_max_age,
        rank=processes.rank,
        world_size=processes.world_size,
        newest_first=config.replay_order == "newest",
    )
    return RolloutCollector(
        classifier=GroupClassifier(
            reward_weights,
            reward_range=config.reward_range,
            aggregation=config.multi_objective_aggregation,
            masks_truncated=config.mask_truncated_completions,
        ),
        group_size=config.num_generations,
        batch_groups=config.generation_batch_size // config.num_generations,
        reward_names=reward_names,
        selector=selector,
        settings=run_settings(config, selector, reward_names, processes.world_size),
        round_sizes=RoundSizes(config.max_rollout_rounds, config.rollout_margin),
        buffer=buffer if validation.replays(config, processes.world_size) else None,
        reserved=validation.reserved_places(config, processes.world_size),
        over_batch=config.scale_rewards == "batch" or config.multi_objective_aggregation == "normalize_then_sum",
        generates_apart=generates_apart,
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
