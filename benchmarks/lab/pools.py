"""The prompt pools: how much of each is easy, learnable and unsolvable for the trained start.

A (family, length) cell is classified by the start's own mean success on `CELL_TASKS` fixed tasks, computed exactly
(see `evaluate`), so a pool follows from the start without sampling noise. Arithmetic fills the unsolvable
part. The learnable cells are drawn equally often.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import Dataset

from .evaluate import success
from .rewards import answer_and_length, exact_match, noisy_match, right_characters
from .tasks import CELLS, Task, make_task


Cell = tuple[str, int]
EASY, LEARNABLE, UNSOLVABLE = "easy", "learnable", "unsolvable"
#: Mean success of a cell from which it is easy; up to which it is unsolvable; within which it is learnable.
EASY_FROM, UNSOLVABLE_UP_TO, LEARNABLE_RANGE = 0.93, 0.002, (0.01, 0.7)
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
        easy, learnable = round(self.easy * self.size), round(self.learnable * self.size)
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
        result[family, length] = success(model, tokenizer, tasks)[0].mean().item()
    return result


def cached_cell_success(folder: Path, model, tokenizer) -> dict[Cell, float]:
    """`cell_success`, kept beside the trained start in `folder`."""
    file = folder / "cells.json"
    if not file.exists():
        rows = [[family, length, p] for (family, length), p in cell_success(model, tokenizer).items()]
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
    """`n` tasks from `cells` in turn, none of them with a prompt in `taken`, which grows by theirs."""
    if n and not cells:
        raise ValueError("The trained start has no cell of a kind that the pool needs; change its noise or its steps.")
    tasks: list[Task] = []
    for _ in range(100 * n):
        if len(tasks) == n:
            break
        task = make_task(rng, *cells[len(tasks) % len(cells)])
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
    return [
        {"prompt": t.prompt, "answer": t.answer, "family": t.family, "length": t.length, "kind": kind} for t in tasks
    ]


def pool_dataset(pool: Pool, kinds: dict[str, list[Cell]], seed: int, only: Iterable[str] | None = None) -> Dataset:
    """The pool's prompts for `seed`, in random order, without held-out prompts.

    Columns: `prompt`, `answer`, `family`, `length`, `kind`. `only` keeps some kinds: the same prompts as in the whole pool.
    """
    rng = np.random.default_rng([seed, 2])
    taken = {task.prompt for task in held_out_tasks(kinds)}
    rows = [row for kind, n in pool.counts().items() for row in as_rows(draw(rng, kinds[kind], n, taken), kind)]
    rows = [rows[i] for i in rng.permutation(len(rows))]
    return Dataset.from_list([row for row in rows if only is None or row["kind"] in set(only)])
