"""
What `trl-dataeff simulate` says of the lab's pools, against what the lab's runs measured.

    python -m benchmarks.simulate          # the table
    python -m benchmarks.simulate --fit    # which constants fit the first pool best
    python -m benchmarks.simulate --scale  # what a step costs, and what `--predictability` is in a run's own metric

The simulation is given what a user could give: the pool's shares of easy and dead prompts, the range of the others'
success rates, and how well embeddings tell them apart. The constants are fitted to an earlier table of the first pool; the
rest is predicted.
"""

from __future__ import annotations

import argparse
import itertools
import math
import resource
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.lab.methods import find
from benchmarks.lab.pools import LEARNABLE_RANGE, POOLS
from benchmarks.lab.ratios import ratios, show
from benchmarks.proof import interval, load, on_first, table, together
from benchmarks.timing import timed
from trl_dataeff.analysis.simulate import (
    ALPHA,
    BASELINE,
    REPLAY_VALUE,
    SPEED,
    Costs,
    Learning,
    Outcome,
    Prompts,
    SimulatedRun,
    compare,
    embed,
    make_config,
)


RESULT = Path(__file__).parent / "results" / "simulate.txt"
SCALE = RESULT.with_name("simulate_scale.txt")
PREDICTABILITY = 0.9  # predictions of the simulated runs then correlate with success rates as those of the lab's, 0.94
STEPS, GROUPS, GROUP_SIZE = 100, 16, 8
ORACLE = "oracle"
LATE = 3.0  # the factor by which it counts as wrong to say that a method arrives, or that it does not
#: Simulated prompts have the success rates of these pools' learnable range
SIMULATED = ("first", "third")
LEFT_OUT = ("uniform",)


def prompts_of(pool: str) -> Prompts:
    shares = POOLS[pool]
    return Prompts(shares.size, shares.easy, shares.dead, LEARNABLE_RANGE, PREDICTABILITY)


def simulate(pool: str, methods: list[str], learning: Learning, seeds: int) -> dict[str, Outcome]:
    """Outcomes of the lab's methods on the simulated pool; the oracle has the learnable prompts alone."""
    prompts = prompts_of(pool)

    def make_run(fields: Mapping[str, Any], seed: int) -> SimulatedRun:
        rng = np.random.default_rng(seed)
        alone = "only" in fields
        log_odds = (
            Prompts(round(prompts.size * POOLS[pool].learnable), 0, 0, prompts.rates) if alone else prompts
        ).log_odds(rng)
        config = make_config(GROUP_SIZE, GROUPS, seed=seed, **{k: v for k, v in fields.items() if k != "only"})
        return SimulatedRun(config, log_odds, lambda: embed(log_odds, prompts.predictability, rng), learning)

    plain = {"selection": "uniform", "replay_fraction": 0.0}
    settings = {name: {**plain, "only": True} if name == ORACLE else find(name).options for name in methods}
    return compare(make_run, settings, steps=STEPS, costs=Costs(), seeds=seeds)


def measured(pool: str) -> dict[str, dict]:
    """The rows of the ratio table of the pool in the proof, at the lab's learning rate."""
    curves = on_first() if pool == "first" else together(load("proof", pool))
    return {row["method"]: row for row in ratios(curves, at_step=STEPS) if row["method"] not in LEFT_OUT}


def error(simulated: float, real: float) -> float:
    """Absolute difference of the logarithms; that of `LATE` where one of them never arrives, 0 where both do not."""
    if math.isfinite(simulated) and math.isfinite(real):
        return abs(math.log(simulated / real))
    return 0.0 if math.isinf(simulated) and math.isinf(real) else math.log(LATE)


