"""
Makes the recorded runs in `tests/data/runs` again: `python -m tests.data.make_runs FOLDER` (ten minutes on two cores).

A tiny model learns to write letters or capitals; it could learn digits and blanks, too, and does not. Of the files, those that a
report reads are kept, without the metrics that it does not show.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from tests.factories.tiny import run
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer


TASKS = {"letter": str.isalpha, "digit": str.isdigit, "space": str.isspace, "upper": str.isupper}
KINDS = [*TASKS, "never", "always"]
LEVELS = {1: 0.34, 2: 0.5, 3: 0.6}  # share of fitting characters that is rewarded
OURS, PLAIN = (DataEfficientGRPOTrainer, DataEfficientGRPOConfig), (GRPOTrainer, GRPOConfig)


def dataset(size: int, seed: int = 0) -> Dataset:
    levels = np.random.default_rng(seed).integers(1, 4, size).tolist()
    return Dataset.from_list(
        [
            {
                "prompt": f"{i:03d} write a {KINDS[i % 6]}: ",
                "task": KINDS[i % 6],
                "level": levels[i],
                "source": ["web", "book"][i % 2],
            }
            for i in range(size)
        ]
    )


def reward(completions, task, level, **kwargs) -> list[float]:
    scores = {"always": 1.0, "never": 0.0}
    shares = [sum(map(TASKS.get(t, str.isalpha), c)) / max(len(c), 1) for c, t in zip(completions, task)]
    return [scores.get(t, float(share >= LEVELS[n])) for share, t, n in zip(shares, task, level)]


def record(classes, folder: Path, seed: int = 0, **fields) -> None:
    evaluation = {"eval_strategy": "steps", "eval_steps": 10, "eval_on_start": True, "per_device_eval_batch_size": 64}
    saving = {"save_strategy": "steps", "save_steps": 60, "save_total_limit": 1, "log_completions": True}
    options = {"per_device_train_batch_size": 64, "num_generations": 8, "learning_rate": 4e-3, "logging_steps": 2}
    data = {"train_dataset": dataset(360), "eval_dataset": dataset(48, 1)}
    given = {"max_steps": 120, "lr_scheduler_type": "constant", "num_completions_to_print": 0, "seed": seed}
    off = {"selection": "auto", "replay_fraction": 0.5} if classes is OURS else {}
    run(
        *classes, folder, rewards=reward, trainer=data, **{**evaluation, **saving, **options, **given, **off, **fields}
    )


if __name__ == "__main__":
    root = Path(sys.argv[1])
    for seed in (0, 1):
        record(OURS, root / f"dots-{seed}", seed)
        record(OURS, root / f"uniform-{seed}", seed, selection="uniform", replay_fraction=0.0)
    record(PLAIN, root / "plain")
    record(OURS, root / "dapo", selection="dots+greso", dynamic_sampling=True)
