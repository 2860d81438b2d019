"""What the update may leave out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class Parts:
    """
    What the update may leave out, because it does not change the gradient.

    Attributes:
        zero_rows: rows whose advantage is 0.
        exchange: whether rows may change their micro-batch within an optimizer step.
        left_padding: padding of prompts.
        right_padding: padding of completions.
        shared_prompts: all but one computation of a prompt in a micro-batch.
        prompt_scores: scores of prompt tokens by the model's head, which the loss does not use.
    """

    zero_rows: bool
    exchange: bool
    left_padding: bool
    right_padding: bool
    shared_prompts: bool
    prompt_scores: bool

    def without(self, names: Sequence[str]) -> Parts:
        """The parts but these."""
        return replace(self, **dict.fromkeys(names, False))

    def __and__(self, other: Parts) -> Parts:
        values = {field.name: getattr(self, field.name) and getattr(other, field.name) for field in fields(self)}
        return Parts(**values)
