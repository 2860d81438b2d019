"""The rows of the training dataset that a selector chose, as TRL's dataloader would deliver them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from datasets import Dataset
from torch.utils._pytree import tree_map


class ChosenRows:
    """
    Rows by prompt. A row is read once in a generation batch, and each completion gets its own lists and dictionaries.

    Args:
        group_size (`int`): G, completions per group.

    Attributes:
        trained (`list[dict]`, *optional*): the rows on which this process trains in the present generation batch.
        trained_prompts (`list[int]`, *optional*): their prompts, one for each group.
        read_last (`list[int]`): prompts that were read last: a failure's note names them.
    """

    def __init__(self, group_size: int):
        self.group_size = group_size
        self.read_last: list[int] = []
        self.begin_run(None, list)

    def begin_run(self, dataset: Dataset | None, collate: Callable[[list[dict[str, Any]]], Any]) -> None:
        """
        Begin a run.

        Args:
            dataset ([`~datasets.Dataset`], *optional*): from which rows are read.
            collate (`Callable`): the trainer's data collator.
        """
        self._dataset = dataset
        self._collate = collate
        self.read_last.clear()  # in place: the notes of a failure hold this list
        self.begin_batch()

    def begin_batch(self) -> None:
        """Forget the rows of the last generation batch."""
        self._rows: dict[int, dict[str, Any]] = {}
        self.trained: list[dict[str, Any]] | None = None
        self.trained_prompts: list[int] | None = None

    def of(self, ids: np.ndarray) -> list[dict[str, Any]]:
        """The rows of prompts `(n,)`, G of each."""
        assert self._dataset is not None, "no run has begun"
        self.read_last[:] = ids.tolist()
        missing = [i for i in self.read_last if i not in self._rows]
        if missing:
            self._rows.update(zip(missing, self._dataset.__getitems__(missing), strict=True))
        rows = []
        for prompt_id in self.read_last:
            rows += [copy_of(self._rows[prompt_id]) for _ in range(self.group_size)]
        return list(self._collate(rows))

    def choose(self, ids: np.ndarray) -> list[dict[str, Any]]:
        """The rows of prompts `(n,)`, G of each, on which the present generation batch is trained."""
        self.trained = self.of(ids)
        self.trained_prompts = ids.tolist()
        return list(self.trained)


def copy_of(row: dict[str, Any]) -> dict[str, Any]:
    """The row with its own lists and dictionaries, and the same values in them."""
    return tree_map(lambda value: value, row)
