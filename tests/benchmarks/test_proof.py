"""
The statistics behind the tables of the results, on made-up runs; the pages that show them; and the smaller benchmarks.
"""

import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import proof, tables, theorem, time_model
from benchmarks.curves import band, final, isotonic, on_grid, reach
from benchmarks.lab.ratios import Curve, cost, curves_of, ratio_table, ratios
from benchmarks.smollm2.tables import claims_table, full_table, kinds_table, points, readme_table, settings_of


def run(method: str, seed: int, slope: float, steps: int = 100, per_step: int = 128, pool: str = "first") -> Curve:
    """Accuracy rises by `slope` a step from 0.2."""
    rows = []
    for step in range(0, steps + 1, 10):
        rows.append(
            {
                "step": step,
                "rollouts": per_step * step,
                "cpu_s": 2.0 * step,
                "accuracy_sampled": 0.2 + slope * step,
                "groups": 16 if step > 0 else 0,
                "effective_groups": 4 if step > 0 else 0,
                "machine": "here",
            }
        )
    return Curve(pool, 1e-4, method, seed, rows)


def end(
    method: str,
    seed: int,
    success: float,
    rollouts: int = 1024,
    rate: float = 2e-3,
    pool: str = "mixed",
) -> dict:
    """The last row of a run on the pretrained model."""
    return {
        "run": f"{method}-{seed}-{rate}-{rollouts}-{pool}",
        "method": method,
        "seed": seed,
        "pool": pool,
        "learning_rate": rate,
        "rollouts": rollouts,
        "step": rollouts // 64,
        "cpu_s": 100.4,
        "accuracy_sampled": success,
        "accuracy_greedy": success + 0.01,
        "accuracy_by_kind": {"sums": 2 * success},
        "entropy_held_out": success - 1,
        "groups": 16,
        "effective_groups": 4,
        "machine": "here",
    }


def evaluated(last: dict, *earlier: float) -> list[dict]:
    """The rows of a run with these earlier accuracies, evaluated at equal distances before its end."""
    rows = []
    evaluations = len(earlier) + 1
    for i, accuracy in enumerate(earlier, start=1):
        share = i / evaluations
        row = {**last, "accuracy_sampled": accuracy}
        for column in ("rollouts", "step", "cpu_s"):
            row[column] = last[column] * share
        rows.append(row)
    return [*rows, last]


def cells(text: str) -> list[list[str]]:
    """The cells of a table, without its header."""
    _header, _rule, *lines = text.splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_ratios_are_paired_by_seed_and_by_hand():
    # Seed 0: uniform ends at 0.6; a run of twice the slope and half the rollouts a step is there after 50 of 100 steps
    base = [run("uniform", 0, 0.004), run("uniform", 1, 0.002)]
    own = [run("fast", 1, 0.002), run("fast", 0, 0.008, per_step=64), run("fast", 2, 0.008)]
    assert ratios(own, base, "rollouts") == pytest.approx([1, 0.25])
    assert ratios(own, base, "step") == pytest.approx([1, 0.5])
    assert ratios([run("slow", 0, 0.001)], base, "cpu_s") == [math.inf]


def test_the_ratio_table_by_hand():
    curves = [
        run("uniform", 0, 0.004),
        run("fast", 0, 0.008, per_step=64),
        run("uniform", 1, 0.004),
        run("fast", 1, 0.008, per_step=64),
        run("slow", 0, 0.004),
        run("slow", 1, 0.001, steps=30),
    ]
    uniform, fast, slow = cells(ratio_table(curves))
    assert uniform[:3] == ["plain GRPO", "2", "1.00"]
    assert fast[1:6] == ["2", "0.25", "0.50", "0.50", "0.25"]
    assert fast[6:] == ["0.825", "+0.469"]  # steps 78.125 and 39.0625
    assert slow[2:] == ["not in 1 of 2"] * 3 + ["0.25", "-", "+0.000"]  # a run of 30 steps has not 5,000 rollouts
    assert [row[-1] for row in cells(ratio_table(curves, rivals=("fast",)))[:2]] == ["-0.469", "-"]
    other = [run("uniform", 0, 0.004, pool="second"), run("fast", 0, 0.008, pool="second")]
    several = cells(ratio_table([*curves[:2], *other]))[1::2]
    assert [row[:4] for row in several] == [["first", "`fast`", "1", "0.25"], ["second", "`fast`", "1", "0.50"]]


