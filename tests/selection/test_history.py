"""Success rates estimated from earlier groups, against a loop over them."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_dataeff.selection.estimate import SuccessHistory


VISITS = st.lists(
    st.lists(st.tuples(st.integers(0, 4), st.one_of(st.floats(0, 1), st.just(math.nan))), max_size=6), max_size=8
)


@given(
    batches=VISITS,
    prior=st.floats(0.5, 10),
    half_lives=st.lists(st.floats(0.5, 30), min_size=1, max_size=3),
    later=st.integers(0, 5),
)
def test_posterior_against_a_loop_over_visits(batches, prior, half_lives, later):
    history = SuccessHistory(5, prior, half_lives)
    predicted = np.linspace(0.1, 0.9, 5 * len(half_lives), dtype=np.float32).reshape(-1, 5)
    visits: list[tuple[int, int, float, int]] = []
    for batch, groups in enumerate(batches):
        ids, rates = np.array([g[0] for g in groups], int), np.array([g[1] for g in groups], np.float32)
        trials = np.array([2 + i % 3 for i in range(len(groups))], np.float32)
        history.observe(ids, rates, trials, batch)
        visits += [(batch, i, r, t) for i, r, t in zip(ids, rates, trials, strict=True) if not math.isnan(r)]
    now = len(batches) + later
    estimate = history.estimate(predicted, now)
    for (k, half_life), prompt in itertools.product(enumerate(half_lives), range(5)):
        s, n = prior * predicted[k, prompt], prior
        for batch, i, rate, trials in visits:
            if i == prompt:
                fade = 0.5 ** ((now - batch) / half_life)
                s, n = s + fade * rate * trials, n + fade * trials
        assert estimate[k, prompt] == pytest.approx(s / n, abs=1e-5)
    assert estimate.dtype == np.float32
    np.testing.assert_array_equal(history.estimate(predicted[:, [3, 1]], now, np.array([3, 1])), estimate[:, [3, 1]])


def test_a_wider_range_of_the_reward_is_as_if_it_had_been_known_from_the_start():
    """Rewards from 0 to 1, and then one of -3: a rate r becomes (r + 3) / 4."""
    history, wide = (SuccessHistory(3, 2.0, (1.0, 5.0)) for _ in range(2))
    rates, ids, trials = np.array([0.25, 1.0], np.float32), np.array([0, 2]), np.full(2, 8, np.float32)
    history.observe(ids, rates, trials, 1)
    history.rescale(0.25, 0.75)
    wide.observe(ids, (rates + 3) / 4, trials, 1)
    prior = np.full((2, 3), 0.5, np.float32)
    np.testing.assert_allclose(history.estimate(prior, 4), wide.estimate(prior, 4), atol=1e-6)


def test_evidence_of_another_pool_is_refused():
    with pytest.raises(ValueError, match="3 prompts and 2 half-lives does not fit a pool of 4 prompts and 2"):
        SuccessHistory(4, 2.0, (1.0, 5.0)).load_state_dict(SuccessHistory(3, 2.0, (1.0, 5.0)).state_dict())
