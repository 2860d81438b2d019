"""The numbers behind the figures, by hand."""

import numpy as np
import pyarrow as pa
import pytest

from tests.factories import RUNS
from trl_dataeff.tracking import summaries
from trl_dataeff.tracking.recorded import RecordedRun, read_run


def make_run(tmp_path, rows, lines=(), prompts=None) -> RecordedRun:
    """A run of these groups: (step, prompt, success rate, predicted, disposition)."""
    names = ("step", "prompt_id", "success_rate", "predicted", "disposition")
    columns = dict(zip(names, map(list, zip(*rows))))
    columns["kind"] = [{1.0: "easy", 0.0: "hard"}.get(rate, "effective") for rate in columns["success_rate"]]
    columns["tokens"] = [10] * len(rows)
    about = {"arguments": {"num_generations": 4}}
    table = None if prompts is None else pa.table(prompts)
    return RecordedRun(tmp_path, "made", about, list(lines), pa.table(columns), table)


def test_intervals_hold_every_step():
    intervals = summaries.bins(np.arange(100), most=40)
    assert intervals.edges[0] == 0
    assert intervals.edges[-1] >= 100
    assert len(intervals.edges) - 1 <= 40
    np.testing.assert_array_equal(intervals.of(np.array([0, 2, 3, 99])), [0, 0, 1, 33])
    assert len(summaries.bins(np.zeros(1)).centres) == 1


def test_flow_by_hand(tmp_path):
    rows = [(0, 0, 0.5, None, "trained"), (0, 1, 0.5, None, "dropped"), (1, 2, 0.5, None, "trained")]
    lines = [
        {"step": 1, "dataeff/rollouts_replayed": 0, "dataeff/selector/prompts_skipped": 3},
        {"step": 2, "dataeff/rollouts_replayed": 4, "dataeff/selector/prompts_skipped": 3},
    ]
    x, flows, width = summaries.flow(make_run(tmp_path, rows, lines))
    np.testing.assert_array_equal(x, [0.5, 1.5])
    assert width == 1
    assert {name: values.tolist() for name, values in flows.items()} == {
        "trained": [4, 4],
        "dropped": [4, 0],
        "replayed": [0, 4],
        "skipped": [12, 0],
    }


def test_flow_agrees_with_the_counters_of_a_run():
    run = read_run(RUNS / "dapo")
    _, flows, width = summaries.flow(run)
    steps = np.full(len(next(iter(flows.values()))), width)
    generated = sum((flows[name] * steps).sum() for name in ("trained", "leftover", "dropped") if name in flows)
    assert generated == pytest.approx(run.last("dataeff/rollouts_generated"), rel=0.02)


def test_shares_of_kinds_sum_to_one():
    x, shares = summaries.kind_shares(read_run(RUNS / "dots-0"))
    np.testing.assert_allclose(shares.sum(axis=0), 1)
    assert len(x) == shares.shape[1]


def test_success_rates_by_column_and_where_a_kind_is_absent(tmp_path):
    rows = [(0, 0, 0.0, None, "trained"), (0, 1, 1.0, None, "trained"), (1, 1, 0.5, None, "trained")]
    prompts = {"prompt_id": [0, 1], "prompt": ["a", "b"], "level": [10, 9]}
    table = summaries.by_column(make_run(tmp_path, rows, prompts=prompts), "level")
    assert table.rows == ["9", "10"], "sorted as numbers"
    np.testing.assert_array_equal(table.values, [[1.0, 0.5], [0.0, np.nan]])
    np.testing.assert_array_equal(table.groups, [[1, 1], [1, 0]])


def test_rare_values_share_a_row(tmp_path):
    rows = [(0, i % 30, 0.5, None, "trained") for i in range(60)]
    prompts = {"prompt_id": list(range(30)), "prompt": ["a"] * 30, "source": [f"s{i}" for i in range(30)]}
    table = summaries.by_column(make_run(tmp_path, rows, prompts=prompts), "source")
    assert len(table.rows) == summaries.MOST_ROWS
    assert table.rows[-1] == summaries.OTHERS
    assert table.groups.sum() == 60


def test_columns_with_few_values_are_offered():
    assert summaries.columns_of(read_run(RUNS / "dots-0")) == ["task", "level", "source"]
    assert summaries.columns_of(read_run(RUNS / "plain")) == []


def test_distribution_of_success_rates(tmp_path):
    rows = [(0, i, rate, None, "trained") for i, rate in enumerate([0.0, 0.2, 0.5, 0.75, 0.9, 1.0, 1.0, 0.4])]
    table = summaries.by_rate(make_run(tmp_path, rows))
    assert (table.values[:, 0] * 8).tolist() == [1, 1, 1, 1, 1, 1, 2]


def test_calibration_of_exact_and_of_late_predictions(tmp_path):
    rng = np.random.default_rng(0)
    rates = rng.integers(0, 5, 200) / 4
    exact = make_run(tmp_path, [(i, i, rate, rate, "trained") for i, rate in enumerate(rates)])
    table = summaries.calibration(exact)
    assert table.correlation == pytest.approx(1)
    np.testing.assert_allclose(table.predicted, table.observed)
    assert table.bias == 0
    assert not table.explored
    late = make_run(tmp_path, [(i, i, rate, rate * 0.5, "trained") for i, rate in enumerate(rates)])
    assert summaries.calibration(late).bias == pytest.approx(rates[133:].mean() / 2, abs=0.02)
    assert summaries.calibration(make_run(tmp_path, [(0, 0, 0.5, 0.5, "trained")])) is None


def test_outcomes_of_prompts(tmp_path):
    rates = {0: [1.0, 1.0], 1: [0.0, 0.0], 2: [0.0, 0.5], 3: [0.5, 0.0], 4: [1.0, 0.0], -1: [1.0], 5: [None]}
    rows = [(step, i, rate, None, "trained") for i, own in rates.items() for step, rate in enumerate(own)]
    tables = summaries.outcomes(make_run(tmp_path, rows))
    assert {name: table["prompt_id"].tolist() for name, table in tables.items()} == {
        "always solved": [0],
        "never solved": [1],
        "became solvable": [2],
    }