def test_cells_by_hand():
    half = 4.30 * 0.1 / math.sqrt(3)  # Student's t for three seeds
    assert tables.difference([-0.1, 0.0, 0.1]) == f"+0.000 ± {half:.3f}"
    assert tables.difference([0.25]) == "+0.250", "one seed has no interval"
    assert tables.difference([0.25, 0.75]) == "+0.500", "nor have two"
    spread = math.exp(4.30 * math.log(2) / math.sqrt(3))  # t times the standard error of the three logarithms
    assert tables.ratio([0.25, 0.5, 1.0]) == f"0.50 ({0.5 / spread:.2f}-{0.5 * spread:.2f})"
    assert tables.ratio([0.25, math.inf]) == "not in 1 of 2"
    assert tables.ratio([]) == tables.difference([]) == tables.mean([]) == "-"
    assert tables.markdown(["a", "bb"], [["1", ""]]) == "| a | bb |\n|---|----|\n| 1 |    |"


def test_the_table_of_the_pretrained_model_by_hand():
    """Paired with plain GRPO on the pool, also at another rate or plan; with selection at the same one.

    Its best: 2e-3.
    """
    ends = [
        end("default", 1, 0.45),
        end("default", 0, 0.4),
        end("uniform", 0, 0.3),
        end("uniform", 1, 0.4),
        end("default", 0, 0.3, rollouts=512 + 40),
        end("selection", 0, 0.38),
        end("default", 0, 0.2, rate=4e-3),
        end("default", 0, 0.9, pool="learnable"),
        end("uniform", 0, 0.1, rate=1e-3, rollouts=9600),
        {**end("default", 0, 0.7), "prompts": 32, "run": "32"},
        end("uniform", 1, 0.38, rate=8e-3),
    ]
    settings = settings_of(curves_of(ends))
    rows = cells(full_table(settings))
    assert [row[:7] + row[10:13] for row in rows] == [
        ["mixed", "8", "0.001", "150", "plain GRPO", "1", "0.100", "-", "-", "-"],
        ["mixed", "8", "0.002", "16", "plain GRPO", "2", "0.350", "-", "-", "-"],
        ["mixed", "8", "0.002", "16", "selection alone", "1", "0.380", "+0.080", "+0.080", "-"],
        ["mixed", "8", "0.002", "16", "default", "2", "0.425", "+0.075", "+0.075", "+0.020"],
        ["mixed", "8", "0.002", "8", "default", "1", "0.300", "+0.000 †", "+0.000 †", "-"],
        ["mixed", "8", "0.004", "16", "default", "1", "0.200", "-0.100 †", "-0.100 †", "-"],
        ["mixed", "8", "0.008", "16", "plain GRPO", "1", "0.380", "-", "-", "-"],
        ["mixed", "32", "0.002", "16", "default", "1", "0.700", "-", "-", "-"],
        ["learnable", "8", "0.002", "16", "default", "1", "0.900", "-", "-", "-"],
    ]
    assert rows[3][7:10] == ["0.435", "0.25", "1.00"]
    assert {tuple(row[-2:]) for row in rows} == {("-", "-")}, "one evaluation does not say when a run arrived"
    (short,) = cells(readme_table(settings))
    assert short == ["a third unsolvable", "16", "2", "35.0 %", "42.5 %"]
    both = settings_of(curves_of([*ends, end("uniform", 0, 0.8, pool="learnable")]))
    leads = [["plain GRPO", "2", "1", "+0.100", "+0.100"], ["selection alone", "1", "1", "+0.020", "+0.020"]]
    assert cells(proof.rivals_table(both)) == leads, "0.1 on two kinds, 0.4 instead of 0.38 on one"
    *_, mean = cells(readme_table(both))
    assert mean[-1] == "+10.0 points", "of the seed that both pools have"
    assert points([0.1, 0.2, 0.3]) == "+20.0 points (-4.8 to 44.8)", "4.30 standard errors on both sides"
    assert cells(kinds_table(settings)) == [["sums", "+0.150"], ["*entropy*", "+0.075"]]
    same_seed = [end("default", 0, 0.4), {**end("default", 0, 0.5), "run": "other"}]
    with pytest.raises(ValueError, match="same seed"):
        settings_of(curves_of(same_seed))


