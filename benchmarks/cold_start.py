"""
What predictions of an earlier run are worth (`history_from`): runs that begin with them, against the same runs without.

    python -m benchmarks.cold_start --seeds 0 1 2 3

Of each seed, the first run of the defaults leaves its groups behind. The second one trains the same initial model on the same
pool, as after a change of a hyperparameter. The rollouts of the first run are not counted in the second.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from pathlib import Path

import numpy as np


ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "cold_start.txt"
EARLY = 600  # rollouts
TARGETS = (0.4, 0.5)


def measure(seed: int, start: Path) -> tuple[list[float], list[float]]:
    """Early effective share and rollouts to each target: of the run without an earlier one, and of that with it."""
    from benchmarks.lab.train import RunSpec, run

    rows: tuple[list[dict], list[dict]] = ([], [])
    with tempfile.TemporaryDirectory() as earlier:
        for method, kept, own in (("default", earlier, rows[0]), (f"default,history_from={earlier}", None, rows[1])):
            spec = RunSpec(method, seed, "first", start.name, steps=200, max_rollouts=3_000, eval_every=4)
            run(spec, start, own.append, kept)
    return _of(rows[0]), _of(rows[1])


def _of(rows: list[dict]) -> list[float]:
    from benchmarks.curves import reach

    rollouts, accuracy, groups, effective = (
        np.array([row[name] for row in rows], dtype=float)
        for name in ("rollouts", "accuracy_sampled", "groups", "effective_groups")
    )
    shares = np.interp(EARLY, rollouts, effective.cumsum()) / np.interp(EARLY, rollouts, groups.cumsum())
    return [float(shares), *(reach(rollouts, accuracy, target) for target in TARGETS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    seeds = parser.parse_args().seeds
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # before the numerical libraries are imported
        os.environ.setdefault(name, "1")
    from benchmarks.curves import geometric_mean
    from benchmarks.lab.pretrain import StartRecipe, start_folder
    from benchmarks.lab.ratios import show

    start = start_folder(StartRecipe(), ROOT / ".cache" / "lab")
    found = [measure(seed, start) for seed in seeds]
    lines = [
        f"| seed | effective share of the first {EARLY} rollouts | with history_from | "
        + " | ".join(f"rollouts to {target:g} | with history_from" for target in TARGETS)
        + " |",
        "|---" * (3 + 2 * len(TARGETS)) + "|",
    ]
    for seed, (without, given) in zip(seeds, found, strict=True):
        cells = [f"{without[0]:.2f}", f"{given[0]:.2f}"]
        cells += [show(value, 0) for pair in zip(without[1:], given[1:], strict=True) for value in pair]
        lines.append(f"| {seed} | {' | '.join(cells)} |")
    lines.append("")
    for place, target in enumerate(TARGETS, 1):
        pairs = [(given[place], without[place]) for without, given in found]
        if all(map(math.isfinite, np.ravel(pairs))):
            ratio, low, high = geometric_mean([a / b for a, b in pairs])
            lines.append(f"Rollouts to {target:g}: {ratio:.2f} ({low:.2f}-{high:.2f}) of those without.")
        else:
            lines.append(f"Rollouts to {target:g}: not reached by every run.")
    RESULT.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
