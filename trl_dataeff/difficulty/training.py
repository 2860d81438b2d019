"""
Fitting a network that predicts groups from each other: batches, early stopping, seeds.

What is deliberately not here: the network and its loss (`attention.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn


LEARNING_RATE = 1e-3
PATIENCE = 4
QUERIES = 256  # groups predicted in a step, and references that they are predicted from
FEWEST_STEPS, MOST_STEPS = 8, 32  # of an epoch
HELD_OUT = 0.2
FEWEST = 32


class Task(NamedTuple):
    """
    Groups of one policy, each of another prompt. Each group is predicted from the others.

    Attributes:
        rows (`np.ndarray` of shape `(n,)`): row of each group's embedding.
        p (`torch.Tensor` of shape `(n,)`): success rates in [0, 1].
        weight (`torch.Tensor` of shape `(n,)`): weights > 0.
        held_out (`np.ndarray` of shape `(n,)` and dtype bool): groups that decide when to stop. The network is neither
            fitted to them nor predicts from them.
    """

    rows: np.ndarray
    p: torch.Tensor
    weight: torch.Tensor
    held_out: np.ndarray


#: Loss of a batch, a scalar: task, groups to predict `(q,)`, groups to predict from `(r,)`; both index the task's arrays.
Loss: TypeAlias = Callable[[Task, np.ndarray, np.ndarray], torch.Tensor]


@contextmanager
def own_random_state(seed: int) -> Iterator[None]:
    """Seed torch's random state inside the block; restore it afterwards."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield


def leave_one_out(p: torch.Tensor, weight: torch.Tensor, seed: int) -> list[Task]:
    """
    One task of the groups, success rates `p` and weights `(n,)`, whose weight is above 0. A fifth of them, chosen by the seed, is
    held out. No task if there are fewer than 32.
    """
    rows = torch.nonzero(weight > 0).squeeze(1)
    if len(rows) < FEWEST:
        return []
    held_out = np.zeros(len(rows), dtype=bool)
    order = np.random.default_rng(seed).permutation(len(rows))
    held_out[order[: int(len(rows) * HELD_OUT)]] = True
    return [Task(rows.numpy(), p[rows], weight[rows], held_out)]


def train(network: nn.Module, tasks: Sequence[Task], loss: Loss, seed: int, epochs: int) -> None:
    """
    Fit a network to tasks with Adam, learning rate 1e-3, from its present parameters on.

    An epoch draws each task's groups 256 at a time, in 8 to 32 steps. The parameters with the lowest loss on held-out
    groups are kept, the initial ones included. Fitting stops after 4 epochs without an improvement.

    Args:
        network (`nn.Module`): fitted in place.
        tasks (sequence of [`Task`]), loss ([`Loss`]): without any task, nothing happens.
        seed (`int`): of the batches and of dropout.
        epochs (`int`): maximum number of epochs.
    """
    if not tasks:
        return
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)
    best = held_out_loss(tasks, loss)
    kept, waited = copy.deepcopy(network.state_dict()), 0
    with own_random_state(seed):
        for _ in range(epochs):
            network.train()
            for batch in _batches(tasks, rng):
                value = loss(*batch)
                optimizer.zero_grad()
                value.backward()
                optimizer.step()
            network.eval()
            now = held_out_loss(tasks, loss)
            waited = 0 if now < best else waited + 1
            if now < best:
                best, kept = now, copy.deepcopy(network.state_dict())
            if waited == PATIENCE:
                break
    network.load_state_dict(kept)


@torch.no_grad()
def held_out_loss(tasks: Sequence[Task], loss: Loss) -> float:
    """Weighted mean loss of the tasks' held-out groups, each predicted from those that are not; 0 without any."""
    total = weights = 0.0
    for task in tasks:
        queries, references = np.flatnonzero(task.held_out), np.flatnonzero(~task.held_out)
        weight = float(task.weight[queries].sum())
        if weight > 0 and len(references):
            total += float(loss(task, queries, references)) * weight
            weights += weight
    return total / weights if weights else 0.0


def _batches(tasks: Sequence[Task], rng: np.random.Generator) -> list[tuple[Task, np.ndarray, np.ndarray]]:
    """Queries and references of an epoch. Each batch draws references of its own."""
    batches: list[tuple[Task, np.ndarray, np.ndarray]] = []
    while len(batches) < FEWEST_STEPS:
        for task in tasks:
            groups = rng.permutation(np.flatnonzero(~task.held_out))
            for start in range(0, len(groups), QUERIES):
                references = rng.choice(groups, min(len(groups), QUERIES), replace=False)
                batches.append((task, groups[start : start + QUERIES], np.sort(references)))
    return [batches[i] for i in rng.permutation(len(batches))[:MOST_STEPS]]
