"""The settings on which the content of a checkpoint depends, and whether a checkpoint fits those of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers.utils import logging

from trl_dataeff.checkpoint.state import check_dataset_hash, check_settings, load_scalars
from trl_dataeff.config import DataEfficientGRPOConfig
from trl_dataeff.difficulty.loading import PREDICTORS, load_predictor
from trl_dataeff.selection.base import Selector
from trl_dataeff.selection.dots import DotsSelector


logger = logging.get_logger(__name__)
FITTED = ("predictor_args", "half_lives")  # what was learned with one value may not fit another
_ROLLOUTS = ("num_generations", "reward_functions", "use_vllm")
_BATCH = (
    *("number of processes", "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"),
    "num_iterations",
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
    if not isinstance(selector, DotsSelector):
        return {}
    predictor, arguments = selector.predictor, selector.predictor_args or {}
    half_lives = {"half_lives": list(selector.half_lives)}
    if isinstance(predictor, str) and predictor in PREDICTORS:
        return {"predictor": predictor, "predictor_args": repr(arguments), **half_lives}
    if isinstance(predictor, str):  # by its class: the folder may have moved
        predictor = load_predictor(predictor)
    name = f"a predictor of the class {type(predictor).__name__}"
    return {"predictor": name, "predictor_args": repr(predictor.settings()), **half_lives}


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
