"""Optimizer steps whose gradient is not finite (`skip_nonfinite_steps`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate.utils import DistributedType
from transformers.utils import logging


logger = logging.get_logger(__name__)
MOST_IN_A_ROW = 10


class NonfiniteStepGuard:
    """
    Decides which steps are skipped because their gradient is not finite: they would make every weight NaN. Ten in a row
    end the run.

    Args:
        on_skip (`Callable`): called for each skipped step.
        is_main_process (`bool`): whether this process logs.
    """

    def __init__(self, on_skip: Callable[[], None], is_main_process: bool = True):
        self._on_skip = on_skip
        self._is_main_process = is_main_process
        self._in_a_row = 0

    def skips(self, norm: float | torch.Tensor | None, step: int) -> bool:
        """
        Whether the step is to be skipped.

        Args:
            norm (`float`, `torch.Tensor` or `None`): norm of its gradient; `None` if it is not known.
            step (`int`): number of the step.

        Raises:
            `FloatingPointError`: it is the tenth in a row.
        """
        value = norm.item() if isinstance(norm, torch.Tensor) else norm
        if value is None or math.isfinite(value):
            self._in_a_row = 0
            return False
        self._in_a_row += 1
        self._on_skip()
        if self._in_a_row >= MOST_IN_A_ROW:
            raise FloatingPointError(
                f"The gradient was not finite in {MOST_IN_A_ROW} steps in a row. Lower `learning_rate` or "
                "`max_grad_norm`, or find the reward or log-probability that is not finite."
            )
        if self._in_a_row == 1 and self._is_main_process:
            logger.warning(
                f"The gradient of step {step} is not finite (norm {value}): the step is skipped, since it would make "
                "every weight NaN. `dataeff/steps_skipped` counts such steps."
            )
        return True


def step_guard(accelerator: Any, counters: Any) -> NonfiniteStepGuard | None:
    """
    The guard of a run, which calls `counters.add(steps_skipped=1)`; `None` where a loss scaler or DeepSpeed skips such steps,
    with a smaller scale.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED or accelerator.scaler is not None:
        return None
    return NonfiniteStepGuard(partial(counters.add, steps_skipped=1), accelerator.is_main_process)
