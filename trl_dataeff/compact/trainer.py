"""
`CompactGRPOTrainer`: TRL's `GRPOTrainer`, whose update computes what has a gradient, and that once.

What is deliberately not here: generation, rewards, advantages, the order of prompts, checkpoints. They are TRL's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from transformers import PreTrainedModel
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from trl_dataeff.compact.check import Check
from trl_dataeff.compact.exact import (
    computes_old_logps,
    corrects_sampler,
    exact_parts,
    is_aligned,
    is_batch_private,
    policy_of,
)
from trl_dataeff.compact.loss_inputs import LossInputs
from trl_dataeff.compact.micro_batches import MicroBatch, scale_token_means
from trl_dataeff.compact.padding import forward_by_length, rows_with_gradient
from trl_dataeff.compact.prompts import SharedPrompts, completions_alone
from trl_dataeff.compact.rounding import computing_type, embeddings_rounded_otherwise
from trl_dataeff.compact.sampler import METRICS as SAMPLER_METRICS
from trl_dataeff.compact.sampler import SamplerRatio, sampling_metrics
from trl_dataeff.compact.update import CompactUpdate
from trl_dataeff.utils import PREFIX


#: What TRL's `_get_per_token_logps_and_entropies` returns
ForwardOutputs: TypeAlias = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
#: Key of TRL's batch, bool `(B,)`: rows without a gradient, for which no old log-probs were computed
WITHOUT_OLD_LOGPS = "without_old_logps"


class CompactGRPOTrainer(GRPOTrainer):
    """
    [`~trl.GRPOTrainer`] with an update that computes only what has a gradient. Takes the same arguments, and works
    with TRL's own [`~trl.GRPOConfig`]. The weights are TRL's up to rounding.

    Rows whose advantage is exactly 0, padding, and further computations of a prompt are left out of the forward and
    backward pass of TRL's micro-batches, and of its passes for old and reference log-probs. What is not exact with a
    loss or a model is not left out.

    Overridden methods, and why:

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

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        policy = policy_of(self, self.model)
        self._dataeff_update = CompactUpdate(
            self.accelerator,
            Check(self.accelerator, computed_in=computing_type(self, policy), model_name=type(policy).__name__),
            multiple=cast("int | None", self.pad_to_multiple_of),
        )

    __init__.__signature__ = inspect.signature(GRPOTrainer.__init__)  # type: ignore[attr-defined]

    # The loss

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = super()._prepare_inputs(generation_batch)
        if self._dataeff_update is not None and self._buffered_inputs is not None:
            self._dataeff_update.note(self._buffered_inputs, type(self).__name__)
        return inputs

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        if inputs is self._dataeff_in_loss:
            # Below TRL 1.16, Liger makes the loss call this method again, within
            return super()._compute_loss(model, inputs)
        micro_batch = self._dataeff_compacted(inputs)
        values: Any = inputs if micro_batch is None else micro_batch.inputs
        if self._dataeff_needs_logps(values):
            values = LossInputs(values, is_rewritten=self._dataeff_rewrites(values))
        self._dataeff_in_loss = values
        try:
            with self._dataeff_compact_forward(model, micro_batch):
                loss: torch.Tensor = super()._compute_loss(model, values)
        finally:
            self._dataeff_in_loss = None
        if micro_batch is None:
            return loss
        scale_token_means(self._metrics["train"], float(micro_batch.metric_weight), self.importance_sampling_level)
        return loss * micro_batch.factor

    def _dataeff_compacted(self, inputs: dict[str, Any]) -> MicroBatch | None:
        """The micro-batch that is computed in the place of one of TRL's; `None` if it is computed TRL's way."""
        update = self._dataeff_update
        if update is None or not self.model.training:
            return None
        parts_now = partial(exact_parts, self)
        accumulated = self.args.gradient_accumulation_steps
        found = update.micro_batch(inputs, parts_now, self.loss_type, accumulated, self._dataeff_logps_of_rows)
        if found.metrics:
            for name, value in found.metrics.items():
                self._metrics["train"][PREFIX + name].append(value)
            if self.args.gradient_checkpointing:
                update.advise_on_checkpointing(partial(exact_parts, self, gradient_checkpointing=False))
        return found.micro_batch

    def _dataeff_compact_forward(
        self, model: torch.nn.Module, micro_batch: MicroBatch | None
    ) -> AbstractContextManager[None]:
        """Within this context, the forward pass over a compacted micro-batch computes completions alone."""
        if micro_batch is None or not micro_batch.scores_completions:
            return nullcontext()
        width = micro_batch.inputs["completion_ids"].size(1)
        return completions_alone(cast(PreTrainedModel, policy_of(self, model)), width, micro_batch.shared)

    def _dataeff_logps_of_rows(
        self,
        inputs: dict[str, Any],
        *,
        scores_completions: bool = False,
        shared: SharedPrompts | None = None,
        rounds_otherwise: bool = False,
    ) -> torch.Tensor:
        """
        Log-probs `(rows, T)` of rows under the policy, without gradient and dropout. For the arguments, see
        [`LogprobsOf`].
        """
        policy = cast(PreTrainedModel, policy_of(self, self.model))
        input_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        width = inputs["completion_ids"].size(1)
        forward: AbstractContextManager[None] = nullcontext()
        if scores_completions:
            forward = completions_alone(policy, width, shared)
        elif rounds_otherwise:
            forward = embeddings_rounded_otherwise(policy, computing_type(self, policy))
        with torch.no_grad(), evaluating(self.model), forward:
            outputs = super()._get_per_token_logps_and_entropies(self.model, input_ids, attention_mask, width)
        logps: torch.Tensor = outputs[0]
        return logps

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
            own_logps = {"old_per_token_logps": logps.detach()}
            metrics = sampling_metrics({**values, **own_logps}, self.accelerator.gather, self._dataeff_stale(values))
            for name, value in metrics.items():
                self._metrics["train"][name].append(value)
        return values

    def _dataeff_stale(self, inputs: Mapping[str, Any]) -> torch.Tensor | None:
        """Rows of a micro-batch that an earlier policy sampled, bool `(B,)`; `None` if there are none."""
        return None

    # TRL's passes without gradient

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        update = self._dataeff_update
        if update is None or not self.model.training or self._is_vlm:  # images are not by row
            return super()._generate_and_score_completions(inputs)
        is_private = is_batch_private(self)
        leaves_out = is_private and corrects_sampler(self) and is_aligned(self)
        delays = is_private and not corrects_sampler(self) and exact_parts(self).zero_rows
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
            rows = rows_with_gradient(batch["advantages"], self.accelerator)
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

    @contextmanager
    def _dataeff_passes_by_length(self) -> Iterator[None]:
        """Within this context, passes without gradient for log-probs run over rows of similar length."""
        update = self._dataeff_update
        if update is None or self._is_vlm:
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
        parts = update.check.passed(exact_parts(self))

        def forward_of_chunk(ids: torch.Tensor, mask: torch.Tensor, width: int, **options: Any) -> ForwardOutputs:
            if not parts.prompt_scores:
                return forward(model, ids, mask, width, **options)
            with completions_alone(cast(PreTrainedModel, policy_of(self, model)), width):
                return forward(model, ids, mask, width, **options)

        return forward_by_length(
            forward_of_chunk,
            input_ids,
            attention_mask,
            logits_to_keep,
            batch_size=batch_size or len(input_ids),
            rows=rows,
            cuts_left=parts.left_padding,
            cuts_right=parts.right_padding,
            multiple=update.multiple,
            **kwargs,
        )


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Within this context, a model has no dropout; afterwards each of its modules is as it was."""
    was_training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in was_training.items():
            module.training = training
