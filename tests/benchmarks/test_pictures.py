"""The pictures of a run: every group is in one of the areas, and a run without a kind of groups is drawn."""

import json
from pathlib import Path

import pandas as pd
import pytest

from benchmarks.pictures import COMMITTED_RUNS, KINDS, RECORDED, TRIAL, draw, ranges, shares
from trl_dataeff.analysis.recorded import RecordedRun


@pytest.fixture
def groups() -> pd.DataFrame:
    kinds = {0: ["hard", "hard", "hard", "effective"], 1: ["effective"], 2: ["hard", "effective"]}
    return pd.DataFrame([{"step": step, "kind": kind} for step, names in kinds.items() for kind in names])


def test_shares_of_a_step_add_up_and_each_step_counts_equally(groups):
    by_step = shares(groups)
    assert list(by_step) == list(KINDS)
    assert by_step.sum(axis=1).tolist() == pytest.approx([1, 1, 1])
    assert by_step.loc[1].to_dict() == pytest.approx({"easy": 0, "effective": (0.25 + 1 + 0.5) / 3, "hard": 1.25 / 3})


def test_ranges_are_those_of_replay_and_leave_out_what_was_not_measured():
    empty = {name: [None, None] for name in RECORDED}
    runs = [
        {
            "method": "fill",
            "seed": 41,
            "evaluations": {**empty, "groups": [0, 10], "effective_groups": [0, 5], "entropy": [None, 1]},
        },
        {
            "method": "fill",
            "seed": 41,
            "evaluations": {**empty, "groups": [10, 10], "effective_groups": [1, 9], "entropy": [2, 3]},
        },
        {
            "method": "uniform",
            "seed": 41,
            "evaluations": {**empty, "groups": [10, 10], "effective_groups": [0, 0], "entropy": [9, 9]},
        },
        {
            "method": "fill",
            "seed": TRIAL[0],
            "evaluations": {**empty, "groups": [10, 10], "effective_groups": [0, 0], "entropy": [9, 9]},
        },
    ]
    runs[0]["evaluations"].update(replay_ess=[None, 0.5], replay_clipped=[None, 0.5])
    found = ranges(json.dumps(run) for run in runs)
    assert found["effective"] == pytest.approx((0.14, 0.86))
    assert found["entropy"] == pytest.approx((1.1, 2.9))
    assert found["replay_ess"] == (0.5, 0.5)


def test_the_page_has_the_ranges_of_the_committed_runs():
    page = (Path(__file__).parents[2] / "docs" / "reading.md").read_text(encoding="utf-8")
    metrics = {
        "effective": "effective_ratio",
        "entropy": "entropy",
        "replay_ess": "replay/ess",
        "replay_clipped": "replay/clipped_share",
    }
    found = ranges(COMMITTED_RUNS.read_text(encoding="utf-8").splitlines())
    assert found.keys() == metrics.keys()
    for name, (low, high) in found.items():
        row = f"| `{metrics[name]}` | {low:.2f} to {high:.2f}"
        assert row in page, "python -m benchmarks.pictures prints the ranges"


def test_a_run_is_drawn_the_same_each_time(groups, tmp_path):
    pytest.importorskip("matplotlib")
    run = RecordedRun(tmp_path, {}, pd.DataFrame([{"step": 0, "eval_reward": 0.2}]), groups)
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        draw(run, tmp_path / folder / "run.svg")
    first, second = ((tmp_path / folder / "run.svg").read_bytes() for folder in ("first", "second"))
    assert first == second
    assert b"<svg" in first
