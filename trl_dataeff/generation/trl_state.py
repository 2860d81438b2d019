"""
TRL's private state, as far as it is read and set from outside of the trainer.

Only the modules of `compact/`, `generation/` and `replay/`, and the trainer itself, use TRL's private names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import RepeatSampler

from trl_dataeff.rollouts.distributed import Processes, all_gather


@contextmanager
def temporarily(obj: Any, **attributes: Any) -> Iterator[None]:
    """Sets attributes of an object within this context."""
    former = {name: getattr(obj, name) for name in attributes}
    for name, value in attributes.items():
        setattr(obj, name, value)
    try:
        yield
    finally:
        for name, value in former.items():
            setattr(obj, name, value)


@contextmanager
def shadowed(trainer: GRPOTrainer, **methods: Any) -> Iterator[None]:
    """
    Within this context, attributes of a trainer take the place of its methods, those of subclasses included.

    Args:
        trainer ([`~trl.GRPOTrainer`]): the trainer.
        **methods (`Callable`): by name what is called instead, without `self`.
    """
    attributes = vars(trainer)
    former = {name: attributes[name] for name in methods if name in attributes}
    attributes.update(methods)
    try:
        yield
    finally:
        for name in methods:
            del attributes[name]
        attributes.update(former)


def has_tool_images(trainer: GRPOTrainer) -> bool:
    """Whether tools may answer a trainer's model with images."""
    return trainer._is_vlm and bool(trainer.tools)


def tokenizer_of(trainer: GRPOTrainer) -> Any:
    """The tokenizer of a trainer's policy; of a vision-language model, that of its processor."""
    return trainer._tokenizer


# The training loop


def forget_last_run(trainer: GRPOTrainer) -> None:
    """Clear what TRL's trainer keeps from one call of `train` to the next."""
    # TRL would continue within the last run's generation batch
    trainer._step = 0
    trainer._buffered_inputs = None
    trainer._metrics["train"].clear()
    trainer._pending_metrics.clear()
    trainer._pending_extra_logs.clear()
    if trainer.use_vllm:
        trainer._last_loaded_step = -1  # TRL would take the weights of the last run for those of the first step


def loop_state(trainer: GRPOTrainer) -> dict[str, Any]:
    """
    Where TRL's training loop is, and what it has summed up since the last log. A collective.

    Returns:
        `dict`: JSON values, the argument of [`continue_interval`].
    """
    metrics = {}
    for name, values in trainer._metrics["train"].items():
        metrics[name] = [float(value) for value in values]
    return {
        "micro_step": trainer._step,
        "last_logged": trainer._globalstep_last_logged,
        "loss": all_gather(float(trainer._tr_loss)),
        "metrics": metrics,
    }


def continue_interval(trainer: GRPOTrainer, loop: dict[str, Any], processes: Processes) -> None:
    """
    Continue the logging interval of [`loop_state`]. Call it when the Trainer has begun training: it begins one of its
    own.
    """
    losses = loop["loss"]
    mean = sum(losses) / len(losses)
    same_processes = len(losses) == processes.world_size
    own = losses[processes.rank] if same_processes else mean
    trainer._tr_loss = torch.full_like(trainer._tr_loss, own)
    trainer._total_loss_scalar = -mean  # `train_loss` is about the steps of this call of `train` alone
    trainer._globalstep_last_logged = loop["last_logged"]
    trainer._metrics["train"].update(loop["metrics"])


def continue_sampler(trainer: GRPOTrainer) -> None:
    """
    Have TRL's sampler continue with the pass over the dataset in which a checkpoint was written: a new sampler begins
    with the first one. Call it when the Trainer has made its dataloader.
    """
    sampler = trainer.callback_handler.train_dataloader
    while sampler is not None and not isinstance(sampler, RepeatSampler):
        # Each process has its share of a sampler of batches, which is around that of rows
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    if sampler is None:  # another one, or an iterable dataset
        return
    num_passes = math.floor(trainer.state.epoch or 0)
    for _ in range(num_passes):
        next(iter(sampler), None)  # draws the order of a pass


def unused_batch(trainer: GRPOTrainer) -> list[dict[str, Any]] | None:
    """The micro-batches of the present generation batch; `None` if all of them have been trained on."""
    steps_per_generation = cast(int, cast("GRPOConfig", trainer.args).steps_per_generation)  # the config fills it in
    passes = steps_per_generation * trainer.num_iterations
    if trainer._step % passes == 0:
        return None
    return trainer._buffered_inputs
