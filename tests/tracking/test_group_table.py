"""Reading `groups.parquet`: its types, and what is said of a file that is not one."""

import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.factories import RUNS
from trl_dataeff.tracking.group_table import SCHEMA, UnreadableTable, read_group_table


NEEDED = ("step", "prompt_id", "kind", "success_rate")


@pytest.fixture
def groups():
    return pq.read_table(RUNS / "dots-0" / "dataeff" / "groups.parquet")


def replaced(table: pa.Table, **columns) -> pa.Table:
    for name, values in columns.items():
        table = table.set_column(table.column_names.index(name), name, pa.array(values))
    return table


def read(path, table: pa.Table):
    pq.write_table(table, path)
    return read_group_table(path, NEEDED)


def test_numbers_are_wide_whatever_wrote_them(groups, tmp_path):
    found, left_out = read(tmp_path / "g.parquet", groups)
    assert left_out == 0
    assert found.num_rows == groups.num_rows
    assert {found.schema.field(name).type for name in ("step", "prompt_id")} == {pa.int64()}
    assert {found.schema.field(name).type for name in ("success_rate", "tokens")} == {pa.float64()}
    texts = replaced(groups, step=[str(step) for step in groups["step"].to_pylist()])
    assert read(tmp_path / "t.parquet", texts)[0]["step"].equals(found["step"])


@pytest.mark.parametrize(
    ("name", "values", "left"),
    [
        ("step", [None, -1, 2**40, 3], 1),
        ("prompt_id", [None, 1, 2, 3], 3),
        ("kind", ["good", None, "easy", "hard"], 2),
    ],
)
def test_rows_without_step_prompt_or_kind_are_counted(groups, tmp_path, name, values, left):
    found, left_out = read(tmp_path / "g.parquet", replaced(groups.slice(0, 4), **{name: values}))
    assert (found.num_rows, left_out) == (left, 4 - left)


def test_what_is_wrong_is_said(groups, tmp_path):
    path = tmp_path / "g.parquet"
    with pytest.raises(FileNotFoundError):
        read_group_table(path, NEEDED)
    with pytest.raises(UnreadableTable, match=r"lacks the columns kind, step$"):
        read(path, groups.drop_columns(["kind", "step"]))
    with pytest.raises(UnreadableTable, match="has string in the column success_rate, where numbers belong"):
        read(path, replaced(groups, success_rate=["high"] * len(groups)))
    with pytest.raises(UnreadableTable, match=re.escape("has list<element: int64> in the column prompt_id")):
        read(path, replaced(groups, prompt_id=[[1]] * len(groups)))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UnreadableTable, match="cannot be read as parquet"):
        read_group_table(path, NEEDED)


def test_a_flipped_bit_is_found(groups, tmp_path):
    """In a file with checksums, as a run writes it; without them, values would change unseen."""
    path = tmp_path / "g.parquet"
    rates = pa.table({"success_rate": np.random.default_rng(0).random(5000)})
    pq.write_table(rates, path, write_page_checksum=True, use_dictionary=False, compression="none")
    content = bytearray(path.read_bytes())
    content[20_000] ^= 1
    path.write_bytes(content)
    with pytest.raises(UnreadableTable, match="cannot be read"):
        read_group_table(path, ["success_rate"])


def test_every_column_has_a_meaning():
    assert all(field.metadata for field in SCHEMA)
