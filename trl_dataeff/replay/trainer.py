"""`CorrectedGRPOTrainer`: TRL's loss on groups from an earlier window, corrected, at no forward of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trl import GRPOTrainer

from trl_dataeff.config import DataEfficientGRPOConfig
from trl_dataeff.replay.correction import correct_inputs, ratio_statistics, reduce_ratio_statistics
from trl_dataeff.replay.kl import missing_kl, token_scale
from trl_dataeff.replay.logprobs import BehaviorRecorder, behavior_tensors, keep_behavior_logps
from trl_dataeff.rollouts.capture import Collection
from trl_dataeff.rollouts.group import RolloutGroup
from trl_dataeff.tracking.metrics import record


class CorrectedGRPOTrainer(GRPOTrainer):
    """
    Overridden methods, and why:

    - `_get_per_token_logps_and_entropies`, called by the loss: its log-probs are what the ratio and the buffer need.
      The ratio is put into the micro-batch then, before the loss reads its advantages.
    - `_compute_loss`: lends the loss a copy of the micro-batch for that.
    """

    args: DataEfficientGRPOConfig

    def __init__(self, *args, **kwargs):
        self._recorder = BehaviorRecorder()
        self._loss_inputs: dict[str, Any] | None = None  # while a micro-batch is in the loss
        super().__init__(*args, **kwargs)

    def _prepare_correction(
        self, batch: dict, groups: Sequence[RolloutGroup], collection: Collection, *, stores: bool
    ) -> None:
        """
        Provide a window's batch with what the loss has to know of its groups, and the groups that may be used again with
        their log-probs.

        Args:
            batch (`dict`): TRL's batch of this process.
            groups: this process's groups, in the order of the batch.
            collection ([`Collection`]): the window.
            stores (`bool`): whether groups that are trained on now may be used again.
        """
        keep_behavior_logps(self, collection.fresh_surplus, spare=groups[0])
        if collection.stale:
            batch.update(behavior_tensors(groups, collection.stale, batch["completion_ids"]))
        if stores:
            self._recorder.expect(groups, [group for group in collection.fresh_trained if group.effective], batch)

    def _compute_loss(self, model, inputs):
        if "replayed" not in inputs and "window_row" not in inputs:
            return super()._compute_loss(model, inputs)
        self._loss_inputs = dict(inputs)  # a copy: TRL passes a micro-batch again with `num_iterations > 1`
        try:
            loss = super()._compute_loss(model, self._loss_inputs)
            return loss + self._missing_kl(self._loss_inputs) if "replay_ratio" in self._loss_inputs else loss
        finally:
            self._loss_inputs = None

    def _missing_kl(self, inputs):
        if not (self.beta and self.args.use_bias_correction_kl and self.args.replay_clip == "proximal"):
            return 0.0
        scale = token_scale(
            inputs["completion_mask"] * inputs.get("tool_mask", 1),
            self.loss_type,
            num_items=inputs["num_items_in_batch"],
            num_processes=self.accelerator.num_processes,
            max_completion_length=self.max_completion_length,
            accumulation_steps=self.current_gradient_accumulation_steps,
            steps_per_generation=self.args.steps_per_generation,
        )
        return self.beta * missing_kl(
            inputs,
            inputs["per_token_logps"],
            inputs["replay_ratio"],
            level=self.importance_sampling_level,
            scale=scale,
        )

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        outputs = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        inputs = self._loss_inputs or {}
        if "window_row" in inputs:
            self._recorder.note(inputs["window_row"], outputs[0].detach())
        if "replayed" in inputs:
            ratio = correct_inputs(
                inputs,
                outputs[0].detach(),
                clip=self.args.replay_clip,
                cap=self.args.replay_ratio_cap,
                level=self.importance_sampling_level,
                loss_type=self.loss_type,
            )
            inputs["per_token_logps"] = outputs[0]
            statistics = ratio_statistics(ratio, inputs)
            mean, largest = reduce_ratio_statistics(self.accelerator.gather(statistics))
            record(self._metrics["train"], {"replay/ratio_mean": mean, "replay/ratio_max": largest})
        return outputs
