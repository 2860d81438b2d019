"""The rollout counter: one place for every method, at the moment at which completions are generated.

TRL generates through `_generate_single_turn`, and it does so for plain `GRPOTrainer` and for every subclass: discarded
groups, reference groups, calibration and exploration included. Generation in evaluation mode does not count.
"""

from __future__ import annotations

import functools

from trl import GRPOTrainer


class CountsRollouts(GRPOTrainer):
    """
    Counts completions and their tokens, and trained-on effective groups. It stands between `GRPOTrainer` and the class
    that is counted: completions that this class makes up, or generates beside its batches, are seen for what they are.
    """

    rollouts_generated = 0  # completions generated in training mode
    tokens_generated = 0  # their tokens, end token included
    groups_trained = 0  # groups that optimizer steps were taken on
    effective_trained = 0  # those of them with an advantage other than 0

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        training = self.model.training
        result = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        if training:
            self.rollouts_generated += len(result[0])
            self.tokens_generated += sum(map(len, result[0]))
        return result

    def _generate_and_score_completions(self, inputs):
        training = self.model.training
        batch = super()._generate_and_score_completions(inputs)
        if training:
            rows = batch["advantages"].reshape(len(batch["advantages"]), -1)  # (B G,) or (B G, T)
            groups = rows.abs().amax(-1).reshape(-1, self.num_generations)
            self.groups_trained += len(groups)
            self.effective_trained += int((groups > 1e-6).any(-1).sum())
        return batch


@functools.cache
def counting(trainer_class: type) -> type:
    """`trainer_class` with the counter underneath it."""
    bases = (CountsRollouts,) if trainer_class is GRPOTrainer else (trainer_class, CountsRollouts)
    return type(f"Counting{trainer_class.__name__}", bases, {})
