"""The settings on which the content of a checkpoint depends, and whether a checkpoint fits those of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trl_dataeff.checkpoint.state import check_dataset_hash, check_settings, load_scalars
from trl_dataeff.config import DataEfficientGRPOConfig
from trl_dataeff.difficulty.base import is_predictor
from trl_dataeff.difficulty.loading import load_predictor
from trl_dataeff.selection.base import Selector
from trl_dataeff.selection.dots import DotsSelector


PREDICTOR, PREDICTOR_ARGS = "dots_predictor", "dots_predictor_args"
FITTED = (PREDICTOR_ARGS, "history_half_lives")  # what was learned with one value may not fit another
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
        "history_half_lives": config.history_half_lives,
        "num_generations": config.num_generations,
        "reward_functions": list(reward_names),
        "use_vllm": config.use_vllm,
        "number of processes": world_size,
        "per_device_train_batch_size": config.per_device_train_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "steps_per_generation": config.steps_per_generation,
        "num_iterations": config.num_iterations,
    }


def _predictor_settings(selector: Selector | None) -> dict[str, str]:
    """Which predictor a DOTS selector fits, and its arguments, in words."""
    if not isinstance(selector, DotsSelector):
        return {}
    predictor, arguments = selector.predictor, selector.predictor_args or {}
    if isinstance(predictor, str) and is_predictor(predictor):
        return {PREDICTOR: predictor, PREDICTOR_ARGS: repr(arguments)}
    if isinstance(predictor, str):  # by its class: the folder may have moved
        predictor = load_predictor(predictor)
    name = f"a predictor of the class {type(predictor).__name__}"
    return {PREDICTOR: name, PREDICTOR_ARGS: repr(predictor.settings())}


def check_fits(checkpoint: Path, settings: dict[str, Any], dataset: dict[str, Any] | None) -> None:
    """
    Compare a checkpoint with the run that is to resume from it, before anything is computed for that run.

    Args:
        checkpoint (`Path`): a checkpoint whose manifest was checked.
        settings (`dict`): of the run, from [`run_settings`].
        dataset (`dict`, *optional*): its `size` and `hash`; `None` where prompts are not known by row.

    Raises:
        `CheckpointError`: it was written with another dataset or with settings that do not fit.
    """
    scalars = load_scalars(checkpoint)
    saved = scalars["settings"]
    if dataset is not None:
        check_dataset_hash(checkpoint, scalars["dataset"], dataset)
    check_settings(checkpoint, saved, settings, ["selector"], "the selection state")
    if PREDICTOR in saved and PREDICTOR in settings:
        check_settings(checkpoint, saved, settings, [PREDICTOR], "the selection state")
    if "leftover" in scalars["files"] or "replay" in scalars["files"]:
        check_settings(checkpoint, saved, settings, _ROLLOUTS, "rollouts")
    if scalars["half_used"]:
        check_settings(checkpoint, saved, settings, [*_ROLLOUTS, *_BATCH], "a half-used generation batch")
