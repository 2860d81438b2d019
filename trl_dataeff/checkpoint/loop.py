"""What a checkpoint keeps of the training loop because neither TRL nor the Trainer does: its place in batch and interval."""

from __future__ import annotations

from typing import Any, cast

import torch
from trl import GRPOConfig, GRPOTrainer

from trl_dataeff.rollouts.distributed import Processes, all_gather


def loop_state(trainer: GRPOTrainer) -> dict[str, Any]:
    """TRL's micro-step, and what was summed up since the last log, for JSON. A collective."""
    return {
        "micro_step": trainer._step,
        "last_logged": trainer._globalstep_last_logged,
        "loss": all_gather(float(trainer._tr_loss)),
        "metrics": {name: list(map(float, values)) for name, values in trainer._metrics["train"].items()},
    }


def unused_batch(trainer: GRPOTrainer) -> list[dict[str, Any]] | None:
    """The micro-batches of the present generation batch; `None` if all of them have been trained on."""
    steps = cast(GRPOConfig, trainer.args).steps_per_generation
    assert steps is not None  # the config fills it in
    used_up = trainer._step % (steps * trainer.num_iterations) == 0
    return None if used_up else trainer._buffered_inputs


def continue_interval(trainer: GRPOTrainer, loop: dict[str, Any], processes: Processes) -> None:
    """Continue the logging interval of [`loop_state`]. Call it when the Trainer has begun training: it begins one of its own."""
    losses, mean = loop["loss"], sum(loop["loss"]) / len(loop["loss"])
    own = losses[processes.rank] if len(losses) == processes.world_size else mean
    trainer._tr_loss = torch.tensor(own, device=trainer.args.device)
    trainer._total_loss_scalar = -mean  # `train_loss` is about the steps of this call of `train` alone
    trainer._globalstep_last_logged = loop["last_logged"]
    trainer._metrics["train"].update(loop["metrics"])
