"""`DataEfficientGRPOTrainer`: translates calls of TRL's `GRPOTrainer`, and delegates. No method of TRL is copied."""

from __future__ import annotations

import inspect
import math
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

import trl_dataeff.validation as validation
from trl_dataeff.callback import DataEfficientCallback, RolloutsAxis
from trl_dataeff.checkpoint.resume import Run, complete_checkpoint, failure_notes, remove_older, resolve_run
from trl_dataeff.checkpoint.state import continue_interval, loop_state, unused_batch
from trl_dataeff.collector import GenerationBatch, make_collector
from trl_dataeff.collector.advantages import deviation_over_batch, renormalize
from trl_dataeff.collector.state import begin_run, check_agreement, load_run, save_run
from trl_dataeff.config import DataEfficientGRPOConfig, own_copy
from trl_dataeff.difficulty.embedding import embed_for
from trl_dataeff.replay.correction import LossCorrection
from trl_dataeff.replay.logprobs import (
    behavior_tensors,
    compute_leftover_logps,
    exclude_masked,
    group_logps,
    sampling_metrics,
)
from trl_dataeff.rollouts import capture
from trl_dataeff.rollouts.checks import ContextCheck
from trl_dataeff.rollouts.distributed import Processes
from trl_dataeff.rollouts.group import RolloutGroup
from trl_dataeff.rollouts.skipping import FACTOR as SKIP_FACTOR
from trl_dataeff.rollouts.skipping import RowSkipper, inexact_reason, is_active
from trl_dataeff.selection.base import Selector
from trl_dataeff.signals import StopSignals, exception_of
from trl_dataeff.tracking.card import complete_card
from trl_dataeff.tracking.metrics import (
    StepTimer,
    group_metrics,
    record,
    record_selector,
    replace_last,
    without_rounds,
)


_SIGNATURE = inspect.signature(GRPOTrainer.__init__)
_Norm: TypeAlias = float | torch.Tensor | None
_Forward: TypeAlias = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]  # as TRL returns it


