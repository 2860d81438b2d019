"""
What the trainer costs when everything in it is switched off: step time against `GRPOTrainer`, interleaved in one run.

    python -m benchmarks.overhead

Both trainers train the same small Llama (made in code, about 1.3M parameters) on the same prompts, 16 x 8 completions
of 32 tokens a step, in short runs that take turns, so that whatever else the machine does falls on both. Each run's
first steps are left out. Prints the medians and the ratio of medians, and exits with 1 if it is above the limit.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.lab.model import make_model, make_tokenizer
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer


LIMIT = 1.01
OFF = {"selection": "uniform", "replay": "off", "compact_update": False}
WARM_UP = 2

Name = TypeVar("Name")
Result = TypeVar("Result")


class StepTimes(TrainerCallback):
    """Seconds of each step, from its begin to its end."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.step_start = 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        self.step_start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(time.perf_counter() - self.step_start)


def digits_reward(completions: list[str], **kwargs) -> list[float]:
    return [sum(c.isdigit() for c in completion) / 32 for completion in completions]


def train_briefly(
    trainer_class: type, config_class: type, steps: int, folder: str, **options
) -> tuple[object, list[float]]:
    """The trainer after `steps` steps, and the seconds of each."""
    tokenizer = make_tokenizer()
    times = StepTimes()
    config = config_class(
        folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=128,
        num_generations=8,
        max_completion_length=32,
        learning_rate=1e-5,
        max_steps=steps,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    trainer = trainer_class(
        model=make_model(tokenizer, seed=0, hidden=160),
        reward_funcs=digits_reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [f"{i}+{i * 7}=" for i in range(512)]}),
        processing_class=tokenizer,
        callbacks=[times],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer, times.seconds


def run_steps(trainer_class: type, config_class: type, steps: int, folder: str) -> list[float]:
    """Seconds of `steps` steps after the warm-up."""
    options = OFF if config_class is DataEfficientGRPOConfig else {}
    _, seconds = train_briefly(trainer_class, config_class, steps + WARM_UP, folder, **options)
    return seconds[WARM_UP:]


def in_turns(names: Iterable[Name], turns: int, run: Callable[[Name, str], list[Result]]) -> dict[Name, list[Result]]:
    """What `run(name, folder)` gives for each name, one after the other and then backwards, `turns` times in all."""
    results: dict[Name, list[Result]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(turns):
            order = list(results)
            if turn % 2 == 1:
                order.reverse()
            for name in order:
                results[name] += run(name, folder)
            print(f"turn {turn + 1}/{turns}", file=sys.stderr)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=12, help="runs of each trainer")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a run")
    parser.add_argument("--limit", type=float, default=LIMIT, help="largest ratio that passes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    classes = {
        "GRPOTrainer": (GRPOTrainer, GRPOConfig),
        "DataEfficientGRPOTrainer, everything off": (DataEfficientGRPOTrainer, DataEfficientGRPOConfig),
    }

    def run(name: str, folder: str) -> list[float]:
        trainer_class, config_class = classes[name]
        return run_steps(trainer_class, config_class, options.steps, folder)

    seconds = in_turns(classes, options.turns, run)
    medians = []
    for name, values in seconds.items():
        lower, median, upper = (1e3 * quartile for quartile in statistics.quantiles(values, n=4))
        medians.append(median)
        print(f"{name:42s} median {median:7.1f} ms   quartiles {lower:.1f} to {upper:.1f} ms   {len(values)} steps")
    reference, ours = medians
    ratio = ours / reference
    print(f"ratio of medians {ratio:.4f} (limit {options.limit})")
    sys.exit(1 if ratio > options.limit else 0)


if __name__ == "__main__":
    main()
