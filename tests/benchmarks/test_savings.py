"""What methods learn and what they need for it, on made-up runs."""

import pytest

from benchmarks.lab.ratios import curves_of
from benchmarks.savings import (
    after_same_time,
    best_of,
    by_setting,
    costs_table,
    group_sizes_table,
    kinds_table,
    learning_table,
    rates_table,
    savings_table,
    short_runs_table,
    steps_table,
)


def run(method: str, seed: int, rate: float, accuracies: list[float], seconds: float, machine: str = "here") -> list:
    """A run that takes so many seconds and 100 rollouts from one evaluation to the next."""
    rows = []
    for i, accuracy in enumerate(accuracies):
        rows.append(
            {
                "run": f"{method} {seed} {rate}",
                "pool": "first",
                "method": method,
                "seed": seed,
                "learning_rate": rate,
                "prompts": 8,
                "group_size": 8,
                "machine": machine,
                "rollouts": 100 * i,
                "cpu_s": seconds * i,
                "wall_s": 2 * seconds * i,  # beside another process
                "step": 10 * i,
                "generation_s": None if i == 0 else 0.1 * seconds,  # elapsed, of a step
                "update_s": None if i == 0 else 0.02 * seconds,
                "accuracy_sampled": accuracy,
                "groups": 10,
                "effective_groups": 4,
            }
        )
    return rows


ROWS = [
    *run("uniform", 0, 0.1, [0.1, 0.2, 0.3], seconds=10),
    *run("uniform", 0, 0.2, [0.1, 0.2, 0.5], seconds=10),
    *run("fill", 0, 0.1, [0.1, 0.5, 0.6], seconds=12),
    *run("fill", 0, 0.2, [0.1, 0.3, 0.5], seconds=5),
]


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_each_method_at_each_rate_is_compared_with_plain_grpo_at_its_best():
    rows = cells(savings_table(by_setting(curves_of(ROWS))))
    found = {(row[0], row[1]): row[2:5] for row in rows}
    assert found["plain GRPO", "0.2"] == ["1.00", "1.00", "+0.000"]
    assert found["plain GRPO", "0.1"] == ["not in 1 of 1", "not in 1 of 1", "-0.200"]
    # 12 of 20 seconds, 100 of 200 rollouts; two thirds of the way from 0.5 to 0.6 after 20 seconds
    name = "selection and replay"
    assert found[name, "0.1"] == ["0.60", "0.50", "+0.067"]
    assert found[name, "0.2"] == ["0.50", "1.00", "+0.000"], "its end counts after more time than it took"


def test_the_best_rate_is_the_one_with_the_highest_end():
    settings = by_setting(curves_of(ROWS))
    (best,) = best_of("uniform", settings)
    assert best.learning_rate == 0.2
    with pytest.raises(ValueError, match="share"):
        best_of("share", settings)


def test_time_is_compared_on_one_machine_alone():
    own = curves_of(run("fill", 0, 0.1, [0.1, 0.5], seconds=1, machine="there"))
    assert after_same_time(own, curves_of(ROWS[3:6])) == []


def test_two_runs_of_a_setting_with_one_seed_are_refused():
    again = [{**row, "run": "again"} for row in ROWS[:3]]
    with pytest.raises(ValueError, match="seed 0"):
        by_setting(curves_of([*ROWS, *again]))


