"""
What sequential rollouts do to a prompt's expected gradient, exactly: by enumeration of all groups.

    python -m benchmarks.sequential_bias

A prompt's completions get one of a few rewards, each with a probability that the policy changes. Its group contributes
`sum_i A_i grad log pi(completion_i)`, which in expectation is `sum_v w_v grad P(v)`, with one weight per reward. A group that is
stopped contributes nothing. The table assumes the most that the rule can do: every group whose first half agrees is stopped.
For 0/1 rewards there is one gradient, so that stopping rescales it; for graded rewards it may turn. Prints the share of completions
that are generated, the gradient's length against that of whole groups, and the cosine between the two.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from itertools import product

import numpy as np


EPSILON = 1e-4  # that TRL adds to the standard deviation
RATES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
#: Rewards and their probabilities: partial credit is the rule, is as frequent as failure, or is rare
GRADED = {
    "0, 0.2, 1 at 0.05, 0.90, 0.05": ((0.0, 0.2, 1.0), (0.05, 0.90, 0.05)),
    "0, 0.2, 1 at 0.45, 0.45, 0.10": ((0.0, 0.2, 1.0), (0.45, 0.45, 0.10)),
    "0, 0.2, 1 at 0.90, 0.08, 0.02": ((0.0, 0.2, 1.0), (0.90, 0.08, 0.02)),
    "0, 0.5, 1 at 0.96, 0.02, 0.02": ((0.0, 0.5, 1.0), (0.96, 0.02, 0.02)),
    "0, 0.5, 1 at 0.02, 0.96, 0.02": ((0.0, 0.5, 1.0), (0.02, 0.96, 0.02)),
}


def counts(n: int, probabilities: Sequence[float]) -> list[tuple[np.ndarray, float]]:
    """How often each reward may occur among n completions, and how likely that is."""
    found = []
    for head in product(range(n + 1), repeat=len(probabilities) - 1):
        if sum(head) <= n:
            k = np.array([*head, n - sum(head)])
            ways = math.factorial(n) / math.prod(math.factorial(int(each)) for each in k)
            found.append((k, ways * float(np.prod(np.power(probabilities, k)))))
    return found


def gradient(
    rewards: Sequence[float], probabilities: Sequence[float], group_size: int, *, scaled: bool, stops: bool
) -> tuple[np.ndarray, float]:
    """
    Expected gradient by the logits of the rewards' probabilities, `(V,)`, and expected completions per group.

    Args:
        rewards (`Sequence[float]`), probabilities (`Sequence[float]`): V different rewards.
        group_size (`int`): G.
        scaled (`bool`): whether advantages are divided by the group's standard deviation.
        stops (`bool`): whether a group whose first half agrees is stopped.
    """
    values, total, completions = np.array(rewards), np.zeros(len(rewards)), 0.0
    first = group_size // 2
    for (a, p), (b, q) in product(counts(first, probabilities), counts(group_size - first, probabilities)):
        stopped = stops and a.max() == first
        completions += p * q * (first if stopped else group_size)
        if not stopped:
            k = a + b
            mean = k @ values / group_size
            deviation = math.sqrt(k @ (values - mean) ** 2 / (group_size - 1))
            total += p * q * k * (values - mean) / (deviation + EPSILON if scaled else 1.0)
    return total, completions


def row(rewards: Sequence[float], probabilities: Sequence[float], group_size: int, scaled: bool) -> list[float]:
    """Share of completions generated, length of the gradient against that of whole groups, and cosine."""
    whole, _ = gradient(rewards, probabilities, group_size, scaled=scaled, stops=False)
    stopped, completions = gradient(rewards, probabilities, group_size, scaled=scaled, stops=True)
    length = float(np.linalg.norm(stopped) / np.linalg.norm(whole))
    cosine = float(whole @ stopped / np.linalg.norm(whole) / np.linalg.norm(stopped))
    return [completions / group_size, length, min(cosine, 1.0)]


def table(group_size: int) -> list[str]:
    """The lines of the table, with and without division by the standard deviation."""
    lines = [f"| rewards, G = {group_size} | completions | length | cosine | length, unscaled | cosine, unscaled |"]
    lines.append("|---|---|---|---|---|---|")
    cases = {f"0, 1 at {1 - p:.2f}, {p:.2f}": ((0.0, 1.0), (1 - p, p)) for p in RATES} | GRADED
    for name, (rewards, probabilities) in cases.items():
        scaled, unscaled = (row(rewards, probabilities, group_size, scaled) for scaled in (True, False))
        numbers = [*scaled, *unscaled[1:]]
        lines.append(f"| {name} | " + " | ".join(f"{number:.3f}" for number in numbers) + " |")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_generations", type=int, default=8, help="G (default: 8).")
    print("\n".join(table(parser.parse_args(argv).num_generations)))


if __name__ == "__main__":
    main()
