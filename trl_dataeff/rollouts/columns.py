"""Columns of a dataset that selection reads: success rates that are known before the run, and kinds of prompts."""

from __future__ import annotations

from numbers import Number

import numpy as np
import pandas as pd
from datasets import Dataset

from trl_dataeff.utils import UserError, closest, listed


ROUNDING = 1e-5  # by which a mean may be outside of [0, 1]


def read_success_rates(dataset: Dataset, name: str) -> np.ndarray:
    """
    Read a column of success rates (`success_rate_column`).

    Args:
        dataset ([`~datasets.Dataset`]): N rows.
        name (`str`): the column: numbers in [0, 1], of any model; missing values are allowed.

    Returns:
        `np.ndarray` of shape `(N,)`: float32, NaN where the rate is missing.

    Raises:
        `UserError`: there is no such column, it has other values, or no rate.
    """
    values = _as_numbers(_read(dataset, name, "success_rate_column"))
    if not pd.api.types.is_numeric_dtype(values) and not values.isna().all():
        example = values.dropna().iloc[0]
        raise UserError(
            f"`success_rate_column` is {name!r}, whose values are such as {example!r} ({type(example).__name__}). It "
            f"takes success rates, numbers in [0, 1]: make a column of them with `dataset.map`."
        )
    rates = values.to_numpy(dtype=np.float32, na_value=np.nan)
    if np.isnan(rates).all():
        raise UserError(f"`success_rate_column` is {name!r}, which has no value in any of {len(rates)} rows.")
    low = np.nanmin(rates)
    high = np.nanmax(rates)
    if low < -ROUNDING or high > 1 + ROUNDING:
        raise UserError(
            f"`success_rate_column` is {name!r}, whose values reach from {low:g} to {high:g}. It takes success rates "
            "in [0, 1]: the share of a prompt's completions that were right. Make a column of them with "
            "`dataset.map`: `{'success_rate': row['right'] / row['samples']}`, or `1 - row['difficulty']` where 1 "
            "is hard."
        )
    return rates.clip(0, 1)


def _as_numbers(values: pd.Series) -> pd.Series:
    """A column of objects as floats, if all of them are numbers or missing, such as decimals."""
    if values.dtype == object and values.map(lambda value: value is None or isinstance(value, Number)).all():
        return values.astype(float)
    return values


def read_kinds(dataset: Dataset, name: str) -> np.ndarray:
    """
    Read a column of kinds (`stratify_by`).

    Args:
        dataset ([`~datasets.Dataset`]): N rows.
        name (`str`): the column: texts or numbers. Rows without a value are a kind of their own.

    Returns:
        `np.ndarray` of shape `(N,)`: int64, from 0 to K - 1, by the order in which kinds first occur.

    Raises:
        `UserError`: there is no such column, its values cannot be compared, or most prompts would be alone.
    """
    values = _read(dataset, name, "stratify_by")
    try:
        kinds, distinct = pd.factorize(values, use_na_sentinel=False)
    except TypeError as error:
        raise UserError(
            f"`stratify_by` is {name!r}, whose values are such as {values.iloc[0]!r:.80}. It takes texts or numbers."
        ) from error
    num_alone = int((np.bincount(kinds) == 1).sum())
    if len(distinct) > 1 and 2 * num_alone > len(values):
        raise UserError(
            f"`stratify_by` is {name!r}, which has {len(distinct):,} different values in {len(values):,} rows: most "
            "prompts would be a kind of their own, and nothing were left to select. Name a column with fewer kinds."
        )
    return kinds.astype(np.int64)


def _read(dataset: Dataset, name: str, field: str) -> pd.Series:
    """A column as it is stored, without a transform. Raises a [`UserError`] if there is none."""
    if name not in dataset.column_names:
        raise UserError(
            f"`{field}` is {name!r}, and `train_dataset` has the columns {listed(dataset.column_names)}."
            f"{closest(name, dataset.column_names)}"
        )
    table: pd.DataFrame = dataset.select_columns([name]).with_format("pandas")[:]
    return table[name]
