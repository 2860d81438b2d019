"""
From which layer of the policy are prompts best embedded?

    python -m benchmarks.embedding_layer

The lab's trained start embeds the prompts of its first pool by the mean, over a prompt's tokens, of the hidden states of
each layer, and by the last token's. The default predictor is fitted to some groups of 8 of random prompts, and predicts the
true success rates (which the lab computes exactly) of 512 prompts that it has not seen. Prints Pearson correlations, means over
seeds; a predictor that says the same of all prompts counts as 0. The package takes the mean of the last layer.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.lab.cli import ROOT
from benchmarks.lab.evaluate import success
from benchmarks.lab.pools import POOLS, cached_cell_success, classify, pool_dataset
from benchmarks.lab.pretrain import StartRecipe, start_folder
from benchmarks.lab.tasks import Task
from trl_dataeff.difficulty.loading import LogisticDifficultyPredictor
from trl_dataeff.difficulty.online import RollingDifficulty, pearson


GROUPS = (16, 64, 160)
GROUP_SIZE = 8
RESULT = Path(__file__).parent / "results" / "embedding_layer.txt"


@torch.no_grad()
def embeddings(model, tokenizer, prompts: list[str]) -> dict[str, np.ndarray]:
    """By layer and pooling: `(N, h)`. Layer 0 is what goes into the first block."""
    parts: dict[str, list[torch.Tensor]] = {}
    for start in range(0, len(prompts), 128):
        batch = tokenizer(prompts[start : start + 128], return_tensors="pt", padding=True)
        mask = batch["attention_mask"][..., None].float()
        layers = model(**batch, output_hidden_states=True).hidden_states
        for number, states in enumerate(layers):
            parts.setdefault(f"{number}, mean", []).append((states * mask).sum(1) / mask.sum(1))
        parts.setdefault(f"{number}, last token", []).append(layers[-1][:, -1])  # padded on the left
    return {name: torch.cat(values).numpy() for name, values in parts.items()}


def measure(seed: int, cache: Path) -> dict[tuple[str, int], float]:
    """Pearson correlation by embedding and number of groups."""
    start = start_folder(StartRecipe(), cache)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(start).eval(), AutoTokenizer.from_pretrained(start)
    kinds = classify(cached_cell_success(start, model, tokenizer))
    rows = [row for s in (seed, seed + 1000) for row in pool_dataset(POOLS["first"], kinds, s).to_list()]
    tasks = [Task(row["family"], row["length"], row["prompt"], row["answer"]) for row in rows]
    true, rng = success(model, tokenizer, tasks).sampled.double().numpy(), np.random.default_rng(seed)
    half = len(rows) // 2
    found = {}
    for name, E in embeddings(model, tokenizer, [row["prompt"] for row in rows]).items():
        for groups in GROUPS:
            ids = rng.permutation(half)[:groups]
            predictor = RollingDifficulty(E, LogisticDifficultyPredictor())
            predictor.observe(ids, rng.binomial(GROUP_SIZE, true[ids].clip(0, 1)) / GROUP_SIZE, 0)
            found[name, groups] = float(np.nan_to_num(pearson(predictor.refresh(0)[half:], true[half:])))
    return found


def table(results: list[dict[tuple[str, int], float]]) -> str:
    lines = [f"| layer, pooling | {' | '.join(f'{n} groups' for n in GROUPS)} |", "|---|" + "---|" * len(GROUPS)]
    for name in dict.fromkeys(name for name, _ in results[0]):
        values = (np.mean([result[name, groups] for result in results]) for groups in GROUPS)
        lines.append(f"| {name} | {' | '.join(f'{value:.2f}' for value in values)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "lab", help="folder of the trained start")
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = table([measure(seed, options.cache) for seed in range(options.seeds)])
    RESULT.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
