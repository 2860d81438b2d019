"""Uniform selection, against TRL's sampler."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trl.trainer.utils import RepeatSampler

from tests.factories import generator
from trl_dataeff.selection import UniformSelector
from trl_dataeff.selection.base import SelectorContext


def uniform(size: int, batch: int, shuffle: bool = True) -> UniformSelector:
    selector = UniformSelector(shuffle=shuffle)
    selector.bind(SelectorContext(size, batch, group_size=4))
    return selector


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("size", "batch"), [(24, 8), (7, 2), (8, 8), (5, 1)])
def test_uniform_takes_prompts_in_the_order_of_trls_sampler(size, batch, shuffle):
    sampler = RepeatSampler(range(size), mini_repeat_count=1, batch_size=batch, shuffle=shuffle, seed=11)
    selector, rng = uniform(size, batch, shuffle), generator(11)
    for _ in range(3):  # passes
        for start in range(0, size // batch * batch, batch):
            if start == 0:
                order = list(sampler)
            assert selector.propose(batch, rng).tolist() == order[start : start + batch]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=30))
def test_a_pass_offers_each_of_its_prompts_once_whatever_the_sizes(sizes):
    """12 prompts in passes of 12: the k-th dozen proposed differs from a permutation only by what a proposal that
    spans two passes may not repeat, so visits never differ by more than two."""
    selector, rng = uniform(12, 3), generator()
    visits = np.zeros(12, dtype=int)
    for n in sizes:
        visits[selector.propose(n, rng)] += 1
        assert visits.max() - visits.min() <= 2


def test_a_batch_larger_than_the_dataset_is_refused():
    with pytest.raises(ValueError, match=r"8 .*from 1 to 5"):
        uniform(5, 8)
