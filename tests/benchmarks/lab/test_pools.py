"""The pools that follow from made-up success rates; `test_start.py` has those of a trained start."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest

from benchmarks.lab import pools
from benchmarks.lab.pools import DEAD, LEARNABLE, POOLS, held_out_tasks, pool_dataset
from benchmarks.lab.tasks import ARITHMETIC, CELLS, LEARNABLE_FAMILIES


CONTINUUM = POOLS["continuum"]
#: Success falls by so much with every letter: `second` to 0.72 and no further, `vowels` to 0.003; the others reach 0
SLOPES = {"rotate": 0.09, "vowels": 0.0789, "interleave": 0.29, "second": 0.019}
CELL_SUCCESS = {
    (family, length): 0.0 if family in ARITHMETIC else max(0.0, 0.95 - SLOPES[family] * (length - 2))
    for family, length in CELLS
}
#: Digests of the prompts of pool and held-out set that these cells gave when the committed tables were made
COMMITTED = {"first": "c37a9ca1fa3e36b2", "second": "3440d666cb6062af", "third": "c37a9ca1fa3e36b2"}


def test_pools_with_the_same_shares_have_the_same_prompts():
    assert digest("graded") == digest("third") == digest("first")
    data = pool_dataset(POOLS["learnable"], POOLS["learnable"].kinds(CELL_SUCCESS), seed=3)
    assert set(data["kind"]) == {LEARNABLE}
    assert len(data) == 512


def in_range(index: int) -> list[tuple[str, int]]:
    """The cells whose success is in the range of this index, of `SUCCESS_RANGES` equal ones."""
    width = (pools.EASY_FROM - pools.DEAD_UP_TO) / pools.SUCCESS_RANGES
    low = pools.DEAD_UP_TO + index * width
    return [c for c, p in CELL_SUCCESS.items() if pools.DEAD_UP_TO < p < pools.EASY_FROM and low <= p < low + width]


def count(family_of: str, *kinds: str) -> Counter:
    """Prompts of the continuum of these kinds, by `family` or by cell."""
    data = pool_dataset(CONTINUUM, CONTINUUM.kinds(CELL_SUCCESS), 0, only=kinds)
    cells = zip(data["family"], data["length"], strict=True)
    return Counter(family for family, _ in cells) if family_of == "family" else Counter(cells)


def digest(name: str) -> str:
    kinds = POOLS[name].kinds(CELL_SUCCESS)
    prompts = [*pool_dataset(POOLS[name], kinds, seed=3)["prompt"], *(task.prompt for task in held_out_tasks(kinds))]
    return hashlib.sha256("\n".join(prompts).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", COMMITTED)
def test_the_pools_of_the_committed_tables_have_the_same_prompts_as_then(name):
    assert digest(name) == COMMITTED[name]


def test_a_third_of_the_continuum_is_unsolvable_and_its_families_are_equally_often():
    assert count("family", LEARNABLE) == dict.fromkeys(LEARNABLE_FAMILIES, 80)
    assert count("cell", DEAD).total() == 160
    assert count("cell", LEARNABLE, DEAD).total() == CONTINUUM.size == 480
    held_out = held_out_tasks(CONTINUUM.kinds(CELL_SUCCESS))
    assert Counter(task.family for task in held_out) == dict.fromkeys(LEARNABLE_FAMILIES, 128)
    assert {task.cell for task in held_out} == set(count("cell", LEARNABLE))


def test_the_continuum_is_even_over_success_and_goes_from_hardly_ever_to_nearly_always():
    """`rotate` and `vowels` have a cell in every range; so have both the same number of prompts in each."""
    found = count("cell", LEARNABLE)
    for family in ("rotate", "vowels"):
        by_range = [sum(found[c] for c in in_range(i) if c[0] == family) for i in range(pools.SUCCESS_RANGES)]
        assert by_range == [80 / pools.SUCCESS_RANGES] * pools.SUCCESS_RANGES
    for i in range(pools.SUCCESS_RANGES):  # cells of one family that share a range take turns
        of_vowels = [found[c] for c in in_range(i) if c[0] == "vowels"]
        assert max(of_vowels) - min(of_vowels) <= 1
    rates = [CELL_SUCCESS[c] for c in found]
    assert (min(rates), max(rates)) == (pytest.approx(0.0032), pytest.approx(0.912))
    assert set(found) == {c for c, p in CELL_SUCCESS.items() if pools.DEAD_UP_TO < p < pools.EASY_FROM}


def test_where_a_family_has_no_cell_in_a_range_the_nearest_stands_in():
    found = count("cell", LEARNABLE)
    # `interleave` has 0.66, 0.37 and 0.08, in the ranges 5, 3 and 0 of 8; `second` has nothing below 0.72
    ranges = {("interleave", 3): (4, 5, 6, 7), ("interleave", 4): (2, 3), ("interleave", 5): (0, 1)}
    assert {cell: found[cell] for cell in ranges} == {cell: 10 * len(those) for cell, those in ranges.items()}
    assert found["second", 14] > 60


def test_a_continuum_is_the_same_each_time_and_shares_no_prompt_with_the_held_out_tasks():
    kinds = CONTINUUM.kinds(CELL_SUCCESS)
    data, again = (pool_dataset(CONTINUUM, kinds, seed=1).to_list() for _ in range(2))
    assert data == again
    prompts = {row["prompt"] for row in data}
    assert len(prompts) == len(data)
    assert not prompts & {task.prompt for task in held_out_tasks(kinds)}
    assert prompts != set(pool_dataset(CONTINUUM, kinds, seed=2)["prompt"])
    assert held_out_tasks(kinds) == held_out_tasks(CONTINUUM.kinds(CELL_SUCCESS))


def test_a_continuum_without_a_family_says_so():
    without = {cell: 0.0 if cell[0] == "vowels" else p for cell, p in CELL_SUCCESS.items()}
    with pytest.raises(ValueError, match="no cell of 'vowels'"):
        CONTINUUM.kinds(without)
