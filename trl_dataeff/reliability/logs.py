"""A logging interval that a checkpoint falls into: its sums are part of the state, or the next log would lack them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trl_dataeff.rollouts.distributed import all_gather


if TYPE_CHECKING:
    from trl_dataeff.trainer import DataEfficientGRPOTrainer


def pending_logs(trainer: DataEfficientGRPOTrainer) -> dict[str, Any]:
    """
    What was summed up since the last log: the step of that log, each process's loss, and lists of metrics. A collective.
    """
    return {
        "last_logged": trainer._globalstep_last_logged,
        "loss": all_gather(float(trainer._tr_loss)),
        "metrics": {name: [float(v) for v in values] for name, values in trainer._metrics["train"].items()},
    }


def restore_pending_logs(trainer: DataEfficientGRPOTrainer, pending: dict[str, Any]) -> None:
    """The inverse of [`pending_logs`], at the beginning of training."""
    losses, rank = pending["loss"], trainer.accelerator.process_index
    mean = sum(losses) / len(losses)
    own = losses[rank] if len(losses) == trainer.accelerator.num_processes else mean
    trainer._tr_loss = torch.tensor(own, device=trainer.args.device)
    trainer._globalstep_last_logged = pending["last_logged"]
    trainer._total_loss_scalar = -mean  # `train_loss` is about the steps of this call of `train` alone
    for name, values in pending["metrics"].items():
        trainer._metrics["train"][name] = list(values)
