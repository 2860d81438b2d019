"""`history_from`: what is read of an earlier run's groups, what becomes of it, and what is refused."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from tests.factories.comparison import groups_since
from tests.factories.tiny import run
from tests.factories.training import mixed_reward
from trl_dataeff import DotsSelector
from trl_dataeff.rollouts.scale import RewardScale
from trl_dataeff.selection.base import SelectorContext
from trl_dataeff.selection.dots.earlier import read_earlier_run
from trl_dataeff.testing import make_context, make_groups
from trl_dataeff.tracking.files import ABOUT, SCHEMA
from trl_dataeff.utils import UserError


NAMES = ("step", "prompt_id", "success_rate", "reward", "kind")
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
NOT_SCORED = ROWS[5]


def write(path, rows, dataset="abc", low=-1.0, high=3.0) -> str:
    """Write a table of groups, of a run whose rewards reached from `low` to `high`. Rows have the fields `NAMES`."""
    table = pa.Table.from_pylist([dict(zip(NAMES, row, strict=True)) for row in rows], schema=SCHEMA)
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"dataset": dataset, "reward_range": {"low": low, "high": high}}
    pq.write_table(table.replace_schema_metadata({ABOUT: json.dumps(about)}), path)
    return str(path)


def context_of(dataset_hash: str, scale: RewardScale, numbers: list[int] | None = None) -> SelectorContext:
    """Of a run on prompts with this hash, and with these numbers by their content."""
    number_prompts = None if numbers is None else lambda: np.array(numbers)
    return replace(make_context(), dataset_hash=dataset_hash, scale=scale, number_prompts=number_prompts)


def test_by_hand(tmp_path):
    scale = RewardScale()
    write(tmp_path / "dataeff" / "groups.parquet", ROWS)
    earlier = read_earlier_run(str(tmp_path), context_of("abc", scale))
    assert earlier.ids.tolist() == [2, 4, 7]  # by their last groups
    np.testing.assert_allclose(earlier.rates, [1.0, 0.75, 0.25], atol=1e-6)
    np.testing.assert_allclose(earlier.effective, [0, 0.5, 2 / 3], atol=1e-6)
    assert earlier.counts.tolist() == [1, 2, 3]
    assert (scale.low, scale.high) == (pytest.approx(-1), pytest.approx(3)), "as if this run had seen these rewards"


def test_groups_of_a_default_run_are_those_of_the_rows_with_their_prompt(tmp_path):
    write(tmp_path / "dataeff" / "groups.parquet", ROWS, dataset="")
    numbers = [7, 5, 4, 7]  # prompt 2 is not in this dataset, and 7 twice
    earlier = read_earlier_run(str(tmp_path), context_of("abc", RewardScale(), numbers))
    found = dict(zip(earlier.ids.tolist(), zip(earlier.rates.tolist(), earlier.counts.tolist())))
    assert found == {0: (0.25, 3), 2: (0.75, 2), 3: (0.25, 3)}


def test_a_table_that_was_written_again_without_its_metadata_is_read_by_content(tmp_path):
    path = tmp_path / "groups.parquet"
    write(path, ROWS, dataset="")
    pq.write_table(pq.read_table(path).replace_schema_metadata(None), path)
    earlier = read_earlier_run(str(path), context_of("abc", RewardScale(), [7, 5, 4, 7]))
    assert sorted(earlier.ids.tolist()) == [0, 2, 3]


@pytest.mark.parametrize(
    ("rewards", "known", "given", "rates"),
    [
        # Outside of a range that is set they are cut off, as those of this run
        ((-1, 1, 3), (-1, 3), [0, 2], [0, 0.5, 1]),
        ((0, 1, 2), (0, 2), None, [0, 0.5, 1]),  # though 1 was the highest so far, with a rate of 1
        ((5, 5, 5), (5, 5), None, [1, 1, 1]),
    ],
)
def test_rates_are_read_by_the_last_range(tmp_path, rewards, known, given, rates):
    rows = [(step, step, float(reward > 0), float(reward), "easy") for step, reward in enumerate(rewards)]
    scale = RewardScale.of(given) if given else RewardScale()
    path = write(tmp_path / "groups.parquet", rows, low=float(known[0]), high=float(known[1]))
    assert read_earlier_run(path, context_of("abc", scale)).rates.tolist() == rates
    assert [scale.low, scale.high] == (given or list(known))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda path: None, "no file"),
        (lambda path: path.write_bytes(b"PAR1 no more"), "no table of groups"),
        (lambda path: pq.write_table(pa.table({"step": [1]}), path), "no table of groups"),
        (lambda path: write(path, ROWS, "xyz"), "another dataset"),
        (lambda path: write(path, [NOT_SCORED]), "success rate"),
        (lambda path: write(path, ROWS, ""), "none of its prompts is in this dataset"),
    ],
)
def test_what_cannot_be_used_is_said(tmp_path, make, named):
    path = tmp_path / "groups.parquet"
    make(path)
    with pytest.raises(UserError, match=named) as raised:
        read_earlier_run(str(path), context_of("abc", RewardScale()))
    assert str(path) in str(raised.value)


def test_the_first_predictions_are_those_of_the_earlier_run_and_its_own_groups_outweigh_them(tmp_path):
    ids = np.arange(60)
    rates = np.where(ids % 2, 0.9, 0.1)
    rows = [(i, i, rate, rate, "effective") for i, rate in zip(ids.tolist(), rates.tolist())]
    path = write(tmp_path / "groups.parquet", rows)
    selector = DotsSelector(history_from=path)
    selector.bind(replace(make_context(), dataset_hash="abc"))
    before = selector.predict(ids)
    assert before[::2].mean() < 0.3 < 0.7 < before[1::2].mean()
    for batch in range(6):  # the opposite
        seen = ids[batch * 8 : batch * 8 + 8]
        selector.observe(make_groups(seen, np.where(seen % 2, 0.0, 1.0)))
    after = selector.predict(ids)
    assert after[:48:2].mean() > 0.5 > after[1:48:2].mean()


def test_a_run_of_the_default_gives_the_first_predictions_of_its_prompts(tmp_path):
    texts = [f"{letter} {letter}" for letter in "abcdefgh"]
    answered = set(texts[:4])

    def reward(prompts, completions, **kwargs):
        return [float(prompt in answered and i % 2) for i, prompt in enumerate(prompts)]

    def train(name, order, **fields):
        dataset = Dataset.from_dict({"prompt": [texts[i] for i in order]})
        return run(tmp_path / name, rewards=reward, trainer={"train_dataset": dataset}, **fields)

    train("default", range(8), max_steps=8)
    given = {"history_from": str(tmp_path / "default")}
    trainer = train("second", range(7, -1, -1), max_steps=1, selection="dots", selector_args=given)
    first_batch = groups_since(tmp_path / "second", 0)
    assert first_batch["prompt_id"].min() >= 4, "the last rows have the prompts that are answered"
    predicted = trainer.selector.predict(np.arange(8))
    assert predicted[4:].min() > predicted[:4].max()


def test_a_run_begins_with_the_earlier_ones_rates_and_resumes_without_the_file(tmp_path):
    def train(name, **fields):
        run(tmp_path / name, selection="dots", rewards=mixed_reward, **fields)
        return groups_since(tmp_path / name, 0)

    first = train("first")
    own = {
        "selector_args": {"history_from": str(tmp_path / "first")},
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    second = train("second", **own)
    opening = second[second["step"] == 0]
    assert opening["predicted"].notna().all()
    assert opening["prompt_id"].isin(first["prompt_id"]).any()
    (tmp_path / "first" / "dataeff" / "groups.parquet").unlink()
    train("again", resume=str(tmp_path / "second" / "checkpoint-2"), **own)
    pd.testing.assert_frame_equal(groups_since(tmp_path / "again", 2), groups_since(tmp_path / "second", 2))


def test_a_run_that_is_not_there_is_said_before_the_prompts_are_embedded(tmp_path):
    def embed():
        raise AssertionError("embedding takes long")

    context = replace(make_context(), embed=embed)
    with pytest.raises(UserError, match="there is no file"):
        DotsSelector(history_from=str(tmp_path / "nowhere")).bind(context)
