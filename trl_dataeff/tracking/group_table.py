"""The columns of `groups.parquet`, and a reader that gives them the types that are expected, or says what is wrong."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trl_dataeff.rollouts.group import KINDS


SCHEMA = pa.schema(
    [
        pa.field("step", pa.int32(), metadata={"meaning": "optimizer step at which the group was generated"}),
        pa.field("prompt_id", pa.int64(), metadata={"meaning": "row of the training dataset; -1 if not known"}),
        pa.field("round", pa.int16(), metadata={"meaning": "round of its generation batch, from 0"}),
        pa.field("success_rate", pa.float32(), metadata={"meaning": "in [0, 1]; null if no completion was scorable"}),
        pa.field("reward", pa.float32(), metadata={"meaning": "mean total reward of the scorable completions"}),
        pa.field("kind", pa.string(), metadata={"meaning": " | ".join(KINDS)}),
        pa.field("predicted", pa.float32(), metadata={"meaning": "success rate predicted before the rollout"}),
        pa.field(
            "explored",
            pa.bool_(),
            metadata={"meaning": "whether its prompt was drawn uniformly, not by its prediction"},
        ),
        pa.field("origin", pa.string(), metadata={"meaning": "fresh | reference"}),
        pa.field("disposition", pa.string(), metadata={"meaning": "trained | leftover | dropped, in its own batch"}),
        pa.field("completions", pa.int16(), metadata={"meaning": "generated for it; fewer if the group was stopped"}),
        pa.field("tokens", pa.int32(), metadata={"meaning": "tokens generated for its completions"}),
        pa.field("seconds", pa.float32(), metadata={"meaning": "its share of the time its round took"}),
    ]
)
_WORDS = {pa.int64(): "integers", pa.float64(): "numbers", pa.string(): "texts", pa.bool_(): "true and false"}
_MOST_STEPS = 2**31
#: In the file's metadata: id of the run, and content hash of its prompts
RUN, DATASET = b"trl_dataeff.run", b"trl_dataeff.dataset"


class UnreadableTable(ValueError):
    """A table of groups cannot be used; the message continues a sentence that begins with the file."""


def read_group_table(path: Path, needed: Iterable[str]) -> tuple[pa.Table, int]:
    """
    Read a table of groups. Integers become int64 and other numbers float64, `tokens` among them.

    Args:
        path (`Path`): the file.
        needed (`Iterable[str]`): columns that it must have.

    Returns:
        `(pa.Table, int)`: its rows with a step, a prompt and a kind, and how many rows have not.

    Raises:
        `FileNotFoundError`: it does not exist.
        [`UnreadableTable`]: it is no parquet file, or lacks a column, or a column has values of another type.
    """
    try:
        table = pq.read_table(path, page_checksum_verification=True)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UnreadableTable(f"cannot be read as parquet ({type(error).__name__})") from error
    lacking = sorted(set(needed) - set(table.column_names))
    if lacking:
        raise UnreadableTable(f"lacks the column{'s' * (len(lacking) > 1)} {', '.join(lacking)}")
    for i, name in enumerate(table.column_names):
        if name in SCHEMA.names:
            kind = _wide(name)
            try:
                table = table.set_column(i, name, table[name].cast(kind))
            except pa.ArrowException as error:
                raise UnreadableTable(
                    f"has {table[name].type} in the column {name}, where {_WORDS[kind]} belong"
                ) from error
    known = pc.is_in(table["kind"], pa.array(KINDS))
    dated = pc.and_(pc.greater_equal(table["step"], 0), pc.less(table["step"], _MOST_STEPS))
    whole = pc.fill_null(pc.and_(pc.and_(known, dated), pc.is_valid(table["prompt_id"])), False)
    rows = table.filter(whole)
    return rows, len(table) - len(rows)


def _wide(name: str) -> pa.DataType:
    kind = SCHEMA.field(name).type
    if pa.types.is_floating(kind) or name == "tokens":
        return pa.float64()
    return pa.int64() if pa.types.is_integer(kind) else kind
