"""
How long DOTS takes to select the prompts of a generation batch among 10,000, by the width of the model that embeds
them.

    python -m benchmarks.selection

Prints the CPU time of one thread per generation batch of 16 groups of 8: a proposal, predictions for the logs, and the
groups observed afterwards. Embeddings and rewards are random, and no model runs. A step logs the same work as
`dataeff/time/selection_s`. Before that, the memory that selection takes for each of a million prompts, after two
generation batches and at its peak, embeddings left out.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from trl_dataeff import DotsSelector, SelectorContext
from trl_dataeff.rollouts.scale import RewardScale
from trl_dataeff.testing import make_groups


GROUPS = 16
WARM_UP = 5
BATCHES = 30
#: Models by the width of their hidden states
WIDTHS = {576: "SmolLM2-135M", 896: "Qwen2.5-0.5B", 1536: "Qwen2.5-1.5B", 3584: "Qwen2.5-7B"}
PROMPTS = 10_000
MANY_PROMPTS = 1_000_000


def bound(embeddings: np.ndarray) -> DotsSelector:
    """A selector at the start of a run."""
    selector = DotsSelector()
    selector.bind(
        SelectorContext(
            len(embeddings),
            batch_groups=GROUPS,
            group_size=8,
            embed=lambda: embeddings,
            scale=RewardScale.of((0.0, 1.0)),
        )
    )
    return selector


def resident_bytes() -> int:
    """Memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def bytes_per_prompt(num_prompts: int) -> tuple[float, float]:
    """Memory that selection takes for each prompt: after two generation batches, and at the peak of this process."""
    rng = np.random.default_rng(0)
    embeddings = rng.standard_normal((num_prompts, 32), dtype=np.float32).astype(np.float16)
    before = resident_bytes()
    selector = bound(embeddings)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        prompt_ids = selector.propose(GROUPS, generator)
        selector.observe(make_groups(prompt_ids, rng.random(GROUPS)))
    after = resident_bytes()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return (after - before) / num_prompts, (peak - before) / num_prompts


def seconds_per_batch(num_prompts: int, width: int) -> list[float]:
    """CPU seconds of each generation batch after the warm-up."""
    rng = np.random.default_rng(0)
    embeddings = rng.standard_normal((num_prompts, width), dtype=np.float32).astype(np.float16)
    selector = bound(embeddings)
    generator = torch.Generator().manual_seed(0)
    seconds = []
    for _ in range(WARM_UP + BATCHES):
        success = rng.random(GROUPS)
        start = time.process_time()
        prompt_ids = selector.propose(GROUPS, generator)
        selector.predict(prompt_ids)
        selector.observe(make_groups(prompt_ids, success))
        seconds.append(time.process_time() - start)
    return seconds[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    torch.set_num_threads(1)
    after, peak = bytes_per_prompt(MANY_PROMPTS)
    print(f"{MANY_PROMPTS:,} prompts: {after:.0f} bytes a prompt, {peak:.0f} at the peak")
    for width, model in WIDTHS.items():
        seconds = seconds_per_batch(PROMPTS, width)
        median = 1e3 * statistics.median(seconds)
        print(f"{PROMPTS:,} prompts, width {width:4} ({model}): median {median:.0f} ms")


if __name__ == "__main__":
    main()
