"""The rollout counter: one place for every method, at the moment at which completions are generated.

TRL generates through `_generate_single_turn`, and it does so for plain `GRPOTrainer` and for every subclass: discarded
groups, reference groups, calibration and exploration included. Generation in evaluation mode does not count.
"""

from __future__ import annotations

import functools

from trl import GRPOTrainer


#: Advantages up to this size are those of equal rewards, but for rounding
ZERO = 1e-6


class CountsRollouts(GRPOTrainer):
    """Counts completions and their tokens, and trained-on effective groups.

    It stands between `GRPOTrainer` and the class that is counted. So it sees what TRL generates: completions that the
    class generates beside its batches are counted, and stored ones that it hands to TRL are not.
    """

    rollouts_generated = 0  # completions generated in training mode
    tokens_generated = 0  # their tokens, end token included
    groups_trained = 0  # groups that optimizer steps were taken on
    effective_trained = 0  # those of them with an advantage other than 0

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        training = self.model.training
        result = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        if training:
            completions = result[0]
            self.rollouts_generated += len(completions)
            self.tokens_generated += sum(len(ids) for ids in completions)
        return result

    def _generate_and_score_completions(self, inputs):
        training = self.model.training
        batch = super()._generate_and_score_completions(inputs)
        if training:
            advantages = batch["advantages"]  # (B G,) or (B G, T)
            largest = advantages.reshape(len(advantages), -1).abs().amax(-1)  # (B G,)
            has_gradient = largest.reshape(-1, self.num_generations) > ZERO  # (B, G)
            self.groups_trained += len(has_gradient)
            self.effective_trained += int(has_gradient.any(-1).sum())
        return batch


@functools.cache
def counting(trainer_class: type) -> type:
    """`trainer_class` with the counter underneath it."""
    bases: tuple[type, ...] = (trainer_class, CountsRollouts)
    if trainer_class is GRPOTrainer:
        bases = (CountsRollouts,)
    return type(f"Counting{trainer_class.__name__}", bases, {})
