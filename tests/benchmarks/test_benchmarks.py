"""The smaller benchmarks run, and pages say what the committed results say."""

import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks import distributed, overhead, proof, theorem
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer


ROOT = Path(__file__).parents[2]


def test_overhead_times_each_step_after_the_warm_up(tmp_path):
    (seconds,) = overhead.run_steps(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, steps=1, folder=str(tmp_path))
    assert seconds > 0


def test_the_theorem_holds_where_it_is_measured():
    ratio, error = theorem.measure(0.3, 8, 2000, np.random.default_rng(1))
    assert ratio == pytest.approx(1, abs=5 * error)
    assert error < 0.03


def test_the_cost_of_communication_is_measured():
    ids, flags, moved, packed = distributed.measure()
    assert ids == 0  # one process
    assert min(flags, moved, packed) > 0


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


@pytest.mark.parametrize("page", proof.PAGES[:2], ids=lambda page: page.name)
def test_figures_in_the_text_are_figures_of_a_table(page):
    prose = re.sub(r"^\|.*$|(?s:```.*?```)|`[^`]*`|https?://\S+|\]\(\S+\)", "", page.read_text(), flags=re.MULTILINE)
    quoted = set(re.findall(r"(?<![\d.])0\.\d{2,3}(?!\d)", prose))
    assert quoted <= set(re.findall(r"\d\.\d+", "".join(make() for make in proof.TABLES.values())))
