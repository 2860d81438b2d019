"""The statistics behind the tables of the results, on made-up runs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks import proof
from benchmarks.lab.pools import POOLS, classify, held_out_tasks, pool_dataset
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


def test_equal_table_leaves_out_what_a_run_has_not_come_to():
    curves = [run("uniform", 0, 0.004), run("short", 0, 0.004, steps=50), run("cgrpo", 0, 0.004)]
    text = proof.equal_table(curves, (6_400, 12_800), (50, 100))
    assert cells(text, "uniform")[1:5] == ["0.400", "0.600", "0.400", "0.600"]
    assert cells(text, "short")[1:5] == ["0.400", "", "0.400", ""]
    assert cells(text, "uniform")[-1] == "0.25"
    assert cells(text, "cgrpo")[-1] == ""


def test_intervals_are_students():
    values = [0.4, 0.5, 0.6]
    half = 4.30 * 0.1 / math.sqrt(3)
    assert proof.number(values) == f"0.500 ± {half:.3f}"
    assert proof.number([0.4, math.nan]) == ""


def test_entropy_is_compared_at_equal_accuracy():
    curves = [run("uniform", 0, 0.004), run("fast", 0, 0.008)]
    text = proof.entropy_table(curves, (0.4, 0.9))
    assert cells(text, "uniform")[1:] == ["0.200 (1)", "never"]  # at step 50
    assert cells(text, "fast")[1:] == ["0.250 (1)", "0.125 (1)"]  # at steps 25 and 87.5


def test_against_is_the_ratio_of_ratios_and_says_who_never_arrives():
    curves = [
        c for seed in (0, 1)
        for c in (run("uniform", seed, 0.004), run("default", seed, 0.016), run("oracle", seed, 0.008))
    ]  # fmt: skip
    assert proof.against(curves, "oracle", 100) == "0.50 (0.50-0.50)"
    late = [*[c for c in curves if c.method != "oracle"], run("oracle", 0, 0.001), run("oracle", 1, 0.008)]
    assert proof.against(late, "oracle", 100) == "oracle never, in 1 of 2 seeds"


def test_the_pooled_deviation_is_that_of_the_noise():
    """Variations without any effect, whose base has its own luck on each seed: intervals cover 0 as often as they say."""
    rng, outside, total, found = np.random.default_rng(0), 0, 0, []
    for _ in range(1500):
        base = rng.normal(0, 0.03, 2)
        differences = {
            str(v): {seed: value - base[seed] for seed, value in enumerate(rng.normal(0, 0.03, 2))} for v in range(20)
        }
        deviation, degrees = proof.pooled_deviation(differences)
        found.append(deviation)
        half = proof.t_95(degrees) * deviation / math.sqrt(2)
        means = [np.mean(list(values.values())) for values in differences.values()]
        outside += sum(abs(mean) > half for mean in means)
        total += len(means)
    assert degrees == 19
    assert np.sqrt(np.mean(np.square(found))) == pytest.approx(0.03 * math.sqrt(2), rel=0.03)
    assert outside / total == pytest.approx(0.05, abs=0.015)


def test_variations_are_told_by_what_they_change():
    base = "default,exploration=0.1,replay_clip=proximal"
    assert proof._changes("default,exploration=0.1,replay_clip=proximal,sharpness=2", base) == "sharpness=2"
    assert proof._changes("default,replay_clip=proximal,exploration=0.05", base) == "exploration=0.05"


def test_a_peers_calibration_set_is_of_prompts_that_no_run_sees(cells_of_a_start):
    from benchmarks.lab.peers import CALIBRATION, cgrpo

    kinds = classify(cells_of_a_start)
    given = cgrpo(POOLS["first"], kinds, seed=3)["calibration_dataset"]
    assert len(given) == CALIBRATION
    assert sum(kind == "dead" for kind in given["kind"]) == round(0.7 * CALIBRATION)
    seen = {*pool_dataset(POOLS["first"], kinds, 3)["prompt"], *(task.prompt for task in held_out_tasks(kinds))}
    assert not seen & set(given["prompt"])


@pytest.fixture
def cells_of_a_start():
    """Success by cell as a start may have it: short tasks easy, long ones dead."""
    from benchmarks.lab.tasks import ARITHMETIC, CELLS

    return {
        (family, length): 0.0 if family in ARITHMETIC or length > 12 else 0.99 if length == 2 else 0.3
        for family, length in CELLS
    }