def validate(learning: Learning, seeds: int, pools: list[str]) -> tuple[str, dict[str, list[float]]]:
    """The table, and by pool the errors of the ratios of rollouts."""
    body, errors = [], {}
    for pool in pools:
        rows = measured(pool)
        outcomes = simulate(pool, list(rows), learning, seeds)
        errors[pool] = [error(outcomes[name].ratio, row["rollouts_ratio"]) for name, row in rows.items()]
        for name, row in rows.items():
            o = outcomes[name]
            steps = o.steps / outcomes[BASELINE].steps
            body.append(
                (
                    pool, f"`{name}`", show(o.ratio), interval(row, "rollouts"), show(steps), show(row["step_ratio"]),
                    f"{o.effective:.2f}", f"{row['effective']:.2f}",
                )
            )  # fmt: skip
    header = (
        "pool", "method", "rollouts, simulated", "measured", "steps, simulated", "measured", "effective, simulated", "measured",
    )  # fmt: skip
    return table(header, body), errors


def fit(seeds: int) -> list[tuple[float, float, float]]:
    """Root mean square error of the first pool's ratios of rollouts and of steps, by `alpha` and `replay_value`."""
    rows, found = measured("first"), []
    for alpha, value in itertools.product((0.5, 0.6, 0.7, 0.75, 0.8, 0.9, 1.0), (0.0, 0.15, 0.3, 0.5)):
        outcomes = simulate("first", list(rows), Learning(SPEED, alpha, value), seeds)
        base = outcomes[BASELINE].steps
        errors = [error(outcomes[name].ratio, row["rollouts_ratio"]) for name, row in rows.items()]
        errors += [error(outcomes[name].steps / base, row["step_ratio"]) for name, row in rows.items()]
        found.append((float(np.sqrt(np.mean(np.square(errors)))), alpha, value))
    return sorted(found)


def scale(seeds: int) -> str:
    """CPU seconds of a step of DOTS by the number of prompts, and the correlation that simulated runs report."""
    lines = ["| prompts | seconds a step |", "|---|---|"]
    for size in (10_000, 1_000_000, 10_000_000):
        rng = np.random.default_rng(0)
        log_odds = Prompts(size, 0.1, 0.5).log_odds(rng)
        run = SimulatedRun(make_config(8, 64), log_odds, lambda log_odds=log_odds, rng=rng: embed(log_odds, 0.9, rng))
        run.step()
        cost = timed(lambda run=run: list(run.steps(3)))
        lines.append(f"| {size:,} | {cost.cpu_seconds / 3:.2g} |")
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    lines += ["", f"At most {gigabytes:.1f} GB.", "", "| predictability | pearson_explored |", "|---|---|"]
    for predictability in (0.3, 0.5, 0.6, 0.7, 0.9, 0.95):
        reported = []
        for seed in range(seeds):
            rng = np.random.default_rng(seed)
            log_odds = replace(prompts_of("first"), size=4096).log_odds(rng)
            E = embed(log_odds, predictability, rng)
            run = SimulatedRun(make_config(8, 64, seed=seed, exploration=0.3), log_odds, lambda E=E: E)
            for _ in run.steps(20):
                pass
            assert run.collector.selector is not None
            reported.append(run.collector.selector.metrics()["predictor/pearson_explored"])
        lines.append(f"| {predictability} | {np.mean(reported):.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--scale", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    if options.scale:
        text = scale(options.seeds)
        SCALE.write_text(text + "\n")
        print(text)
        return
    if options.fit:
        for value, alpha, replay in fit(options.seeds)[:8]:
            print(f"alpha {alpha:g}, replay_value {replay:g}: error {value:.3f}")
        return
    text, errors = validate(Learning(SPEED, ALPHA, REPLAY_VALUE), options.seeds, list(SIMULATED))
    lines = [text, ""]
    for pool, values in errors.items():
        both = [value for value in values if value != math.log(LATE)]
        median, most = (math.exp(value) for value in (np.median(both), max(both)))
        lines.append(
            f"{pool} pool: rollouts are off by a factor of {median:.2f} in the median, {most:.2f} at most, over the {len(both)} of "
            f"{len(values)} methods that arrive in both or in neither."
        )
    RESULT.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
