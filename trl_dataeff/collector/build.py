"""
From the configuration to a collector and its parts: the one place where fields become plain arguments. Also the settings on
which the content of a checkpoint depends, and whether a checkpoint fits those of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers.utils import logging

from trl_dataeff.checkpoint.state import check_dataset_hash, check_settings, load_scalars
from trl_dataeff.collector.collector import RolloutCollector
from trl_dataeff.collector.rounds import Rounds
from trl_dataeff.config import DataEfficientGRPOConfig
from trl_dataeff.difficulty import PREDICTORS, load_predictor
from trl_dataeff.difficulty.predictor import Embeddings
from trl_dataeff.replay.buffer import ReplayBuffer
from trl_dataeff.rollouts.classification import GroupClassifier
from trl_dataeff.rollouts.distributed import Processes, all_gather
from trl_dataeff.selection.base import Selector, SelectorContext, checked_state
from trl_dataeff.selection.dots import DotsSelector
from trl_dataeff.selection.dots_paper import PaperDotsSelector
from trl_dataeff.selection.earlier import read_earlier_groups
from trl_dataeff.tracking.groups import RunLogs
from trl_dataeff.utils import hash_prompts
from trl_dataeff.validation import reserved_places


logger = logging.get_logger(__name__)
FITTED = ("predictor_args",)  # what was learned with one value may not fit another
_ROLLOUTS = ("num_generations", "reward_functions", "use_vllm")
_BATCH = (
    *("number of processes", "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"),
    "num_iterations",
)


def make_collector(
    config: DataEfficientGRPOConfig,
    *,
    selector: Selector | None,
    dataset: Dataset | None = None,
    num_prompts: int = 0,
    embed: Callable[[], Embeddings] | None = None,
    reward_names: Sequence[str],
    reward_weights: np.ndarray,
    replays: bool,
    rounds: int = 1,
    writes_logs: bool = False,
    checkpoint: str | None = None,
    processes: Processes = Processes(),  # noqa: B008 (immutable)
) -> RolloutCollector:
    """
    The collector of a run; binds the selector.

    Args:
        config ([`DataEfficientGRPOConfig`]): the run's configuration.
        selector ([`Selector`] or `None`): not bound yet; `None` where prompts are not known by row.
        dataset ([`~datasets.Dataset`], *optional*): the prompts, where they are known by row.
        num_prompts (`int`, *optional*, defaults to `0`): N, if there is no `dataset` to select from.
        embed (`Callable`, *optional*): makes the embeddings of all prompts, `(N, h)`.
        reward_names (`list[str]`), reward_weights (`np.ndarray` of shape `(F,)`): the reward functions.
        replays (`bool`): whether groups are replayed.
        rounds (`int`, *optional*, defaults to `1`): rounds of rollouts per generation batch.
        writes_logs (`bool`, *optional*, defaults to `False`): whether the main process writes the files of [`RunLogs`].
        checkpoint (`str`, *optional*): what the run is to resume from. It is compared with these settings and the dataset
            before prompts are embedded.
        processes ([`Processes`], *optional*): of the run; by default a single one.

    Raises:
        `CheckpointError`: the checkpoint does not fit.
        `ValueError`: the processes have different prompts.
    """
    micro_batches, accumulated = (
        config.steps_per_generation * config.num_iterations,
        config.gradient_accumulation_steps,
    )
    group_size = config.num_generations
    batch_groups = config.generation_batch_size // group_size
    num_prompts = num_prompts if dataset is None else len(dataset)
    dataset_hash = "" if dataset is None else hash_prompts(dataset)
    _check_same_prompts(num_prompts, dataset_hash, processes)
    settings = run_settings(config, selector, reward_names, processes.world_size)
    if checkpoint is not None:
        known = None if selector is None else {"size": num_prompts, "hash": dataset_hash}
        check_fits(Path(checkpoint), settings, known, processes.is_main)
    if selector is not None:
        selector.context = context = SelectorContext(num_prompts, batch_groups, group_size, config.seed, embed)
        selector.bind(context)
        checked_state(selector)  # before training, not at the first checkpoint
    classifier = GroupClassifier(
        reward_weights,
        reward_range=config.reward_range,
        aggregation=config.multi_objective_aggregation,
        masks_truncated=config.mask_truncated_completions,
    )
    if isinstance(selector, DotsSelector) and selector.history_from is not None and checkpoint is None:
        selector.start_from(read_earlier_groups(selector.history_from, dataset_hash, classifier.scale))
    return RolloutCollector(
        classifier=classifier,
        group_size=group_size,
        batch_groups=batch_groups,
        reward_names=reward_names,
        selector=selector,
        num_prompts=num_prompts,
        dataset_hash=dataset_hash,
        settings=settings,
        rounds=Rounds(rounds, config.rollout_margin),
        buffer=_buffer(config, processes) if replays else None,
        reserved=reserved_places(config, processes.world_size) if replays else 0,
        overlaps=bool(micro_batches % accumulated and accumulated % micro_batches),
        logs=RunLogs(config.output_dir) if writes_logs and processes.is_main else None,
        seed=config.seed,
        processes=processes,
    )


def _check_same_prompts(num_prompts: int, dataset_hash: str, processes: Processes) -> None:
    """Prompts are known by row: another order on one process would train on other prompts than were selected."""
    if processes.world_size == 1:
        return
    first, *others = all_gather((num_prompts, dataset_hash))
    differ = [str(rank) for rank, own in enumerate(others, 1) if own != first]
    if differ:
        sizes = ", ".join(str(own[0]) for own in [first, *others])
        raise ValueError(
            f"`train_dataset` differs between processes: that of {', '.join(differ)} is not that of process 0 (prompts of "
            f"each: {sizes}). Give every process the same prompts in the same order: shuffle with a fixed seed, and do not "
            "split the dataset by process; that is done later."
        )


def _buffer(config: DataEfficientGRPOConfig, processes: Processes) -> ReplayBuffer:
    return ReplayBuffer(
        config.replay_capacity,
        config.replay_max_age,
        rank=processes.rank,
        world_size=processes.world_size,
        newest_first=config.replay_order == "newest",
    )


def run_settings(
    config: DataEfficientGRPOConfig, selector: Selector | None, reward_names: Sequence[str], world_size: int
) -> dict[str, Any]:
    """The settings on which the content of a checkpoint depends, by name. JSON values."""
    return {
        "selector": type(selector).__name__,
        **_predictor_settings(selector),
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


def _predictor_settings(selector: Selector | None) -> dict[str, Any]:
    """Which predictor a DOTS selector fits, and its arguments, in words."""
    if not isinstance(selector, (DotsSelector, PaperDotsSelector)):
        return {}
    predictor, arguments = selector.predictor, selector.predictor_args or {}
    if isinstance(predictor, str) and predictor in PREDICTORS:
        return {"predictor": predictor, "predictor_args": repr(arguments)}
    if isinstance(predictor, str):  # by its class: the folder may have moved
        predictor = load_predictor(predictor)
    name = f"a predictor of the class {type(predictor).__name__}"
    return {"predictor": name, "predictor_args": repr(predictor.settings())}


def check_fits(
    checkpoint: Path, settings: dict[str, Any], dataset: dict[str, Any] | None, is_main: bool = True
) -> None:
    """
    Compare a checkpoint with the run that is to resume from it, before anything is computed for that run.

    Args:
        checkpoint (`Path`): a checkpoint whose manifest was checked.
        settings (`dict`): of the run, from [`run_settings`].
        dataset (`dict`, *optional*): its `size` and `hash`; `None` where prompts are not known by row.
        is_main (`bool`, *optional*, defaults to `True`): whether this process warns of another learning rate.

    Raises:
        `CheckpointError`: it was written with another dataset or with settings that do not fit.
    """
    scalars = load_scalars(checkpoint)
    saved = scalars["settings"]
    if dataset is not None:
        check_dataset_hash(checkpoint, scalars["dataset"], dataset)
    check_settings(checkpoint, saved, settings, ["selector"], "the selection state")
    check_settings(checkpoint, saved, settings, ["predictor"], "the selection state")
    if saved["learning_rate"] != settings["learning_rate"] and is_main:
        logger.warning(
            f"`learning_rate` is {settings['learning_rate']}, and {checkpoint} was written with {saved['learning_rate']}, which "
            "applies: the Trainer restores the schedule of the checkpoint. To train with another one, start a new run with this "
            "checkpoint's weights as the model."
        )
    if "leftover" in scalars["files"] or "replay" in scalars["files"]:
        check_settings(checkpoint, saved, settings, _ROLLOUTS, "rollouts")
    if scalars["half_used"]:
        check_settings(checkpoint, saved, settings, [*_ROLLOUTS, *_BATCH], "a half-used generation batch")
