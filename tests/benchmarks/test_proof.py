"""The statistics behind the tables of the results, on made-up runs."""

from __future__ import annotations

import math

import pytest

from benchmarks import proof
from benchmarks.lab.ratios import Curve


def run(method: str, seed: int, slope: float, steps: int = 100, per_step: int = 128, **columns) -> Curve:
    """Accuracy rises by `slope` a step from 0.2."""
    rows = [
        {
            "step": step, "rollouts": per_step * step, "wall_s": 2.0 * step, "cpu_s": float(step),
            "accuracy_sampled": 0.2 + slope * step, "accuracy_greedy": 0.5, "accuracy_easy": 0.9,
            "entropy_held_out": 0.3 - 0.002 * step, "groups": 16 * (step > 0), "effective_groups": 4 * (step > 0),
            "selection_s": 0.01, "generation_s": 0.4, "training_s": 0.59, "replay_age": None,
            "replay_ratio": None, "replay_ratio_max": None,
        } | columns
        for step in range(0, steps + 1, 10)
    ]  # fmt: skip
    return Curve(method, seed, rows)


def cells(text: str, method: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| `{method}` |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_at_is_linear_between_evaluations_and_knows_its_end():
    curve = run("uniform", 0, 0.004)
    assert proof.at(curve, "step", 25) == pytest.approx(0.3)
    assert proof.at(curve, "rollouts", 128 * 25) == pytest.approx(0.3)
    assert proof.at(curve, "step", 102) == pytest.approx(0.6)  # a whole step may be missing
    assert math.isnan(proof.at(curve, "step", 120))


def test_reach_table_by_hand():
    # Twice as fast by step, a quarter of the rollouts: half of the steps, half of the rollouts of each
    curves = [c for seed in (0, 1) for c in (run("uniform", seed, 0.004), run("fast", seed, 0.008, per_step=64))]
    row = cells(proof.reach_table(curves, 50), "fast")
    assert row[2] == "1600"  # 25 steps of 64
    assert row[3] == "0.25 (0.25-0.25)"
    assert row[5:] == ["0.50 (0.50-0.50)"] * 3
    slow = [*curves, run("slow", 0, 0.001), run("slow", 1, 0.001)]
    assert cells(proof.reach_table(slow, 50), "slow")[2:4] == ["never", "never, in 2 of 2"]


def test_rollouts_of_effective_groups_by_hand():
    """Uniform reaches 0.4 at step 50, with 5 evaluations of 80 effective groups of 8 in 6,400 rollouts; fast with 2.5 of them."""
    curves = [run("uniform", 0, 0.004), run("fast", 0, 0.008, per_step=64), run("slow", 0, 0.001)]
    for curve in curves:
        for row in curve.rows[1:]:
            row["effective_groups"] = 80
    text = proof.effective_alone(curves, 50)
    assert cells(text, "uniform")[2:] == ["1.00", "0.50"]
    assert cells(text, "fast")[2:] == ["0.25", "0.25"]
    assert cells(text, "slow")[2:] == ["never, in 1 of 1", "never"]


def test_ratios_to_a_target_are_paired_by_seed_and_leave_out_what_has_few_seeds():
    curves = [run("default", seed, 0.004 * (seed + 1)) for seed in (0, 1, 2)]
    curves += [run("default,x=1", seed, 0.008 * (seed + 1), per_step=64) for seed in (0, 1)]
    curves += [run("default,y=1", 0, 0.004)]
    text = proof.to_target_table(curves, "default", 0.4, seeds=2)
    assert cells(text, "x=1")[1:] == ["2", "0.25 (0.25-0.25)", "0.50 (0.50-0.50)", "0.50 (0.50-0.50)"]
    assert "y=1" not in text
    assert text.splitlines()[-1].startswith("| base | 3 | 1.00 |")


def test_intervals_are_students():
    values = [0.4, 0.5, 0.6]
    half = 4.30 * 0.1 / math.sqrt(3)
    assert proof.number(values) == f"0.500 ± {half:.3f}"
    assert proof.number([0.4, math.nan]) == ""
