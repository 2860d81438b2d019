"""The pool of prompts: streaks of zero-variance groups, and their state."""

import itertools

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
        assert pool.streak[i] == pool.faded()[i] == streak
        if seen:
            assert pool.streak_kind[i] == seen[-1]


@pytest.mark.parametrize("half_life", [0.5, 3.0, 100.0])
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([EFFECTIVE, EASY, HARD])), max_size=8), max_size=9)
)
def test_faded_streaks_against_a_loop_over_visits(half_life, rounds):
    """Each group of a streak counts 0.5 ** (age / half-life), its age being the batches since its own."""
    pool = PromptPool(4, half_life)
    for now, groups in enumerate(rounds):
        pool.observe([visit(i, kind) for i, kind in groups])
        expected = []
        for i in range(4):
            visits = [(step, k) for step, batch in enumerate(rounds[: now + 1]) for j, k in batch if j == i]
            last = visits[-1][1] if visits else EFFECTIVE
            streak = itertools.takewhile(lambda v, last=last: v[1] == last != EFFECTIVE, reversed(visits))
            expected.append(sum(0.5 ** ((now - step) / half_life) for step, _ in streak))
        np.testing.assert_allclose(pool.faded(), expected, rtol=1e-6)
        np.testing.assert_array_equal(pool.faded(np.array([2, 0])), pool.faded()[[2, 0]])


def test_a_streak_of_three_by_hand():
    """With a half-life of 2: groups at batches 1, 1 and 3 count 0.5 + 0.5 + 1 then, and half of it at batch 5."""
    pool = PromptPool(1, half_life=2)
    pool.observe([visit(0, HARD), visit(0, HARD)])
    pool.observe([])
    pool.observe([visit(0, HARD)])
    assert pool.faded() == 2.0
    pool.observe([])
    pool.observe([])
    assert pool.faded() == 1.0
    pool.observe([visit(0, EASY)])
    assert pool.faded() == 1.0, "a group of another kind starts a streak of one"


def test_memory_stays_below_64_bytes_a_prompt():
    pool = PromptPool(100_000)
    assert sum(values.nbytes for values in pool.state_dict().values()) <= 64 * len(pool)


def test_state_round_trip_and_mismatch():
    pool, other = PromptPool(4, half_life=3), PromptPool(4, half_life=3)
    pool.observe([visit(1, HARD, 3), visit(1, HARD, 3), visit(2, EFFECTIVE, 3, 0.25)])
    pool.observe([visit(3, EASY)])
    other.load_state_dict(pool.state_dict())
    for later in ([], [visit(1, HARD)], [visit(3, EASY), visit(0, EASY)]):
        for name, values in pool.state_dict().items():
            np.testing.assert_array_equal(values, other.state_dict()[name], strict=True)
        np.testing.assert_array_equal(pool.faded(), other.faded(), strict=True)
        pool.observe(later)
        other.observe(later)
    with pytest.raises(ValueError, match="Streaks of 4 prompts do not fit a pool of 5"):
        PromptPool(5).load_state_dict(pool.state_dict())