class DataEfficientGRPOTrainer(GRPOTrainer):
    """
    [`~trl.GRPOTrainer`] that needs fewer rollouts: it selects prompts that are likely to carry a gradient, and replays recent
    rollouts. Takes the same arguments.

    Overridden methods, and why:

    - `_generate_and_score_completions`: in training, rows come from the collector, not from the dataloader; TRL's method
      runs once, on exactly what is trained on.
    - `_generate`, `_calculate_rewards`: record what is generated; play back stored rollouts.
    - `_tokenize_prompts`: finds prompts that vLLM would reject.
    - `_compute_loss`, `_get_per_token_logps_and_entropies`: correct the loss of groups that an earlier policy sampled.
    - `train`: checks the checkpoint to resume from, starts a collector, and handles signals and failures.
    - `_save_checkpoint`, `_load_optimizer_and_scheduler`: save and load the state of the run, with a manifest.
    - `create_scheduler`: with FSDP2 the collector starts here, where the policy has been sharded and can embed prompts.
    - `_run_epoch`: a run that is resumed from its last checkpoint, or stopped by now, has nothing left to do.
    - `_finalize_training`: a run that was stopped neither loads its best model nor deletes its last checkpoint.
    - `create_model_card`: the model card says what the run did.

    Args:
        model, reward_funcs, args, train_dataset, ...: see [`~trl.GRPOTrainer`]. `args` may be a
            [`DataEfficientGRPOConfig`] or a [`~trl.GRPOConfig`], which gets the fields of the former; it is copied, not changed.
        selector ([`Selector`], *optional*): selects prompts, in place of the one that `args.selection` names.

    Attributes:
        collector ([`RolloutCollector`]): state of the run, from `train` on.
        stopped_by (`signal.Signals` or `None`): the signal that ended the last call of `train` early, if one did.

    Example:
    ```python
    dataset = load_dataset("trl-lib/DeepMath-103K", split="train")
    trainer = DataEfficientGRPOTrainer("Qwen/Qwen2.5-0.5B-Instruct", accuracy_reward, train_dataset=dataset)
    trainer.train()
    ```
    """

    args: DataEfficientGRPOConfig
    model: PreTrainedModel  # this and the next two are wider in TRL
    reward_funcs: list[Any]
    chat_template_kwargs: dict[str, Any]
    _buffered_inputs: list[dict[str, Any]] | None  # type: ignore[assignment]  # TRL's is inferred as `None`
    _tag_names = ["trl", "grpo", "trl-dataeff"]  # noqa: RUF012
    _recording: capture.Recording | None = None  # while a round is generated
    _playback: capture.Playback | None = None  # while stored rollouts pass through TRL's method
    _correction: LossCorrection = None  # type: ignore[assignment]  # from `train` on
    _skipper: RowSkipper | None = None
    _signals: StopSignals | None = None
    _prompt_ids: Sequence[int] = ()  # rows that are generated or trained on now
    _run: Run = Run("")  # from `train` on
    _begins_sharded = False  # whether a run has yet to begin, once the policy is sharded
    _loop: dict[str, Any] | None = None  # of the training loop, as a checkpoint has it

    def __init__(self, *args: Any, selector: Selector | None = None, **kwargs: Any):
        call = _SIGNATURE.bind(self, *args, **kwargs)
        given = call.arguments
        given["args"] = config = own_copy(given.get("args"), given["model"])
        validation.resolve_selector(config, selector)
        validation.check_dataset(config, given.get("train_dataset"), given.get("environment_factory"), selector)
        super().__init__(*call.args[1:], **call.kwargs)

        self._map_style = given.get("train_dataset") is not None and isinstance(self.train_dataset, Dataset)
        environments, tool_images = self.environment_factories is not None, self._is_vlm and bool(self.tools)
        reason = validation.unsupported_reason(self.train_dataset, environments, tool_images)
        self._processes = Processes.of(self.accelerator)
        sharded = self.is_fsdp_enabled or is_deepspeed_zero3_enabled()
        self._fsdp2 = bool(self.is_fsdp_enabled and self.accelerator.is_fsdp2)
        cannot_embed = sharded and not self._fsdp2
        self.selector = validation.resolve_selector(config, selector, reason, cannot_embed, self._processes.world_size)
        self._rounds = config.max_rollout_rounds if reason is None else 1
        self._replays = reason is None and validation.replays(config, self._processes.world_size)
        validation.check_steps(config, self._replays or self.selector.uses_references, self._rounds)
        skips = config.skip_zero_advantage and inexact_reason(self) is None
        accumulated = config.gradient_accumulation_steps
        self._skipper = RowSkipper(self.loss_type, accumulated, self._processes) if skips else None
        in_rounds = self._rounds > 1 or self._replays or skips or self.selector.uses_references
        self._in_rounds = reason is None and in_rounds
        dataset = self.train_dataset if isinstance(self.train_dataset, Dataset) else None
        columns_are_passed = not environments and self.rollout_func is None and not config.remove_unused_columns
        if dataset is not None and columns_are_passed:
            validation.check_reward_arguments(self.reward_funcs, dataset[0])
        num_prompts = None if dataset is None else len(dataset)
        validation.announce(config, self.selector, reason, self._processes, num_prompts, self.model)

        self._context_check = ContextCheck.of(self.model.config, config, getattr(self, "vllm_generation", None))
        self._timer = StepTimer()
        self._callback = DataEfficientCallback(
            on_begin=self._on_train_begin,
            on_step=lambda: record(self._metrics["train"], self._timer.take()),
            on_log=lambda logs: self.collector.log(logs, self.state.global_step),
            on_end=self._flush_logs,
            received_signal=lambda: None if self._signals is None else self._signals.agreed(),
            how_to_resume=lambda: self._run.how_to_resume(),
        )
        self.add_callback(self._callback)
        self.callback_handler.callbacks.insert(0, RolloutsAxis(self._rollouts_so_far))

    __init__.__signature__ = _SIGNATURE.replace(  # type: ignore[attr-defined]
        parameters=[*_SIGNATURE.parameters.values(), inspect.signature(__init__).parameters["selector"]]
    )

    # Starting and ending

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        self._run = resolve_run(resume_from_checkpoint, self.args.output_dir, self._processes, self.args.should_save)
        self._callback.stopped_by, self._prompt_ids = None, ()
        self._signals = StopSignals(self._processes) if self.args.save_on_signal else None
        with failure_notes(self._run, lambda: self._prompt_ids, self._flush_logs), self._signals or nullcontext():
            self._begins_sharded = self._fsdp2
            if not self._begins_sharded:
                self._begin_run()
            output = super().train(self._run.checkpoint, *args, **kwargs)
        if self.stopped_by is not None:
            raise exception_of(self.stopped_by)
        return output

    @property
    def _over_batch(self) -> bool:
        """Whether TRL divides advantages by the deviation over the whole batch."""
        return self.scale_rewards == "batch" or self.multi_objective_aggregation == "normalize_then_sum"

    def _begin_run(self) -> None:
        """State of a run. A second call of `train` starts again, with the dataset that is there then."""
        args, dataset = self.args, cast(Dataset, self.train_dataset)  # any other is read by TRL alone
        self._begins_sharded = False
        self._step, self._buffered_inputs = 0, None  # TRL would continue within the last run's generation batch
        self._metrics["train"].clear()
        if self.use_vllm:
            self._last_loaded_step = -1  # TRL would take the weights of the last run for those of its first step
        if self._map_style:
            validation.check_dataset(args, dataset, self.environment_factories, self.selector)
        removes = self._map_style and args.remove_unused_columns
        self._rows_dataset = self._remove_unused_columns(dataset, description="training") if removes else dataset
        self.collector = make_collector(
            args,
            selector=self.selector if self._map_style else None,
            dataset=dataset if self._map_style else None,
            embed=lambda: embed_for(self, dataset, args.prompt_embedding, resumed=self._run.checkpoint is not None),
            reward_names=self.reward_func_names,
            reward_weights=self.reward_weights.numpy(),
            replays=self._replays,
            rounds=self._rounds,
            writes_logs=True,
            checkpoint=self._run.checkpoint,
            processes=self._processes,
        )
        self._correction = LossCorrection.of(
            self,
            args.replay_clip,
            args.replay_ratio_cap or math.inf,
            self.collector.buffer is not None,
        )

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        scheduler = super().create_scheduler(*args, **kwargs)
        if self._begins_sharded:
            self._begin_run()
        return scheduler

    @property
    def stopped_by(self) -> signal.Signals | None:
        return self._callback.stopped_by

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step < self.state.max_steps and self.stopped_by is None:
            return super()._run_epoch(*args, **kwargs)
        self.control.should_training_stop = True  # the Trainer would check that after one more step

    def _finalize_training(self, *args: Any, **kwargs: Any) -> TrainOutput:
        kept = {} if self.stopped_by is None else {"load_best_model_at_end": False, "save_total_limit": None}
        with capture.temporarily(self.args, **kept):
            return cast(TrainOutput, super()._finalize_training(*args, **kwargs))

    # Generating

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        self.collector.classifier.weights = self.reward_weights.cpu().numpy()  # a callback may change them
        return self._train_on_rounds() if self._in_rounds else self._train_on_single_pass(inputs)

    def _train_on_single_pass(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """All groups of a generation batch are generated within TRL's pass, and trained on."""
        with self._timer.selection():
            ids = self.collector.propose(self.collector.batch_groups)
            if self.collector.selector is not None:
                inputs = self._rows(self._processes.share(ids))
        with self._recorded() as recording:
            tensors = super()._generate_and_score_completions(inputs)
        with self._timer.selection():
            batch = self.collector.enter(ids, recording.complete(self._processes), self.state.global_step)
            self._log(batch)
        return tensors

    def _train_on_rounds(self) -> dict[str, Any]:
        """Groups are generated in rounds; what is trained on passes through TRL's method as if generated there."""
        with self._timer.selection(), without_rounds(self._metrics["train"], self.state):
            batch = self.collector.collect(self._roll_out, self.state.global_step)
            own = self.collector.own(batch.trained)
            playback = capture.Playback(own, np.concatenate([group.rewards for group in batch.trained]))
            rows = self._rows(np.array([group.prompt_id for group in own]))
        for column, values in playback.logged.items():
            self._log_completion_extra(column, values)
        if self._skipper is not None and not self._is_vlm:
            playback.skip_rows(self.reward_weights, self.args.multi_objective_aggregation, self._processes)
        with capture.temporarily(self, _playback=playback):
            tensors = super()._generate_and_score_completions(rows)
        compute_leftover_logps(batch.leftover_now, self._logps, own[0], self._processes)
        if self._over_batch and batch.generated != batch.trained:
            groups = batch.trained, batch.generated
            tensors["advantages"] = renormalize(tensors["advantages"], *groups, self.collector.classifier)
        if self.args.vllm_importance_sampling_mode == "sequence_mask":
            exclude_masked(own, tensors)
        if batch.trained_stale:
            tensors.update(behavior_tensors(own, tensors["completion_ids"]))
        if batch.trained_stale or playback.rows is not None:  # TRL's are over all rows
            replace_last(self._metrics["train"], sampling_metrics(tensors, self._processes))
        if "old_per_token_logps" in tensors:  # NaN in rows that were skipped
            known = ~tensors["old_per_token_logps"].isnan() | is_active(tensors).unsqueeze(1)
            tensors["old_per_token_logps"] = tensors["old_per_token_logps"].where(known, 0.0)
        if self.collector.buffer is not None:
            self._correction.recorder.expect(own, tensors)
        self._log(batch)
        return tensors

    def _roll_out(self, ids: np.ndarray) -> capture.Round:
        """Generate and score G completions of prompts, each process an equal part of them, outside of TRL's pass."""
        with self._recorded() as recording:
            rows = self._rows(self._processes.share(ids))
            prompts = capture.prompts_with_images(rows)
            if self.tools:  # TRL prepares these for the rows of its pass
                self._sync_tool_dicts, self._async_tool_dicts = capture.tool_dicts(self._standalone_tools, len(rows))
            generated = capture.Generated(*self._generate(prompts))
            if (
                self.use_vllm
                and not self.vllm_importance_sampling_correction
                and self.off_policy_mask_threshold is None
            ):
                generated = generated._replace(logprobs=None)  # TRL's loss takes the policy as the sampler, too
            for i, row in enumerate(rows):
                row.update({name: capture.row_value(values, i) for name, values in generated.extra_fields.items()})
            self._calculate_rewards(rows, prompts, generated.completions, generated.completion_ids)
        rollouts = capture.split_rollouts(generated, cast(int, self.num_generations), dict(self._pending_extra_logs))
        self._pending_extra_logs.clear()
        return recording.complete(self._processes, rollouts)

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        if self._playback is not None:
            return self._play_back(self._playback, prompts)
        generate: Callable[[list[Any]], tuple[Any, ...]] = super()._generate
        return generate(prompts) if self._recording is None else self._recording.generate(generate, prompts)

    def _tokenize_prompts(self, prompts: list[Any]) -> tuple[Any, ...]:
        tokenized: tuple[Any, ...] = super()._tokenize_prompts(prompts)
        self._context_check.check_room(prompts, [len(ids) for ids in tokenized[0]], self._processes.world_size)
        return tokenized

    def _play_back(self, playback: capture.Playback, prompts: list[Any]) -> capture.Generated:
        """TRL's own `_generate` on completions that exist already: they enter through its `rollout_func` slot."""
        with capture.temporarily(self, **playback.fields_of(self)):
            # The prompts are tokenized already. As plain text they need no parsing of messages
            generated = capture.Generated(*super()._generate([""] * len(playback.completions)))
        return generated._replace(completions=playback.completions, images=capture.images_of(prompts))

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: list[Any], completions: list[Any], completion_ids_list: list[Any]
    ) -> torch.Tensor:
        if self._playback is not None:
            return torch.from_numpy(self._playback.rewards).to(self.accelerator.device)
        arguments = (inputs, prompts, completions, completion_ids_list)
        calculate: Callable[..., torch.Tensor] = super()._calculate_rewards
        return calculate(*arguments) if self._recording is None else self._recording.score(calculate, *arguments)

    @contextmanager
    def _recorded(self) -> Iterator[capture.Recording]:
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        recording = capture.Recording(ends, self._context_check.overlong)
        with capture.temporarily(self, _recording=recording):
            yield recording
        self._timer.add_generation(recording.seconds)

    def _rows(self, ids: np.ndarray) -> list[dict[str, Any]]:
        """The dataset's rows, G in a row for each prompt, as TRL's dataloader would deliver them."""
        self._prompt_ids = ids.tolist()
        return self._rows_dataset.__getitems__(np.repeat(ids, cast(int, self.num_generations)).tolist())

    # The loss

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        if self._skipper is not None and self.model.training:
            inputs = self._without_zero_rows()
        corrects = "replayed" in inputs or "batch_row" in inputs
        with self._correction.micro_batch(inputs) if corrects else nullcontext(inputs) as own_inputs:
            loss: torch.Tensor = super()._compute_loss(model, own_inputs)
            if corrects:
                loss = loss + self._correction.missing_kl(self.current_gradient_accumulation_steps)
        return loss * inputs[SKIP_FACTOR] if SKIP_FACTOR in inputs else loss

    def _without_zero_rows(self) -> dict[str, Any]:
        """The present micro-batch. All of a generation batch lose their rows without a gradient as the first enters the loss."""
        assert self._skipper is not None
        assert self._buffered_inputs is not None
        if SKIP_FACTOR not in self._buffered_inputs[0]:
            self._buffered_inputs = self._skipper.apply(self._buffered_inputs)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _get_per_token_logps_and_entropies(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> _Forward:
        forward: Callable[..., _Forward] = partial(super()._get_per_token_logps_and_entropies, model)
        if self._playback is not None and self._playback.rows is not None:
            return capture.forward_of_rows(forward, self._playback.rows, *args, **kwargs)
        outputs = forward(*args, **kwargs)
        if self._correction is not None:
            record(self._metrics["train"], self._correction.on_logps(outputs[0]))
        return outputs

    def _logps(self, group: RolloutGroup) -> list[np.ndarray]:
        """Log-probs of a group's completions under the present policy."""
        if not self._is_vlm:
            return group_logps(group, self._forward, self._tokenizer.pad_token_id, self._processes.device)
        make_batch = partial(super()._generate_and_score_completions, self._rows(np.array([group.prompt_id])))
        return capture.logps_of_pass(self, group, make_batch, self._processes.world_size)

    @torch.no_grad()
    def _forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, length: int) -> torch.Tensor:
        """Log-probs `(B, length)` under the present policy, by TRL's forward pass."""
        assert not isinstance(self.args.gradient_checkpointing_kwargs, str)  # TrainingArguments parses JSON text
        with disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            return self._get_per_token_logps_and_entropies(
                self.model, input_ids, attention_mask, length, batch_size=self.args.per_device_train_batch_size
            )[0]

    # Logs, model card and checkpoints

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        super().create_model_card(*args, **kwargs)
        if hasattr(self, "collector") and self.collector.logs is not None:
            complete_card(Path(self.args.output_dir, "README.md"), self.collector.logs.about, self.state.log_history)

    def _log(self, batch: GenerationBatch) -> None:
        store = self._metrics["train"]
        # TRL has logged rewards and lengths of what is trained on
        if batch.generated and batch.generated != batch.trained:
            weights = self.collector.classifier.weights
            values = group_metrics(batch.generated, self.reward_func_names, weights)
            if self._over_batch:  # TRL's says whether all rewards of the batch are equal
                deviation = deviation_over_batch(batch.generated, self.collector.classifier)
                values["frac_reward_zero_std"] = float(np.isclose(deviation, 0))
            replace_last(store, values)
        effective = any(group.effective for group in batch.generated)
        self.collector.reward_checks.check_gradient(effective, self.state.global_step / self.state.max_steps)
        record(store, batch.metrics)
        record_selector(store, batch.selector_metrics)

    def _rollouts_so_far(self) -> int | None:
        return self.collector.counters.values["rollouts_generated"] if self._callback.training else None

    def _flush_logs(self) -> None:
        if hasattr(self, "collector") and self.collector.logs is not None:
            self.collector.logs.groups.flush(force=True)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        args, step = self.args, self.state.global_step
        checkpoint = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        resumable = not args.save_only_model
        if resumable:
            check_agreement(self.collector)
        writing = complete_checkpoint(self._run, checkpoint, step, resumable, args.should_save, self._processes)
        with writing, capture.temporarily(args, save_total_limit=None, push_to_hub=False):
            if resumable:
                save_run(checkpoint, self.collector, loop_state(self), unused_batch(self), writes=args.should_save)
            super()._save_checkpoint(model, trial)
        if args.push_to_hub:
            self._push_from_checkpoint(str(checkpoint))
        if args.should_save:
            remove_older(checkpoint, args.save_total_limit, [self.state.best_model_checkpoint])

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._loop, self._buffered_inputs = load_run(Path(checkpoint), self.collector)
            # Between two generation batches TRL begins one, however it is split into micro-batches now
            self._step = 0 if self._buffered_inputs is None else self._loop["micro_step"]

    def _on_train_begin(self) -> None:
        """Name the run in its folder, and continue the logging interval of a checkpoint, as the Trainer has begun one."""
        begin_run(self.collector, self.state.global_step, str(self.model.config._name_or_path))
        loop, self._loop = self._loop, None
        if loop is not None:
            continue_interval(self, loop, self._processes)
