"""`DataEfficientGRPOTrainer`: translates calls of TRL's `GRPOTrainer`, and delegates. No method of TRL is copied."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from datasets import Dataset
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput
from trl import GRPOTrainer

import trl_dataeff.compat as compat
import trl_dataeff.validation as validation
from trl_dataeff.callback import DataEfficientCallback
from trl_dataeff.checkpoint.resume import Run, complete_checkpoint, failure_notes, remove_older, resolve_run
from trl_dataeff.checkpoint.state import check_agreement, check_fits, load_run, save_run
from trl_dataeff.collector import GenerationBatch, hash_same_prompts, make_collector, plan_runs
from trl_dataeff.config import DataEfficientGRPOConfig, own_copy
from trl_dataeff.difficulty.embedding import embed_for
from trl_dataeff.replay.correction import LossCorrection
from trl_dataeff.replay.logprobs import compute_leftover_logps, group_logps
from trl_dataeff.rollouts import capture
from trl_dataeff.rollouts.distributed import Processes
from trl_dataeff.rollouts.group import RolloutGroup
from trl_dataeff.rollouts.playback import Playback, forward_of_rows
from trl_dataeff.rollouts.skipping import FACTOR as SKIP_FACTOR
from trl_dataeff.rollouts.skipping import RowSkipper
from trl_dataeff.selection import Selector
from trl_dataeff.signals import StopSignals, exception_of
from trl_dataeff.tracking.card import complete_card
from trl_dataeff.tracking.metrics import StepTimer, record, record_selector, replace_last, without_rounds


compat.check(GRPOTrainer)
_SIGNATURE = inspect.signature(GRPOTrainer.__init__)
_Forward: TypeAlias = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]  # as TRL returns it


class DataEfficientGRPOTrainer(GRPOTrainer):
    """
    [`~trl.GRPOTrainer`] that prefers prompts whose groups are likely to have a gradient, once it has seen a first batch, and
    replaces groups without a gradient with recent ones. Takes the same arguments.

    Overridden methods, and why:

    - `_generate_and_score_completions`: in training, rows come from the collector; TRL's method runs once, on what is trained on.
    - `_generate`, `_calculate_rewards`: record what is generated; play back groups that were generated before TRL's method runs.
    - `_compute_loss`, `_get_per_token_logps_and_entropies`: correct the loss of earlier rollouts; skip rows without a gradient.
    - `train`: checks the checkpoint to resume from, begins a run of the collector, and handles signals and failures.
    - `_save_checkpoint`, `_load_optimizer_and_scheduler`: save and load the state of the run, with a manifest.
    - `create_model_card`: adds what happened in the run.
    - `create_scheduler`: with FSDP2 or `bf16_full_eval` a run begins here, once the policy is on its device and can embed prompts.
    - `_run_epoch`: a run that is resumed from its last checkpoint, or that a signal has stopped, has nothing left to do.

    Args:
        model, reward_funcs, args, train_dataset, ...: see [`~trl.GRPOTrainer`]. `args` may be a
            [`DataEfficientGRPOConfig`] or a [`~trl.GRPOConfig`], which gets the fields of the former; it is copied, not changed.
        selector ([`Selector`], *optional*): selects prompts, in place of the one that `args.selection` names.

    Attributes:
        collector ([`RolloutCollector`]): makes the generation batches, and holds the state of the run.
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
    _playback: Playback | None = None  # while groups that were generated before pass through TRL's method
    _skipper: RowSkipper | None = None  # this and the next: until `__init__` has run
    _correction: LossCorrection | None = None

    def __init__(self, *args: Any, selector: Selector | None = None, **kwargs: Any):
        call = _SIGNATURE.bind(self, *args, **kwargs)
        given = call.arguments
        given["args"] = config = own_copy(given.get("args"), given["model"])
        validation.resolve_selector(config, selector)
        validation.check_dataset(config, given.get("train_dataset"), given.get("environment_factory"), selector)
        super().__init__(*call.args[1:], **call.kwargs)

        self._processes = processes = Processes.of(self.accelerator)
        self._map_style = given.get("train_dataset") is not None and isinstance(self.train_dataset, Dataset)
        corrects_loss = compat.corrects_loss(type(self), DataEfficientGRPOTrainer)
        plan = plan_runs(self, selector, is_map_style=self._map_style, corrects_loss=corrects_loss)
        self.selector, self._generates_apart = plan.selector, plan.generates_apart
        self.collector = make_collector(self, plan, processes)
        skipper = RowSkipper(self.loss_type, config.gradient_accumulation_steps, processes)
        self._skipper = skipper if plan.skips_rows else None
        self._correction = LossCorrection.of(self, config, self.collector.buffer, processes)
        self._timer = StepTimer()
        self._run, self._begins_late = Run(), False
        self._prompt_ids: list[int] = []  # rows that are generated or trained on now
        self._rows_read: dict[int, dict[str, Any]] = {}  # rows of the present generation batch
        self._loop: dict[str, Any] | None = None  # of the training loop, as a checkpoint has it
        on_events = self._continue_interval, self._correction.check_applied
        self._callback = DataEfficientCallback(self.collector, self._timer, self._metrics["train"], *on_events)
        self.callback_handler.callbacks.insert(1, self._callback)  # see its class

    __init__.__signature__ = _SIGNATURE.replace(  # type: ignore[attr-defined]
        parameters=[*_SIGNATURE.parameters.values(), inspect.signature(__init__).parameters["selector"]]
    )

    # A run

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        config = self.args
        self._run = resolve_run(resume_from_checkpoint, config.output_dir, self._processes, config.should_save)
        signals = StopSignals(self._processes) if config.save_on_signal else None
        self._callback.begin(self._run, signals)
        # Embedding needs the policy on its device, and with FSDP2 sharded: here both happen within the Trainer's `train`
        late = config.bf16_full_eval or config.fp16_full_eval or (self.is_fsdp_enabled and self.accelerator.is_fsdp2)
        self._begins_late = bool(late and not self.is_deepspeed_enabled)
        self._prompt_ids.clear()
        # The callback changes these when it stops a run; they are restored afterwards
        kept = {name: getattr(config, name) for name in ("load_best_model_at_end", "save_total_limit")}
        notes = failure_notes(self._run, self._prompt_ids, self.collector.flush_logs)
        with notes, signals or nullcontext(), capture.temporarily(config, **kept):
            if not self._begins_late:
                self._begin_run()
            output = super().train(self._run.checkpoint, *args, **kwargs)
        if self.stopped_by is not None:
            raise exception_of(self.stopped_by)
        return output

    def _begin_run(self) -> None:
        """State of a run. A second call of `train` starts again, with the dataset that is there then."""
        args, dataset = self.args, cast(Dataset, self.train_dataset)  # any other is read by TRL alone
        self._begins_late = False
        capture.forget_last_run(self)
        cast(LossCorrection, self._correction).begin()
        checkpoint, num_prompts, dataset_hash = self._run.checkpoint, 0, ""
        if self._map_style:
            validation.check_dataset(args, dataset, self.environment_factories, self.selector)
            num_prompts, dataset_hash = len(dataset), hash_same_prompts(dataset, self._processes)
        if checkpoint is not None:
            check_fits(Path(checkpoint), self.collector.settings, num_prompts, dataset_hash, self._processes.is_main)
        removes = self._map_style and args.remove_unused_columns
        self._rows_dataset = self._remove_unused_columns(dataset, description="training") if removes else dataset
        resumed = checkpoint is not None
        embed = partial(embed_for, self, dataset, args.prompt_embedding, resumed=resumed)
        self.collector.bind(num_prompts, embed=embed, dataset_hash=dataset_hash, resumed=resumed)

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        scheduler = super().create_scheduler(*args, **kwargs)
        if self._begins_late:
            self._begin_run()
        return scheduler

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step < self.state.max_steps and self.stopped_by is None:
            return super()._run_epoch(*args, **kwargs)
        self.control.should_training_stop = True  # the Trainer would check that after one more step

    @property
    def stopped_by(self) -> signal.Signals | None:
        return self._callback.stopped_by

    # Generating

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self.log_completions = self.args.log_completions  # which a resumed run may have turned off until here
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        self._skipper = self._skipper if capture.can_skip_rows(self) else None  # a callback may raise `beta`
        self.collector.classifier.weights = self.reward_weights.cpu().numpy()  # a callback may change them
        self._rows_read.clear()
        return self._generate_apart() if self._generates_apart else self._generate_within_pass(inputs)

    def _generate_within_pass(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """All groups of a generation batch are generated within TRL's pass, and trained on."""
        tensors: dict[str, Any] = {}
        make_batch = super()._generate_and_score_completions

        def roll_out(ids: np.ndarray) -> capture.GeneratedRound:
            rows = inputs if self.collector.selector is None else self._rows(self._processes.share(ids))
            with self._recorded() as recording:
                tensors.update(make_batch(rows))
            return recording.complete(self._processes)

        with self._timer.selection():
            self._log(self.collector.collect(roll_out, self.state.global_step))
        return tensors

    def _generate_apart(self) -> dict[str, Any]:
        """Groups are generated first; those to train on then pass through TRL's method as if they were generated there."""
        collector = self.collector
        with self._timer.selection(), without_rounds(self._metrics["train"], self.state):
            batch = collector.collect(self._roll_out, self.state.global_step)
            own = collector.own(batch.trained)
            playback = Playback(own, np.concatenate([group.rewards for group in batch.trained]))
            rows = self._rows(np.array([group.prompt_id for group in own]))
        for column, values in playback.logged.items():
            self._log_completion_extra(column, values)
        # It is known which advantages are 0 before TRL computes them, if rewards are added up and no subclass changes them
        sums = self.args.multi_objective_aggregation == "sum_then_normalize"
        known = sums and type(self)._calculate_rewards is DataEfficientGRPOTrainer._calculate_rewards
        if self._skipper is not None and not self._is_vlm and known:
            playback.skip_rows(self.reward_weights, self._processes)
        with capture.temporarily(self, _playback=playback):
            tensors = super()._generate_and_score_completions(rows)
        compute_leftover_logps(batch.leftover_now, self._logps, own[0], self._processes)
        tensors["advantages"] = collector.renormalize(tensors["advantages"], batch)
        stale, skipped = bool(batch.trained_stale), playback.rows is not None
        correction = cast(LossCorrection, self._correction)
        replace_last(self._metrics["train"], correction.prepare(tensors, own, stale=stale, skipped=skipped))
        self._log(batch)
        return tensors

    def _roll_out(self, ids: np.ndarray) -> capture.GeneratedRound:
        """Generate and score G completions of prompts, each process an equal part of them, outside of TRL's pass."""
        with self._recorded() as recording:
            rollouts = capture.roll_out(self, self._rows(self._processes.share(ids)))
        return recording.complete(self._processes, rollouts)

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        generate: Callable[[list[Any]], tuple[Any, ...]] = super()._generate
        if self._playback is not None:
            return capture.play_back(self, self._playback, generate, prompts)
        return generate(prompts) if self._recording is None else self._recording.generate(generate, prompts)

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
        recording = capture.Recording({*self.eos_token_ids, self._tokenizer.pad_token_id})
        with capture.temporarily(self, _recording=recording):
            yield recording
        self._timer.add_generation(recording.seconds)

    def _rows(self, ids: np.ndarray) -> list[dict[str, Any]]:
        """
        The dataset's rows for prompts `ids`, G of each, as TRL's dataloader would deliver them. A row is read once in a
        generation batch, and each completion gets its own lists and dictionaries.
        """
        self._prompt_ids[:] = ids.tolist()
        missing = [i for i in self._prompt_ids if i not in self._rows_read]
        if missing:
            self._rows_read.update(zip(missing, self._rows_dataset.__getitems__(missing), strict=True))
        rows = [self._rows_read[i] for i in self._prompt_ids]
        return [tree_map(lambda value: value, row) for row in rows for _ in range(cast(int, self.num_generations))]

    # The loss

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        if self._skipper is not None and self.model.training:
            inputs = self._without_zero_rows(self._skipper, inputs)
        with nullcontext(inputs) if self._correction is None else self._correction.micro_batch(inputs) as own_inputs:
            own_inputs.pop(SKIP_FACTOR, None)  # below TRL 1.16, Liger makes the loss call this method again, within
            loss: torch.Tensor = super()._compute_loss(model, own_inputs)
        return loss * inputs[SKIP_FACTOR] if SKIP_FACTOR in inputs else loss

    def _without_zero_rows(self, skipper: RowSkipper, inputs: dict[str, Any]) -> dict[str, Any]:
        """The micro-batch without rows that have no gradient: a generation batch loses them as its first one enters the loss."""
        batches, i = cast(list[dict[str, Any]], self._buffered_inputs), self._step % self.args.steps_per_generation
        # A subclass has changed it; or the first one, so that nothing was exchanged
        if inputs is not batches[i] or (i and SKIP_FACTOR not in inputs):
            return inputs
        if SKIP_FACTOR not in inputs:
            self._buffered_inputs = batches = skipper.apply(batches)
        return batches[i]

    def _get_per_token_logps_and_entropies(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> _Forward:
        forward: Callable[..., _Forward] = partial(super()._get_per_token_logps_and_entropies, model)
        if self._playback is not None and self._playback.rows is not None:
            return forward_of_rows(forward, self._playback.rows, *args, **kwargs)
        outputs = forward(*args, **kwargs)
        # TRL's loss calls this before it reads advantages and old log-probs of its micro-batch, which are rewritten here
        if self._correction is not None:
            record(self._metrics["train"], self._correction.on_logps(outputs[0]))
        return outputs

    def _logps(self, group: RolloutGroup) -> list[np.ndarray]:
        """Log-probs of a group's completions under the present policy, `(T_i,)` each."""
        if not self._is_vlm:
            forward = partial(capture.forward, self)
            return group_logps(group, forward, self._tokenizer.pad_token_id, self._processes.device)
        make_batch = partial(super()._generate_and_score_completions, self._rows(np.array([group.prompt_id])))
        return capture.logps_of_pass(self, group, make_batch, self._processes.world_size)

    # Logs and checkpoints

    def _log(self, batch: GenerationBatch) -> None:
        store = self._metrics["train"]
        replace_last(store, batch.trl_metrics)
        effective = any(group.effective for group in batch.generated)
        self.collector.reward_checks.check_gradient(effective, self.state.global_step / self.state.max_steps)
        record(store, batch.metrics)
        record_selector(store, batch.selector_metrics)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        args, step, collector = self.args, self.state.global_step, self.collector
        checkpoint = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        resumable, state = not args.save_only_model, dict[str, Any]()
        if resumable:
            state = {"collector": collector.state_dict(), "loop": capture.loop_state(self), **collector.about()}
            check_agreement(state["collector"], self._processes, collector.own_state())
        writing = complete_checkpoint(self._run, checkpoint, step, resumable, args.should_save, self._processes)
        with writing, capture.temporarily(args, save_total_limit=None, push_to_hub=False):
            if resumable:
                save_run(checkpoint, state, capture.unused_batch(self), self._processes.rank, args.should_save)
            super()._save_checkpoint(model, trial)
            collector.flush_logs()  # before the checkpoint is complete: a run that resumes from it has these rows
        if args.push_to_hub:
            self._push_from_checkpoint(str(checkpoint))
        if args.should_save:
            remove_older(checkpoint, args.save_total_limit, [self.state.best_model_checkpoint])

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        super().create_model_card(*args, **kwargs)
        if self.collector.logs is not None and self.collector.logs.about:
            complete_card(Path(self.args.output_dir, "README.md"), self.collector.logs.about, self.state.log_history)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            state, self._buffered_inputs = load_run(Path(checkpoint), self._processes)
            self.collector.load_state_dict(state["collector"])
            self._loop = state["loop"]
            # Completions of a half-used batch are in the table of the run that made it; TRL would replace it with an empty one
            self.log_completions &= self._buffered_inputs is None
            # Between two generation batches TRL begins one, however it is split into micro-batches now
            self._step = 0 if self._buffered_inputs is None else state["loop"]["micro_step"]

    def _continue_interval(self) -> None:
        """Name the run in its folder, and continue the logging interval of a checkpoint, as the Trainer has begun one."""
        self.collector.begin_logs(self.state.global_step, str(self.model.config._name_or_path))
        loop, self._loop = self._loop, None
        if loop is not None:
            capture.continue_interval(self, loop, self._processes)
