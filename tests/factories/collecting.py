"""Collectors without a trainer: selectors that are told what to propose, rollouts by their rewards, and several processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import torch

from tests.factories.groups import make_group
from trl_dataeff.collector.collector import RolloutCollector
from trl_dataeff.rollouts.capture import Round
from trl_dataeff.rollouts.classification import GroupClassifier
from trl_dataeff.rollouts.distributed import Processes
from trl_dataeff.selection.base import Selector


class InTurn(Selector):
    """Proposes prompts in turn, or those of `prompts`, keeps the success rate of every group, and maps it as it is told to."""

    def __init__(self, prompts=(), references=()):
        self.next, self.prompts, self.references = 0, list(prompts), list(references)
        self.rates, self.groups, self.uses_references = {}, [], bool(self.references)

    def propose(self, n, rng):
        self.next += n
        ids = np.arange(self.next - n, self.next)
        return np.array(self.prompts)[ids] if self.prompts else ids

    def roll_out_references(self, roll_out, rng):
        roll_out(np.array(self.references))

    def observe(self, groups):
        self.rates.update({group.prompt_id: group.success_rate for group in groups})
        self.groups += groups

    def rescale(self, scale, offset):
        self.rates = {prompt: scale * rate + offset for prompt, rate in self.rates.items()}


class AtRandom(Selector):
    """Proposes prompts and references at random, the same on every process."""

    exact = True

    def __init__(self, num_prompts: int, references: int = 0):
        self.num_prompts, self.references, self.uses_references = num_prompts, references, references > 0

    def propose(self, n, rng):
        return torch.randperm(self.num_prompts, generator=rng)[:n].numpy()

    def roll_out_references(self, roll_out, rng):
        roll_out(self.propose(self.references, rng))


def collector(**options) -> RolloutCollector:
    arguments = {
        "group_size": 4,
        "batch_groups": 2,
        "reward_names": ["reward"],
        "num_prompts": 40,
        "selector": InTurn(),
    }
    return RolloutCollector(classifier=GroupClassifier(np.array([1.0])), **arguments | options)


def rounds(rewards: dict[int, list[float]]):
    """Rollouts of prompts by their rewards."""

    def roll_out(ids: np.ndarray) -> Round:
        values = np.array([rewards[int(i)] for i in ids], dtype=np.float32).reshape(-1, 1)
        return Round(values, np.ones(len(values), np.int32), np.zeros(len(values), bool))

    return roll_out


def rounds_at_random(seed: int, effective: float, processes: Processes = Processes()):  # noqa: B008 (immutable)
    """Rollouts of groups that are effective with this probability; the prompt's tokens tell which group it is."""
    rng, calls = np.random.default_rng(seed), iter(range(10**6))

    def roll_out(ids: np.ndarray) -> Round:
        rewards = np.zeros((len(ids), 4), np.float32)
        rewards[rng.random(len(ids)) < effective, 0] = 1
        call = next(calls)
        own = [make_group(g=4, prompt_tokens=np.array([i, call])).rollouts for i in processes.share(ids)]
        return Round(
            rewards.reshape(-1, 1), np.ones(rewards.size, np.int32), np.zeros(rewards.size, bool), rollouts=own
        )

    return roll_out


def on_processes(world_size: int, work: Callable[[Processes], Any]) -> list[Any]:
    """What `work` returns on each of `world_size` threads that stand for processes."""
    barrier, values, local = threading.Barrier(world_size, timeout=20), [None] * world_size, threading.local()

    def all_gather(value):
        values[local.rank] = value
        barrier.wait()
        gathered = list(values)
        barrier.wait()
        return gathered

    def start(rank):
        local.rank = rank
        try:
            return work(Processes(rank, world_size))
        except BaseException:
            barrier.abort()
            raise

    target = "trl_dataeff.rollouts.distributed.all_gather"
    with mock.patch(target, all_gather), ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(start, range(world_size)))