@pytest.mark.parametrize(
    ("baseline_first", "first", "need"),
    [(0.1, 0.2, "0.67"), (0.1, 0.41, "at most 0.33"), (0.6, 0.2, "-")],
)
def test_a_run_that_arrives_before_its_first_evaluation_needs_at_most_so_much(baseline_first, first, need):
    """
    Plain GRPO ends at 0.4 after three evaluations, or has it at the first; the other at the second, or the first.
    """
    base = evaluated(end("uniform", 0, 0.4), baseline_first, 0.2)
    own = evaluated({**end("default", 0, 0.6), "cpu_s": 50.2}, first, max(first, 0.4))
    settings = settings_of(curves_of([*base, *own]))
    (row,) = cells(claims_table(settings))
    assert row[-2:] == ["+0.200", "+0.200"]
    row = cells(full_table(settings))[1]
    assert (row[9], row[-2]) == ("0.50", need)
    assert cost(curves_of(own), curves_of(base), "step") == need
    # Shares are of the same machine's time. `None`: not recorded
    for base_machine, own_machine in (("here", "another"), (None, None)):
        rows = [{**row, "machine": base_machine} for row in base]
        rows += [{**row, "machine": own_machine} for row in own]
        settings = settings_of(curves_of(rows))
        row = cells(full_table(settings))[1]
        assert (row[9], row[-2], row[-1]) == ("50 s", need, "-")


def test_pages_are_filled(monkeypatch):
    monkeypatch.setitem(proof.TABLES, "methods", lambda: "| x |")
    page = "a\n<!-- table methods -->\nold\n<!-- end -->\nb"
    assert proof.fill(page) == "a\n<!-- table methods -->\n\n| x |\n\n<!-- end -->\nb"


def test_the_picture_has_a_line_for_each_method(tmp_path):
    pytest.importorskip("matplotlib")
    curves = [run(method, seed, 0.004) for method in proof.COLOURS for seed in (0, 1)]
    proof.draw(curves, tmp_path / "picture.svg", "rollouts", "rollouts")
    text = (tmp_path / "picture.svg").read_text()
    assert all(f"{words}, 2 seeds" in text for words in map(tables.title, proof.COLOURS))


def test_the_time_model_by_hand():
    setup = time_model.Setup("mine", prompt=100, completion=300, generation=1e3, update=8e3, groups=4, group_size=2)
    # 8 completions: 2.4 s of generation, 0.4 s of the update
    assert setup.seconds(1.0, 1.0) == pytest.approx(2.4 + 0.4)
    need = time_model.Needs(steps=0.5, rollouts=0.5, rows=0.25)
    assert need.hours(setup) == pytest.approx(time_model.STEPS * 0.5 * (1.2 + 0.1) / 3600)
    assert time_model.where_faster(need, time_model.Needs(0.5, 0.4, 0.5)) == "below 71%"
    assert time_model.where_faster(need, time_model.Needs(0.5, 1, 0.2)) == "above 9%"
    assert time_model.where_faster(need, time_model.Needs(0.2, 1, 0.5)) == "nowhere"


def test_what_the_time_model_takes_from_runs():
    fast = run("share", 0, 0.008, per_step=64)
    for row in fast.rows:
        row["groups_trained"] = 8
        row["effective_groups_trained"] = 6
    need = time_model.measured("share", [run("uniform", 0, 0.004), fast])
    assert (need.steps, need.rollouts, need.rows) == pytest.approx((0.5, 0.5, 0.75))


