"""
What replay saves of a step's time, and what the lab says of how it learns.

    python -m benchmarks.replay

The same small Llama (made in code, about 1.3M parameters) trains on 16 x 8 completions of 32 tokens a step with nothing, a
quarter and a half of each batch replayed, in short runs that take turns, so that whatever else the machine does falls on
all of them. Steps before the buffer can give its share are left out. Prints the medians of a step's parts, and exits with
1 if generation with half replayed takes more than 0.55 of what it takes with nothing. Then prints the accuracy, and the
age and ratio of what was replayed, of the runs of the lab's table.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import pyarrow.parquet as pq
import torch
from datasets import Dataset
from transformers import PrinterCallback

from benchmarks.greso import lab_accuracy_at
from benchmarks.lab.ratios import curves_by_setting, ratios, show
from benchmarks.overhead import character_tokenizer, digits_reward, small_llama
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer


LIMIT = 0.55
SHARES = (0.0, 0.25, 0.5)
WARM_UP = 3  # steps, after which the buffer can give every share
PARTS = ("generation", "training", "selection")
LAB = Path(__file__).parent / "results" / "lab" / "methods" / "results.parquet"


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


def lab_table(path: Path) -> str:
    """The lab's runs as Markdown: accuracy against rollouts, and the means over the run of age and ratio."""
    rows = pq.read_table(path).to_pylist()
    lines = [
        "| method | seeds | accuracy at the end | rollouts | to reach uniform's end | ratio | per seed | age | ratio, mean | ratio, largest |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for curves in curves_by_setting(rows).values():
        for row in ratios(curves):
            own = [r for r in rows if r["method"] == row["method"]]
            means = []
            for column in ("replay_age", "replay_ratio", "replay_ratio_max"):
                values = [r[column] for r in own if r.get(column) is not None]
                means.append(f"{statistics.fmean(values):.2f}" if values else "")
            per_seed = ", ".join(show(value) for value in row["rollouts_ratios"])
            lines.append(
                f"| `{row['method']}` | {row['seeds']} | {row['end']:.3f} | {row['rollouts']:,.0f} | {show(row['reach'], 0)} | "
                f"{show(row['rollouts_ratio'])} | {per_seed} | {' | '.join(means)} |"
            )
    return "\n".join(lines)


def selection_shares(path: Path) -> dict[str, float]:
    """By method of a lab table: share of a step that choosing prompts took, mean over the runs' evaluations."""
    parts: dict[str, list[list[float]]] = {}
    for row in pq.read_table(path).to_pylist():
        if row["step"] and row["selection_s"] is not None:
            parts.setdefault(row["method"], []).append(
                [row[f"{part}_s"] for part in ("selection", "generation", "training")]
            )
    means = {
        method: [statistics.fmean(column) for column in zip(*rows, strict=True)] for method, rows in parts.items()
    }
    return {method: values[0] / sum(values) for method, values in means.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=6, help="runs of each share")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a run")
    parser.add_argument("--lab", type=Path, default=LAB, help="table of `python -m benchmarks.lab run`")
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
    if options.lab.exists():
        print(f"\n{lab_table(options.lab)}\n")
        for rollouts in (3000, 6400):
            accuracy = lab_accuracy_at(options.lab, rollouts)
            print(f"accuracy after {rollouts:,} rollouts:", *(f"{name} {v:.3f}" for name, v in accuracy.items()))
        shares = selection_shares(options.lab)
        print("share of a step that is selection:", *(f"{name} {share:.1%}" for name, share in shares.items()))
    sys.exit(int(medians[0.5]["generation"] > LIMIT * none["generation"]))


if __name__ == "__main__":
    main()
