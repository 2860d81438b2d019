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
    """Proposes prompts in turn, or those of `prompts`, and always the same references; keeps what it has observed."""

    def __init__(self, prompts=(), references=()):
        self.next, self.prompts, self.fixed, self.groups = 0, list(prompts), list(references), []

    def propose(self, n, rng):
        self.next += n
        prompts = self.prompts or range(self.context.num_prompts)
        return np.take(prompts, range(self.next - n, self.next), mode="wrap")

    def references(self, rng):
        return np.array(self.fixed)

    def observe(self, groups):
        self.groups += groups


class AtRandom(Selector):
    """Proposes prompts and so many references at random, the same on every process."""

    exact = True

    def __init__(self, references: int = 0):
        self.count = references

    def propose(self, n, rng):
        return torch.randperm(self.context.num_prompts, generator=rng)[:n].numpy()

    def references(self, rng):
        return self.propose(self.count, rng)


def collector(num_prompts: int = 40, **options) -> RolloutCollector:
    """A collector whose run has begun."""
    arguments = {"group_size": 4, "batch_groups": 2, "reward_names": ["reward"], "selector": InTurn()}
    run = RolloutCollector(classifier=GroupClassifier(np.array([1.0])), **arguments | options)
    run.bind(num_prompts)
    return run


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
