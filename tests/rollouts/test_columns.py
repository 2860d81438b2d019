"""Columns that selection reads: what their values become, and what is refused."""

from decimal import Decimal

import numpy as np
import pytest
from datasets import Dataset

from trl_dataeff.rollouts.columns import read_kinds, read_success_rates
from trl_dataeff.utils import UserError


def dataset(**columns) -> Dataset:
    size = len(next(iter(columns.values())))
    return Dataset.from_dict({"prompt": [f"prompt {i}" for i in range(size)], **columns})


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.25, 1.0, 0.0], [0.25, 1, 0]),
        ([0.25, None, float("nan")], [0.25, np.nan, np.nan]),
        ([1, 0, None], [1, 0, np.nan]),
        ([True, False, True], [1, 0, 1]),
        ([True, None, False], [1, np.nan, 0]),
        ([Decimal("0.25"), None, Decimal(1)], [0.25, np.nan, 1]),
        ([1.000001, -0.000001, 0.5], [1, 0, 0.5]),
    ],
)
def test_rates(values, expected):
    rates = read_success_rates(dataset(rate=values), "rate")
    np.testing.assert_array_equal(rates, expected)
    assert rates.dtype == np.float32


def test_rows_that_were_shuffled_chosen_and_transformed_are_read_in_their_order():
    rows = dataset(rate=[0.0, 0.25, 0.5, 0.75, 1.0], kind=["a", "b", "a", "c", "c"]).select([4, 1, 3, 0])
    rows.set_transform(lambda batch: {"prompt": batch["prompt"]})
    np.testing.assert_array_equal(read_success_rates(rows, "rate"), [1, 0.25, 0.75, 0])
    np.testing.assert_array_equal(read_kinds(rows, "kind"), [0, 1, 0, 2])


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([0, 8, 16], ["0 to 16", "1 - row['difficulty']"]),
        ([-0.5, 0.5, 1], ["-0.5 to 1"]),
        ([0.5, float("inf"), 1], ["inf"]),
        (["0/8", "3/8", "8/8"], ["'0/8'", "str"]),
        ([[0.5], [1.0], [0.0]], ["ndarray"]),
        ([None, None, None], ["no value in any of 3 rows"]),
        ([float("nan")] * 3, ["no value"]),
    ],
)
def test_other_values_than_rates_are_refused(values, says):
    with pytest.raises(UserError) as raised:
        read_success_rates(dataset(rate=values), "rate")
    for part in ("`success_rate_column` is 'rate'", *says):
        assert part in str(raised.value)


@pytest.mark.parametrize("read", [read_success_rates, read_kinds])
def test_a_column_that_is_not_there_is_refused_with_the_nearest_name(read):
    with pytest.raises(UserError, match="llama8b_solve_rate"):
        read(dataset(llama8b_solve_rate=[0.5, 0.5]), "llama8b_solve_rates")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["b", "a", "b", "a"], [0, 1, 0, 1]),
        ([3, 3, 1, 1], [0, 0, 1, 1]),
        (["a", None, None, "a"], [0, 1, 1, 0]),
        (["a", "a", "a", "a"], [0, 0, 0, 0]),
        (["a", "a", "b", "b", "c"], [0, 0, 1, 1, 2]),
        (["a"], [0]),
    ],
)
def test_kinds(values, expected):
    kinds = read_kinds(dataset(kind=values), "kind")
    np.testing.assert_array_equal(kinds, expected)
    assert kinds.dtype == np.int64


@pytest.mark.parametrize(
    ("values", "says"), [(["a", "b", "c", "d"], "4 different values in 4 rows"), ([["a"], ["a"], ["a"]], "texts")]
)
def test_other_columns_than_kinds_are_refused(values, says):
    with pytest.raises(UserError, match=says):
        read_kinds(dataset(kind=values), "kind")