X = [0, 100, 200, 300]


@pytest.mark.parametrize(
    ("x", "values", "target", "expected"),
    [
        (X, [0.1, 0.2, 0.4, 0.5], 0.3, 150),  # linear between points
        (X, [0.1, 0.2, 0.3, 0.3], 0.31, math.inf),
        (X, [0.5, 0.6, 0.7, 0.8], 0.5, 0),
        ([50, 100], [0.5, 0.6], 0.5, 50),
        ([50, 100], [0.5, 0.6], 0.60005, 100),  # equal but for rounding
        # The peak of 0.5 at 100 is pooled with the fall after it: (0.5 + 0.1) / 2 = 0.3
        (X, [0.0, 0.5, 0.1, 0.6], 0.45, 250),
    ],
)
def test_reach_by_hand(x, values, target, expected):
    assert reach(x, values, target) == pytest.approx(expected)


def test_the_end_is_that_of_the_fit():
    assert final([0.1, 0.5, 0.3]) == pytest.approx(0.4)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_isotonic_is_increasing_and_keeps_the_mean(values):
    fit = isotonic(values)
    assert len(fit) == len(values)
    assert np.all(np.diff(fit) >= -1e-12)
    assert fit.mean() == pytest.approx(np.mean(values), abs=1e-9)
    assert isotonic(fit) == pytest.approx(fit)


def test_the_band_of_three_seeds():
    mean, half = band(np.array([[1.0], [2.0], [3.0]]))
    assert mean == pytest.approx([2.0])
    assert half == pytest.approx([4.30 / math.sqrt(3)])
    assert np.isnan(band(np.ones((1, 4)))[1]).all()


def test_a_grid_ends_with_the_shortest_curve():
    grid, values = on_grid([([0, 10], [0.0, 1.0]), ([0, 20], [0.0, 1.0])], points=3)
    assert grid.tolist() == [0, 5, 10]
    assert values.tolist() == [[0, 0.5, 1.0], [0, 0.25, 0.5]]


ROOT = Path(__file__).parents[2]


def test_the_theorem_holds_where_it_is_measured():
    ratio, error = theorem.measure(0.3, 8, 2000, np.random.default_rng(1))
    assert ratio == pytest.approx(1, abs=5 * error)
    assert error < 0.03


def test_times_of_communication_are_the_committed_ones():
    committed = (ROOT / "benchmarks" / "results" / "distributed.txt").read_text(encoding="utf-8").strip()
    assert committed in (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", proof.PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_the_committed_runs(page):
    text = page.read_text(encoding="utf-8")
    assert proof.fill(text) == text, "python -m benchmarks.proof --write puts the tables in"


def test_every_table_stands_on_a_page():
    pages = "".join(page.read_text(encoding="utf-8") for page in proof.PAGES)
    assert {found["name"] for found in proof.MARKED.finditer(pages)} == set(proof.TABLES)


#: Percentages of what the benchmarks are like, and of intervals
NO_RESULTS = {"8", "12", "18", "70", "95"}


@pytest.mark.parametrize("page", proof.PAGES[:2], ids=lambda page: page.name)
def test_figures_in_the_text_are_figures_of_a_table(page):
    table_or_code_or_link = r"^\|.*$|(?s:```.*?```)|`[^`]*`|https?://\S+|\]\(\S+\)"
    prose = re.sub(table_or_code_or_link, "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    percents = set()
    for low, high in re.findall(r"(\d+)(?: to (\d+))? %", prose):
        percents |= {low, high}
    quoted = {f"{int(percent) / 100:.2f}" for percent in percents - NO_RESULTS - {""}}
    assert quoted
    quoted |= set(re.findall(r"(?<![\d.])[01]\.\d{2,3}(?![\d.]\d|\d)", prose))
    all_tables = "".join(make() for make in proof.TABLES.values())
    assert quoted <= set(re.findall(r"\d\.\d+", all_tables))
