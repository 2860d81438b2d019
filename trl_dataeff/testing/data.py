"""Embeddings, contexts and groups without a model, for the conformance checks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from trl_dataeff.rollouts.classification import GroupClassifier
from trl_dataeff.rollouts.group import RolloutGroup
from trl_dataeff.selection.base import SelectorContext


EMBEDDING_WIDTH = 16
PROMPTS, BATCH_GROUPS, GROUP_SIZE = 60, 8, 4

Make: TypeAlias = Callable[[], Any]
Check: TypeAlias = Callable[[Make], None]


def embeddings(size: int = PROMPTS) -> np.ndarray:
    """Embeddings of prompts, float16 `(size, EMBEDDING_WIDTH)`, always the same; the first column tells difficulty."""
    E = np.random.default_rng(0).normal(size=(size, EMBEDDING_WIDTH)) * 0.3
    E[:, 0] = np.linspace(-2, 2, size)
    return E.astype(np.float16)


def make_context(num_prompts: int = PROMPTS, batch_groups: int = BATCH_GROUPS) -> SelectorContext:
    """A context like the one of a small run."""
    return SelectorContext(num_prompts, batch_groups, GROUP_SIZE, seed=0, embed=lambda: embeddings(num_prompts))


def make_groups(
    prompt_ids: Sequence[int] | np.ndarray, success: Sequence[float] | np.ndarray, predicted: Any = np.nan
) -> list[RolloutGroup]:
    """
    Groups with rewards of 0 and 1, as the collector makes them.

    Args:
        prompt_ids (`np.ndarray` of shape `(n,)`): prompts.
        success (`np.ndarray` of shape `(n,)`): share of completions that succeed, rounded to whole ones; NaN for a group
            whose completions got no score.
        predicted (`np.ndarray` of shape `(n,)`, *optional*): what the selector predicted.
    """
    success = np.asarray(success, dtype=np.float64)
    wins = np.round(np.nan_to_num(success) * GROUP_SIZE)
    rewards = (np.arange(GROUP_SIZE) < wins[:, None]).astype(np.float32)[:, :, None]
    rewards[np.isnan(success)] = np.nan
    truncated = np.zeros(rewards.shape[:2], dtype=bool)
    rates, kinds = GroupClassifier(np.ones(1), reward_range=(0.0, 1.0)).classify(rewards, truncated)
    predicted = np.broadcast_to(predicted, len(rates))
    return [
        RolloutGroup(
            prompt_id=int(prompt_ids[i]),
            step=0,
            round=0,
            rewards=rewards[i],
            success_rate=float(rates[i]),
            kind=int(kinds[i]),
            lengths=np.full(GROUP_SIZE, 5, dtype=np.int32),
            truncated=truncated[i],
            seconds=0.1,
            predicted=float(predicted[i]),
        )
        for i in range(len(rates))
    ]


def random_states() -> list[Any]:
    """Global random states of Python, NumPy and torch, comparable."""
    legacy: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    return [random.getstate(), legacy["state"]["key"].tolist(), legacy["state"]["pos"], torch.get_rng_state().tolist()]
