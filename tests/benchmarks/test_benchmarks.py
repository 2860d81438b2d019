"""The benchmarks that the docs quote run, and say what the committed figures say."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks import distributed, overhead, predictor, proof, replay, selection_scale, theorem
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
#: Settings and published figures that the pages name beside what was measured
CONSTANTS = {"0.05", "0.25", "0.75", "0.216", "0.70"}


def test_overhead_times_each_step_after_the_warm_up(tmp_path):
    seconds = overhead.run_steps(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, steps=1, folder=str(tmp_path))
    assert len(seconds) == 1
    assert seconds[0] > 0


def test_refreshes_agree_with_the_published_way_and_are_timed():
    ours, published = selection_scale.compare(size=600, turns=1)  # raises if their predictions differ
    assert 0 < ours.seconds < published.seconds
    for kind in selection_scale.KINDS:
        assert selection_scale.measure(kind, size=600, turns=1).seconds > 0


def test_the_pages_of_dots_and_replay_say_what_the_data_say():
    docs = RESULTS.parents[1] / "docs"
    page, dots = (docs / "replay.md").read_text(), (docs / "dots.md").read_text()
    for line in (RESULTS / "replay.txt").read_text().splitlines():
        assert line in page
    shares = proof.share_of_selection(proof.together(proof.load("first")))
    for page_text in (dots, (docs / "results.md").read_text()):
        assert f"{shares['default']:.1%}".replace("%", " %") in page_text
    rows = json.loads((RESULTS / "predictor.json").read_text())
    for line in predictor.table(rows, [10, 20, 40, 60, 80]).splitlines():
        assert line in dots
    for name in ("selection_scale.txt", "embedding_layer.txt"):
        for line in (RESULTS / name).read_text().splitlines():
            assert line in dots


@pytest.mark.parametrize("page", proof.PAGES, ids=lambda page: page.name)
def test_the_tables_of_the_lab_are_those_of_the_committed_results(page):
    text = page.read_text(encoding="utf-8")
    assert proof.fill(text) == text, "python -m benchmarks.proof --write puts the tables in"


def test_every_table_stands_on_a_page():
    """Results that nobody shows are not looked at; a page that shows none of a study is out of date."""
    pages = "".join(page.read_text(encoding="utf-8") for page in proof.PAGES)
    assert {found["name"] for found in proof.MARKED.finditer(pages)} == set(proof.TABLES)


@pytest.mark.parametrize("name", ["README.md", "docs/results.md", "docs/dots.md", "docs/greso.md", "docs/replay.md"])
def test_figures_in_the_text_are_figures_of_the_data(name):
    """What is quoted between the tables, with two or three digits after the point, is in a table or printed by a command."""
    page = (RESULTS.parents[1] / name).read_text(encoding="utf-8")
    prose = re.sub(r"^\|.*$|(?s:```.*?```)|`[^`]*`|https?://\S+|\]\(\S+\)", "", page, flags=re.MULTILINE)
    quoted = set(re.findall(r"(?<![\d.])0\.\d{2,3}(?!\d)", prose))
    data = "".join(make() for make in proof.TABLES.values()) + proof.in_words()
    data += "".join(path.read_text() for path in RESULTS.glob("*.txt")) + predictor.table(
        json.loads((RESULTS / "predictor.json").read_text()), [10, 20, 40, 60, 80]
    )
    assert quoted <= {*re.findall(r"\d\.\d+", data), *CONSTANTS}


def test_replay_shrinks_generation(tmp_path):
    steps = replay.run_steps(0.5, steps=1, folder=str(tmp_path))
    assert len(steps) == 1
    assert all(seconds > 0 for seconds in steps[0].values())


def test_the_theorem_holds_where_it_is_measured():
    ratio, error = theorem.measure(0.3, 8, 2000, np.random.default_rng(1))
    assert ratio == pytest.approx(1, abs=5 * error)
    assert error < 0.03


def test_the_cost_of_communication_is_measured():
    ids, flags, moved, packed = distributed.measure()
    assert ids == 0  # one process
    assert min(flags, moved, packed) > 0
    page = (RESULTS.parents[1] / "docs" / "scaling.md").read_text(encoding="utf-8")
    assert (RESULTS / "distributed.txt").read_text(encoding="utf-8").strip() in page
