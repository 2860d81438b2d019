"""
What GRESO saves, on simulated prompts whose success rates drift upward, and what a proposal costs.

    python -m benchmarks.greso

The prompts are simulated; selection, rounds, history and controller are the package's own, driven as the trainer drives
them. Three methods roll out from the same population until they have the same number of effective groups: uniform,
dynamic sampling, and GRESO with dynamic sampling. Prints rollouts per effective group, for several numbers of passes
over the dataset, and exits with 1 if GRESO needs more than half of dynamic sampling's with 70 % dead prompts.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
import torch

from benchmarks.timing import timed
from trl_dataeff.analysis.simulate import Learning, SimulatedRun, make_config
from trl_dataeff.rollouts.group import HARD
from trl_dataeff.selection import GresoSelector, SelectorContext


G = 8
BATCH = 16
LIMIT = 0.5


def difficulties(n: int, dead: float, seed: int) -> np.ndarray:
    """
    Log-odds of success of N prompts at the start. `dead` of them are far out of reach, a tenth is easy, the rest is
    graded; skill rises with the optimizer steps, so that a few of the dead become solvable and some are learned.
    """
    rng = np.random.default_rng(seed)
    kinds = rng.random(n)
    difficulty = rng.uniform(-1.5, 3.0, n)
    difficulty[kinds < dead] = rng.uniform(9.0, 30.0, (kinds < dead).sum())
    difficulty[kinds > 0.9] = -8.0
    return -difficulty


def simulate(n: int, dead: float, drift: float, effective: int, seed: int, **fields) -> tuple[float, float]:
    """Rollouts per effective group until `effective` of them were had, and the last tenth's share of hard groups."""
    config = make_config(G, BATCH, seed=seed, rollout_margin=1.25, replay_fraction=0.0, **fields)
    steady = Learning(speed=drift, alpha=0.0)  # skill that rises with the steps, whatever they teach
    run = SimulatedRun(config, difficulties(n, dead, seed), lambda: np.empty((0, 0)), steady)
    hard_shares: list[bool] = []
    while run.now.effective < effective:
        _, batch = run.step()
        hard_shares += [group.kind == HARD for group in batch.generated]
    tail = hard_shares[-max(1, len(hard_shares) // 10) :]
    return run.now.rollouts / run.now.effective, float(np.mean(tail))


METHODS = {
    "uniform": {"selection": "uniform"},
    "dynamic sampling": {"selection": "uniform", "dynamic_sampling": True},
    "GRESO": {"selection": "greso", "dynamic_sampling": True},
}


def compare(n: int, dead: float, drift: float, passes: int, seeds: int) -> dict[str, tuple[float, float]]:
    """
    Means over seeds of rollouts per effective group and of the final share of hard groups. The number of effective
    groups is what `passes` passes over the living prompts can give.
    """
    effective = int(passes * n * (0.9 - dead))
    results = {}
    for name, fields in METHODS.items():
        runs = [simulate(n, dead, drift, effective, seed, **fields) for seed in range(seeds)]
        results[name] = tuple(np.mean(runs, axis=0))
    return results


def time_proposals(n: int = 10_000_000, batch: int = 512) -> tuple[float, float]:
    """
    Seconds of the first proposal of a pass, which shuffles n prompts, and of the slowest of the next nine. Nine tenths of
    the prompts have long streaks.
    """
    selector, rng = GresoSelector(), np.random.default_rng(0)
    selector.bind(SelectorContext(n, batch_groups=BATCH, group_size=G))
    selector.gate.pool.streak[:] = np.where(rng.random(n) < 0.9, 20, 0)
    selector.gate.pool.streak_kind[:] = rng.integers(1, 3, n)
    generator = torch.Generator().manual_seed(0)
    first, *later = (timed(lambda: selector.propose(batch, generator)).seconds for _ in range(10))
    return first, max(later)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=2048)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--drift", type=float, default=2e-4, help="rise of skill per step, in logits")
    options = parser.parse_args()
    torch.set_num_threads(1)
    failed = False
    print(f"{options.prompts} prompts, {BATCH} groups of {G} a generation batch, mean of {options.seeds} seeds")
    print("dead  passes  " + "".join(f"{name:>20s}" for name in METHODS) + "   GRESO / dynamic   hard share")
    for dead in (0.5, 0.7):
        for passes in (4, 8, 16):
            results = compare(options.prompts, dead, options.drift, passes, options.seeds)
            ratio = results["GRESO"][0] / results["dynamic sampling"][0]
            failed |= dead == 0.7 and ratio > LIMIT
            values = "".join(f"{value:20.2f}" for value, _ in results.values())
            print(f"{dead:4.1f}  {passes:6d}  {values}   {ratio:15.3f}   {results['GRESO'][1]:10.3f}")
    print("(rollouts per effective group; hard share: of GRESO's last tenth of rollouts, target 0.167)")
    first, later = time_proposals()
    print(
        f"512 prompts proposed from 10,000,000 on one core: {first:.2f} s when a pass begins (limit 1), then {later:.3f} s at most"
    )
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
