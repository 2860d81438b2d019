"""`DataEfficientGRPOTrainer`: translates calls of TRL's `GRPOTrainer`, and delegates. No method of TRL is copied."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from accelerate.utils import is_peft_model
from datasets import Dataset
from torch.utils._pytree import tree_flatten, tree_map
from transformers import PreTrainedModel
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput
from trl import GRPOTrainer

import trl_dataeff.compat as compat
import trl_dataeff.validation as validation
from trl_dataeff.callback import DataEfficientCallback
from trl_dataeff.checkpoint.folder import own_folder
from trl_dataeff.checkpoint.resume import Run, complete_checkpoint, failure_notes, remove_older, resolve_run
from trl_dataeff.checkpoint.state import check_agreement, check_fits, load_run, save_run
from trl_dataeff.collector import (
    GenerationBatch,
    RolloutCollector,
    check_same_settings,
    hash_same_prompts,
    make_collector,
    plan_runs,
)
from trl_dataeff.config import DataEfficientGRPOConfig, own_fields, with_own_fields
from trl_dataeff.difficulty.embedding import embed_for
from trl_dataeff.generation import trl_state
from trl_dataeff.generation.pregenerated import PregeneratedGroups
from trl_dataeff.generation.recorder import GeneratedRound, RoundRecorder, generate_rollouts
from trl_dataeff.rollouts.distributed import Processes, all_gather
from trl_dataeff.rollouts.group import RolloutGroup
from trl_dataeff.selection import Selector
from trl_dataeff.signals import StopSignals, exception_of
from trl_dataeff.tracking.card import complete_card
from trl_dataeff.tracking.metrics import (
    StepTimer,
    discarding_logs_of_rounds,
    record,
    record_selector,
    replace_last,
    scale_last,
)
from trl_dataeff.update import sampler
from trl_dataeff.update.compaction import (
    FACTOR,
    FIRST_ROWS,
    PROMPT_OF_ROW,
    TOKEN_MEANS,
    TOKEN_MEANS_OF_RATIOS,
    WEIGHT,
    UpdateCompactor,
    exact_parts,
    rows_for_old_logps,
    shared_prompts_of,
    uses_checkpointing,
)
from trl_dataeff.update.correction import LossCorrection, LossOptions
from trl_dataeff.update.logprobs import (
    compute_leftover_logps,
    evaluating,
    forward_of,
    group_logps,
    logps_of_trls_pass,
)
from trl_dataeff.update.padding import forward_by_length
from trl_dataeff.update.parts import Parts
from trl_dataeff.update.prompts import completions_alone
from trl_dataeff.update.rounding import computing_type, embeddings_rounded_otherwise
from trl_dataeff.utils import UserError


compat.check(GRPOTrainer)
_SIGNATURE = inspect.signature(GRPOTrainer.__init__)
#: What TRL's `_get_per_token_logps_and_entropies` returns
_ForwardOutputs: TypeAlias = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class DataEfficientGRPOTrainer(GRPOTrainer):
    """
    [`~trl.GRPOTrainer`] with an update that computes only what has a gradient. With the fields `selection` and
    `replay`, it also chooses the prompts, and trains again on recent groups. Takes the same arguments.

    Overridden methods, and why:

    - `_generate_and_score_completions`: in training, rows come from the collector; TRL's method runs once, on what is
      trained on. Afterwards the list of rows that came in holds those, for subclasses that read it after `super()`.
      Without selection, replay and several rounds, rows that a subclass has changed are trained on as they are.
    - `_generate`, `_calculate_rewards`: record what is generated; return groups that were generated before TRL's
      method runs.
    - `_prepare_inputs`: leaves out of the micro-batches what has no gradient. The list of rows that came in holds
      those of the present generation batch afterwards.
    - `_compute_loss`, `_get_per_token_logps_and_entropies`: correct the loss of earlier rollouts; compute completions
      alone. TRL's loss calls the second of these for its log-probs, and only then reads the advantages and old
      log-probs of its micro-batch. So that is where they are rewritten: within the loss, and no line of it is copied.
    - `train`: checks the checkpoint to resume from, begins a run of the collector, and handles signals and failures.
    - `_save_checkpoint`, `_load_optimizer_and_scheduler`: save and load the state of the run, with a manifest.
    - `create_model_card`: adds what happened in the run.
    - `create_scheduler`: with FSDP2 or `bf16_full_eval` a run begins here, once the policy is on its device and can
      embed prompts.
    - `_run_epoch`: a run that is resumed from its last checkpoint, or that a signal has stopped, has nothing left to
      do.

    Args:
        model, reward_funcs, args, train_dataset, ...: see [`~trl.GRPOTrainer`]. `args` may be a
            [`DataEfficientGRPOConfig`] or a [`~trl.GRPOConfig`], which is copied and gets the fields of the former.
            The fields of this package are read when the trainer is made, but for `save_on_signal`.
        selector ([`Selector`], *optional*): selects prompts, in place of the one that `args.selection` names.

    Attributes:
        collector ([`RolloutCollector`]): makes the generation batches, and holds the state of the run.
        selector ([`Selector`]): selects the prompts; not called in a run that selects none.
        stopped_by (`signal.Signals` or `None`): the signal that ended the last call of `train` early, if one did.

    Example:
    ```python
    dataset = load_dataset("trl-lib/DeepMath-103K", split="train")
    trainer = DataEfficientGRPOTrainer("Qwen/Qwen2.5-0.5B-Instruct", accuracy_reward, train_dataset=dataset)
    trainer.train()
    ```
    """

    # These are wider in TRL
    args: DataEfficientGRPOConfig
    model: PreTrainedModel
    reward_funcs: list[Any]
    chat_template_kwargs: dict[str, Any]
    _buffered_inputs: list[dict[str, Any]] | None  # type: ignore[assignment]  # TRL's is inferred as `None`
    _tag_names = ["trl", "grpo", "trl-dataeff"]  # noqa: RUF012

    # What TRL's generation is to do now: record a round, return groups that exist already, or, `None`, only generate
    _dataeff_generation_mode: RoundRecorder | PregeneratedGroups | None = None
    _dataeff_old_logps_rows: torch.Tensor | None = None  # rows of TRL's pass for old log-probs; `None`: all
    _dataeff_compacts_pass: bool = False  # while TRL's pass over a batch runs, without images
    _dataeff_leaves_out_next_pass: bool = False  # the next pass without gradient, for old log-probs, is left out
    # `None` until `__init__` has run, so that a subclass may call TRL's methods before
    _dataeff_compactor: UpdateCompactor | None = None
    _dataeff_correction: LossCorrection | None = None

    def __init__(self, *args: Any, selector: Selector | None = None, **kwargs: Any):
        call = _SIGNATURE.bind(self, *args, **kwargs)
        given = call.arguments
        config = with_own_fields(given.get("args"), given["model"])
        given["args"] = config
        self._dataeff_fields = own_fields(config)
        validation.resolve_selector(config, selector)
        validation.check_dataset(config, given.get("train_dataset"), given.get("environment_factory"), selector)
        super().__init__(*call.args[1:], **call.kwargs)

        processes = Processes.of(self.accelerator)
        self._dataeff_processes = processes
        self._dataeff_map_style = given.get("train_dataset") is not None and isinstance(self.train_dataset, Dataset)
        corrects_loss = compat.corrects_loss(type(self), DataEfficientGRPOTrainer)
        plan = plan_runs(
            self,
            selector,
            is_map_style=self._dataeff_map_style,
            corrects_loss=corrects_loss,
            replaces_generation=compat.replaces_generation(type(self), DataEfficientGRPOTrainer),
        )
        self._dataeff_selector = plan.selector  # as it was given; the collector calls it as a `CheckedSelector`
        self._dataeff_collector = make_collector(self, plan, processes)
        self._dataeff_generates_before_trl = plan.generates_before_trl
        self._dataeff_can_take_trls_rows = plan.can_take_trls_rows
        self._dataeff_takes_trls_rows = False  # in this run
        self._dataeff_trls_collator = self.data_collator
        self._dataeff_warned_of_rows = False
        self._dataeff_rows_of_dataloader: list[dict[str, Any]] = []  # of a subclass that may change them
        # Of this process in the present generation batch, if the collector has chosen them
        self._dataeff_trained_rows: list[dict[str, Any]] | None = None
        self._dataeff_trained_prompts: list[int] | None = None
        if plan.compacts:
            policy = self._dataeff_policy(self.model)
            self._dataeff_compactor = UpdateCompactor(
                accumulated=config.gradient_accumulation_steps,
                processes=processes,
                multiple=cast(int | None, self.pad_to_multiple_of),
                computed_in=computing_type(self, policy),
                model_name=type(policy).__name__,
            )
        self._dataeff_correction = LossCorrection.of(
            self, config, processes, replays=plan.replays, max_rounds=plan.max_rounds
        )
        self._dataeff_advised_on_checkpointing = False
        self._dataeff_compacted_for: str | None = None  # the loss type of the present generation batch
        self._dataeff_can_score_completions: bool | None = None  # of the model, which does not change in a run
        self._dataeff_timer = StepTimer()
        self._dataeff_run = Run()
        self._dataeff_logs_completions_again = False
        self._dataeff_begins_late = False  # whether `create_scheduler` has yet to begin the run
        # Ids of the rows that `_dataeff_rows` read last: a failure's note names them
        self._dataeff_prompts_at_work: list[int] = []
        self._dataeff_rows_read: dict[int, dict[str, Any]] = {}  # rows of the present generation batch
        self._dataeff_loop: dict[str, Any] | None = None  # of the training loop, as a checkpoint has it
        self._dataeff_callback = DataEfficientCallback(
            self._dataeff_collector,
            self._dataeff_timer,
            self._metrics["train"],
            on_begin=self._dataeff_continue_interval,
            on_gradient=self._dataeff_correction.check_applied,
        )
        self.callback_handler.callbacks.insert(1, self._dataeff_callback)  # see its class

    __init__.__signature__ = _SIGNATURE.replace(  # type: ignore[attr-defined]
        parameters=[*_SIGNATURE.parameters.values(), inspect.signature(__init__).parameters["selector"]]
    )

    # A run

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        with own_folder(self.args.output_dir, self._dataeff_processes):
            output = self._dataeff_train(resume_from_checkpoint, *args, **kwargs)
        stopped_by = self._dataeff_callback.stopped_by
        if stopped_by is not None:
            raise exception_of(stopped_by)
        return output

    def _dataeff_train(self, resume_from_checkpoint: str | bool | None, *args: Any, **kwargs: Any) -> TrainOutput:
        config = self.args
        check_same_settings(self, self._dataeff_selector, resume_from_checkpoint, self._dataeff_processes)
        self._dataeff_run = resolve_run(
            resume_from_checkpoint, config.output_dir, self._dataeff_processes, config.should_save
        )
        signals = StopSignals(self._dataeff_processes) if config.save_on_signal else None
        self._dataeff_callback.begin(self._dataeff_run, signals)
        self._dataeff_prompts_at_work.clear()
        # Embedding needs the policy on its device, and with FSDP2 sharded; here the Trainer's `train` does both
        moves_late = config.bf16_full_eval or config.fp16_full_eval
        shards_late = self.is_fsdp_enabled and self.accelerator.is_fsdp2
        self._dataeff_begins_late = (moves_late or shards_late) and not self.is_deepspeed_enabled
        # The callback changes these when it stops a run; they are restored afterwards
        changed_by_callback = {
            "load_best_model_at_end": config.load_best_model_at_end,
            "save_total_limit": config.save_total_limit,
        }
        notes = failure_notes(self._dataeff_run, self._dataeff_prompts_at_work, self._dataeff_collector.flush_logs)
        with notes, signals or nullcontext(), trl_state.temporarily(config, **changed_by_callback):
            if not self._dataeff_begins_late:
                self._dataeff_begin_run()
            return super().train(self._dataeff_run.checkpoint, *args, **kwargs)

    def _dataeff_begin_run(self) -> None:
        """State of a run. A second call of `train` starts again, with the dataset that is there then."""
        config = self.args
        validation.check_unchanged(self._dataeff_fields, own_fields(config))
        dataset = cast(Dataset, self.train_dataset)  # any other is read by TRL alone
        self._dataeff_begins_late = False
        self._dataeff_loop = None
        self._dataeff_trained_rows = None
        self._dataeff_trained_prompts = None
        trl_state.forget_last_run(self)
        cast(LossCorrection, self._dataeff_correction).begin()
        num_prompts = 0
        dataset_hash = ""
        if self._dataeff_map_style:
            validation.check_dataset(config, dataset, self.environment_factories, self._dataeff_selector)
            validation.check_size(config, dataset)
            num_prompts = len(dataset)
            dataset_hash = hash_same_prompts(dataset, self._dataeff_processes)
        checkpoint = self._dataeff_run.checkpoint
        if checkpoint is not None:
            check_fits(
                Path(checkpoint),
                self._dataeff_collector.settings,
                num_prompts,
                dataset_hash,
                self._dataeff_processes.is_main,
            )
        row_hooks = compat.row_hooks(type(self), DataEfficientGRPOTrainer)
        if self.data_collator is not self._dataeff_trls_collator:
            row_hooks.append("data_collator")
        self._dataeff_takes_trls_rows = self._dataeff_can_take_trls_rows and bool(row_hooks)
        if self._dataeff_collector.selector is not None and not self._dataeff_can_take_trls_rows:
            validation.warn_of_unused_rows(row_hooks, self._dataeff_processes)
        self._dataeff_rows_dataset = dataset
        if self._dataeff_map_style and config.remove_unused_columns:
            self._dataeff_rows_dataset = self._remove_unused_columns(dataset, description="training")
        is_resumed = checkpoint is not None
        embed = partial(
            embed_for,
            self,
            dataset,
            config.prompt_embedding,
            dataset_hash=dataset_hash,
            resumed=is_resumed,
        )
        self._dataeff_collector.bind(num_prompts, embed=embed, dataset_hash=dataset_hash, resumed=is_resumed)

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        scheduler = super().create_scheduler(*args, **kwargs)
        self._dataeff_begin_late_run()
        return scheduler

    def _dataeff_begin_late_run(self) -> None:
        """Begin the run if that is due. A subclass may make its scheduler without calling `create_scheduler`."""
        if self._dataeff_begins_late:
            self._dataeff_begin_run()

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step < self.state.max_steps and self._dataeff_callback.stopped_by is None:
            return super()._run_epoch(*args, **kwargs)
        self.control.should_training_stop = True  # the Trainer would check that after one more step

    # The public names. No method here reads them, so that a subclass may have its own

    @property
    def collector(self) -> RolloutCollector:
        return self._dataeff_collector

    @property
    def selector(self) -> Selector:
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
        self._dataeff_collector.drop_rollouts()

    # Generating

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self._dataeff_logs_completions_again:  # the half-used batch of a checkpoint has ended
            self.log_completions = True
            self._dataeff_logs_completions_again = False
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        self._dataeff_read_options()
        self._dataeff_rows_read.clear()
        self._dataeff_trained_rows = None
        self._dataeff_trained_prompts = None
        if self._dataeff_takes_trls_rows or self._dataeff_changed_by_subclass(inputs):
            return self._dataeff_train_on_trls_rows(inputs)
        if self._dataeff_generates_before_trl:
            return self._dataeff_train_on_pregenerated(inputs)
        return self._dataeff_generate_within_trls_pass(inputs)

    def _dataeff_read_options(self) -> None:
        """Read what decides rewards and advantages in TRL's pass. A callback may have changed it."""
        validation.check_unchanged(self._dataeff_fields, own_fields(self.args))
        self._dataeff_collector.read_options(
            self.reward_funcs,
            weights=self.reward_weights.float().cpu().numpy(),
            scale_rewards=self.scale_rewards,
            aggregation=self.multi_objective_aggregation,
            masks_truncated=self.mask_truncated_completions,
        )
        cast(LossCorrection, self._dataeff_correction).sampler_ratio = sampler.SamplerRatio.of(self)

    def _dataeff_changed_by_subclass(self, inputs: list[dict[str, Any]]) -> bool:
        """
        Whether rows are to be trained on as they came in, because a subclass has changed them before this method. A
        collective if a subclass has a method of this name.
        """
        overrides_generation = compat.overrides(type(self), "_generate_and_score_completions")
        if self._dataeff_collector.selector is None or not overrides_generation:
            return False
        values, structure = tree_flatten(inputs)
        values_before, structure_before = tree_flatten(self._dataeff_rows_of_dataloader)
        is_changed = structure != structure_before
        is_changed |= any(value is not before for value, before in zip(values, values_before, strict=False))
        if self._dataeff_can_take_trls_rows:
            changed = torch.tensor([is_changed], device=self._dataeff_processes.device)
            return bool(self._dataeff_processes.gather(changed).any())
        if is_changed and not self._dataeff_warned_of_rows:
            self._dataeff_warned_of_rows = True
            validation.warn_of_unused_rows(["_generate_and_score_completions"], self._dataeff_processes)
        return False

    def _dataeff_train_on_trls_rows(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Train on rows that TRL's dataloader, or a subclass, has chosen or changed. Their prompts are not known."""
        with trl_state.temporarily(self._dataeff_collector, generates_before_trl=False):
            return self._dataeff_generate_within_trls_pass(rows, takes_rows=True)

    def _dataeff_generate_within_trls_pass(
        self, inputs: list[dict[str, Any]], takes_rows: bool = False
    ) -> dict[str, Any]:
        """
        All groups of a generation batch are generated within TRL's pass, and trained on.

        Args:
            inputs (`list[dict]`): rows of TRL's dataloader, which become those that are trained on.
            takes_rows (`bool`, *optional*, defaults to `False`): whether they are trained on as they are, in the place
                of the selector's prompts.
        """
        takes_rows = takes_rows or self._dataeff_collector.selector is None
        tensors: dict[str, Any] = {}
        make_batch = super()._generate_and_score_completions

        def generate_groups(ids: np.ndarray) -> GeneratedRound:
            # One round is enough: nothing is replayed, no group is replaced, and no references are generated, because
            # any of these makes `plan_runs` have groups generated before TRL's pass
            assert not tensors, "a second round would replace the rows of the first"
            if not takes_rows:
                self._dataeff_choose_rows(inputs, self._dataeff_processes.share(ids))
            with (
                self._dataeff_recorded() as recorder,
                trl_state.temporarily(self, _dataeff_compacts_pass=not self._is_vlm),
            ):
                tensors.update(make_batch(inputs))
            return replace(recorder.complete(self._dataeff_processes), is_as_proposed=not takes_rows)

        with self._dataeff_timer.selection():
            batch = self._dataeff_collector.collect(generate_groups, self.state.global_step)
            self._dataeff_log_batch(batch)
        return tensors

    def _dataeff_train_on_pregenerated(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """
        Groups are generated first; those to train on then pass through TRL's method as if they were generated there.

        Args:
            inputs (`list[dict]`): rows of TRL's dataloader. They become those that are trained on, which a subclass
                may read after `super()`.
        """
        collector = self._dataeff_collector
        metrics = self._metrics["train"]
        with self._dataeff_timer.selection(), discarding_logs_of_rounds(metrics, self.state):
            batch = collector.collect(self._dataeff_generate_round, self.state.global_step)
            own = collector.groups_of_this_process(batch)
            groups = [member.group for member in own]
            self._dataeff_choose_rows(inputs, np.array([group.prompt_id for group in groups]))
        # Of all processes, as TRL's `_calculate_rewards` returns them
        rewards = np.concatenate([group.rewards for group in batch.trained])
        pregenerated = PregeneratedGroups(groups, rewards)
        for column, values in pregenerated.logged.items():
            self._log_completion_extra(column, values)
        old_logps_rows = None
        leaves_out_pass = self._dataeff_leaves_out_pass_for_old_logps()
        if self._dataeff_knows_zero_advantages() and not leaves_out_pass:
            group_size = cast(int, self.num_generations)
            old_logps_rows = rows_for_old_logps(rewards, self.reward_weights, group_size, self._dataeff_processes)
        # A vision-language model's images are not by row
        compacts = {"_dataeff_compacts_pass": not self._is_vlm}
        mode = {"_dataeff_generation_mode": pregenerated, "_dataeff_old_logps_rows": old_logps_rows, **compacts}
        with trl_state.temporarily(self, **mode, _dataeff_leaves_out_next_pass=leaves_out_pass):
            tensors = super()._generate_and_score_completions(inputs)
        if leaves_out_pass:
            del tensors["old_per_token_logps"], tensors["importance_sampling_ratio"]
            for name in sampler.METRICS:
                metrics[name].pop()
        # Before the loss, while the policy is still the one that sampled them
        with trl_state.temporarily(self, **compacts):
            compute_leftover_logps(
                batch.leftover_now, self._dataeff_logps, padding_group=groups[0], processes=self._dataeff_processes
            )
        tensors["advantages"] = collector.normalized_over_generated(tensors["advantages"], batch)
        # `any_stale` is about the groups of all processes, because collectives depend on it
        corrected_metrics = cast(LossCorrection, self._dataeff_correction).prepare(
            tensors, own, any_stale=bool(batch.trained_stale), rows_skipped=old_logps_rows is not None
        )
        replace_last(metrics, {name: [value] for name, value in corrected_metrics.items()})
        self._dataeff_log_batch(batch)
        return tensors

    def _dataeff_leaves_out_pass_for_old_logps(self) -> bool:
        """Whether TRL makes a pass for old log-probs for vLLM's sake alone, which the loss computes as well."""
        if self._dataeff_compactor is None or self._is_vlm:
            return False
        corrects_sampler = self.use_vllm and self.vllm_importance_sampling_correction
        return corrects_sampler and sampler.is_aligned(self)

    def _dataeff_knows_zero_advantages(self) -> bool:
        """
        Whether advantages of 0 are known before TRL computes them, so that their rows can skip the pass for old
        log-probs: rewards are added up, and no subclass changes them. Not with images, whose tensors are not by row:
        the pass cannot be made over some rows alone.
        """
        if self._dataeff_compactor is None or not self._dataeff_exact_parts().zero_rows or self._is_vlm:
            return False
        adds_rewards = self.multi_objective_aggregation == "sum_then_normalize"
        return adds_rewards and not compat.overrides_rewards(type(self))

    def _dataeff_generate_round(self, ids: np.ndarray) -> GeneratedRound:
        """Generate and score G completions of prompts, each process an equal part of them, outside of TRL's pass."""
        rows = self._dataeff_rows(self._dataeff_processes.share(ids))
        with self._dataeff_recorded() as recorder:
            rollouts = generate_rollouts(self, rows)
        # TRL's pass comes afterwards, and reads whether the policy trains. A reward function or a `rollout_func` that
        # asks the policy may have left it in evaluation mode
        self.model.train()
        return recorder.complete(self._dataeff_processes, rollouts)

    @contextmanager
    def _dataeff_recorded(self) -> Iterator[RoundRecorder]:
        """What TRL generates within this context is recorded."""
        recorder = RoundRecorder(end_tokens={*self.eos_token_ids, self._tokenizer.pad_token_id})
        with trl_state.temporarily(self, _dataeff_generation_mode=recorder):
            yield recorder
        self._dataeff_timer.add_generation(recorder.seconds)

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        if self._dataeff_generation_mode is None:
            return super()._generate(prompts)
        return self._dataeff_generation_mode.generate(self, super()._generate, prompts)

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: list[Any], completions: list[Any], completion_ids_list: list[Any]
    ) -> torch.Tensor:
        calculate: Callable[..., torch.Tensor] = super()._calculate_rewards
        if self._dataeff_generation_mode is None:
            return calculate(inputs, prompts, completions, completion_ids_list)
        rewards = self._dataeff_generation_mode.calculate_rewards(
            calculate, inputs, prompts, completions, completion_ids_list
        )
        return rewards.to(self.accelerator.device)

    def _dataeff_rows(self, ids: np.ndarray) -> list[dict[str, Any]]:
        """
        The dataset's rows for prompts `ids`, G of each, as TRL's dataloader would deliver them. A row is read once in
        a generation batch, and each completion gets its own lists and dictionaries.
        """
        self._dataeff_prompts_at_work[:] = ids.tolist()  # in place: the notes of a failure hold this list
        missing = [i for i in self._dataeff_prompts_at_work if i not in self._dataeff_rows_read]
        if missing:
            self._dataeff_rows_read.update(zip(missing, self._dataeff_rows_dataset.__getitems__(missing), strict=True))
        rows = []
        for prompt_id in self._dataeff_prompts_at_work:
            row = self._dataeff_rows_read[prompt_id]
            rows += [_copy_of(row) for _ in range(cast(int, self.num_generations))]
        return rows

    def _dataeff_choose_rows(self, inputs: list[dict[str, Any]], ids: np.ndarray) -> None:
        """Replace the rows of TRL's dataloader by those of prompts `ids`, on which the generation batch is trained."""
        inputs[:] = self._dataeff_rows(ids)
        self._dataeff_trained_rows = list(inputs)
        self._dataeff_trained_prompts = ids.tolist()

    # The loss

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        is_training = self.model.training
        if is_training and compat.overrides(type(self), "_generate_and_score_completions"):
            self._dataeff_rows_of_dataloader = [_copy_of(row) for row in generation_batch]
        inputs: dict[str, Any] = super()._prepare_inputs(generation_batch)
        # TRL's dataloader delivers the rows of a generation batch again for each of its micro-batches
        rows = self._dataeff_trained_rows
        if is_training and rows is not None and compat.overrides(type(self), "_prepare_inputs"):
            generation_batch[:] = [_copy_of(row) for row in rows]
        if self._dataeff_compactor is None or not is_training:
            return inputs
        self.model.train()  # a reward function that asks the policy may have left it in evaluation mode
        return self._dataeff_compacted(self._dataeff_compactor, inputs)

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        if self._dataeff_correction is None:
            return super()._compute_loss(model, inputs)
        factor = inputs.get(FACTOR)
        # It is `None` for the half-used batch of a checkpoint
        has_changed = self._dataeff_compacted_for not in (None, self.loss_type)
        if factor is not None and has_changed:
            raise RuntimeError(
                f"`loss_type` is {self.loss_type!r}, and was {self._dataeff_compacted_for!r} when the generation "
                "batch began, by which the rows that are left out of the update count in the loss. Change it where a "
                "generation batch begins (every `steps_per_generation` x `num_iterations` micro-batches), or set "
                "`compact_update=False`."
            )
        with (
            self._dataeff_correction.micro_batch(inputs, LossOptions.of(self)) as micro_batch,
            self._dataeff_compact_forward(model, inputs),
        ):
            # Below TRL 1.16, Liger makes the loss call this method again, within
            for key in (FACTOR, FIRST_ROWS, PROMPT_OF_ROW, WEIGHT):
                micro_batch.pop(key, None)
            loss: torch.Tensor = super()._compute_loss(model, micro_batch)
        if factor is None:
            return loss
        names = [*TOKEN_MEANS]
        if self.importance_sampling_level == "token":
            names += TOKEN_MEANS_OF_RATIOS
        scale_last(self._metrics["train"], names, float(inputs[WEIGHT]))
        return loss * factor

    def _dataeff_compacted(self, compactor: UpdateCompactor, inputs: dict[str, Any]) -> dict[str, Any]:
        """The micro-batch without what does not change the gradient. All micro-batches of a generation batch are
        compacted before the first of them is given out, so that a subclass which changes a micro-batch in its loss
        meets each row once; later ones, and those of a checkpoint, are so already.
        """
        is_first = self._buffered_inputs is not None and inputs is self._buffered_inputs[0]
        if not is_first or FACTOR in inputs:
            return inputs
        batches = cast(list[dict[str, Any]], self._buffered_inputs)
        compacted = compactor.compact(
            batches, self._dataeff_exact_parts(), self.loss_type, self._dataeff_logps_of_micro_batch
        )
        if self.args.gradient_checkpointing and not self._dataeff_advised_on_checkpointing:
            parts = self._dataeff_exact_parts(gradient_checkpointing=False)
            self._dataeff_advised_on_checkpointing = compactor.advise_on_checkpointing(batches, parts, compacted)
        self._buffered_inputs = compacted.batches
        self._dataeff_compacted_for = self.loss_type
        metrics = {
            "update/tokens": compacted.tokens,
            "update/tokens_saved": 1 - compacted.tokens / compacted.tokens_of_trl,
        }
        record(self._metrics["train"], metrics)
        return compacted.batches[0]

    def _dataeff_exact_parts(self, gradient_checkpointing: bool | None = None) -> Parts:
        """
        What the update may leave out now; a callback may change the loss.

        Args:
            gradient_checkpointing (`bool`, *optional*): whether layers are computed again in the backward pass. By
                default, what holds for the trainer now.
        """
        policy = self._dataeff_policy(self.model)
        if gradient_checkpointing is None:
            gradient_checkpointing = uses_checkpointing(self, policy)
        has_dropout = validation.has_dropout(policy)
        return exact_parts(self, policy, has_dropout=has_dropout, gradient_checkpointing=gradient_checkpointing)

    def _dataeff_policy(self, model: torch.nn.Module) -> torch.nn.Module:
        """A model without the wrapping of accelerate and PEFT."""
        unwrapped: torch.nn.Module = self.accelerator.unwrap_model(model)
        return cast(Any, unwrapped).get_base_model() if is_peft_model(unwrapped) else unwrapped

    def _dataeff_compact_forward(self, model: torch.nn.Module, inputs: dict[str, Any]) -> AbstractContextManager[None]:
        """Within this context, the forward pass over a compacted micro-batch computes completions alone."""
        if FACTOR not in inputs or self._dataeff_compactor is None:
            return nullcontext()
        if self._dataeff_can_score_completions is None:
            self._dataeff_can_score_completions = self._dataeff_exact_parts().prompt_scores
        if not (self._dataeff_can_score_completions and self._dataeff_compactor.kept.prompt_scores):
            return nullcontext()
        width = inputs["completion_ids"].size(1)
        return completions_alone(cast(PreTrainedModel, self._dataeff_policy(model)), width, shared_prompts_of(inputs))

    def _dataeff_logps_of_micro_batch(
        self, inputs: dict[str, Any], *, scores_completions: bool = False, rounds_otherwise: bool = False
    ) -> torch.Tensor:
        """
        Log-probs `(rows, T)` of a micro-batch under the policy, without gradient and dropout. For the arguments, see
        [`LogprobsOf`].
        """
        policy = cast(PreTrainedModel, self._dataeff_policy(self.model))
        input_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        width = inputs["completion_ids"].size(1)
        forward: AbstractContextManager[None] = nullcontext()
        if scores_completions:
            forward = completions_alone(policy, width, shared_prompts_of(inputs))
        elif rounds_otherwise:
            forward = embeddings_rounded_otherwise(policy, computing_type(self, policy))
        with torch.no_grad(), evaluating(self.model), forward:
            outputs = super()._get_per_token_logps_and_entropies(self.model, input_ids, attention_mask, width)
        logps: torch.Tensor = outputs[0]
        return logps

    def _get_per_token_logps_and_entropies(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> _ForwardOutputs:
        forward: Callable[..., _ForwardOutputs] = partial(super()._get_per_token_logps_and_entropies, model)
        if self._dataeff_leaves_out_next_pass:
            self._dataeff_leaves_out_next_pass = False
            return torch.zeros(args[0].size(0), args[2], dtype=torch.float32, device=args[0].device), None, None
        # A subclass may have use for more than log-probs
        wants_logps_alone = not (kwargs.get("compute_entropy") or kwargs.get("compute_aux_loss"))
        is_pass = self._dataeff_compacts_pass and wants_logps_alone and not torch.is_grad_enabled()
        if self._dataeff_compactor is not None and is_pass:
            return self._dataeff_forward_by_length(forward, self._dataeff_compactor, model, *args, **kwargs)
        outputs = forward(*args, **kwargs)
        # Rewrites the micro-batch that is in the loss, see `_compute_loss` in the docstring of the class. Outside of a
        # loss it does nothing
        if self._dataeff_correction is not None:
            metrics = self._dataeff_correction.on_logps(outputs[0])
            for name in sampler.METRICS:
                if name in metrics:
                    self._metrics["train"][name].append(metrics.pop(name))
            record(self._metrics["train"], metrics)
        return outputs

    def _dataeff_forward_by_length(
        self,
        forward: Callable[..., _ForwardOutputs],
        compactor: UpdateCompactor,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> _ForwardOutputs:
        """
        TRL's forward pass without gradient, over chunks of rows of similar length, if what is left out was checked.
        """
        parts = compactor.checked(self._dataeff_exact_parts())

        def forward_of_chunk(ids: torch.Tensor, mask: torch.Tensor, width: int, **options: Any) -> _ForwardOutputs:
            if not parts.prompt_scores:
                return forward(ids, mask, width, **options)
            with completions_alone(cast(PreTrainedModel, self._dataeff_policy(model)), width):
                return forward(ids, mask, width, **options)

        return forward_by_length(
            forward_of_chunk,
            input_ids,
            attention_mask,
            logits_to_keep,
            batch_size=batch_size or len(input_ids),
            rows=self._dataeff_old_logps_rows,
            cuts_left=parts.left_padding,
            cuts_right=parts.right_padding,
            multiple=compactor.multiple,
            **kwargs,
        )

    def _dataeff_logps(self, group: RolloutGroup) -> list[np.ndarray]:
        """Log-probs of a group's completions under the present policy, `(T_i,)` each."""
        if not self._is_vlm:
            return group_logps(
                group, partial(forward_of, self), self._tokenizer.pad_token_id, self._dataeff_processes.device
            )
        rows = self._dataeff_rows(np.array([group.prompt_id]))
        make_batch = partial(super()._generate_and_score_completions, rows)
        return logps_of_trls_pass(self, group, make_batch, self._dataeff_processes.world_size)

    # Logs and checkpoints

    def _dataeff_log_batch(self, batch: GenerationBatch) -> None:
        metrics = self._metrics["train"]
        replace_last(metrics, batch.trl_metrics)
        any_effective = any(group.effective for group in batch.generated)
        progress = self.state.global_step / self.state.max_steps
        self._dataeff_collector.reward_checks.check_gradient(any_effective, progress)
        record(metrics, batch.metrics)
        record_selector(metrics, batch.selector_metrics)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        config = self.args
        collector = self._dataeff_collector
        step = self.state.global_step
        checkpoint = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        is_resumable = not config.save_only_model
        state: dict[str, Any] = {}
        if is_resumable:
            state = {"collector": collector.state_dict(), "loop": trl_state.loop_state(self), **collector.about()}
            state["prompts"] = all_gather(self._dataeff_trained_prompts)
            state["update"] = None if self._dataeff_compactor is None else self._dataeff_compactor.state_dict()
            check_agreement(state["collector"], self._dataeff_processes, collector.own_state())
        writing = complete_checkpoint(
            self._dataeff_run, checkpoint, step, is_resumable, config.should_save, self._dataeff_processes
        )
        with writing, trl_state.temporarily(config, save_total_limit=None, push_to_hub=False):
            if is_resumable:
                unused_batch = trl_state.unused_batch(self)
                save_run(checkpoint, state, unused_batch, self._dataeff_processes.rank, config.should_save)
            super()._save_checkpoint(model, trial)
            collector.flush_logs()  # before the checkpoint is complete: a run that resumes from it has these rows
        if config.push_to_hub:
            self._push_from_checkpoint(str(checkpoint))
        if config.should_save:
            remove_older(checkpoint, config.save_total_limit, [self.state.best_model_checkpoint])

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        super().create_model_card(*args, **kwargs)
        logs = self._dataeff_collector.logs
        if logs is not None and logs.about:
            complete_card(Path(self.args.output_dir, "README.md"), logs.about, self.state.log_history)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        self._dataeff_begin_late_run()
        state, unused_batch = load_run(Path(checkpoint), self._dataeff_processes)
        self._dataeff_collector.load_state_dict(state["collector"])
        checks = state.get("update")  # a checkpoint of an earlier version has none
        if self._dataeff_compactor is not None and checks is not None:
            self._dataeff_compactor.load_state_dict(checks)
        self._dataeff_loop = state["loop"]
        self._buffered_inputs = unused_batch
        if unused_batch is None:
            # Between two generation batches TRL begins one, however it is split into micro-batches now
            self._step = 0
        else:
            self._step = state["loop"]["micro_step"]
            prompts = state.get("prompts")  # a checkpoint of an earlier version has none
            if prompts is not None and prompts[self._dataeff_processes.rank] is not None:
                self._dataeff_choose_rows([], np.array(prompts[self._dataeff_processes.rank]))
            # Completions of a half-used batch are in the table of the run that made it. TRL would replace the table
            # with an empty one. `_generate_and_score_completions` turns this on again
            self._dataeff_logs_completions_again = self.log_completions
            self.log_completions = False

    def _dataeff_continue_interval(self) -> None:
        """
        Name the run in its folder, and continue the logging interval of a checkpoint, as the Trainer has begun one.
        """
        self._dataeff_begin_late_run()
        checkpoint = self._dataeff_run.checkpoint
        if checkpoint is not None and self._dataeff_loop is None:
            raise UserError(
                f"The state of the run in {checkpoint} was not read: {type(self).__name__} has a "
                "`_load_optimizer_and_scheduler` that does not call `super()`. Let it call it, or start a new run "
                "with this checkpoint's weights as the model."
            )
        self._dataeff_collector.begin_logs(self.state.global_step, str(self.model.config._name_or_path))
        if self._dataeff_loop is not None:
            trl_state.continue_interval(self, self._dataeff_loop, self._dataeff_processes)
            self._dataeff_loop = None


def _copy_of(row: dict[str, Any]) -> dict[str, Any]:
    """The row with its own lists and dictionaries, and the same values in them."""
    return tree_map(lambda value: value, row)
