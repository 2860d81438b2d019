"""
TRL's loss computes log-probs, and only then reads advantages and old log-probs. So values that depend on the loss's
own log-probs are filled in between, and no line of the loss is copied.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from typing import Any


#: Values of a micro-batch that are filled in, once the loss has its log-probs
REWRITTEN = (
    "advantages",
    "old_per_token_logps",
    "sampling_per_token_logps",
    "importance_sampling_ratio",
)


class LossInputs(UserDict[str, Any]):
    """
    A copy of a micro-batch for TRL's loss. It refuses to give out values that are about to be rewritten: a loss that
    read them before its forward pass would train on others, and without a sign of it.

    Args:
        inputs (`Mapping`): the micro-batch.
        is_rewritten (`bool`): whether values are about to be rewritten.
    """

    def __init__(self, inputs: Mapping[str, Any], is_rewritten: bool):
        # The loss may call itself with the micro-batch that it got, which has to be copied while values are refused
        values = inputs.data if isinstance(inputs, LossInputs) else inputs
        self.refused: tuple[str, ...] = ()
        self.awaits_logps = True
        super().__init__(values)
        if is_rewritten:
            self.refused = REWRITTEN

    def __getitem__(self, key: str) -> Any:
        self._check(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._check(key)
        return super().__contains__(key)

    def _check(self, key: object) -> None:
        if key in self.refused:
            raise RuntimeError(
                f"The loss reads `{key}` before its forward pass, so that it would train on values that are not "
                "corrected yet. If a subclass overrides the loss, let it call `super()._compute_loss` first. If TRL's "
                "own loss does this, install a version of TRL that this package is tested with, or switch off what "
                "needs it: `replay='off'`, `max_rollout_rounds=1` and `compact_update=False`, or TRL's own trainer."
            )

    def rewrite(self, values: Mapping[str, Any]) -> None:
        """Replace values, and give out all of them from now on."""
        self.refused = ()
        self.awaits_logps = False
        self.update(values)
