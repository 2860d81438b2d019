"""Fitting the towers of an [`AttentionDifficultyPredictor`] to groups."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy

from trl_dataeff.difficulty.attention import AttentionDifficultyPredictor, own_random_state
from trl_dataeff.difficulty.base import Embeddings, take


LEARNING_RATE = 1e-3
PATIENCE = 4
QUERIES = 256  # groups predicted in a step, and references that they are predicted from
FEWEST_STEPS, MOST_STEPS = 8, 32  # of an epoch
HELD_OUT = 0.2
FEWEST = 32


class Task(NamedTuple):
    """
    Groups of one policy, each of another prompt: what one of them is predicted from are the others.

    Attributes:
        rows (`np.ndarray` of shape `(n,)`): row of each group's embedding.
        p, weight (`torch.Tensor` of shape `(n,)`): success rates and weights.
        held_out (`np.ndarray` of shape `(n,)` and dtype bool): groups that are predicted to stop in time, and neither
            fitted nor attended to.
    """

    rows: np.ndarray
    p: torch.Tensor
    weight: torch.Tensor
    held_out: np.ndarray


def leave_one_out(p: torch.Tensor, weight: torch.Tensor, seed: int) -> list[Task]:
    """One task of the groups whose weight is above 0, a fifth of them held out; none of fewer than 32 groups."""
    rows = torch.nonzero(weight > 0).squeeze(1)
    if len(rows) < FEWEST:
        return []
    held_out = np.zeros(len(rows), dtype=bool)
    order = np.random.default_rng(seed).permutation(len(rows))
    held_out[order[: int(len(rows) * HELD_OUT)]] = True
    return [Task(rows.numpy(), p[rows], weight[rows], held_out)]


def train(
    predictor: AttentionDifficultyPredictor, E: Embeddings, tasks: Sequence[Task], seed: int, epochs: int
) -> None:
    """
    Minimise binary cross-entropy on success rates, each group predicted from others of its task: Adam, 1e-3, dropout.
    An epoch draws each task's groups 256 at a time, in 8 to 32 steps. The best parameters by the held-out groups, those
    at the start included, are kept, and 4 epochs without better ones end it. The time is bounded by these numbers, so
    that the result depends on the seed alone.

    Args:
        predictor ([`AttentionDifficultyPredictor`]): fitted in place, from its present parameters on.
        E (`torch.Tensor` or `np.ndarray` of shape `(N, h)`): embeddings that the tasks' rows point to.
        tasks (sequence of [`Task`]): nothing happens without any.
        seed (`int`): of the batches and of dropout.
        epochs (`int`): at most as many.
    """
    if not tasks:
        return
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.Adam(predictor.parameters(), lr=LEARNING_RATE)
    best = held_out_loss(predictor, E, tasks)
    kept, waited = copy.deepcopy(predictor.state_dict()), 0
    with own_random_state(seed):
        for _ in range(epochs):
            predictor.train()
            for task, queries, references in _batches(tasks, rng):
                loss = _loss(predictor, E, task, queries, references)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            predictor.eval()
            loss_now = held_out_loss(predictor, E, tasks)
            waited = 0 if loss_now < best else waited + 1
            if loss_now < best:
                best, kept = loss_now, copy.deepcopy(predictor.state_dict())
            if waited == PATIENCE:
                break
    predictor.load_state_dict(kept)


@torch.no_grad()
def held_out_loss(predictor: AttentionDifficultyPredictor, E: Embeddings, tasks: Sequence[Task]) -> float:
    """Weighted mean cross-entropy of the tasks' held-out groups, each predicted from those that are not; no dropout."""
    total = weights = 0.0
    for task in tasks:
        queries, references = np.flatnonzero(task.held_out), np.flatnonzero(~task.held_out)
        weight = float(task.weight[queries].sum())
        if weight > 0 and len(references):
            total += float(_loss(predictor, E, task, queries, references)) * weight
            weights += weight
    return total / weights if weights else 0.0


def _batches(tasks: Sequence[Task], rng: np.random.Generator) -> list[tuple[Task, np.ndarray, np.ndarray]]:
    """The queries and references of an epoch: in each task, the references of a batch are drawn anew."""
    batches: list[tuple[Task, np.ndarray, np.ndarray]] = []
    while len(batches) < FEWEST_STEPS:
        for task in tasks:
            groups = rng.permutation(np.flatnonzero(~task.held_out))
            for start in range(0, len(groups), QUERIES):
                references = rng.choice(groups, min(len(groups), QUERIES), replace=False)
                batches.append((task, groups[start : start + QUERIES], np.sort(references)))
    return [batches[i] for i in rng.permutation(len(batches))[:MOST_STEPS]]


def _loss(
    predictor: AttentionDifficultyPredictor, E: Embeddings, task: Task, queries: np.ndarray, references: np.ndarray
) -> torch.Tensor:
    head, device = predictor.regressor.sim_head, predictor.device
    zq = head.query_proj(take(E, task.rows[queries]).to(device))
    zr = head.ref_proj(take(E, task.rows[references]).to(device))
    place = np.searchsorted(references, queries).clip(max=len(references) - 1)
    exclude = torch.from_numpy(np.where(references[place] == queries, place, -1)).to(device)
    p, weight = task.p.to(device), task.weight.to(device)
    predicted = predictor.attend(zq, zr, p[references], weight[references], exclude)
    share = weight[queries] / weight[queries].sum()
    return (share * binary_cross_entropy(predicted, p[queries], reduction="none")).sum()
