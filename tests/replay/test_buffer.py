"""The replay buffer against a list that is searched from the end."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.factories import generator, make_group, visit
from trl_dataeff.replay.buffer import ReplayBuffer, replay_groups
from trl_dataeff.rollouts.group import EASY, EFFECTIVE, HARD, pack_groups, unpack_groups


KINDS = st.sampled_from([EFFECTIVE, EFFECTIVE, EASY, HARD])
ROUNDS = st.lists(st.lists(st.tuples(st.integers(0, 9), KINDS), max_size=8), max_size=8)


def newest_effective(entered: list, capacity: int) -> list:
    """By hand: walk backwards over all that was entered, take each prompt's first effective group, oldest first."""
    seen, kept = set(), []
    for group in reversed(entered):
        if group.kind == EFFECTIVE and group.prompt_id not in seen:
            seen.add(group.prompt_id)
            kept.append(group)
    return kept[:capacity][::-1]


@given(rounds=ROUNDS, capacity=st.integers(1, 6))
def test_first_in_first_out_newest_per_prompt_effective_only(rounds, capacity):
    buffer, entered = ReplayBuffer(capacity), []
    for step, visits in enumerate(rounds):
        groups = [visit(prompt_id, kind, step) for prompt_id, kind in visits]
        buffer.add(groups)
        entered += groups
        assert [id(g) for g in buffer.groups] == [id(g) for g in newest_effective(entered, capacity)]


@given(rounds=ROUNDS, max_age=st.integers(1, 6), now=st.integers(0, 12))
def test_age(rounds, max_age, now):
    buffer, unlimited = ReplayBuffer(99, max_age), ReplayBuffer(99)
    for step, visits in enumerate(rounds):
        groups = [visit(prompt_id, kind, step) for prompt_id, kind in visits]
        buffer.add(groups)
        unlimited.add(groups)
    buffer.expire(now)
    unlimited.expire(now)
    assert [id(g) for g in buffer.groups] == [id(g) for g in unlimited.groups if now - g.step <= max_age]


@given(prompts=st.sets(st.integers(0, 30)), exclude=st.lists(st.integers(0, 30)), data=st.data())
def test_samples_are_distinct_and_leave_out_what_is_fresh(prompts, exclude, data):
    buffer = ReplayBuffer(99)
    buffer.add(visit(i, EFFECTIVE, 0) for i in prompts)
    allowed = prompts - set(exclude)
    assert buffer.available(exclude) == len(allowed)
    n = data.draw(st.integers(0, len(allowed)))
    chosen = [group.prompt_id for group in buffer.sample(n, generator(), exclude)]
    assert len(chosen) == len(set(chosen)) == n
    assert set(chosen) <= allowed
    assert len(buffer) == len(prompts)
    with pytest.raises(ValueError, match=f"can give {len(allowed)}"):
        buffer.sample(len(allowed) + 1, generator(), exclude)


def test_all_groups_are_drawn_equally_often():
    buffer, rng, draws = ReplayBuffer(10), generator(1), 4000
    buffer.add(visit(i, EFFECTIVE, i) for i in range(10))
    counts = np.bincount([g.prompt_id for _ in range(draws) for g in buffer.sample(3, rng)], minlength=10)
    share = 3 / 10
    assert np.abs(counts - draws * share).max() < 4 * np.sqrt(draws * share * (1 - share))


def test_groups_that_are_equal_in_all_but_their_prompt_make_no_tie():
    buffer = ReplayBuffer(3)
    buffer.add([make_group(prompt_id=i, step=0) for i in range(5)])
    assert [g.prompt_id for g in buffer.groups] == [2, 3, 4]


def test_a_buffer_that_was_packed_gives_the_same_samples():
    buffer, copy = ReplayBuffer(8), ReplayBuffer(8)
    buffer.add([make_group(prompt_id=i, behavior_logps=[np.array([-1.0]), np.array([-1.0, i])]) for i in range(12)])
    copy.add(unpack_groups(pack_groups(buffer.groups)))
    for seed in range(5):
        first, second = buffer.sample(3, generator(seed), [5]), copy.sample(3, generator(seed), [5])
        assert [g.prompt_id for g in first] == [g.prompt_id for g in second]
        for a, b in zip(first, second, strict=True):
            np.testing.assert_array_equal(a.rollouts.behavior_logps[1], b.rollouts.behavior_logps[1])


def test_memory_is_bounded_by_the_capacity():
    """8 groups of 2 completions of 1,000 tokens, 4 bytes for each token and 4 for its log-prob."""

    def big(prompt_id: int):
        return make_group(
            prompt_id=prompt_id,
            completion_tokens=[np.zeros(1000, np.int32) for _ in range(2)],
            completions=["x", "y"],
            behavior_logps=[np.zeros(1000, np.float32) for _ in range(2)],
        )

    buffer = ReplayBuffer(8)
    tracemalloc.start()
    try:
        sizes = []
        for start in range(0, 400, 100):
            buffer.add(big(i) for i in range(start, start + 100))
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    payload = 8 * 2 * 1000 * 8
    assert all(payload < size < 1.5 * payload for size in sizes)
    assert max(sizes) - min(sizes) < 0.05 * payload


@pytest.mark.parametrize(
    ("fraction", "batch", "processes", "expected"),
    [
        (0.5, 16, 1, 8),
        (0.25, 16, 1, 4),
        (0.5, 3, 1, 2),
        (0.5, 1, 1, 0),
        (0.9, 2, 1, 1),
        (0.5, 8, 4, 4),
        (0.3, 8, 4, 4),
        (0.2, 8, 4, 0),
        (0.0, 8, 1, 0),
    ],
)
def test_share_of_a_window_by_hand(fraction, batch, processes, expected):
    assert replay_groups(fraction, batch, processes) == expected
