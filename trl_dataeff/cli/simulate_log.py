"""Shares of easy and of dead prompts from the `groups.parquet` of a run, for `trl-dataeff simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trl_dataeff.analysis.simulate import success_rate_distribution
from trl_dataeff.cli.errors import UserError, listed
from trl_dataeff.tracking.group_table import SCHEMA


FEWEST = 32  # prompts in a log
DEAD_BELOW, EASY_FROM = 0.02, 0.95  # success rates; a group of 8 cannot tell 0.01 from 0
COLUMNS = ("prompt_id", "success_rate", "predicted")
SIZE = "completions"  # a column that logs of earlier versions lack
SHOWN = 6  # columns of a wrong file
HOW = "A run writes it to `<output_dir>/dataeff/groups.parquet`."


class Shares(NamedTuple):
    """What a log says of a dataset. `rates` is the range of the other prompts' success rates, `None` if there are none."""

    easy: float
    dead: float
    rates: tuple[float, float] | None
    prompts: int


def shares_of_log(path: str, group_size: int) -> Shares:
    """
    Estimate the shares from each prompt's first group; a log that cannot be used is a [`UserError`].

    Args:
        path (`str`):
            The file.
        group_size (`int`):
            Completions of a group in that run; where the log has a column `completions`, that counts.
    """
    table = _read(path)
    ids, rates = table["prompt_id"].to_numpy(), table["success_rate"].to_numpy().astype(np.float64)
    known = ~np.isnan(rates) & (ids >= 0)
    trials = table[SIZE].fill_null(group_size).to_numpy().astype(np.float64)[known]
    ids, rates = ids[known], rates[known]
    _, first = np.unique(ids, return_index=True)  # the policy as it was at the start, as far as may be
    if len(first) < FEWEST:
        raise UserError(f"`--groups {path}` has groups of {len(first)} prompts; at least {FEWEST} are needed.")
    if len(table) - table["predicted"].null_count:
        raise UserError(
            f"`--groups {path}` is of a run with predictions, which mostly chose its prompts by them (DOTS): they are not like "
            "the dataset. Take the log of a run with `selection: uniform` and `advantage_baseline: group`, even a short one."
        )
    rates, trials = rates[first], trials[first]
    successes = np.round(rates * trials)
    if (np.abs(successes - rates * trials) > 0.02 * trials).any():
        raise UserError(
            f"`--groups {path}`: success rates are not shares of {trials.max():.0f} completions. Say how many there were with "
            "`--logged_num_generations`; a run with graded rewards cannot be used, so give `--easy` and `--dead`."
        )
    grid, weights = success_rate_distribution(successes, trials)
    between = (grid >= DEAD_BELOW) & (grid < EASY_FROM)
    easy, dead = float(weights[grid >= EASY_FROM].sum()), float(weights[grid < DEAD_BELOW].sum())
    if weights[between].sum() < 0.5 / len(first):  # less than half a prompt: nothing to tell a range from
        return Shares(easy, dead, None, len(first))
    cumulative = np.cumsum(weights[between]) / weights[between].sum()
    low, high = (float(grid[between][np.searchsorted(cumulative, q)]) for q in (0.05, 0.95))
    return Shares(easy, dead, (low, high), len(first))


def _read(path: str) -> pa.Table:
    """The columns that are needed, of their types, and `completions`, which is null where the log lacks it."""
    file = Path(path).expanduser()
    if file.is_dir():
        raise UserError(f"`--groups {path}` is a folder; it takes the file groups.parquet of a run. {HOW}")
    if not file.exists():
        raise UserError(f"`--groups {path}` does not exist: there is no such file. {HOW}")
    try:
        names = pq.read_schema(file).names
    except (OSError, pa.ArrowException) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"`--groups {path}` cannot be read as a parquet file ({reason}). {HOW}") from error
    missing = [name for name in COLUMNS if name not in names]
    if missing:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        raise UserError(
            f"`--groups {path}` is not the groups.parquet of a run: it lacks {listed(missing)}, and has "
            f"{listed(names[:SHOWN])}{more}. {HOW}"
        )
    try:
        table = pq.read_table(file, columns=[name for name in (*COLUMNS, SIZE) if name in names])
        if SIZE not in names:
            table = table.append_column(SIZE, pa.nulls(len(table)))
        return table.cast(pa.schema([SCHEMA.field(name) for name in (*COLUMNS, SIZE)]))
    except (OSError, pa.ArrowException) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"`--groups {path}` is not the groups.parquet of a run ({reason}). {HOW}") from error
