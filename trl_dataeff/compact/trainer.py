"""
`CompactGRPOTrainer`: TRL's `GRPOTrainer`, whose update computes what has a gradient, and that once.

What is deliberately not here: generation, rewards, advantages, the order of prompts, checkpoints. They are TRL's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from transformers import PreTrainedModel
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from trl_dataeff.compact import packing
from trl_dataeff.compact.check import Check
from trl_dataeff.compact.exact import (
    Parts,
    agreed,
    computes_old_logps,
    corrects_sampler,
    exact_parts,
    handles_losses,
    has_gradient,
    has_own_method,
    hash_of_modules,
    is_aligned,
    is_batch_private,
    least_advantage,
    obstacles,
    policy_of,
)
from trl_dataeff.compact.loss_inputs import LossInputs
from trl_dataeff.compact.metrics import weigh_last
from trl_dataeff.compact.micro_batches import MicroBatch
from trl_dataeff.compact.padding import forward_by_length, prompt_numbers, rows_with_gradient
from trl_dataeff.compact.prompts import Expected, SharedPrompts, completions_alone, with_positions
from trl_dataeff.compact.sampler import METRICS as SAMPLER_METRICS
from trl_dataeff.compact.sampler import SampledTokens, SamplerRatio
from trl_dataeff.compact.trial import GradientTrial
from trl_dataeff.compact.update import CompactUpdate, Situation
from trl_dataeff.utils import PREFIX, with_parameters_of


#: What TRL's `_get_per_token_logps_and_entropies` returns
ForwardOutputs: TypeAlias = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
#: Key of TRL's batch, bool `(B,)`: rows without a gradient, for which no old log-probs were computed
WITHOUT_OLD_LOGPS = "without_old_logps"


class CompactGRPOTrainer(GRPOTrainer):
    """
    [`~trl.GRPOTrainer`] with an update that computes only what has a gradient. Takes the same arguments, and works
    with TRL's own [`~trl.GRPOConfig`]. Every gradient is TRL's up to rounding.

    Rows whose advantage is exactly 0, padding, and further computations of a prompt are left out of the forward and
    backward pass of TRL's micro-batches, and of its passes for old and reference log-probs. What is not exact with a
    loss or a model is not left out.

    Overridden methods, and why:

    - `train`, `training_step`: measure what updates take, and say it.
    - `_prepare_inputs`: notes the micro-batches that TRL has made. It returns them as they are.
    - `_compute_loss`: gives TRL's loss the compacted micro-batch in the place of TRL's own. If a subclass passes on
      another one, the loss is TRL's.
    - `_generate_and_score_completions`: while TRL's method runs, its passes for log-probs are compacted.
    - `_get_per_token_logps_and_entropies`: computes these passes by length. In the loss, fills in what depends on
      the loss's log-probs: TRL's loss calls this method first, and only then reads advantages and old log-probs.
    """

    # These are wider in TRL
    model: PreTrainedModel
    _buffered_inputs: list[dict[str, Any]] | None  # type: ignore[assignment]  # TRL's is inferred as `None`

    # `None` until `__init__` has run, so that a subclass may call TRL's methods before
    _dataeff_update: CompactUpdate | None = None
    _dataeff_in_loss: Mapping[str, Any] | None = None  # the micro-batch that TRL's loss has now
    _dataeff_trial: GradientTrial | None = None  # while rows are computed both ways
    _dataeff_sampled: SampledTokens | None = None  # of the step, where the loss computes vLLM's ratio
    _dataeff_in_step = False  # whether the Trainer's own training step runs

    @with_parameters_of(GRPOTrainer.__init__)
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        policy = policy_of(self, self.model)
        self._dataeff_update = CompactUpdate(
            self.accelerator, Check(self.accelerator, model_name=type(policy).__name__)
        )

    # A run

    def train(self, *args: Any, **kwargs: Any) -> Any:
        update = self._dataeff_update
        if update is None:
            return super().train(*args, **kwargs)
        update.begin_run()
        self._dataeff_sampled = None
        started = time.perf_counter()
        output = super().train(*args, **kwargs)
        update.say_what_was_saved(time.perf_counter() - started)
        return output

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        update = self._dataeff_update
        if update is None:
            return super().training_step(*args, **kwargs)
        on_cuda = self.accelerator.device.type == "cuda"
        making_before = update.step.making_seconds
        started = time.perf_counter()
        self._dataeff_in_step = True
        try:
            loss: torch.Tensor = super().training_step(*args, **kwargs)
        finally:
            self._dataeff_in_step = False
            update.end_micro_step()
            packing.end()
        if on_cuda and self.accelerator.sync_gradients:
            torch.cuda.synchronize()
        update.step.seconds += time.perf_counter() - started - (update.step.making_seconds - making_before)
        if self.accelerator.sync_gradients:
            metrics = update.end_step()
            if on_cuda and metrics:
                metrics["update/memory"] = torch.cuda.max_memory_allocated() / 2**30
            for name, value in metrics.items():
                self._metrics["train"][PREFIX + name].append(value)
            self._dataeff_log_sampled()
        return loss

    # The loss

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        packing.end()  # of a training loop of the user's own
        started = time.perf_counter()
        inputs: dict[str, Any] = super()._prepare_inputs(generation_batch)
        update = self._dataeff_update
        if update is not None and self._buffered_inputs is not None:
            update.note(self._buffered_inputs, type(self).__name__)
        if update is not None and self.model.training:
            update.step.making_seconds += time.perf_counter() - started
        return inputs

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        if inputs is self._dataeff_in_loss:
            # Below TRL 1.16, Liger makes the loss call this method again, within
            return super()._compute_loss(model, inputs)
        if self._dataeff_trial is not None:  # a subclass's loss is tried
            return self._dataeff_loss(model, cast(MicroBatch, self._dataeff_trial.micro_batch))
        update = self._dataeff_update
        if update is None or not self.model.training:
            return self._dataeff_loss(model, inputs)
        if handles_losses(self):
            update.say_once(
                f"`compact_update`: {type(self).__name__} has a loss of its own, so that all rows stay, each in its "
                "micro-batch. Padding and repeated prompts are left out where its gradient is TRL's."
            )
        trial = GradientTrial(self, model, policy_of(self, model), partial(self._dataeff_tried_loss, model))
        self._dataeff_trial = trial
        try:
            micro_batch = update.micro_batch(inputs, self._dataeff_situation, self._dataeff_remaining(update), trial)
        finally:
            self._dataeff_trial = None
        if micro_batch is None:
            loss = self._dataeff_loss(model, inputs)
        else:
            loss = self._dataeff_loss(model, micro_batch) * micro_batch.factor
            if micro_batch.weights is not None:
                weigh_last(self._metrics["train"], micro_batch.weights, self.importance_sampling_level)
        update.say_what_is_left_out(partial(obstacles, self), self._dataeff_leaves_out_old_logps)
        return loss

    def _dataeff_loss(self, model: torch.nn.Module, computed: dict[str, Any] | MicroBatch) -> torch.Tensor:
        """TRL's loss of one of its micro-batches, or of what is computed in its place."""
        packing.end()
        values: Any = computed
        forward: AbstractContextManager[None] = nullcontext()
        if isinstance(computed, MicroBatch):
            values = computed.inputs
            forward = self._dataeff_compact_forward(model, computed)
        if self._dataeff_needs_logps(values):
            values = LossInputs(values, is_rewritten=self._dataeff_rewrites(values))
        self._dataeff_in_loss = values
        try:
            with forward:
                loss: torch.Tensor = super()._compute_loss(model, values)
        finally:
            self._dataeff_in_loss = None
        return loss

    def _dataeff_compact_forward(
        self, model: torch.nn.Module, micro_batch: MicroBatch
    ) -> AbstractContextManager[None]:
        """Within this context, the forward pass over a micro-batch computes completions alone."""
        policy = cast(PreTrainedModel, policy_of(self, model))
        if micro_batch.positions is not None:
            return with_positions(policy, micro_batch.positions)
        if not micro_batch.scores_completions:
            return nullcontext()
        expected = Expected.of(micro_batch.inputs)
        return completions_alone(policy, expected, micro_batch.shared, self._dataeff_on_other_inputs)

    def _dataeff_on_other_inputs(self, what: str) -> None:
        """Something else than the micro-batch has reached the model, so that what was asked is computed."""
        if self._dataeff_trial is not None:
            self._dataeff_trial.other_inputs = what
        elif self._dataeff_update is not None:
            self._dataeff_update.check.note_other_inputs(what)

    def _dataeff_tried_loss(
        self, model: torch.nn.Module, micro_batch: MicroBatch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The loss of a micro-batch that is tried, and its log-probs."""
        trial = cast(GradientTrial, self._dataeff_trial)
        trial.micro_batch = micro_batch
        full = cast("dict[str, Any]", micro_batch.in_full)
        if has_own_method(self, "compute_loss"):
            loss = self.compute_loss(model, full)
        elif has_own_method(self, "_compute_loss"):
            loss = self._compute_loss(model, full)
        else:
            loss = self._dataeff_loss(model, micro_batch)
        return loss * micro_batch.factor, trial.logps

    def _dataeff_situation(self) -> Situation:
        return Situation(
            parts=exact_parts(self),
            loss_type=self.loss_type,
            has_kl_term=self.beta != 0.0,
            least_advantage=least_advantage(self),
            multiple=cast("int | None", self.pad_to_multiple_of),
            model_seen=hash_of_modules(policy_of(self, self.model)),
        )

    def _dataeff_remaining(self, update: CompactUpdate) -> int:
        """
        Micro-batches of the optimizer step that are not computed yet, with the present one. At least so many: where
        the number of a step's micro-batches changes in a run, the Trainer may end a step before.
        """
        accumulated = self.args.gradient_accumulation_steps
        update.accumulated = update.accumulated or accumulated
        if accumulated != update.accumulated:
            update.say_once(
                f"`compact_update`: `gradient_accumulation_steps` was {update.accumulated} and is {accumulated}, so "
                "that rows keep their micro-batch from here on."
            )
            update.keeps_micro_batches = True
        is_own_loop = not self._dataeff_in_step
        if is_own_loop or update.keeps_micro_batches or self.accelerator.sync_gradients:
            return 1
        return self.current_gradient_accumulation_steps - update.step.micro_batches

    # What depends on the loss's log-probs

    def _dataeff_needs_logps(self, inputs: Mapping[str, Any]) -> bool:
        """Whether something is to be done once the loss has the log-probs of a micro-batch."""
        return self._dataeff_rewrites(inputs)

    def _dataeff_rewrites(self, inputs: Mapping[str, Any]) -> bool:
        """Whether values of a micro-batch are then rewritten."""
        return WITHOUT_OLD_LOGPS in inputs or self._dataeff_ratio_is_due(inputs)

    def _dataeff_ratio_is_due(self, inputs: Mapping[str, Any]) -> bool:
        """Whether the loss has to compute TRL's importance-sampling ratio, because TRL's pass was left out."""
        leaves_out_passes = self._dataeff_update is not None
        return leaves_out_passes and corrects_sampler(self) and "importance_sampling_ratio" not in inputs

    def _dataeff_on_logps(self, values: dict[str, Any], logps: torch.Tensor) -> dict[str, Any]:
        """
        Rewrite a micro-batch that is in the loss.

        Args:
            values (`dict`): the micro-batch.
            logps (`torch.Tensor` of shape `(B, T)`): the loss's log-probs, with gradient.
        """
        values = dict(values)
        if WITHOUT_OLD_LOGPS in values:
            without = values[WITHOUT_OLD_LOGPS].unsqueeze(1)
            values["old_per_token_logps"] = torch.where(without, logps.detach(), values["old_per_token_logps"])
        ratio_of = SamplerRatio.of(self)
        if ratio_of is not None and self._dataeff_ratio_is_due(values):
            values["importance_sampling_ratio"] = ratio_of.of_rows(values, logps.detach())
            if self._dataeff_trial is None:
                self._dataeff_sampled = self._dataeff_sampled or SampledTokens()
                own_logps = {"old_per_token_logps": logps.detach()}
                self._dataeff_sampled.add({**values, **own_logps}, self._dataeff_stale(values))
                if not self._dataeff_in_step:  # in a training loop of the user's own, where no step ends
                    self._dataeff_log_sampled()
        return values

    def _dataeff_log_sampled(self) -> None:
        """Log TRL's metrics of vLLM's log-probs, if the loss has computed its ratio since the last time."""
        if self._dataeff_sampled is None:
            return
        for name, value in self._dataeff_sampled.metrics(self.accelerator.gather).items():
            self._metrics["train"][name].append(value)
        self._dataeff_sampled = None

    def _dataeff_stale(self, inputs: Mapping[str, Any]) -> torch.Tensor | None:
        """Rows of a micro-batch that an earlier policy sampled, bool `(B,)`; `None` if there are none."""
        return None

    # TRL's passes without gradient

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        update = self._dataeff_update
        if update is None or not self.model.training or self._is_vlm:  # images are not by row
            return super()._generate_and_score_completions(inputs)
        update.parts_of_passes = agreed(update.check.kept & exact_parts(self), self.accelerator)
        leaves_out = self._dataeff_leaves_out_old_logps()
        delays = is_batch_private(self) and not corrects_sampler(self) and update.parts_of_passes.zero_rows
        delays = delays and self._dataeff_computes_by_length()
        if computes_old_logps(self) and (leaves_out or delays):
            update.delays_next_pass = True
        with self._dataeff_passes_by_length():
            batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
            delayed = update.take_delayed_pass()
            if delayed is None:
                return batch
            if leaves_out:
                # The loss computes the same log-probs, and the ratio to the sampler's, see `_dataeff_on_logps`
                del batch["old_per_token_logps"], batch["importance_sampling_ratio"]
                for name in SAMPLER_METRICS:
                    self._metrics["train"][name].pop()
                return batch
            args, kwargs = delayed
            rows = rows_with_gradient(has_gradient(batch, least_advantage(self)), self.accelerator)
            options = cast("dict[str, Any] | None", self.args.gradient_checkpointing_kwargs)
            with torch.no_grad(), disable_gradient_checkpointing(self.model, options):
                old_logps, _, _ = self._dataeff_logps_by_length(
                    super()._get_per_token_logps_and_entropies, self.model, *args, **kwargs, rows=rows
                )
        if "old_per_token_logps" not in batch:
            raise RuntimeError(
                "TRL's batch has no `old_per_token_logps`, though TRL computes old log-probs. Install a version of "
                "TRL that this package is tested with."
            )
        batch[WITHOUT_OLD_LOGPS] = old_logps.isnan().all(1)
        batch["old_per_token_logps"] = old_logps.nan_to_num(nan=0.0)
        return batch

    def _dataeff_leaves_out_old_logps(self) -> bool:
        """Whether TRL's pass for old log-probs is left out, since the loss computes the same ones."""
        is_needless = corrects_sampler(self) and is_aligned(self)
        return is_needless and is_batch_private(self) and self._dataeff_computes_by_length()

    def _dataeff_computes_by_length(self) -> bool:
        """
        Whether passes without gradient may be others than TRL's: once the model was checked, if it draws no random
        numbers, and if something may be left out. As long as the policy is the reference, the difference of both is 0
        to the bit in TRL's way.
        """
        update = self._dataeff_update
        if update is None or self._is_vlm:
            return False
        is_checked = update.check.is_begun and update.parts_of_passes != Parts.none()
        is_reference = self.beta != 0.0 and not update.has_learned
        return is_checked and not update.check.draws and not is_reference

    @contextmanager
    def _dataeff_passes_by_length(self) -> Iterator[None]:
        """Within this context, passes without gradient for log-probs run over rows of similar length."""
        update = self._dataeff_update
        if update is None or not self._dataeff_computes_by_length():
            yield
            return
        update.passes_by_length = True
        try:
            yield
        finally:
            update.passes_by_length = False

    def _get_per_token_logps_and_entropies(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> ForwardOutputs:
        forward: Callable[..., ForwardOutputs] = super()._get_per_token_logps_and_entropies
        update = self._dataeff_update
        # A subclass may have use for more than log-probs
        wants_logps_alone = not (kwargs.get("compute_entropy") or kwargs.get("compute_aux_loss"))
        is_pass = wants_logps_alone and not torch.is_grad_enabled()
        if update is not None and update.passes_by_length and is_pass:
            if update.delays_next_pass:
                update.delay(args, kwargs)
                return torch.zeros(args[0].size(0), args[2], device=args[0].device), None, None
            return self._dataeff_logps_by_length(forward, model, *args, **kwargs)
        outputs = forward(model, *args, **kwargs)
        if self._dataeff_trial is not None:
            self._dataeff_trial.logps = outputs[0]
        micro_batch = self._dataeff_in_loss
        if isinstance(micro_batch, LossInputs) and micro_batch.awaits_logps and outputs[0] is not None:
            micro_batch.rewrite(self._dataeff_on_logps(micro_batch.data, outputs[0]))
        return outputs

    def _dataeff_logps_by_length(
        self,
        forward: Callable[..., ForwardOutputs],
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        *,
        rows: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> ForwardOutputs:
        """
        TRL's forward pass without gradient, over chunks of rows of similar length, if what is left out was checked.
        """
        update = cast(CompactUpdate, self._dataeff_update)
        parts = update.check.passed(update.parts_of_passes, input_ids.size(1))
        if type(policy_of(self, model)) is not type(policy_of(self, self.model)):
            parts = Parts.none()  # a reference of another architecture, which was not checked

        def forward_of_chunk(ids: torch.Tensor, mask: torch.Tensor, width: int, **options: Any) -> ForwardOutputs:
            if not parts.prompt_scores:
                return forward(model, ids, mask, width, **options)
            policy = cast(PreTrainedModel, policy_of(self, model))
            shared = None
            if parts.shared_prompts:
                multiple = cast("int | None", self.pad_to_multiple_of)
                shared = SharedPrompts.of(prompt_numbers(ids[:, :-width], mask[:, :-width]), ids.device, multiple)
            expected = Expected(ids, mask, width)
            with completions_alone(policy, expected, shared, self._dataeff_on_other_inputs):
                outputs = forward(model, ids, mask, width, **options)
            packing.end()
            return outputs

        return forward_by_length(
            forward_of_chunk,
            input_ids,
            attention_mask,
            logits_to_keep,
            batch_size=batch_size or len(input_ids),
            rows=rows,
            cuts_left=parts.left_padding,
            cuts_right=parts.right_padding,
            keeps_groups=parts.shared_prompts,
            multiple=cast("int | None", self.pad_to_multiple_of),
            **kwargs,
        )
