"""Files are complete or absent. Hashes see every change of content, and no change of storage."""

import json

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from datasets import Dataset, concatenate_datasets
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_dataeff.utils import hash_array, hash_bytes, hash_json, hash_prompts, hash_rows, write_atomically


TEXTS = ["1+1=", "", "été", "a", "ab", "1+1="]
CHATS = [
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1="}],
    [],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": "été"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "a"}],
]
CHAT = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
message = st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": st.none() | st.text()})
texts = st.lists(st.none() | st.text(max_size=8), max_size=12)
conversations = st.lists(st.lists(message, max_size=3), min_size=1, max_size=8)


def dataset(prompts, kind=None) -> Dataset:
    kind = kind or (CHAT if prompts and isinstance(prompts[0], list) else pa.string())
    return Dataset(pa.table({"prompt": pa.array(prompts, kind)}))


def by_hand(prompts: list) -> str:
    """The hash from Python objects: each 1024 prompts as JSON, behind its length."""
    parts = [json.dumps(prompts[i : i + 1024], sort_keys=True).encode() for i in range(0, len(prompts), 1024)]
    return xxhash.xxh3_128(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).hexdigest()


def test_a_write_that_fails_leaves_the_former_file(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, lambda p: p.write_text("old"))

    def fail(p):
        p.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fail)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_on_windows_no_folder_is_opened(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setattr("os.open", lambda *args: pytest.fail("a folder was opened"))
    write_atomically(tmp_path / "file", lambda p: p.write_text("text"))
    assert (tmp_path / "file").read_text() == "text"


@settings(max_examples=80, deadline=None)
@given(texts | conversations, st.randoms(use_true_random=False))
def test_prompts_are_hashed_as_by_hand_however_they_are_stored(prompts, rng):
    plain = dataset(prompts)
    expected = by_hand(prompts)
    assert hash_prompts(plain) == expected
    cut = rng.randrange(len(prompts) + 1)
    first = Dataset(plain.data.table.slice(0, cut))
    second = Dataset(plain.data.table.slice(cut))
    assert hash_prompts(concatenate_datasets([first, second])) == expected
    # The same rows through an indices mapping, among others that are left out
    order = list(range(len(prompts)))
    rng.shuffle(order)
    shuffled = dataset([prompts[row] for row in order] + prompts[:1])
    selected = shuffled.select([order.index(row) for row in range(len(prompts))])
    assert hash_prompts(selected) == hash_prompts(selected.flatten_indices()) == expected


@pytest.mark.parametrize("prompts", [TEXTS, CHATS], ids=["texts", "chats"])
def test_other_columns_formats_and_files_do_not_count(prompts, tmp_path):
    plain = dataset(prompts)
    expected = hash_prompts(plain)
    assert hash_prompts(plain.add_column("other", list(range(len(plain)))).with_format("torch")) == expected
    assert hash_prompts(plain.rename_column("prompt", "question"), "question") == expected
    if prompts is TEXTS:
        for kind in (pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())):
            assert hash_prompts(dataset(prompts, kind)) == expected
    plain.save_to_disk(tmp_path / "data")
    assert hash_prompts(Dataset.load_from_disk(tmp_path / "data")) == expected


def test_chunks_of_many_rows_are_hashed_as_by_hand():
    shuffled = dataset([f"{i}" for i in range(3000)]).shuffle(seed=0)
    assert hash_prompts(shuffled) == by_hand(shuffled["prompt"][:])


def test_where_a_text_ends_counts_and_the_order_of_keys_does_not():
    assert hash_bytes([b"ab", b"c"]) != hash_bytes([b"a", b"bc"]) != hash_bytes([b"abc"])
    assert hash_json({"a": 1, "b": [2]}) == hash_json({"b": [2], "a": 1}) != hash_json({"a": 1, "b": [3]})


def test_whole_rows_where_a_transform_makes_the_prompts():
    days = pa.array([1, None, 3], pa.date32())
    table = pa.table({"question": ["a", None, "c"], "day": days, "raw": [b"1", b"", None]})
    rows = Dataset(table)
    rows.set_transform(lambda batch: pytest.fail("a transform was run"))
    found = {hash_prompts(rows)}
    for i, name in enumerate(table.column_names):
        other_values = table.column(name).take(pa.array([1, 1, 2]))
        found.add(hash_prompts(Dataset(table.set_column(i, name, other_values))))
        found.add(hash_prompts(Dataset(table.drop_columns([name]))))
    assert len(found) == 1 + 2 * table.num_columns


@pytest.mark.parametrize("rows", [1, 3, 1024, 5000])
@pytest.mark.parametrize("function", [hash_array, hash_rows])
def test_arrays(function, rows):
    values = np.random.default_rng(0).normal(size=(rows, 4)).astype(np.float16)
    expected = function(values)
    assert function(np.asfortranarray(values)) == expected
    others = [values.astype(np.float32), values[:-1], values.reshape(-1, 2), -values, values[:, ::-1]]
    assert expected not in [function(other) for other in others]
    for row in (0, rows - 1):
        changed = values.copy()
        changed[row, 2] += 1
        assert function(changed) != expected


def test_a_sample_of_rows_is_spread_evenly():
    blocks = np.arange(10_000)[:, None] // 100
    assert len({hash_rows(blocks == i) for i in range(101)}) == 101  # the last has no row that differs
