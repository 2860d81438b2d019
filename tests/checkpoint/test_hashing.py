"""Content hashes against a slow calculation of their own: they see every change of content, and no change of layout."""

from __future__ import annotations

import itertools
import json
import random

import numpy as np
import pyarrow as pa
import pytest
import torch
import xxhash
from datasets import Dataset, concatenate_datasets
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_dataeff.checkpoint import hashing
from trl_dataeff.checkpoint.hashing import hash_array, hash_bytes, hash_file, hash_json, hash_prompts, hash_rows


TEXTS = ["1+1=", "", "été", "a", "ab", "1+1="]
CHATS = [
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1="}],
    [],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": "été"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "a"}],
]
texts = st.lists(st.text(max_size=8), min_size=1, max_size=12)
chats = st.lists(
    st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "system"]), "content": st.none() | st.text(max_size=5)}
        ),
        max_size=3,
    ),
    min_size=1,
    max_size=8,
)
CHAT = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


def dataset(prompts, kind=None) -> Dataset:
    kind = kind or (pa.string() if isinstance(prompts[0], str) else CHAT)
    return Dataset(pa.table({"prompt": pa.array(prompts, kind)}))


def by_hand(prompts: list) -> str:
    """The hash from Python objects: each 1024 prompts as JSON, behind its length."""
    parts = [json.dumps(prompts[i : i + 1024], sort_keys=True).encode() for i in range(0, len(prompts), 1024)]
    return xxhash.xxh3_128(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).hexdigest()


@settings(max_examples=80, deadline=None)
@given(texts | chats)
def test_prompts_are_hashed_as_by_hand(prompts):
    assert hash_prompts(dataset(prompts)) == by_hand(prompts)


@settings(max_examples=80, deadline=None)
@given(texts | chats, st.lists(st.integers(0, 12), max_size=4), st.randoms(use_true_random=False))
def test_layout_does_not_count(prompts, cuts, rng):
    expected = hash_prompts(dataset(prompts))
    cuts = [0, *sorted(min(cut, len(prompts)) for cut in cuts), len(prompts)]
    whole = dataset(prompts)
    parts = [Dataset(whole.data.table.slice(a, b - a)) for a, b in itertools.pairwise(cuts)]
    assert hash_prompts(concatenate_datasets([part for part in parts if len(part)])) == expected
    # The same rows through an indices mapping, among others that are left out
    order = list(range(len(prompts)))
    rng.shuffle(order)
    place = {row: i for i, row in enumerate(order)}
    shuffled = dataset([prompts[row] for row in order] + [prompts[0]])
    selected = shuffled.select([place[row] for row in range(len(prompts))])
    assert hash_prompts(selected) == expected
    assert hash_prompts(selected.flatten_indices()) == expected


@pytest.mark.parametrize("prompts", [TEXTS, CHATS], ids=["texts", "chats"])
def test_other_columns_formats_and_files_do_not_count(prompts, tmp_path):
    expected = hash_prompts(dataset(prompts))
    plain = dataset(prompts)
    assert hash_prompts(plain.add_column("other", list(range(len(plain)))).with_format("torch")) == expected
    assert hash_prompts(plain.rename_column("prompt", "question"), "question") == expected
    plain.save_to_disk(tmp_path / "data")
    assert hash_prompts(Dataset.load_from_disk(tmp_path / "data")) == expected


def test_large_strings_and_keys_in_another_order_do_not_count():
    for kind in (pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())):
        whole = dataset(TEXTS, kind)
        assert hash_prompts(whole) == hash_prompts(dataset(TEXTS))
        assert hash_prompts(Dataset(whole.data.table.slice(2, 3))) == hash_prompts(dataset(TEXTS[2:5]))
        shuffled = dataset(TEXTS, kind).select([5, 4, 3, 2, 1, 0])
        assert hash_prompts(shuffled) == hash_prompts(dataset(TEXTS[::-1]))
    kind = pa.large_list(pa.struct([("content", pa.large_string()), ("role", pa.large_string())]))
    assert hash_prompts(dataset(CHATS, kind)) == hash_prompts(dataset(CHATS))


def test_gathered_pieces_do_not_count():
    shuffled = dataset([f"{i}" for i in range(3000)]).shuffle(seed=0)
    assert hash_prompts(shuffled) == by_hand(shuffled["prompt"][:])
    assert hash_prompts(shuffled.select(range(50, 90))) == by_hand(shuffled["prompt"][50:90])


def changes(prompts):
    yield "order", [*prompts[1:], prompts[0]]
    yield "shorter", prompts[:-1]
    yield "longer", [*prompts, prompts[-1]]
    yield "empty", []
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            yield f"one more in {i}", [*prompts[:i], prompt + "x", *prompts[i + 1 :]]
            yield f"null in {i}", [*prompts[:i], None, *prompts[i + 1 :]]
        for j, message in enumerate(prompt if isinstance(prompt, list) else []):
            for key in message:
                changed = [*prompt[:j], {**message, key: "other"}, *prompt[j + 1 :]]
                yield f"{key} of {j} in {i}", [*prompts[:i], changed, *prompts[i + 1 :]]
            yield f"without {j} in {i}", [*prompts[:i], [*prompt[:j], *prompt[j + 1 :]], *prompts[i + 1 :]]


