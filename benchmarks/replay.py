"""
What replay saves of a step's time.

    python -m benchmarks.replay

The same small Llama (made in code, about 1.3M parameters) trains on 16 x 8 completions of 32 tokens a step with nothing, a
quarter and a half of each batch replayed, in short runs that take turns, so that whatever else the machine does falls on
all of them. Steps before the buffer can give its share are left out. Prints the medians of a step's parts, and exits with
1 if generation with half replayed takes more than 0.55 of what it takes with nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile

import torch
from datasets import Dataset
from transformers import PrinterCallback

from benchmarks.overhead import character_tokenizer, digits_reward, small_llama
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer


LIMIT = 0.55
SHARES = (0.0, 0.25, 0.5)
WARM_UP = 3  # steps, after which the buffer can give every share
PARTS = ("generation", "training", "selection")


def run_steps(share: float, steps: int, folder: str) -> list[dict[str, float]]:
    """Seconds of the parts of each of `steps` steps after the warm-up."""
    tokenizer = character_tokenizer()
    config = DataEfficientGRPOConfig(
        folder,
        selection="uniform",
        replay_fraction=share,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=128,
        num_generations=8,
        max_completion_length=32,
        learning_rate=1e-5,
        max_steps=steps + WARM_UP,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = DataEfficientGRPOTrainer(
        model=small_llama(len(tokenizer)),
        reward_funcs=digits_reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [f"{i}+{i * 7}=?" for i in range(512)]}),
        processing_class=tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log][WARM_UP:]
    return [{part: log[f"dataeff/time/{part}_s"] for part in PARTS} for log in logs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=6, help="runs of each share")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    times: dict[float, list[dict[str, float]]] = {share: [] for share in SHARES}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.turns):
            for share in SHARES if turn % 2 == 0 else reversed(SHARES):
                times[share] += run_steps(share, options.steps, folder)
            print(f"turn {turn + 1}/{options.turns}", file=sys.stderr)
    medians = {
        share: {part: statistics.median(step[part] for step in steps) for part in PARTS}
        for share, steps in times.items()
    }
    print("| replayed | generation, ms | training, ms | selection, ms | step, ms | generation against none | step |")
    print("|---|---|---|---|---|---|---|")
    none = medians[0.0]
    for share, parts in medians.items():
        cells = " | ".join(f"{1e3 * parts[part]:.0f}" for part in PARTS)
        step, ratio = sum(parts.values()), parts["generation"] / none["generation"]
        print(f"| {share:.2f} | {cells} | {1e3 * step:.0f} | {ratio:.2f} | {step / sum(none.values()):.2f} |")
    sys.exit(int(medians[0.5]["generation"] > LIMIT * none["generation"]))


if __name__ == "__main__":
    main()
