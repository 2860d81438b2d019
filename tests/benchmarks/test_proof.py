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

from benchmarks import proof, tables, theorem
from benchmarks.curves import band, final, isotonic, on_grid, reach
from benchmarks.lab.ratios import Curve, cost, ratio_table, ratios


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


@pytest.mark.parametrize(
    ("baseline", "own", "need"),
    [
        ([0.1, 0.2, 0.4], [0.2, 0.4, 0.6], "0.67"),
        ([0.1, 0.2, 0.4], [0.41, 0.41, 0.6], "at most 0.33"),  # it is there when it is first evaluated
        ([0.6, 0.2, 0.4], [0.2, 0.4, 0.6], "-"),  # so is the baseline, which has the mean of its three values then
    ],
)
def test_a_run_that_arrives_before_its_first_evaluation_needs_at_most_so_much(baseline, own, need):
    base_runs = [evaluated("uniform", baseline)]
    assert cost([evaluated("fill", own)], base_runs, "step") == need
    assert cost([evaluated("fill", own)], base_runs, "cpu_s") == need
    # Times of other machines, or of machines that were not recorded, are not compared
    assert cost([evaluated("fill", own, machine="there")], base_runs, "cpu_s") == "-"
    assert cost([evaluated("fill", own, machine=None)], [evaluated("uniform", baseline, None)], "cpu_s") == "-"


def evaluated(method: str, accuracies: list[float], machine: str | None = "here") -> Curve:
    """A run that is evaluated after each of its steps."""
    rows = []
    for step, accuracy in enumerate(accuracies, start=1):
        rows.append({"step": step, "cpu_s": 2.0 * step, "accuracy_sampled": accuracy, "machine": machine})
    return Curve("mixed", 1e-3, method, 0, rows)


def test_pages_are_filled(monkeypatch):
    monkeypatch.setitem(proof.TABLES, "mixed, tried", lambda: "| x |")
    page = "a\n<!-- table mixed, tried -->\nold\n<!-- end -->\nb"
    assert proof.fill(page) == "a\n<!-- table mixed, tried -->\n\n| x |\n\n<!-- end -->\nb"


def test_the_picture_has_a_line_for_each_method(tmp_path):
    pytest.importorskip("matplotlib")
    curves = [run(method, seed, 0.004) for method in proof.COLOURS for seed in (0, 1)]
    others = [run(method, seed, 0.008) for method in ("compact", "selection") for seed in (0, 1)]
    proof.draw(tmp_path / "picture.svg", "rollouts", "rollouts", curves, others, "twice the rate")
    text = (tmp_path / "picture.svg").read_text()
    assert all(words in text for words in map(tables.title, proof.COLOURS))
    assert text.count(", twice the rate") == 2


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
