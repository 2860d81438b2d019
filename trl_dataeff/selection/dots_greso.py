"""
DOTS and GRESO together: a prompt's weight is DOTS's, times the probability with which GRESO keeps the prompt.

All prompts come from one draw with these weights. Prompts are not admitted one by one in the order of DOTS's draw: once many
prompts have a streak, that would reach down to prompts of hardly any weight, such as unsolvable ones that are not known yet.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trl_dataeff.rollouts.group import RolloutGroup
from trl_dataeff.selection.base import register_selector
from trl_dataeff.selection.dots import DotsSelector
from trl_dataeff.selection.greso import GresoBase


@register_selector("dots+greso")
class DotsGresoSelector(GresoBase, DotsSelector):
    """
    Samples prompts as DOTS does, with weights multiplied by GRESO's keep probability, so that prompts with repeated
    zero-variance groups are drawn less often. Their streaks fade.

    The explored share is drawn uniformly, whatever the streaks. Its groups, and those of reference rollouts, count in the
    streaks, but do not move the keep probabilities, which have no influence on them. The keep probabilities adapt after as
    many generation batches as a pass over the prompts takes.

    Args:
        p_init, p_step, p_min, p_max, target_zero_variance, easy_share, streak_half_life: see [`GresoBase`];
            `streak_half_life` defaults to 100.
        ...: see [`DotsSelector`].
    """

    default_half_life = 100.0

    def log_weights(self) -> torch.Tensor:
        """Those of DOTS plus the log-probabilities of being kept, float64 `(N,)`, finite."""
        return super().log_weights() + self._log_keep()

    def _log_keep(self) -> torch.Tensor:
        return torch.from_numpy(np.log(self.gate.keep()))

    def _draw(self, log_weights: torch.Tensor, n: int, rng: torch.Generator) -> np.ndarray:
        same_noise = torch.Generator()
        same_noise.set_state(rng.get_state())
        drawn = super()._draw(log_weights, n, rng)
        by_dots_alone = super()._draw(log_weights - self._log_keep(), n, same_noise)
        self.gate.skipped += n - int(np.isin(by_dots_alone, drawn).sum())
        return drawn

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        explored = set(self._explored.tolist())
        super().observe(groups)
        self.gate.pool.observe(groups)
        if self.batch * self.context.batch_groups >= self.context.num_prompts:
            self.gate.adapt([g for g in groups if g.origin != "reference" and g.prompt_id not in explored])
