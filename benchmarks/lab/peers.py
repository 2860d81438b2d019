"""What other packages' trainers want beside what all methods get."""

from __future__ import annotations

from typing import Any

import numpy as np
from datasets import Dataset

from .pools import Cell, Pool, as_rows, draw, held_out_tasks, pool_dataset


CALIBRATION = 32  # prompts, of the pool's own mixture, that no pool of this seed trains on


def cgrpo(pool: Pool, kinds: dict[str, list[Cell]], seed: int) -> dict[str, Any]:
    """
    A calibration set like the pool, and the answer, which is the whole completion. Each calibration takes 8 rollouts of
    all its prompts, hence few: the package's own example has 200.
    """
    rng, taken = np.random.default_rng([seed, 5]), {task.prompt for task in held_out_tasks(kinds)}
    taken |= set(pool_dataset(pool, kinds, seed)["prompt"])
    shares = {kind: round(CALIBRATION * n / pool.size) for kind, n in pool.counts().items()}
    rows = [row for kind, n in shares.items() for row in as_rows(draw(rng, kinds[kind], n, taken), kind)]
    return {"calibration_dataset": Dataset.from_list(rows), "answer_extractor": lambda completion: completion}
