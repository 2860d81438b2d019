"""The pool of prompts: streaks of zero-variance groups, and their state."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.factories import visit
from trl_dataeff.rollouts.group import EASY, EFFECTIVE, HARD
from trl_dataeff.selection.pool import PromptPool


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([EFFECTIVE, EASY, HARD])), max_size=12), max_size=6)
)
def test_streaks_against_a_loop_over_visits(rounds):
    """Streaks by hand: the trailing visits of one zero-variance kind, per prompt, in the order of visits."""
    pool = PromptPool(5)
    visits = {i: [] for i in range(5)}
    for step, groups in enumerate(rounds):
        pool.observe([visit(i, kind, step) for i, kind in groups])
        for i, kind in groups:
            visits[i].append(kind)
    for i, seen in visits.items():
        streak = 0
        for kind in reversed(seen):
            if kind == EFFECTIVE or kind != seen[-1]:
                break
            streak += 1
        assert pool.streak[i] == streak
        if seen:
            assert pool.streak_kind[i] == seen[-1]


def test_memory_stays_below_64_bytes_a_prompt():
    pool = PromptPool(100_000)
    assert sum(values.nbytes for values in pool.state_dict().values()) <= 64 * len(pool)


def test_state_round_trip_and_mismatch():
    pool = PromptPool(4)
    pool.observe([visit(1, HARD, 3), visit(1, HARD, 3), visit(2, EFFECTIVE, 3, 0.25)])
    other = PromptPool(4)
    other.load_state_dict(pool.state_dict())
    for name, values in pool.state_dict().items():
        np.testing.assert_array_equal(values, other.state_dict()[name])
    with pytest.raises(ValueError, match="Streaks of 4 prompts do not fit a pool of 5"):
        PromptPool(5).load_state_dict(pool.state_dict())
