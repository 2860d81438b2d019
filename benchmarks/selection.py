"""
How long DOTS takes to select the prompts of a generation batch among 10,000, by the width of the model that embeds
them.

    python -m benchmarks.selection

Prints the CPU time of one thread per generation batch of 16 groups of 8: a proposal, predictions for the logs, and the
groups observed afterwards. Embeddings and rewards are random, and no model runs. A step logs the same work as
`dataeff/time/selection_s`.
"""

from __future__ import annotations

import statistics
import time

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


def seconds_per_batch(num_prompts: int, width: int) -> list[float]:
    """CPU seconds of each generation batch after the warm-up."""
    rng = np.random.default_rng(0)
    embeddings = rng.standard_normal((num_prompts, width), dtype=np.float32).astype(np.float16)
    selector = DotsSelector()
    selector.bind(
        SelectorContext(
            num_prompts,
            batch_groups=GROUPS,
            group_size=8,
            embed=lambda: embeddings,
            scale=RewardScale.of((0.0, 1.0)),
        )
    )
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
    torch.set_num_threads(1)
    for width, model in WIDTHS.items():
        seconds = seconds_per_batch(PROMPTS, width)
        median = 1e3 * statistics.median(seconds)
        print(f"{PROMPTS:,} prompts, width {width:4} ({model}): median {median:.0f} ms")


if __name__ == "__main__":
    main()
