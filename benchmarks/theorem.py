"""
The gradient of a group against its success rate: the theorem behind DOTS, checked on a policy whose gradient is exact.

    python -m benchmarks.theorem

arXiv 2506.05316 shows that the expected squared norm of a group's gradient is proportional to p (1 - p) (1 - 1/G). A policy of
independent softmax tokens draws completions of 12 tokens from 16; whether one is right is drawn with probability p, apart from the
tokens. For each p and G the mean squared norm of `1/G sum_i (r_i - mean r) grad log pi(completion_i)` is taken over many groups and
laid beside the theorem, whose one constant, E|grad log pi|^2 / G, is known in closed form. Prints the table, and exits
with 1 if a ratio is further from 1 than its sampling error allows.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np


TOKENS, VOCABULARY = 12, 16
GROUP_SIZES = (4, 8, 16)
RATES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)


def measure(p: float, group_size: int, groups: int, rng: np.random.Generator) -> tuple[float, float]:
    """Mean over groups of the squared norm of the gradient, by the theorem's expectation; and its standard error."""
    logits = rng.normal(size=(TOKENS, VOCABULARY))
    pi = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    constant = (1 - (pi**2).sum(-1)).sum()  # E|e_a - pi|^2 = 1 - sum_a pi_a^2, for each token
    drawn = rng.random((groups, group_size, TOKENS, 1)) > pi.cumsum(-1)
    gradient = np.eye(VOCABULARY)[np.minimum(drawn.sum(-1), VOCABULARY - 1)] - pi  # of log pi, by the logits
    rewards = (rng.random((groups, group_size)) < p).astype(float)
    advantages = rewards - rewards.mean(axis=1, keepdims=True)
    total = np.einsum("ng,ngtv->ntv", advantages, gradient) / group_size
    norms = (total**2).sum((1, 2)) / (p * (1 - p) * (1 - 1 / group_size) * constant / group_size)
    return float(norms.mean()), float(norms.std(ddof=1) / np.sqrt(groups))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=4000, help="groups for each success rate and G")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    results = {g: [measure(p, g, options.groups, rng) for p in RATES] for g in GROUP_SIZES}
    print("measured / theorem, with standard error\n")
    print("| p | " + " | ".join(f"G = {g}" for g in GROUP_SIZES) + " |")
    print("|---" * (1 + len(GROUP_SIZES)) + "|")
    for i, p in enumerate(RATES):
        print(f"| {p} | " + " | ".join("{:.2f} ± {:.2f}".format(*results[g][i]) for g in GROUP_SIZES) + " |")
    apart = [abs(ratio - 1) / error for values in results.values() for ratio, error in values]
    print(f"\nfurthest from 1: {max(apart):.1f} standard errors, of {len(apart)} ratios")
    sys.exit(int(max(apart) > 4))


if __name__ == "__main__":
    main()
