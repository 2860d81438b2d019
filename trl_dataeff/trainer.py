"""
`DataEfficientGRPOTrainer`: selection and replay on top of the faster update. It translates calls of TRL's
`GRPOTrainer`, and delegates. No method of TRL is copied.
"""

from __future__ import annotations

import inspect
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast, overload

import numpy as np
import torch
from datasets import Dataset
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SchedulerType, TrainOutput
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

import trl_dataeff.compat as compat
import trl_dataeff.validation as validation
from trl_dataeff.callback import DataEfficientCallback
from trl_dataeff.checkpoint.continuation import announce_continuation
from trl_dataeff.checkpoint.folder import own_folder
from trl_dataeff.checkpoint.resume import ResumedRun, complete_checkpoint, failure_notes, remove_older, resolve_run
from trl_dataeff.checkpoint.state import (
    check_agreement,
    check_fits,
    load_fitting_run,
    load_run,
    save_run,
    unwritable_names,
)
from trl_dataeff.collector import (
    GenerationBatch,
    RolloutCollector,
    check_rewards,
    check_same_settings,
    hash_same_prompts,
    make_classifier,
    make_collector,
    plan_runs,
    run_settings,
    say_what_is_on,
)
from trl_dataeff.compact import CompactGRPOTrainer
from trl_dataeff.compact.exact import agreed, exact_parts, least_advantage
from trl_dataeff.compact.sampler import SamplerRatio
from trl_dataeff.config import default_config, own_fields, with_own_fields
from trl_dataeff.difficulty.embedding import embed_for
from trl_dataeff.generation import trl_state
from trl_dataeff.generation.pregenerated import PregeneratedGroups
from trl_dataeff.generation.recorder import GeneratedRound, RoundRecorder, generate_rollouts
from trl_dataeff.replay.correction import LossCorrection, LossOptions
from trl_dataeff.replay.logprobs import STALE, compute_leftover_logps, forward_of, group_logps, logps_of_trls_pass
from trl_dataeff.rollouts.distributed import Processes, all_gather
from trl_dataeff.rollouts.group import RolloutGroup
from trl_dataeff.rows import ChosenRows, copy_of
from trl_dataeff.run import TrainingRun
from trl_dataeff.selection import Selector, resolve_selector
from trl_dataeff.signals import StopSignals, exception_of
from trl_dataeff.tracking.card import complete_card, hub_id_of
from trl_dataeff.tracking.groups import RunLogs
from trl_dataeff.tracking.metrics import StepTimer, discarding_logs_of_rounds, record, record_selector, replace_last
from trl_dataeff.tracking.observer import About, Observer, SeenBatch, hash_of_prompts
from trl_dataeff.utils import UserError, number_prompts, with_parameters_of


logger = logging.get_logger(__name__)
compat.check(GRPOTrainer)
_SIGNATURE = inspect.signature(GRPOTrainer.__init__)