def test_sizes_of_groups_by_the_rollouts_to_an_accuracy():
    rows = []
    for size in (4, 2):
        for method, accuracies in (("uniform", [0.1, 0.3, 0.3]), ("fill", [0.1, 0.3, 0.7])):
            own = run(method, 0, 0.1, accuracies, seconds=1)
            rows += [{**row, "group_size": size, "prompts": 8 // size, "run": f"{method} {size}"} for row in own]
    table = cells(group_sizes_table(by_setting(curves_of(rows)), target=0.5))
    assert table == [
        ["2", "4", "1", "not in 1 of 1", "150", "0.300", "0.700"],
        ["4", "2", "1", "not in 1 of 1", "150", "0.300", "0.700"],
    ]


def test_kinds_of_questions_from_the_hardest_on():
    rows = []
    for method, ends in (("compact", (0.5, 0.3)), ("selection", (0.6, 0.1))):
        start, _, end = run(method, 0, 0.1, [0.1, 0.2, 0.4], seconds=1)
        start["accuracy_by_kind"] = {"sums": 0.2, "products": 0.01}
        end["accuracy_by_kind"] = dict(zip(("sums", "products"), ends, strict=True))
        rows += [start, end]
    table = cells(kinds_table(by_setting(curves_of(rows)), ["selection"]))
    assert table == [["products", "0.010", "0.300", "-0.200"], ["sums", "0.200", "0.500", "+0.100"]]


def test_whole_steps_by_suite_and_method():
    rows = []
    for method, seconds in (("uniform", 10), ("compact", 4), ("selection", 5), ("fill", 8)):
        seeds = (2, 1, 0) if method == "uniform" else (0, 1, 2)  # in another order
        for seed in seeds:
            own = run(method, seed, 0.1, [0.1, 0.3, 0.5], seconds * 2**seed)
            for i, row in enumerate(own):
                row["step"] = (0, 1, 4)[i]
                row["tokens"] = 1000 * i
                row["wall_s"] = row["cpu_s"]
                row["generation_s"] = (None, 1.0, 3.0)[i]  # means since the evaluation before
                if method == "uniform":
                    del row["generation_s"]
            rows += own
    table = cells(steps_table({"mine": by_setting(curves_of(rows))}))
    assert table[0] == ["mine", "plain GRPO", "0.40", "10", "11.7", "-", "1.00 (1.00-1.00)"]
    # 8, 16 and 32 seconds in 4 steps; one step of 1 second and three of 3. Paired by seed, the ratios are the same
    assert table[1] == ["mine", "plain GRPO, faster update", "0.40", "10", "4.7", "2.5", "0.40 (0.40-0.40)"]
    assert [row[-1].partition(" ")[0] for row in table] == ["1.00", "0.40", "0.50", "0.80"]


def test_what_a_step_takes_and_what_is_learned_by_method():
    rows = []
    for seed in (0, 1, 2):
        rows += run("compact", seed, 0.1, [0.1, 0.3, 0.5 + 0.01 * seed], seconds=10)
        rows += run("fill", seed, 0.1, [0.1, 0.5, 0.7 + 0.01 * seed], seconds=20)
        fewer = run("selection", seed, 0.1, [0.1, 0.2, 0.4 + 0.01 * seed], seconds=5)
        rows += [{**row, "prompts": 5} for row in fewer]
    settings = by_setting(curves_of(rows))
    # 100 rollouts in 10 steps. A step of 1 s has 1 elapsed second of generation, half of it of this process
    assert cells(costs_table(settings)) == [
        ["plain GRPO, faster update", "1.0", "0.5", "0.1", "10", "0.40"],
        ["selection and replay", "2.0", "1.0", "0.2", "10", "0.40"],
        ["selection alone, 5 prompts a step", "0.5", "0.2", "0.1", "10", "0.40"],
    ]
    # After 20 s, selection and replay has done half of its steps. Plain GRPO's ends, 0.50, 0.51 and 0.52, are reached
    # after 100, 105 and 109 of 200 rollouts; each takes twice the time
    reached = ["1.05 (0.94-1.16)", "0.52 (0.47-0.58)"]
    of_all = [
        ["plain GRPO, faster update", "3", "0.510", "-", "-", "-"],
        ["selection and replay", "3", "0.710", "+0.200 ± 0.000", "+0.200 ± 0.000", "-0.010 ± 0.025"],
        ["selection alone, 5 prompts a step", "3", "0.410", *["-0.100 ± 0.000"] * 3],
    ]
    assert cells(learning_table(settings)) == of_all, "not all arrive"
    usual = {setting: runs for setting, runs in settings.items() if setting.prompts == 8}
    assert cells(learning_table(usual)) == [[*of_all[0], "-", "-"], [*of_all[1], *reached]]


def test_times_of_a_step_are_those_of_seeds_that_ran_on_one_machine():
    rows = []
    for seed, machine in ((0, "slow"), (1, "fast")):
        own = run("compact", seed, 0.1, [0.1, 0.3, 0.5], seconds=40 if machine == "slow" else 10)
        rows += [{**row, "machine": machine} for row in own]
        rows += [{**row, "machine": "fast"} for row in run("fill", seed, 0.1, [0.1, 0.3, 0.5], seconds=20)]
    table = cells(costs_table(by_setting(curves_of(rows))))
    assert [row[1] for row in table] == ["1.0", "2.0"]


def test_a_run_that_is_higher_once_by_chance_does_not_arrive():
    rows = []
    for seed in (0, 1, 2):
        rows += run("compact", seed, 0.1, [0.1, 0.2, 0.3], seconds=10)
        rows += run("fill", seed, 0.1, [0.1, 0.4, 0.1 if seed else 0.4], seconds=10)
    (baseline, fell) = cells(learning_table(by_setting(curves_of(rows))))
    assert len(baseline) == len(fell) == 6, "without what methods need to arrive"


def test_whether_a_learning_rate_lasts():
    rows = []
    for seed in (0, 1):
        own = run("compact", seed, 0.1, [0.1] * 6, seconds=10)
        for row, effective in zip(own, [0, 4, 3, 2 + 2 * seed, 1, 0], strict=True):
            row.update(groups=0 if row is own[0] else 10, effective_groups=effective)
        rows += own
    assert cells(rates_table(by_setting(curves_of(rows)))) == [
        ["plain GRPO, faster update", "0.1", "0.40", "0.30", "0.00", "0.100"]
    ]


def test_runs_of_less_than_one_pass_are_a_line_for_each_suite():
    rows = []
    for method, end in (("compact", 0.5), ("selection", 0.4), ("fill", 0.6), ("share", 0.5)):
        rows += run(method, 0, 0.1, [0.1, 0.3, end], seconds=1)
    table = cells(short_runs_table({"mine": by_setting(curves_of(rows))}))
    assert table == [["mine", "1", "0.500", "-0.100", "+0.100", "+0.000"]]


def test_notable_kinds_are_the_hardest_and_those_that_fall():
    rows = []
    for seed in (0, 1, 2):
        for method, lead in (("compact", {}), ("fill", {"easy": 0.1, "hard": 0.1, "falls": -0.1, "noisy": -0.1})):
            start, _, end = run(method, seed, 0.1, [0.1, 0.2, 0.4], seconds=1)
            start["accuracy_by_kind"] = {"easy": 0.5, "hard": 0.0, "falls": 0.2, "noisy": 0.3}
            noise = {"noisy": 0.3 * (seed - 1) if method == "fill" else 0.0}
            end["accuracy_by_kind"] = {
                kind: 0.5 + lead.get(kind, 0) + noise.get(kind, 0) for kind in start["accuracy_by_kind"]
            }
            rows += [start, end]
    settings = by_setting(curves_of(rows))
    assert [row[0] for row in cells(kinds_table(settings, ["fill"]))] == ["hard", "falls", "noisy", "easy"]
    assert [row[0] for row in cells(kinds_table(settings, ["fill"], only_notable=True))] == ["hard", "falls"]
