"""The generation batch that is trained on now: TRL's micro-batches, and which of them the loss gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch


class _Seen(NamedTuple):
    """A value of a micro-batch as TRL made it."""

    value: Any
    version: int  # which torch raises whenever a tensor is changed in place


class PresentBatch:
    """
    TRL's micro-batches of a generation batch. They stay as TRL made them: a subclass's method finds in them what it
    finds with TRL. The loss computes others in their place, as long as it gets TRL's own.

    Args:
        buffered (`list[dict]`): the micro-batches that TRL has buffered.
    """

    def __init__(self, buffered: list[dict[str, Any]]):
        self.buffered = buffered
        self._seen = [{key: _Seen(value, _version(value)) for key, value in batch.items()} for batch in buffered]

    def place_of(self, inputs: Mapping[str, Any]) -> int | None:
        """Which of TRL's micro-batches this is; `None` if it is none, or was changed since TRL made it."""
        for place, seen in enumerate(self._seen):
            if _is_unchanged(inputs, seen):
                return place
        return None

    @property
    def has_gradient(self) -> bool:
        """Whether any row of this process has one."""
        return any(bool(batch["advantages"].any()) for batch in self.buffered)


def _version(value: Any) -> int:
    if isinstance(value, torch.Tensor) and not value.is_inference():
        return value._version
    return 0


def _is_unchanged(inputs: Mapping[str, Any], seen: Mapping[str, _Seen]) -> bool:
    if inputs.keys() != seen.keys():
        return False
    pairs: Sequence[tuple[Any, _Seen]] = [(inputs[key], value) for key, value in seen.items()]
    return all(value is known.value and _version(value) == known.version for value, known in pairs)