class DataEfficientGRPOTrainer(CompactGRPOTrainer):
    """
    [`~trl.GRPOTrainer`] with an update that computes only what has a gradient. With the fields `selection` and
    `replay`, it also chooses the prompts, and trains again on recent groups. Takes the same arguments.

    With `selection="uniform"`, `replay="off"` and one round, rows, generation, rewards and advantages are TRL's, and
    generation batches are only watched. Overridden methods, each with `super()`, and why:

    - `_generate_and_score_completions`: in training, rows come from the collector, and TRL's method runs once, on
      what is trained on. The list of rows that came in then holds those, for subclasses that read it after `super()`.
      While TRL's method runs, `_generate` and `_calculate_rewards` are watched, or return groups that were generated
      before.
    - `_prepare_inputs`: the list of rows that came in holds those of the present generation batch afterwards.
    - `train`: decides which checkpoint to resume from, begins a run, and handles signals and failures.
    - `_save_checkpoint`, `_load_optimizer_and_scheduler`: save and load the state of the run, with a manifest.
    - `create_model_card`: adds what happened in the run, and names a model that is not on the Hub.
    - `create_scheduler`: with FSDP2 or `bf16_full_eval` a run with a selector begins here, once the policy is on its
      device and can embed prompts.
    - `_run_epoch`: a run that is resumed from its last checkpoint, or that a signal has stopped, has nothing left to
      do.

    Args:
        model, reward_funcs, args, train_dataset, ...: see [`~trl.GRPOTrainer`]. `args` may be a
            [`DataEfficientGRPOConfig`] or a [`~trl.GRPOConfig`], for which the fields of this package have their
            defaults. They are read when the trainer is made, but for `save_on_signal`.
        selector ([`Selector`], *optional*): selects prompts, in place of the one that `args.selection` names.

    Attributes:
        collector ([`RolloutCollector`] or `None`): makes the generation batches. `None` where they are TRL's.
        selector ([`Selector`] or `None`): selects the prompts.
        stopped_by (`signal.Signals` or `None`): the signal that ended the last call of `train` early, if one did.

    Example:
    ```python
    dataset = load_dataset("trl-lib/DeepMath-103K", split="train")
    trainer = DataEfficientGRPOTrainer("Qwen/Qwen2.5-0.5B-Instruct", accuracy_reward, train_dataset=dataset)
    trainer.train()
    ```
    """

    # These are wider in TRL
    reward_funcs: list[Any]
    chat_template_kwargs: dict[str, Any]
    _tag_names = ["trl", "grpo", "trl-dataeff"]  # noqa: RUF012

    # `None` until `__init__` has run, so that a subclass may call TRL's methods before; the first two also without
    # selection, replay and several rounds
    _dataeff_collector: RolloutCollector | None = None
    _dataeff_correction: LossCorrection | None = None
    _dataeff_observer: Observer | None = None

    @overload
    @with_parameters_of(GRPOTrainer.__init__)
    def __init__(self, *args: Any, **kwargs: Any): ...

    @overload
    def __init__(self, *args: Any, selector: Selector | None, **kwargs: Any): ...

    def __init__(self, *args: Any, selector: Selector | None = None, **kwargs: Any):
        call = _SIGNATURE.bind(self, *args, **kwargs)
        given = call.arguments
        if given.get("args") is None:
            given["args"] = default_config(given["model"])
        config = with_own_fields(given["args"])
        self._dataeff_fields = own_fields(config)
        resolve_selector(config, selector)
        if validation.is_switched_on(config, selector):
            validation.check_dataset(config, given.get("train_dataset"), given.get("environment_factory"), selector)
        super().__init__(*call.args[1:], **call.kwargs)

        if not config.compact_update:
            self._dataeff_update = None
        processes = Processes.of(self.accelerator)
        self._dataeff_config = config
        self._dataeff_processes = processes
        validation.warn_of_prompts(self, processes)
        plan = plan_runs(self, config, selector)
        classifier = make_classifier(self, config)
        self._dataeff_selector: Selector | None = None  # as it was given; the collector has a `CheckedSelector`
        if plan is not None:
            check_rewards(self, config)
            self._dataeff_selector = plan.selector
            self._dataeff_collector = make_collector(self, config, plan, classifier, processes)
            self._dataeff_correction = LossCorrection.of(
                self, config, processes, replays=plan.replays, max_rounds=plan.max_rounds
            )
            say_what_is_on(self, config, plan, processes)
        self._dataeff_rows = ChosenRows(cast(int, self.num_generations))
        needs_scores = plan is not None and (plan.selects or plan.max_rounds > 1 or plan.replays)
        self._dataeff_observer = Observer(
            classifier,
            self.reward_func_names,
            replays=plan is not None and plan.replays,
            max_unscored=config.max_unscored_completions if needs_scores else None,
            logs=RunLogs(str(self.args.output_dir)) if processes.is_main else None,
            is_main=processes.is_main,
        )
        self._dataeff_run = TrainingRun(ResumedRun())
        self._dataeff_timer = StepTimer(selects=plan is not None)
        self._dataeff_callback = DataEfficientCallback(
            self._dataeff_observer,
            self._dataeff_timer,
            self._metrics["train"],
            on_begin=self._dataeff_continue_interval,
            on_gradient=self._dataeff_check_gradient,
            check_seconds=self._dataeff_check_seconds,
        )
        self.callback_handler.callbacks.insert(1, self._dataeff_callback)  # see its class

    __init__.__signature__ = _SIGNATURE.replace(  # type: ignore[attr-defined]
        parameters=[*_SIGNATURE.parameters.values(), inspect.signature(__init__).parameters["selector"]]
    )

    # A run

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        is_required = self._dataeff_collector is not None
        with own_folder(str(self.args.output_dir), self._dataeff_processes, is_required):
            output = self._dataeff_train(resume_from_checkpoint, *args, **kwargs)
        stopped_by = self._dataeff_callback.stopped_by
        if stopped_by is not None:
            raise exception_of(stopped_by)
        return output

    def _dataeff_train(self, resume_from_checkpoint: str | bool | None, *args: Any, **kwargs: Any) -> TrainOutput:
        config = self.args
        processes = self._dataeff_processes
        check_same_settings(self, self._dataeff_config, self._dataeff_selector, resume_from_checkpoint, processes)
        resumed = resolve_run(
            resume_from_checkpoint,
            str(config.output_dir),
            processes,
            config.should_save,
            needs_state=self._dataeff_collector is not None,
        )
        self._dataeff_run = TrainingRun(resumed)
        signals = None
        if getattr(config, "save_on_signal", self._dataeff_config.save_on_signal):
            signals = StopSignals(processes)
        self._dataeff_callback.begin(resumed, signals)
        if self._dataeff_collector is not None:
            # Embedding needs the policy on its device, and with FSDP2 sharded; here the Trainer's `train` does both
            moves_late = config.bf16_full_eval or config.fp16_full_eval
            shards_late = self.is_fsdp_enabled and self.accelerator.is_fsdp2
            self._dataeff_run.begins_late = (moves_late or shards_late) and not self.is_deepspeed_enabled
        # The callback changes these when it stops a run; they are restored afterwards
        changed_by_callback = {
            "load_best_model_at_end": config.load_best_model_at_end,
            "save_total_limit": config.save_total_limit,
        }
        observer = cast(Observer, self._dataeff_observer)
        notes = failure_notes(resumed, self._dataeff_rows.read_last, observer.flush_logs)
        with notes, signals or nullcontext(), trl_state.temporarily(config, **changed_by_callback):
            self._dataeff_forget_last_run()
            if not self._dataeff_run.begins_late:
                self._dataeff_begin_run()
            return super().train(resumed.checkpoint, *args, **kwargs)

    def _dataeff_forget_last_run(self) -> None:
        """A second call of `train` starts again."""
        validation.check_unchanged(self._dataeff_fields, self.args)
        if self._dataeff_callback.has_trained:
            trl_state.forget_last_run(self)
        cast(Observer, self._dataeff_observer).begin_run()

    def _dataeff_begin_run(self) -> None:
        """Bind the selector to the dataset that is there now, if there is one."""
        run = self._dataeff_run
        run.begins_late = False
        collector = self._dataeff_collector
        if collector is None or self._dataeff_selector is None:
            return
        config = self._dataeff_config
        dataset = cast(Dataset, self.train_dataset)
        cast(LossCorrection, self._dataeff_correction).begin()
        if self._dataeff_processes.is_main:
            validation.warn_of_unused_order(self)
        validation.check_dataset(config, dataset, self.environment_factories, self._dataeff_selector)
        validation.check_size(config, dataset)
        dataset_hash = hash_same_prompts(dataset, self._dataeff_processes)
        checkpoint = run.resumed.checkpoint
        if checkpoint is not None:
            check_fits(
                Path(checkpoint), self._dataeff_settings(), len(dataset), dataset_hash, self._dataeff_processes.is_main
            )
        rows_dataset = dataset
        if config.remove_unused_columns:
            rows_dataset = self._remove_unused_columns(dataset, description="training")
        self._dataeff_rows.begin_run(rows_dataset, self.data_collator)
        observer = cast(Observer, self._dataeff_observer)
        observer.begin_run(About(type(self._dataeff_selector).__name__, len(dataset), dataset_hash))
        is_resumed = checkpoint is not None
        embed = partial(
            embed_for,
            self,
            dataset,
            config.prompt_embedding,
            dataset_hash=dataset_hash,
            resumed=is_resumed,
        )
        collector.bind(
            len(dataset),
            embed=embed,
            dataset_hash=dataset_hash,
            number_prompts=partial(number_prompts, dataset),
            resumed=is_resumed,
            reward_checks=observer.reward_checks,
            **validation.known_columns(config, dataset, self._dataeff_selector),
        )

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        scheduler = super().create_scheduler(*args, **kwargs)
        self._dataeff_begin_late_run()
        return scheduler

    def _dataeff_begin_late_run(self) -> None:
        """Begin the run if that is due. A subclass may make its scheduler without calling `create_scheduler`."""
        if self._dataeff_run.begins_late:
            self._dataeff_begin_run()

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step < self.state.max_steps and self._dataeff_callback.stopped_by is None:
            return super()._run_epoch(*args, **kwargs)
        self.control.should_training_stop = True  # the Trainer would check that after one more step

    # The public names. No method here reads them, so that a subclass may have its own

    @property
    def collector(self) -> RolloutCollector | None:
        return self._dataeff_collector

    @property
    def selector(self) -> Selector | None:
        return self._dataeff_selector

    @property
    def stopped_by(self) -> signal.Signals | None:
        return self._dataeff_callback.stopped_by

    def clear_replay_buffer(self) -> None:
        """
        Drop all stored groups, and effective groups that are left over from earlier batches.

        Stored groups keep the rewards that they got. Call this, on every process, when the reward has changed in a way
        that the trainer cannot see: a reward function that depends on the step, or that was edited before a resume. If
        `reward_funcs` holds other objects, the trainer drops the groups itself.
        """
        if self._dataeff_collector is not None:
            self._dataeff_collector.drop_rollouts()

    # Generating

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self._dataeff_observer is None or not self.model.training:
            return super()._generate_and_score_completions(inputs)
        if self._dataeff_run.logs_completions_again:  # the half-used batch of a checkpoint has ended
            self.log_completions = True
            self._dataeff_run.logs_completions_again = False
        validation.check_unchanged(self._dataeff_fields, self.args)
        if self._dataeff_collector is None:
            return self._dataeff_watch(self._dataeff_observer, inputs)
        if self._dataeff_collector.num_prompts == 0:
            raise UserError(
                "Selection, replay and several rounds begin with `train()`. For a batch before it, or a training loop "
                "of your own, set `selection='uniform'`, `replay='off'` and `max_rollout_rounds=1`."
            )
        self._dataeff_read_options(self._dataeff_collector)
        self._dataeff_rows.begin_batch()
        if self._dataeff_collector.generates_before_trl:
            return self._dataeff_train_on_pregenerated(self._dataeff_collector, inputs)
        return self._dataeff_train_on_selected(self._dataeff_collector, inputs)

    def _dataeff_watch(self, observer: Observer, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's own pass over the rows that came in. What it generates and scores is only watched."""
        prompt_hashes = hash_of_prompts(inputs)
        with self._dataeff_recorded() as recorder:
            tensors = super()._generate_and_score_completions(inputs)
        generated = recorder.complete(self._dataeff_processes)
        if generated is None:  # a subclass generates or scores in another way
            return tensors
        hashes = self._dataeff_processes.gather(prompt_hashes.to(self._dataeff_processes.device)).cpu().numpy()
        observer.classifier.read_options(
            self.reward_weights.float().cpu().numpy(),
            self.multi_objective_aggregation,
            self.mask_truncated_completions,
        )
        seen = observer.groups_of(generated, hashes, cast(int, self.num_generations), self.state.global_step)
        if seen is not None:
            self._dataeff_log(seen)
        return tensors

    def _dataeff_read_options(self, collector: RolloutCollector) -> None:
        """Read what decides rewards and advantages in TRL's pass. A callback may have changed it."""
        collector.read_options(
            self.reward_funcs,
            weights=self.reward_weights.float().cpu().numpy(),
            scale_rewards=self.scale_rewards,
            aggregation=self.multi_objective_aggregation,
            masks_truncated=self.mask_truncated_completions,
            can_exchange_rows=agreed(exact_parts(self), self.accelerator).exchange,
        )
        cast(LossCorrection, self._dataeff_correction).sampler_ratio = SamplerRatio.of(self)

    def _dataeff_train_on_selected(self, collector: RolloutCollector, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """The selector's prompts pass through TRL's method, in the place of the rows that came in."""
        tensors: dict[str, Any] = {}
        make_batch = super()._generate_and_score_completions

        def generate_groups(ids: np.ndarray) -> GeneratedRound:
            inputs[:] = self._dataeff_rows.choose(self._dataeff_processes.share(ids))
            with self._dataeff_timer.trls_pass(), self._dataeff_recorded() as recorder:
                tensors.update(make_batch(inputs))
            return self._dataeff_complete(recorder)

        with self._dataeff_timer.selection():
            batch = collector.collect(generate_groups, self.state.global_step)
            self._dataeff_log_batch(collector, batch)
        return tensors

    def _dataeff_train_on_pregenerated(
        self, collector: RolloutCollector, inputs: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """
        Groups are generated first; those to train on then pass through TRL's method as if they were generated there.
        """
        metrics = self._metrics["train"]
        with self._dataeff_timer.selection(), discarding_logs_of_rounds(metrics, self.state):
            batch = collector.collect(self._dataeff_generate_round, self.state.global_step)
            own = collector.groups_of_this_process(batch)
            groups = [member.group for member in own]
            inputs[:] = self._dataeff_rows.choose(np.array([group.prompt_id for group in groups]))
        # Of all processes, as TRL's `_calculate_rewards` returns them
        rewards = np.concatenate([group.rewards for group in batch.trained])
        pregenerated = PregeneratedGroups(groups, rewards)
        for column, values in pregenerated.logged.items():
            self._log_completion_extra(column, values)
        with trl_state.shadowed(self, **pregenerated.methods(self, super()._generate)):
            tensors = super()._generate_and_score_completions(inputs)
        # Before the loss, while the policy is still the one that sampled them
        with self._dataeff_passes_by_length():
            compute_leftover_logps(
                batch.leftover_now, self._dataeff_logps, padding_group=groups[0], processes=self._dataeff_processes
            )
        tensors["advantages"] = collector.normalized_over_generated(tensors["advantages"], batch)
        # `any_stale` is about the groups of all processes, because collectives depend on it
        corrected_metrics = cast(LossCorrection, self._dataeff_correction).prepare(
            tensors, own, any_stale=bool(batch.trained_stale), least_advantage=least_advantage(self)
        )
        replace_last(metrics, {name: [value] for name, value in corrected_metrics.items()})
        self._dataeff_log_batch(collector, batch)
        return tensors

    def _dataeff_generate_round(self, ids: np.ndarray) -> GeneratedRound:
        """Generate and score G completions of prompts, each process an equal part of them, outside of TRL's pass."""
        rows = self._dataeff_rows.of(self._dataeff_processes.share(ids))
        with self._dataeff_recorded() as recorder:
            rollouts = generate_rollouts(self, rows)
        # TRL's pass comes afterwards, and reads whether the policy trains. A reward function or a `rollout_func` that
        # asks the policy may have left it in evaluation mode
        self.model.train()
        recorder.rollouts = rollouts
        return self._dataeff_complete(recorder)

    def _dataeff_complete(self, recorder: RoundRecorder) -> GeneratedRound:
        generated = recorder.complete(self._dataeff_processes)
        if generated is None:
            raise UserError(
                f"Selection, replay and several rounds need what {type(self).__name__} generates and scores in "
                "`_generate` and `_calculate_rewards`, and its `_generate_and_score_completions` does not call them."
            )
        return generated

    @contextmanager
    def _dataeff_recorded(self) -> Iterator[RoundRecorder]:
        """What is generated and scored within this context is recorded."""
        recorder = RoundRecorder(end_tokens={*self.eos_token_ids, self._tokenizer.pad_token_id})
        with recorder.recording(self):
            yield recorder
        self._dataeff_timer.add_generation(recorder.seconds)

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        is_training = self.model.training
        inputs: dict[str, Any] = super()._prepare_inputs(generation_batch)
        if self._dataeff_collector is None or not is_training:
            return inputs
        # TRL's dataloader delivers the rows of a generation batch again for each of its micro-batches
        if self._dataeff_rows.trained is not None:
            generation_batch[:] = [copy_of(row) for row in self._dataeff_rows.trained]
        self.model.train()  # a reward function that asks the policy may have left it in evaluation mode
        return inputs

    # The loss

    def _dataeff_needs_logps(self, inputs: Mapping[str, Any]) -> bool:
        correction = self._dataeff_correction
        is_awaited = correction is not None and correction.awaits_logps_of(inputs)
        return is_awaited or super()._dataeff_needs_logps(inputs)

    def _dataeff_rewrites(self, inputs: Mapping[str, Any]) -> bool:
        correction = self._dataeff_correction
        is_corrected = correction is not None and correction.rewrites(inputs)
        return is_corrected or super()._dataeff_rewrites(inputs)

    def _dataeff_on_logps(self, values: dict[str, Any], logps: torch.Tensor) -> dict[str, Any]:
        has_new_ratio = self._dataeff_ratio_is_due(values)
        values = super()._dataeff_on_logps(values, logps)
        if self._dataeff_correction is None:
            return values
        values, metrics = self._dataeff_correction.apply(
            values, logps, LossOptions.of(self), has_new_ratio=has_new_ratio
        )
        record(self._metrics["train"], metrics)
        return values

    def _dataeff_stale(self, inputs: Mapping[str, Any]) -> torch.Tensor | None:
        return inputs.get(STALE)

    def _dataeff_check_gradient(self) -> None:
        """Before an optimizer step: whether the run does what its configuration says."""
        collector = self._dataeff_collector
        if collector is None:
            return
        if collector.batches == 0:
            raise UserError(
                f"{type(self).__name__} selects no prompts and replays nothing, because its "
                "`_generate_and_score_completions` does not call `super()`. Let it call it, or set "
                "`selection='uniform'`, `replay='off'` and `max_rollout_rounds=1`."
            )
        cast(LossCorrection, self._dataeff_correction).check_applied()

    def _dataeff_check_seconds(self) -> float:
        """What the update's check of gradients has taken so far."""
        return 0.0 if self._dataeff_update is None else self._dataeff_update.check.seconds

    def _dataeff_logps(self, group: RolloutGroup) -> list[np.ndarray]:
        """Log-probs of a group's completions under the present policy, `(T_i,)` each."""
        if not self._is_vlm:
            return group_logps(
                group, partial(forward_of, self), self._tokenizer.pad_token_id, self._dataeff_processes.device
            )
        rows = self._dataeff_rows.of(np.array([group.prompt_id]))
        make_batch = partial(super()._generate_and_score_completions, rows)
        return logps_of_trls_pass(self, group, make_batch, super()._generate, self._dataeff_processes.world_size)

    # Logs and checkpoints

    def _dataeff_log_batch(self, collector: RolloutCollector, batch: GenerationBatch) -> None:
        replace_last(self._metrics["train"], batch.trl_metrics)
        self._dataeff_log(collector.seen(batch))
        record_selector(self._metrics["train"], batch.selector_metrics)

    def _dataeff_log(self, batch: SeenBatch) -> None:
        observer = cast(Observer, self._dataeff_observer)
        step = self.state.global_step
        record(self._metrics["train"], observer.see(batch, step, step / max(self.state.max_steps, 1)))

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        config = self.args
        step = self.state.global_step
        checkpoint = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        is_resumable = not config.save_only_model
        rank = self._dataeff_processes.rank
        state = self._dataeff_state() if is_resumable else {}
        writing = complete_checkpoint(
            self._dataeff_run.resumed, checkpoint, step, is_resumable, config.should_save, self._dataeff_processes
        )
        with writing, trl_state.temporarily(config, save_total_limit=None, push_to_hub=False):
            if is_resumable:
                save_run(checkpoint, state, self._dataeff_unused_batch(), rank, config.should_save)
            super()._save_checkpoint(model, trial)
            # Before the checkpoint is complete: a run that resumes from it has these rows
            cast(Observer, self._dataeff_observer).flush_logs()
        if config.push_to_hub:
            self._push_from_checkpoint(str(checkpoint))
        if config.should_save:
            remove_older(checkpoint, config.save_total_limit, [self.state.best_model_checkpoint])

    def _dataeff_unused_batch(self) -> list[dict[str, Any]] | None:
        """
        What this process has yet to train on of a half-used generation batch; `None` if there is none, or, with a
        warning, if some process cannot write it. A collective.
        """
        unused_batch = trl_state.unused_batch(self)
        unwritable = None if unused_batch is None else unwritable_names(unused_batch)
        found = [names for names in all_gather(unwritable) if names]
        if not found:
            return unused_batch
        if self._dataeff_processes.is_main:
            logger.warning_once(
                f"The half-used generation batch is not in the checkpoint, because of what {type(self).__name__} has "
                f"put into it ({', '.join(found[0])}): only tensors and JSON values can be written. A run that "
                "resumes from it begins another batch."
            )
        return None

    def _dataeff_state(self) -> dict[str, Any]:
        """What a checkpoint holds of the run, beside what the Trainer's has. A collective."""
        processes = self._dataeff_processes
        collector = self._dataeff_collector
        state: dict[str, Any] = {
            "settings": self._dataeff_settings(),
            "loop": trl_state.loop_state(self),
            "observer": cast(Observer, self._dataeff_observer).state_dict(),
            "update": None if self._dataeff_update is None else self._dataeff_update.state_dict(),
        }
        if collector is not None:
            state |= {"collector": collector.state_dict(), **collector.about()}
            state["prompts"] = all_gather(self._dataeff_rows.trained_prompts)
            check_agreement(state["collector"], processes, collector.own_state())
        return state

    def _dataeff_settings(self) -> dict[str, Any]:
        return run_settings(
            cast(GRPOConfig, self.args),
            self._dataeff_selector,
            self.reward_func_names,
            self._dataeff_processes.world_size,
        )

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        config = self.model.config
        with trl_state.temporarily(config, _name_or_path=hub_id_of(str(config._name_or_path))):
            super().create_model_card(*args, **kwargs)
        logs = None if self._dataeff_observer is None else self._dataeff_observer.logs
        if logs is not None and logs.about:
            folder = str(self.args.output_dir)
            complete_card(Path(folder, "README.md"), logs.about, self.state.log_history, folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        self._dataeff_begin_late_run()
        self._dataeff_run.was_read = True
        processes = self._dataeff_processes
        collector = self._dataeff_collector
        if collector is None:
            fitting = load_fitting_run(Path(checkpoint), processes, self._dataeff_settings())
            if fitting is None:
                return  # the Trainer resumes as it does with TRL
            state, unused_batch = fitting
        else:
            state, unused_batch = load_run(Path(checkpoint), processes)
        cast(Observer, self._dataeff_observer).load_state_dict(state["observer"])
        if collector is not None:
            collector.load_state_dict(state["collector"])
        if self._dataeff_update is not None and state["update"] is not None:
            self._dataeff_update.load_state_dict(state["update"])
        self._dataeff_run.loop = state["loop"]
        self._buffered_inputs = unused_batch
        if unused_batch is None:
            # Between two generation batches TRL begins one, however it is split into micro-batches now
            self._step = 0
            return
        self._step = state["loop"]["micro_step"]
        if collector is not None and state["prompts"][processes.rank] is not None:
            self._dataeff_rows.choose(np.array(state["prompts"][processes.rank]))
        # Completions of a half-used batch are in the table of the run that made it. TRL would replace the table with
        # an empty one. `_generate_and_score_completions` turns this on again
        self._dataeff_run.logs_completions_again = self.log_completions
        self.log_completions = False

    def _dataeff_continue_interval(self) -> None:
        """
        Name the run in its folder, and continue the logging interval of a checkpoint, as the Trainer has begun one.
        """
        self._dataeff_begin_late_run()
        run = self._dataeff_run
        checkpoint = run.resumed.checkpoint
        if checkpoint is not None and not run.was_read and self._dataeff_collector is not None:
            raise UserError(
                f"The state of the run in {checkpoint} was not read: {type(self).__name__} has a "
                "`_load_optimizer_and_scheduler` that does not call `super()`. Let it call it, or start a new run "
                "with this checkpoint's weights as the model."
            )
        if checkpoint is not None and self._dataeff_processes.is_main:
            schedule = SchedulerType(self.args.lr_scheduler_type).value
            announce_continuation(checkpoint, self.state, self.lr_scheduler, schedule)
        observer = cast(Observer, self._dataeff_observer)
        observer.begin_logs(self.state.global_step, str(self.model.config._name_or_path))
        if run.loop is not None:
            trl_state.continue_interval(self, run.loop, self._dataeff_processes)
            trl_state.continue_sampler(self)
            run.loop = None
