"""The replay buffer against a list that is searched from the end."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from tests.factories.groups import generator, make_group, visit
from trl_dataeff.replay.buffer import ReplayBuffer
from trl_dataeff.rollouts.group import EASY, EFFECTIVE, HARD, pack_groups


KINDS = st.sampled_from([EFFECTIVE, EFFECTIVE, EASY, HARD])
ROUNDS = st.lists(st.lists(st.tuples(st.integers(0, 9), KINDS), max_size=8), max_size=8)


def newest_if_effective(entered: list) -> list:
    """
    By hand: walk backwards over all that was entered, and take each prompt's first group if it is effective; oldest
    first.
    """
    seen, kept = set(), []
    for group in reversed(entered):
        if group.prompt_id not in seen and group.kind == EFFECTIVE:
            kept.append(group)
        seen.add(group.prompt_id)
    return kept[::-1]


@given(rounds=ROUNDS, capacity=st.integers(1, 6), max_age=st.none() | st.integers(1, 4))
def test_first_in_first_out_newest_per_prompt_effective_only(rounds, capacity, max_age):
    """
    After each round, the newest groups of those that were there before it and of the round; age is in generation
    batches.
    """
    buffer, present = ReplayBuffer(capacity, max_age), []
    for batch, visits in enumerate(rounds):
        buffer.expire(batch)
        present = [group for group in present if max_age is None or batch - group.step // 64 <= max_age]
        assert list(map(id, buffer.groups)) == list(map(id, present))
        groups = [visit(prompt_id, kind, 64 * batch) for prompt_id, kind in visits]
        buffer.add(groups, batch)
        present = newest_if_effective(present + groups)[-capacity:]
        assert list(map(id, buffer.groups)) == list(map(id, present))


def test_a_group_without_any_score_removes_nothing():
    """As where a reward function failed: it says nothing of the prompt."""
    buffer = ReplayBuffer(3)
    buffer.add([visit(1, EFFECTIVE, 0)], 0)
    buffer.add([visit(1, HARD, 1, rate=float("nan"))], 1)
    assert [(g.prompt_id, g.step) for g in buffer.groups] == [(1, 0)]


@given(
    batches=st.lists(st.integers(0, 5), max_size=12),
    draws=st.lists(st.tuples(st.integers(0, 15), st.lists(st.integers(0, 12), max_size=6)), max_size=8),
    newest_first=st.booleans(),
)
def test_samples_are_distinct_and_the_least_replayed_come_first_then_the_newest(batches, draws, newest_first):
    buffer, uses, rng = ReplayBuffer(99, newest_first=newest_first), dict.fromkeys(range(len(batches)), 0), generator()
    for i in sorted(uses, key=lambda i: batches[i]):
        buffer.add([visit(i, EFFECTIVE)], batches[i])
    for n, exclude in draws:
        order = sorted((uses[i], -batches[i]) for i in uses if i not in exclude)
        assert buffer.available(exclude) == len(order)
        drawn = [group.prompt_id for group in buffer.sample(n, rng, exclude)]
        assert len(set(drawn)) == len(drawn) == min(n, len(order))
        assert not set(drawn) & set(exclude)
        if newest_first:
            assert [(uses[i], -batches[i]) for i in drawn] == order[:n]
        uses |= {i: uses[i] + 1 for i in drawn}
        assert len(buffer) == len(batches), "they stay"


@pytest.mark.parametrize("newest_first", [True, False])
def test_equals_are_drawn_equally_often(newest_first):
    """Groups of one generation batch, or in random order those of any."""
    counts, rng = np.zeros(5), generator(1)
    for _ in range(1000):
        buffer = ReplayBuffer(5, newest_first=newest_first)
        for i in range(5):
            buffer.add([visit(i, EFFECTIVE)], 0 if newest_first else i)
        counts[[group.prompt_id for group in buffer.sample(2, rng)]] += 1
    assert np.abs(counts - 400).max() < 4 * np.sqrt(1000 * 0.4 * 0.6)


def test_a_restored_buffer_goes_on_as_before(tmp_path):
    """By a file: the next samples, what enters, and what leaves by capacity and age."""
    buffer, copy, first, second = ReplayBuffer(6, 5), ReplayBuffer(6, 5), generator(3), generator(3)
    for i in (4, 0, 7, 3, 9, 1, 0):  # prompt 0 twice: its second group is the newest
        logps = [np.float32([-i]), np.float32([-1.5, -i])]
        group = make_group(prompt_id=i, step=10 + i, owner=0, behavior_logps=logps, logged={"n": [i, "ä"]})
        buffer.add([group], 10 + i)
    save_file(buffer.state_dict(), tmp_path / "replay.safetensors")
    copy.load_state_dict(load_file(tmp_path / "replay.safetensors"))
    for n, exclude in [(3, []), (2, [4, 9]), (6, []), (1, [0]), (0, []), (4, [7, 99])]:
        drawn, again = buffer.sample(n, first, exclude), copy.sample(n, second, exclude)
        np.testing.assert_equal(pack_groups(again), pack_groups(drawn))
    for one in (buffer, copy):
        one.add([make_group(prompt_id=i, step=20) for i in (3, 5, 6)], 20)
        one.expire(20)
        assert [(g.prompt_id, g.step) for g in one.groups] == [(9, 19), (3, 20), (5, 20), (6, 20)]


def test_groups_that_moved_to_another_process_take_the_place_of_what_they_were():
    buffer = ReplayBuffer(3)
    uses = generator(0)
    groups = [make_group(prompt_id=i, owner=0) for i in range(3)]
    buffer.add(groups, 4)
    moved = replace(groups[1], owner=1, rollouts=None)
    buffer.replace({groups[1]: moved})
    assert list(map(id, buffer.groups)) == list(map(id, [groups[0], moved, groups[2]]))
    assert moved in buffer.sample(3, uses)
