"""What methods need to reach plain GRPO's end, each at its own learning rate."""

import math

import pytest

from benchmarks.lab.ratios import curves_of
from benchmarks.savings import (
    after_same_time,
    best_of,
    by_setting,
    decision_table,
    group_sizes_table,
    kinds_table,
    percent,
    savings_table,
    sooner_table,
    steps_table,
    summary_table,
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
    found = {(row[0], row[1]): row[3:6] for row in rows}
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


def test_the_summary_is_by_method_and_suite_in_percent():
    rows = []
    for method in ("compact", "selection", "share"):
        rows += run(method, 0, 0.1, [0.1, 0.3, 0.5], seconds=5)
    settings = by_setting(curves_of([*ROWS, *rows]))
    table = cells(summary_table({"mine": settings}, "cpu_s"))
    # With replay, runs end highest at 0.1, where it takes 12 of 20 seconds
    assert [row[1] for row in table] == ["50 %", "50 %", "60 %", "50 %"]
    assert percent([0.1, 0.2, math.inf]) == "20 % (2 of 3 runs)"
    assert percent([0.1, math.inf, math.inf]) == "1 of 3 runs"
    middle, _, interval = percent([0.25, 0.25, 0.25]).partition(" % ")
    assert (middle, interval) == ("25", "(25 to 25)")


def test_the_decision_is_by_the_geometric_mean_of_medians():
    rows = []
    for seed, seconds in ((0, 5), (1, 4), (2, 2)):
        rows += run("uniform", seed, 0.1, [0.1, 0.3, 0.5], seconds=10)
        for method in ("compact", "selection", "share"):
            rows += run(method, seed, 0.1, [0.1, 0.3, 0.5], seconds=seconds)
        # It does not arrive with one of the seeds
        rows += run("fill", seed, 0.1, [0.1, 0.3, 0.5 if seed else 0.4], seconds=1)
    own = by_setting(curves_of(rows))
    slower = by_setting(
        curves_of([{**row, "cpu_s": row["cpu_s"] * (1 + 3 * (row["method"] == "share"))} for row in rows])
    )
    table = cells(decision_table({"one": own, "other": slower}))
    assert table[0] == ["plain GRPO, faster update", "0.40", "0.40", "0.40"]
    assert table[2] == ["selection and replay", "0.10", "0.10", "0.10"]
    assert table[3] == ["selection, half of the batch replayed", "0.40", "1.60", "0.80"]


def test_which_of_two_methods_is_sooner_is_counted_by_seed():
    rows = []
    for seed in (0, 1, 2):
        rows += run("uniform", seed, 0.1, [0.1, 0.3, 0.5], seconds=10)
        rows += run("compact", seed, 0.1, [0.1, 0.3, 0.4], seconds=1)  # never arrives
        rows += run("selection", seed, 0.1, [0.1, 0.3, 0.5], seconds=(5, 4, 2)[seed])
    for seed in (2, 1, 0):  # in another order
        rows += run("fill", seed, 0.1, [0.1, 0.3, 0.5], seconds=(4, 5, 6)[seed])
    table = {tuple(row[:2]): row[2] for row in cells(sooner_table({"mine": by_setting(curves_of(rows))}))}
    assert table["selection and replay", "selection alone"] == "1 of 3"
    assert table["selection alone", "plain GRPO, faster update"] == "3 of 3"
    assert table["selection, half of the batch replayed", "selection and replay"] == "-"


def test_whole_steps_by_suite_and_method():
    rows = []
    for method, seconds in (("uniform", 10), ("compact", 4), ("selection", 5), ("fill", 8)):
        seeds = (2, 1, 0) if method == "uniform" else (0, 1, 2)  # in another order
        for seed in seeds:
            own = run(method, seed, 0.1, [0.1, 0.3, 0.5], seconds * 2**seed)
            for i, row in enumerate(own):
                row["step"] = (0, 1, 4)[i]
                row["tokens"] = 1000 * i
                if method != "uniform":
                    row["generation_s"] = (None, 1.0, 3.0)[i]  # means since the evaluation before
            rows += own
    table = cells(steps_table({"mine": by_setting(curves_of(rows))}))
    assert table[0] == ["mine", "plain GRPO", "0.40", "10", "11.7", "-", "1.00 (1.00-1.00)"]
    # 8, 16 and 32 seconds in 4 steps; one step of 1 second and three of 3. Paired by seed, the ratios are the same
    assert table[1] == ["mine", "plain GRPO, faster update", "0.40", "10", "4.7", "2.5", "0.40 (0.40-0.40)"]
    assert [row[-1].partition(" ")[0] for row in table] == ["1.00", "0.40", "0.50", "0.80"]


def test_a_method_that_was_not_run_in_a_suite_has_no_share_there():
    rows = []
    for method in ("uniform", "compact", "selection", "fill"):
        rows += run(method, 0, 0.1, [0.1, 0.3, 0.2 if method == "fill" else 0.5], seconds=5)
    suite = by_setting(curves_of(rows))
    with_share = by_setting(curves_of([*rows, *run("share", 0, 0.1, [0.1, 0.3, 0.5], seconds=5)]))
    suites = {"without": suite, "with": with_share}
    assert cells(summary_table(suites, "cpu_s"))[3] == ["selection, half of the batch replayed", "-", "100 %"]
    table = cells(decision_table(suites))
    assert table[3] == ["selection, half of the batch replayed", "-", "1.00", "-"]
    assert table[2] == ["selection and replay", "not reached", "not reached", "not reached"]
