"""Success rates estimated from earlier groups, against a loop over them."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_dataeff.selection.history import SuccessHistory


VISITS = st.lists(
    st.lists(st.tuples(st.integers(0, 4), st.one_of(st.floats(0, 1), st.just(math.nan))), max_size=6), max_size=8
)


@given(batches=VISITS, prior=st.floats(0.5, 10), half_life=st.floats(0.5, 30), later=st.integers(0, 5))
def test_posterior_against_a_loop_over_visits(batches, prior, half_life, later):
    history, predicted = SuccessHistory(5, prior, half_life), np.linspace(0.1, 0.9, 5, dtype=np.float32)
    visits: list[tuple[int, int, float, int]] = []
    for batch, groups in enumerate(batches):
        ids, rates = np.array([g[0] for g in groups], int), np.array([g[1] for g in groups], np.float32)
        trials = np.array([2 + i % 3 for i in range(len(groups))], np.float32)
        history.observe(ids, rates, trials, batch)
        visits += [(batch, i, r, t) for i, r, t in zip(ids, rates, trials, strict=True) if not math.isnan(r)]
    now = len(batches) + later
    estimate = history.estimate(predicted, now)
    for prompt in range(5):
        s, n = prior * predicted[prompt], prior
        for batch, i, rate, trials in visits:
            if i == prompt:
                fade = 0.5 ** ((now - batch) / half_life)
                s, n = s + fade * rate * trials, n + fade * trials
        assert estimate[prompt] == pytest.approx(s / n, abs=1e-5)
    assert estimate.dtype == np.float32
