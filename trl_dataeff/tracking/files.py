"""
The files that a run writes to `<output_dir>/dataeff`: their names, their formats, and how they are read.

What is deliberately not here: torch and Transformers. `trl-dataeff audit` and `report` only read, and start at once.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trl_dataeff.utils import UserError


METRICS_FILE = "dataeff/metrics.jsonl"
GROUPS_FILE = "dataeff/groups.parquet"
RUN_FILE = "dataeff/run.json"
#: Key of the metadata of `groups.parquet`, whose value is what [`about_groups`] returns, as JSON
ABOUT = b"trl_dataeff"
SCHEMA = pa.schema(
    {
        "step": pa.int32(),  # optimizer steps that were done when the group was generated
        "prompt_id": pa.int64(),  # row of the dataset, or in a default run a hash of the prompt; -1 without one
        "round": pa.int16(),  # of its generation batch, from 0
        "success_rate": pa.float32(),  # in [0, 1]; null if no completion was scorable
        "reward": pa.float32(),  # mean total reward of the scorable completions
        "kind": pa.string(),  # of `KINDS`
        "predicted": pa.float32(),  # success rate predicted before the rollout
        "origin": pa.string(),  # fresh | reference
        "disposition": pa.string(),  # trained | leftover | dropped, in its own batch
        "completions": pa.int16(),  # generated for it
        "tokens": pa.int32(),  # generated for its completions
        "seconds": pa.float32(),  # its share of the time its round took
    }
)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """
    Read the complete lines of a `metrics.jsonl`.

    Args:
        path (`Path`): the file, which need not exist.

    Returns:
        `list[dict]`: a dictionary for each line. Other lines are left out: a process that is killed while it writes
        leaves half a line.
    """
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and "step" in line and "seconds" in line:
            lines.append(line)
    return lines


def read_groups(path: Path) -> pa.Table:
    """
    Read the table of groups of a run.

    Args:
        path (`Path`): its `groups.parquet`.

    Returns:
        `pa.Table`: the columns of `SCHEMA`. Where a group has no success rate, it is NaN.

    Raises:
        [`UserError`]: the table cannot be read.
    """
    try:
        table = pq.read_table(path).select(SCHEMA.names)
        rates = table["success_rate"].cast(pa.float64())
        column = SCHEMA.get_field_index("success_rate")
        return table.set_column(column, "success_rate", pc.fill_null(rates, math.nan))
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        raise UserError(f"{path} is no table of groups of this package ({type(error).__name__}: {error}).") from error


def about_groups(path: Path) -> dict[str, Any]:
    """
    Read what a table of groups says of its run.

    Args:
        path (`Path`): its `groups.parquet`.

    Returns:
        `dict`: `dataset`, the content hash of the prompts, and `reward_range`, the last range of total rewards with
        its ends `low` and `high`. Empty for a table that does not say.
    """
    metadata: dict[bytes, bytes] = pq.read_schema(path).metadata or {}
    about: dict[str, Any] = json.loads(metadata.get(ABOUT, b"{}"))
    return about
