"""
What `replay="share"` saves of a step's time.

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

import torch

from benchmarks.overhead import in_turns, train_briefly
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer


LIMIT = 0.55
SHARES = (0.0, 0.25, 0.5)
WARM_UP = 3  # steps, after which the buffer can give every share
PARTS = ("generation", "training", "selection")


def run_steps(share: float, steps: int, folder: str) -> list[dict[str, float]]:
    """Seconds of the parts of each of `steps` steps after the warm-up."""
    options = {"selection": "uniform", "skip_zero_advantage": False, "replay": "share" if share else "off"}
    options |= {"replay_fraction": share} if share else {}
    trainer, _ = train_briefly(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, steps + WARM_UP, folder, **options)
    logs = [log for log in trainer.state.log_history if "loss" in log][WARM_UP:]
    parts = [(log["dataeff/time/generation_s"], log["dataeff/time/selection_s"], log["step_time"]) for log in logs]
    return [{"generation": g, "training": step - g - s, "selection": s} for g, s, step in parts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=6, help="runs of each share")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    times = in_turns(SHARES, options.turns, lambda share, folder: run_steps(share, options.steps, folder))
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