@pytest.mark.parametrize("prompts", [TEXTS, CHATS], ids=["texts", "chats"])
def test_every_change_counts(prompts):
    kind = pa.string() if prompts is TEXTS else CHAT
    hashes = {"as it is": hash_prompts(dataset(prompts, kind))}
    hashes |= {name: hash_prompts(dataset(changed, kind)) for name, changed in changes(prompts)}
    assert len(set(hashes.values())) == len(hashes)


def test_one_prompt_among_many_counts():
    rows = [f"{i:05d}" for i in range(20_000)]
    before = hash_prompts(dataset(rows))
    rng = random.Random(0)
    for i in rng.sample(range(20_000), 10):
        assert hash_prompts(dataset([*rows[:i], "99999", *rows[i + 1 :]])) != before


def test_where_a_text_ends_counts():
    pairs = [["ab", "c"], ["a", "bc"], ["abc", ""], ["", "abc"]]
    assert len({hash_prompts(dataset(pair)) for pair in pairs}) == 4
    message = {"role": "user", "content": "a"}
    assert hash_prompts(dataset([[message, message], []])) != hash_prompts(dataset([[message], [message]]))


def rows_of_many_types() -> pa.Table:
    return pa.table(
        {
            "question": ["a", None, "c"],
            "number": pa.array([1, None, 3]),
            "share": [0.5, None, 2.5],
            "flag": [True, None, False],
            "day": pa.array([1, None, 3], pa.date32()),
            "time": pa.array([1, None, 3], pa.timestamp("us")),
            "raw": [b"1", None, b""],
            "kind": pa.array(["x", "y", "x"]).dictionary_encode(),
            "nothing": pa.nulls(3),
            "fixed": pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2)),
            "decimal": pa.array([1, None, 3], pa.decimal128(5)),
        }
    )


def test_whole_rows_where_a_transform_makes_the_prompts():
    table = rows_of_many_types()
    rows = Dataset(table)
    rows.set_transform(lambda batch: pytest.fail("a transform was run"))
    expected = hash_prompts(rows)
    parts = concatenate_datasets([Dataset(table.slice(0, 1)), Dataset(table.slice(1))])
    assert hash_prompts(parts) == expected
    assert hash_prompts(parts.select([0, 1, 2]).select([2, 1, 0]).select([2, 1, 0])) == expected
    found = {expected}
    for name in table.column_names:
        i = table.column_names.index(name)
        changed = table.column(name).take(pa.array([1, 1, 2] if name != "nothing" else [0, 0]))
        others = table.slice(0, len(changed))
        found.add(hash_prompts(Dataset(others.set_column(i, name, changed))))
        found.add(hash_prompts(Dataset(table.drop_columns([name]))))
        names = [other + "s" * (other == name) for other in table.column_names]
        found.add(hash_prompts(Dataset(table.rename_columns(names))))
    assert len(found) == 1 + 3 * table.num_columns


def test_a_transform_is_not_run():
    stored = dataset(TEXTS)
    stored.set_transform(lambda batch: pytest.fail("a transform was run"))
    assert hash_prompts(stored) == hash_prompts(dataset(TEXTS))


@pytest.mark.parametrize("rows", [1, 3, 1024, 5000])
def test_arrays(rows):
    values = np.random.default_rng(0).normal(size=(rows, 4)).astype(np.float16)
    for function in (hash_array, hash_rows):
        expected = function(values)
        assert function(np.asfortranarray(values)) == expected
        assert function(torch.from_numpy(values)) == expected
        others = [values.astype(np.float32), values[:-1], values.reshape(-1, 2), -values, values[:, ::-1]]
        assert expected not in [function(other) for other in others]
        assert function(torch.from_numpy(values).bfloat16()) != expected
    for row in (0, rows - 1):
        changed = values.copy()
        changed[row, 2] += 1
        assert hash_rows(changed) != hash_rows(values)


def test_a_sample_of_rows_is_spread_evenly():
    values = np.zeros((10_000, 2))
    expected = hash_rows(values)
    for start in range(0, 10_000, 100):
        changed = values.copy()
        changed[start : start + 100] = 1
        assert hash_rows(changed) != expected
    assert hash_rows(values[:0]) != hash_rows(values[:0, :1])


def test_bytes_json_and_files(tmp_path):
    assert hash_bytes([b"ab", b"c"]) != hash_bytes([b"a", b"bc"]) != hash_bytes([b"abc"])
    assert hash_json({"a": 1, "b": [2]}) == hash_json({"b": [2], "a": 1}) != hash_json({"a": 1, "b": [3]})
    for size in (0, 1, 100, hashing._PIECE, hashing._PIECE + 1):
        data = np.random.default_rng(size).bytes(size)
        (tmp_path / "file").write_bytes(data)
        assert hash_file(tmp_path / "file", sync=True) == (size, xxhash.xxh3_128(data).hexdigest())
