"""`ReliableGRPOTrainer`: checkpoints that prove themselves, an orderly end, and faults that do not ruin a run."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from safetensors import SafetensorError
from transformers import TrainerControl
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging
from trl import GRPOTrainer

from trl_dataeff.checkpoint.manifest import write_manifest
from trl_dataeff.checkpoint.resume import give_up, newest_finished, remove_older, resolve_checkpoint, set_aside
from trl_dataeff.checkpoint.state import CheckpointError
from trl_dataeff.fault_tolerance.reconnect import PatientClient
from trl_dataeff.fault_tolerance.reward_guard import RewardGuard
from trl_dataeff.fault_tolerance.signals import StopSignals
from trl_dataeff.rollouts.distributed import all_gather


logger = logging.get_logger(__name__)
_CANNOT_WRITE = (OSError, RuntimeError, SafetensorError)  # as `torch.save` and safetensors put a full disk
_SKIPS_IN_A_ROW = 10


class ReliableGRPOTrainer(GRPOTrainer):
    """
    What [`DataEfficientGRPOTrainer`] does so that runs survive. Overridden methods, and why:

    - `train`: the checkpoint to resume from is checked before anything is loaded; SIGTERM and Ctrl-C end the run after
      the current step; a run that fails keeps what it can, and its error says where to go on.
    - `_save_checkpoint`: a manifest is written last, and before older checkpoints are deleted.
    - `_run_epoch`: a run that is resumed from its last checkpoint has nothing more to do.
    - `_finalize_training`: a run that was stopped neither loads its best model nor deletes its last checkpoint.
    - `_get_grad_norm`: a step whose gradient is not finite is skipped.
    - `_calculate_rewards`: counts what is wrong with rewards.

    Attributes:
        stopped_by (`signal.Signals` or `None`): the signal that ended the last call of `train` early, if one did.
    """

    reward_funcs: list
    model: Any
    stopped_by: signal.Signals | None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.stopped_by = None
        self._signals = StopSignals()
        self._skipped_in_a_row = 0
        self._said_overlong = False
        self._rows_in_hand: list[int] = []
        self._reward_guard = RewardGuard(self.args.reward_timeout)
        self.reward_funcs = [
            self._reward_guard.wrap(function, name)
            for function, name in zip(self.reward_funcs, self.reward_func_names, strict=True)
        ]
        if self.use_vllm and self.args.vllm_mode == "server" and self.accelerator.is_main_process:
            self.vllm_generation.vllm_client = self._patient_client(self.vllm_generation.vllm_client)

    # What the subclass keeps

    def _save_state(self, checkpoint: Path) -> None:
        """Write what a run needs beside the Trainer's files. Called on every process."""

    def _keep_what_can_be_kept(self) -> None:
        """Called when training fails. May fail with an `OSError`."""

    def _count_fault(self, **amounts: int) -> None:
        """Count faults, under names of `METRICS`."""

    # Starting and ending

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        accelerator = self.accelerator
        checkpoint = resolve_checkpoint(
            resume_from_checkpoint,
            self.args.output_dir,
            processes=accelerator.num_processes,
            checks=self.args.should_save,
            speaks=accelerator.is_main_process,
            gather=all_gather,
        )
        self.stopped_by = None
        self._skipped_in_a_row = 0
        self._rows_in_hand = []
        launched = accelerator.num_processes > 1
        with StopSignals(speaks=accelerator.is_main_process, delivered_twice=launched) as self._signals:
            try:
                return super().train(checkpoint, *args, **kwargs)
            except BaseException as error:
                self._end_in(error)
                raise

    def _end_in(self, error: BaseException) -> None:
        if self._rows_in_hand and isinstance(error, Exception):
            more = "" if len(self._rows_in_hand) <= 16 else f" and {len(self._rows_in_hand) - 16} more"
            error.add_note(
                f"The last prompts of this process were the dataset's rows {self._rows_in_hand[:16]}{more}."
            )
        try:
            self._keep_what_can_be_kept()
        except OSError as second:
            error.add_note(f"The last rows of groups.parquet could not be written either: {second}")
        newest = newest_finished(self.args.output_dir)
        if newest is not None and not isinstance(error, CheckpointError):
            error.add_note(
                f"The newest checkpoint of this run is {newest}. When the cause is mended, go on from it with "
                "`trainer.train(resume_from_checkpoint=True)`, or `--resume_from_checkpoint last` on the command line."
            )

    def stop_if_asked(self, control: TrainerControl) -> None:
        """At the end of a step: stop, with a checkpoint, if a process has received SIGTERM or SIGINT."""
        number = self._signals.received or 0
        if self.accelerator.num_processes > 1:  # all stop at the same step, whichever received it
            own = torch.tensor([int(number)], device=self.accelerator.device)
            number = int(self.accelerator.gather(own).max())
        if number and self.state.global_step < self.state.max_steps:
            self.stopped_by = signal.Signals(number)
            control.should_save = control.should_training_stop = True

    def _run_epoch(self, *args, **kwargs):
        if self.state.global_step < self.state.max_steps:
            return super()._run_epoch(*args, **kwargs)
        self.control.should_training_stop = True  # the Trainer would look at it after one step more

    def _finalize_training(self, *args, **kwargs):
        if self.stopped_by is None:
            return super()._finalize_training(*args, **kwargs)
        if self.accelerator.is_main_process:
            folder = Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            logger.warning(
                f"Stopped by {self.stopped_by.name} after step {self.state.global_step} of {self.state.max_steps}, with "
                f"the checkpoint {folder}. Go on with `trainer.train(resume_from_checkpoint=True)`, or "
                "`--resume_from_checkpoint last` on the command line."
            )
        with self._arguments(load_best_model_at_end=False, save_total_limit=None):
            return super()._finalize_training(*args, **kwargs)

    # Checkpoints

    def _save_checkpoint(self, model, trial):
        args, wait = self.args, self.accelerator.wait_for_everyone
        checkpoint = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        try:
            if args.should_save:
                set_aside(checkpoint)
            wait()
            if not args.save_only_model:
                self._save_state(checkpoint)
            with self._arguments(save_total_limit=None, push_to_hub=False):  # both only when it is whole
                super()._save_checkpoint(model, trial)
            wait()
            if args.should_save:
                write_manifest(
                    checkpoint,
                    step=self.state.global_step,
                    processes=self.accelerator.num_processes,
                    resumable=not args.save_only_model,
                )
        except _CANNOT_WRITE as error:
            raise self._not_written(checkpoint, error) from error
        wait()
        if args.push_to_hub:
            self._push_from_checkpoint(str(checkpoint))
        if args.should_save:
            remove_older(checkpoint, args.save_total_limit, keep=[self.state.best_model_checkpoint])

    def _not_written(self, checkpoint: Path, error: Exception) -> CheckpointError:
        if self.args.should_save:
            give_up(checkpoint)
        older = newest_finished(checkpoint.parent)
        return CheckpointError(
            f"The checkpoint {checkpoint} could not be written ({type(error).__name__}: {error}), and what there was of "
            f"it is removed. "
            + (
                f"{older} is untouched: when there is room, resume from it."
                if older is not None
                else "There is no earlier one: make room, and start the run anew."
            )
        )

    @contextmanager
    def _arguments(self, **changed: Any) -> Iterator[None]:
        former = {name: getattr(self.args, name) for name in changed}
        self.args.__dict__.update(changed)
        try:
            yield
        finally:
            self.args.__dict__.update(former)

    # Faults

    def _get_grad_norm(self, model, grad_norm=None):
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        value = norm.item() if isinstance(norm, torch.Tensor) else norm
        # A loss scaler and DeepSpeed skip such steps by themselves, and go on with a smaller scale
        own = self.accelerator.distributed_type == DistributedType.DEEPSPEED or self.accelerator.scaler is not None
        if value is None or math.isfinite(value) or own:
            self._skipped_in_a_row = 0
        else:
            self._skip_step(model, value)
        return norm

    def _skip_step(self, model, norm: float) -> None:
        self._skipped_in_a_row += 1
        self._count_fault(steps_skipped=1)
        if self._skipped_in_a_row >= _SKIPS_IN_A_ROW:
            raise FloatingPointError(
                f"The gradient was not finite in {_SKIPS_IN_A_ROW} steps in a row. Resume from an earlier checkpoint "
                "with a lower `learning_rate` or `max_grad_norm`, or find out which reward or log-probability is not "
                "finite."
            )
        if self._skipped_in_a_row == 1 and self.accelerator.is_main_process:
            logger.warning(
                f"The gradient of step {self.state.global_step + 1} is not finite (norm {norm}): the step is skipped, "
                "since it would make every weight NaN. `dataeff/steps_skipped` counts on."
            )
        model.zero_grad()  # without gradients the optimizer changes nothing

    def _calculate_rewards(self, *args, **kwargs):
        self._reward_guard.faults = 0
        return super()._calculate_rewards(*args, **kwargs)

    def _without_room(self, prompt_ids) -> list[bool]:
        """For each prompt, whether it and `max_completion_length` tokens exceed the model's context. Warns once."""
        config = self.model.config.get_text_config()
        limits = [getattr(config, "max_position_embeddings", None), self.args.vllm_max_model_length]
        context = min((limit for limit in limits if limit is not None), default=None)
        if context is None:
            return [False] * len(prompt_ids)
        overlong = [len(ids) + self.max_completion_length > context for ids in prompt_ids]
        if any(overlong) and not self._said_overlong:
            self._said_overlong = True
            logger.warning(
                f"A prompt of {max(map(len, prompt_ids))} tokens leaves no room for `max_completion_length` "
                f"({self.max_completion_length}) in the model's context of {context} tokens: what comes after it is cut "
                "off or of no worth. Remove such prompts from the dataset. This is said once; "
                "`dataeff/overlong_prompts` counts on."
            )
        return overlong

    def _patient_client(self, client: Any) -> PatientClient:
        sharded = self.is_fsdp_enabled or (self.is_deepspeed_enabled and self.accelerator.num_processes > 1)
        return PatientClient(
            client,
            device=self.accelerator.device,
            timeout=self.args.vllm_server_timeout,
            named_params=None if sharded else self.vllm_generation._iter_named_params,
            on_return=lambda: self._count_fault(server_returns=1),
        )
