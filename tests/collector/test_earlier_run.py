"""`history_from`: what is read of an earlier run's groups, what becomes of it, and what is refused."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.factories import make_trainer, mixed_reward, run
from tests.factories.collecting import Rates, collector, rounds
from tests.factories.training import Watched
from trl_dataeff import DataEfficientGRPOConfig
from trl_dataeff.collector.earlier_run import HistoryError, read_earlier_run
from trl_dataeff.rollouts.classification import GroupClassifier, RewardScale
from trl_dataeff.selection import make_selector
from trl_dataeff.testing.data import make_context, make_groups
from trl_dataeff.tracking.group_table import DATASET, RUN, SCHEMA


OURS = {"size": 60, "hash": "abc"}


def write(path, rows, dataset="abc", run_id="r") -> str:
    """A table of groups from `(step, prompt_id, success rate, reward, kind)`."""
    names = ("step", "prompt_id", "success_rate", "reward", "kind")
    columns = dict(zip(names, zip(*rows, strict=True), strict=True)) if rows else {}
    length = len(rows)
    full = {f.name: list(columns.get(f.name, [None] * length)) for f in SCHEMA}
    table = pa.Table.from_pydict(full, schema=SCHEMA)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.replace_schema_metadata({RUN: run_id.encode(), DATASET: dataset.encode()}), path)
    return str(path)


ROWS = [
    (0, 4, 0.5, 1.0, "effective"),
    (0, 7, 0.0, -1.0, "hard"),
    (1, 2, 1.0, 3.0, "easy"),
    (2, 4, 1.0, 3.0, "easy"),
    (3, 7, 0.25, 0.0, "effective"),
    (3, 9, None, None, "hard"),  # no completion was scored
    (4, 7, 0.5, 1.0, "effective"),
    (4, -1, 0.5, 1.0, "effective"),  # of a stream
]


def test_by_hand(tmp_path):
    scale = RewardScale()
    earlier = read_earlier_run(write(tmp_path / "groups.parquet", ROWS), OURS, scale)
    assert earlier.ids.tolist() == [2, 4, 7]  # by their last groups
    np.testing.assert_allclose(earlier.rates, [1.0, 0.75, 0.25], atol=1e-6)
    np.testing.assert_allclose(earlier.effective, [0, 0.5, 2 / 3], atol=1e-6)
    assert earlier.counts.tolist() == [1, 2, 3]
    assert (scale.low, scale.high) == (pytest.approx(-1), pytest.approx(3))


def test_a_range_that_is_set_decides(tmp_path):
    """Rewards of 1, 3 and -1 are 0.5, 1 and 0 between 0 and 2: outside they are cut off, as those of this run."""
    scale = RewardScale.of([0, 2])
    earlier = read_earlier_run(write(tmp_path / "groups.parquet", ROWS), OURS, scale)
    np.testing.assert_allclose(earlier.rates, [1.0, (0.5 + 1) / 2, (0 + 0 + 0.5) / 3], atol=1e-6)
    assert (scale.low, scale.high) == (0, 2)


def test_rates_that_are_all_equal_leave_the_range_open(tmp_path):
    scale = RewardScale()
    rows = [(0, 1, 0.0, 5.0, "hard"), (1, 2, 0.0, 5.0, "hard")]
    earlier = read_earlier_run(write(tmp_path / "groups.parquet", rows), OURS, scale)
    assert earlier.rates.tolist() == [0, 0]
    assert scale.low == np.inf


def test_the_output_directory_will_do_and_run_json_where_the_table_is_silent(tmp_path):
    write(tmp_path / "dataeff" / "groups.parquet", ROWS, dataset="")
    about = tmp_path / "dataeff" / "run.json"
    about.write_text(json.dumps({"run": "r", "dataset": {"size": 60, "hash": "abc"}}))
    assert len(read_earlier_run(str(tmp_path), OURS, RewardScale()).ids) == 3
    about.write_text(json.dumps({"run": "another", "dataset": {"size": 60, "hash": "abc"}}))
    with pytest.raises(HistoryError, match="content hash unknown"):
        read_earlier_run(str(tmp_path), OURS, RewardScale())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "there is no file .*Give `dataeff/groups.parquet` of a run on this dataset"),
        (lambda path: path.write_bytes(b"PAR1 no more"), "cannot be read as parquet"),
        (lambda path: pq.write_table(pa.table({"step": [1]}), path), "lacks the columns kind, prompt_id"),
        (
            lambda path: write(path, ROWS, "xyz"),
            "content hash xyz; this one has 60 prompts and abc. Prompts are known by",
        ),
        (lambda path: write(path, [ROWS[5]]), "no group in it has a success rate"),
    ],
)
def test_errors_name_what_was_given_and_the_way_out(tmp_path, make, message):
    make(tmp_path / "groups.parquet")
    with pytest.raises(
        HistoryError, match=f"`history_from` is '{tmp_path}/groups.parquet', .*{message}.*leave `history"
    ):
        read_earlier_run(str(tmp_path / "groups.parquet"), OURS, RewardScale())


def started(tmp_path, rate):
    """A DOTS selector that begins with an earlier run in which half of the prompts had this rate, and half 1 - rate."""
    rows = [(i, i, r := [rate, 1 - rate][i % 2], r, "effective") for i in range(60)]
    selector = make_selector("dots")
    selector.bind(make_context())
    assert selector.start_from(read_earlier_run(write(tmp_path / "groups.parquet", rows), OURS, RewardScale()))
    return selector


def test_the_first_predictions_are_those_of_the_earlier_run_and_its_own_groups_outweigh_them(tmp_path):
    selector, ids = started(tmp_path, 0.1), np.arange(60)
    before = selector.predict(ids)
    assert before[::2].max() < 0.5 < before[1::2].min()
    assert before[::2].mean() < 0.3 < 0.7 < before[1::2].mean()
    assert selector.strength(ids).min() >= 4
    for batch in range(6):  # the opposite
        seen = ids[batch * 8 : batch * 8 + 8]
        selector.observe(make_groups(seen, np.where(seen % 2, 0.0, 1.0), selector.predict(seen)))
    after = selector.predict(ids)
    assert after[:48:2].mean() > 0.5 > after[1:48:2].mean()
    assert (after[:48:2] > before[:48:2]).mean() > 0.9 > 0.1 > (after[1:48:2] > before[1:48:2]).mean()


def test_the_first_reward_above_zero_does_not_wipe_out_the_earlier_rates(tmp_path):
    """A first batch of failures alone, and then a success: the range is known from the earlier run."""
    run_ = collector(selector=Rates(), num_prompts=60)
    rows = [(0, 5, 0.5, 0.5, "effective"), (0, 6, 1.0, 1.0, "easy")]
    run_.classifier = classifier = GroupClassifier(np.array([1.0]))
    read_earlier_run(write(tmp_path / "groups.parquet", rows), OURS, classifier.scale)
    mapped = []
    run_.selector.rescale = lambda *mapping: mapped.append(mapping)
    run_.enter(np.array([0, 1]), rounds({0: [0] * 4, 1: [0] * 4})(np.array([0, 1])), 0)
    run_.enter(np.array([0, 1]), rounds({0: [1, 0, 0, 0], 1: [0] * 4})(np.array([0, 1])), 1)
    assert mapped == []


OPTIONS = {"selection": "dots", "rewards": mixed_reward}


def test_a_run_begins_with_the_earlier_ones_rates_and_resumes_without_the_file(tmp_path):
    first = run(Watched, DataEfficientGRPOConfig, tmp_path / "first", **OPTIONS)
    seen = {group.prompt_id for batch in first.batches for group in batch.generated}
    own = {
        **OPTIONS,
        "history_from": str(tmp_path / "first"),
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    second = run(Watched, DataEfficientGRPOConfig, tmp_path / "second", **own)
    opening = second.batches[0].generated
    assert not np.isnan([group.predicted for group in opening]).any()
    assert any(group.prompt_id in seen for group in opening)
    (tmp_path / "first" / "dataeff" / "groups.parquet").unlink()
    again = run(Watched, DataEfficientGRPOConfig, tmp_path / "again", train=False, **own)
    again.train(resume_from_checkpoint=str(tmp_path / "second" / "checkpoint-2"))
    a, b = ([[(g.prompt_id, g.predicted) for g in batch.generated] for batch in t.batches] for t in (second, again))
    assert a[2:] == b


def test_a_tracked_baseline_takes_it_with_a_selector_that_does_not(tmp_path):
    run(Watched, DataEfficientGRPOConfig, tmp_path / "first", **OPTIONS)
    options = {"rewards": mixed_reward, "history_from": str(tmp_path / "first"), "max_steps": 1}
    second = run(Watched, DataEfficientGRPOConfig, tmp_path, advantage_baseline="tracked", **options)
    assert not np.isnan([group.predicted for group in second.batches[0].generated]).any()
    with pytest.raises(HistoryError, match=r"UniformSelector makes no use of it. Use .*`selection='dots'`.*leave"):
        make_trainer(tmp_path, "off", history_from=str(tmp_path / "first")).train()
