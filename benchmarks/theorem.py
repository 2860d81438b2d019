"""
The gradient of a group against its success rate: the theorem behind DOTS, checked on a policy whose gradient is exact.

    python -m benchmarks.theorem

arXiv 2506.05316 shows that the expected squared norm of a group's gradient is proportional to p (1 - p) (1 - 1/G). A
policy of independent softmax tokens draws completions of 12 tokens from 16; whether one is right is drawn with
probability p, apart from the tokens. For each p and G the mean squared norm of

    1/G sum_i (r_i - mean r) grad log pi(completion_i)

is taken over many groups and compared with the theorem, whose one constant, E|grad log pi|^2 / G, is known in closed
form. Prints the table, and exits with 1 if a ratio is further from 1 than its sampling error allows.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np


TOKENS = 12  # T
VOCABULARY = 16  # V
GROUP_SIZES = (4, 8, 16)
RATES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)


def measure(p: float, group_size: int, groups: int, rng: np.random.Generator) -> tuple[float, float]:
    """Measure the gradient at one success rate.

    Args:
        p (`float`): The success rate.
        group_size (`int`): Completions of a group, G.
        groups (`int`): Number of groups, N.
        rng (`np.random.Generator`): The random state.

    Returns:
        The mean over groups of the squared norm of the gradient, divided by the theorem's expectation; and its
        standard error.
    """
    logits = rng.normal(size=(TOKENS, VOCABULARY))
    pi = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)  # (T, V)
    constant = (1 - (pi**2).sum(-1)).sum()  # E|e_a - pi|^2 = 1 - sum_a pi_a^2, for each token

    # A token is drawn by how many steps of the cumulated probabilities a uniform number exceeds
    exceeds = rng.random((groups, group_size, TOKENS, 1)) > pi.cumsum(-1)  # (N, G, T, V)
    tokens = np.minimum(exceeds.sum(-1), VOCABULARY - 1)  # (N, G, T); the last step may be 1 but for rounding
    gradient = np.eye(VOCABULARY)[tokens] - pi  # of log pi, by the logits, (N, G, T, V)

    rewards = (rng.random((groups, group_size)) < p).astype(float)
    advantages = rewards - rewards.mean(axis=1, keepdims=True)  # (N, G)
    total = np.einsum("ng,ngtv->ntv", advantages, gradient) / group_size
    expected = p * (1 - p) * (1 - 1 / group_size) * constant / group_size
    norms = (total**2).sum((1, 2)) / expected  # (N,)
    standard_error = norms.std(ddof=1) / np.sqrt(groups)
    return float(norms.mean()), float(standard_error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=4000, help="groups for each success rate and G")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    results = {}
    for group_size in GROUP_SIZES:
        for p in RATES:
            results[p, group_size] = measure(p, group_size, options.groups, rng)

    print("measured / theorem, with standard error\n")
    print("| p | " + " | ".join(f"G = {group_size}" for group_size in GROUP_SIZES) + " |")
    print("|---" * (1 + len(GROUP_SIZES)) + "|")
    for p in RATES:
        cells = []
        for group_size in GROUP_SIZES:
            ratio, error = results[p, group_size]
            cells.append(f"{ratio:.2f} ± {error:.2f}")
        print(f"| {p} | " + " | ".join(cells) + " |")
    distances = [abs(ratio - 1) / error for ratio, error in results.values()]
    print(f"\nfurthest from 1: {max(distances):.1f} standard errors, of {len(distances)} ratios")
    sys.exit(1 if max(distances) > 4 else 0)


if __name__ == "__main__":
    main()
