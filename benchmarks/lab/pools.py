"""The prompt pools: how much of each is easy, learnable and unsolvable for the trained start.

A (family, length) cell is classified by the start's own mean success on `CELL_TASKS` fixed tasks, computed exactly
(see `evaluate`), so a pool follows from the start without sampling noise. Arithmetic fills the unsolvable part. The
learnable cells are drawn equally often.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from datasets import Dataset

from .evaluate import success
from .rewards import answer_and_length, exact_match, noisy_match, right_characters
from .tasks import CELLS, Task, make_task


Cell: TypeAlias = tuple[str, int]  # family, length
EASY = "easy"
LEARNABLE = "learnable"
UNSOLVABLE = "unsolvable"
#: Mean success of a cell from which it is easy; up to which it is unsolvable; within which it is learnable
EASY_FROM = 0.93
UNSOLVABLE_UP_TO = 0.002
LEARNABLE_RANGE = (0.01, 0.7)
CELL_TASKS = 128
HELD_OUT = 512
EASY_TASKS = 96


@dataclass(frozen=True)
class Pool:
    """Shares of the three kinds, the reward that is trained on, and the number of prompts."""

    easy: float
    learnable: float
    unsolvable: float
    reward: Callable[..., list[float]] = exact_match
    size: int = 512

    def counts(self) -> dict[str, int]:
        easy = round(self.easy * self.size)
        learnable = round(self.learnable * self.size)
        return {EASY: easy, LEARNABLE: learnable, UNSOLVABLE: self.size - easy - learnable}


POOLS = {
    "first": Pool(easy=0.12, learnable=0.18, unsolvable=0.70),
    "second": Pool(easy=0.15, learnable=0.35, unsolvable=0.50),
    "third": Pool(easy=0.12, learnable=0.18, unsolvable=0.70, reward=right_characters),
    "graded": Pool(easy=0.12, learnable=0.18, unsolvable=0.70, reward=answer_and_length),
    "learnable": Pool(easy=0.0, learnable=1.0, unsolvable=0.0),
    "noisy": Pool(easy=0.12, learnable=0.18, unsolvable=0.70, reward=noisy_match),
    "tiny": Pool(easy=0.12, learnable=0.18, unsolvable=0.70, size=64),
}


def cell_success(model, tokenizer) -> dict[Cell, float]:
    """The start's mean chance of a right completion, by cell, on tasks that depend on the cell alone."""
    result = {}
    for index, (family, length) in enumerate(CELLS):
        rng = np.random.default_rng([97, index])
        tasks = [make_task(rng, family, length) for _ in range(CELL_TASKS)]
        result[family, length] = success(model, tokenizer, tasks).sampled.mean().item()
    return result


def cached_cell_success(folder: Path, model, tokenizer) -> dict[Cell, float]:
    """`cell_success`, kept beside the trained start in `folder`."""
    file = folder / "cells.json"
    if not file.exists():
        success_by_cell = cell_success(model, tokenizer)
        rows = [[family, length, p] for (family, length), p in success_by_cell.items()]
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(rows))
        partial.replace(file)
    return {(family, length): p for family, length, p in json.loads(file.read_text())}


def classify(success_by_cell: dict[Cell, float]) -> dict[str, list[Cell]]:
    """The cells of each kind. A cell between two kinds belongs to none and is not used."""
    low, high = LEARNABLE_RANGE
    return {
        EASY: [cell for cell, p in success_by_cell.items() if p >= EASY_FROM],
        LEARNABLE: [cell for cell, p in success_by_cell.items() if low <= p <= high],
        UNSOLVABLE: [cell for cell, p in success_by_cell.items() if p <= UNSOLVABLE_UP_TO],
    }


def draw(rng: np.random.Generator, cells: list[Cell], n: int, taken: set[str]) -> list[Task]:
    """Draw tasks with different prompts.

    Args:
        rng (`np.random.Generator`): The random state.
        cells (`list[Cell]`): Where they come from, in turn.
        n (`int`): How many.
        taken (`set[str]`): Prompts that are left out. The drawn ones are added.

    Raises:
        ValueError: If there is no cell, or they do not have so many different prompts.
    """
    if n and not cells:
        raise ValueError("The trained start has no cell of a kind that the pool needs; change its noise or its steps.")
    tasks: list[Task] = []
    for _ in range(100 * n):
        if len(tasks) == n:
            break
        family, length = cells[len(tasks) % len(cells)]
        task = make_task(rng, family, length)
        if task.prompt not in taken:
            taken.add(task.prompt)
            tasks.append(task)
    if len(tasks) < n:
        raise ValueError(f"{cells} do not hold {n} different prompts; make the pool smaller.")
    return tasks


def held_out_tasks(kinds: dict[str, list[Cell]]) -> list[Task]:
    """`HELD_OUT` tasks of the learnable cells, the same for every method, seed and pool."""
    return draw(np.random.default_rng(1234), kinds[LEARNABLE], HELD_OUT, set())


def easy_tasks(kinds: dict[str, list[Cell]], pool_prompts: set[str]) -> list[Task]:
    """`EASY_TASKS` tasks of the easy cells that are not in a pool: what a method forgets shows on them."""
    return draw(np.random.default_rng(4321), kinds[EASY], EASY_TASKS, set(pool_prompts))


def as_rows(tasks: Iterable[Task], kind: str) -> list[dict]:
    """Tasks as rows of a dataset."""
    rows = []
    for task in tasks:
        rows.append(
            {
                "prompt": task.prompt,
                "answer": task.answer,
                "family": task.family,
                "length": task.length,
                "kind": kind,
            }
        )
    return rows


def pool_dataset(pool: Pool, kinds: dict[str, list[Cell]], seed: int, only: Iterable[str] | None = None) -> Dataset:
    """The prompts of a pool, in random order, without held-out prompts.

    Args:
        pool (`Pool`): The pool.
        kinds (`dict[str, list[Cell]]`): The cells of each kind, see [`classify`].
        seed (`int`): Each seed has other prompts.
        only (`Iterable[str]`, *optional*): Keeps these kinds: the same prompts as in the whole pool.

    Returns:
        A dataset with the columns `prompt`, `answer`, `family`, `length` and `kind`.
    """
    rng = np.random.default_rng([seed, 2])
    taken = {task.prompt for task in held_out_tasks(kinds)}
    rows: list[dict] = []
    for kind, n in pool.counts().items():
        rows += as_rows(draw(rng, kinds[kind], n, taken), kind)
    rows = [rows[i] for i in rng.permutation(len(rows))]
    if only is not None:
        rows = [row for row in rows if row["kind"] in only]
    return Dataset.from_list(rows)
