"""What a run that continues from a checkpoint says: where it is, and what the learning rate does there."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import logging


logger = logging.get_logger(__name__)


def announce_continuation(checkpoint: str, state: TrainerState, scheduler: Any, schedule: str) -> None:
    """
    Log where a run continues, and warn if its learning rate jumps there, or is 0.

    Args:
        checkpoint (`str`): the checkpoint that the trainer has read.
        state ([`~transformers.TrainerState`]): of the run that continues.
        scheduler (`LRScheduler`): its scheduler, restored from the checkpoint.
        schedule (`str`): name of the schedule, `lr_scheduler_type`.
    """
    place = f"Continuing from {checkpoint} (step {state.global_step} of {state.max_steps})"
    if state.global_step >= state.max_steps:
        logger.warning(f"{place}: nothing is left to do. To train on, raise `max_steps`.")
        return
    logger.warning(f"{place}.")
    scheduler = getattr(scheduler, "scheduler", scheduler)  # accelerate wraps it
    former_steps = TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE_NAME))).max_steps
    jump = rate_jump(scheduler)
    problem = ""
    if jump is not None:
        of_next, of_later = jump
        problem = (
            f"The learning rate jumps: it is {of_next:.3g} for the next step, by the checkpoint's schedule of "
            f"{former_steps} steps, and then follows the {schedule} schedule of {state.max_steps} steps, from "
            f"{of_later:.3g} on."
        )
    elif is_at_its_end(scheduler):
        problem = (
            f"The learning rate is 0: {type(scheduler).__name__} is restored from the checkpoint, as it was made for "
            f"{former_steps} steps."
        )
    if problem:
        logger.warning(
            f"{problem} To begin a schedule instead, start a new run with this checkpoint's weights as the model. For "
            "a run that may become longer, take a schedule that does not depend on its end, such as "
            "`lr_scheduler_type='constant_with_warmup'`."
        )


def rate_jump(scheduler: Any) -> tuple[float, float] | None:
    """
    How the learning rate jumps after a checkpoint, with Transformers' own schedules.

    These are functions of the step, made for this run's number of steps. What a scheduler restores is the rate that it
    has computed for the next step, by the former schedule.

    Args:
        scheduler (`LRScheduler`): restored from the checkpoint.

    Returns:
        `tuple[float, float]`, *optional*: the rates of the next step and of the one after it; `None` if there is no
        jump, or if the scheduler is of another kind.
    """
    if not isinstance(scheduler, LambdaLR):
        return None
    step = scheduler.last_epoch
    base = float(scheduler.base_lrs[0])
    share_at = scheduler.lr_lambdas[0]
    of_next = float(scheduler.get_last_lr()[0])
    if math.isclose(of_next, base * share_at(step), rel_tol=1e-6):
        return None
    return of_next, base * share_at(step + 1)


def is_at_its_end(scheduler: Any) -> bool:
    """Whether the rate of a scheduler that is restored whole, with its number of steps, is 0."""
    is_restored_whole = isinstance(scheduler, LRScheduler) and not isinstance(scheduler, LambdaLR)
    return is_restored_whole and not any(scheduler.get_last_lr())
