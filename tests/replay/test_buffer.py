"""The replay buffer against a list that is searched from the end."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from tests.factories import generator, make_group, visit
from trl_dataeff.replay.buffer import ReplayBuffer, replay_groups
from trl_dataeff.rollouts.group import EASY, EFFECTIVE, HARD


KINDS = st.sampled_from([EFFECTIVE, EFFECTIVE, EASY, HARD])
ROUNDS = st.lists(st.lists(st.tuples(st.integers(0, 9), KINDS), max_size=8), max_size=8)


def newest_if_effective(entered: list) -> list:
    """By hand: walk backwards over all that was entered, and take each prompt's first group if it is effective; oldest first."""
    seen, kept = set(), []
    for group in reversed(entered):
        if group.prompt_id not in seen and group.kind == EFFECTIVE:
            kept.append(group)
        seen.add(group.prompt_id)
    return kept[::-1]


@given(rounds=ROUNDS, capacity=st.integers(1, 6))
def test_first_in_first_out_newest_per_prompt_effective_only(rounds, capacity):
    """After each round, the newest groups of those that were there before it and of the round itself."""
    buffer, present = ReplayBuffer(capacity), []
    for step, visits in enumerate(rounds):
        groups = [visit(prompt_id, kind, step) for prompt_id, kind in visits]
        buffer.add(groups, step)
        present = newest_if_effective(present + groups)[-capacity:]
        assert [id(g) for g in buffer.groups] == [id(g) for g in present]


def test_a_group_without_any_score_removes_nothing():
    """As where a reward function failed: it says nothing of the prompt."""
    buffer = ReplayBuffer(3)
    buffer.add([visit(1, EFFECTIVE, 0)], 0)
    buffer.add([visit(1, HARD, 1, rate=float("nan"))], 1)
    assert [(g.prompt_id, g.step) for g in buffer.groups] == [(1, 0)]


@given(rounds=ROUNDS, max_age=st.integers(1, 6), now=st.integers(0, 12))
def test_age_is_in_generation_batches(rounds, max_age, now):
    buffer, unlimited = ReplayBuffer(99, max_age), ReplayBuffer(99)
    for step, visits in enumerate(rounds):
        groups = [visit(prompt_id, kind, 64 * step) for prompt_id, kind in visits]
        buffer.add(groups, step)
        unlimited.add(groups, step)
    buffer.expire(now)
    unlimited.expire(now)
    assert [id(g) for g in buffer.groups] == [id(g) for g in unlimited.groups if now - g.step // 64 <= max_age]


@given(prompts=st.sets(st.integers(0, 30)), exclude=st.lists(st.integers(0, 30)), data=st.data())
def test_samples_are_distinct_and_leave_out_excluded_prompts(prompts, exclude, data):
    buffer = ReplayBuffer(99)
    buffer.add((visit(i, EFFECTIVE, 0) for i in prompts), 0)
    allowed = prompts - set(exclude)
    assert buffer.available(exclude) == len(allowed)
    n = data.draw(st.integers(0, 40))
    chosen = [group.prompt_id for group in buffer.sample(n, generator(), exclude)]
    assert len(chosen) == len(set(chosen)) == min(n, len(allowed))
    assert set(chosen) <= allowed
    assert len(buffer) == len(prompts)


def test_in_random_order_all_groups_are_drawn_equally_often():
    buffer, rng, draws = ReplayBuffer(10, newest_first=False), generator(1), 4000
    for i in range(10):
        buffer.add([visit(i, EFFECTIVE)], i)
    counts = np.bincount([g.prompt_id for _ in range(draws) for g in buffer.sample(3, rng)], minlength=10)
    share = 3 / 10
    assert np.abs(counts - draws * share).max() < 4 * np.sqrt(draws * share * (1 - share))


@given(batches=st.lists(st.integers(0, 5), min_size=1, max_size=12), sizes=st.lists(st.integers(0, 5), max_size=8))
def test_the_least_replayed_come_first_then_the_newest(batches, sizes):
    buffer, uses, rng = ReplayBuffer(99), dict.fromkeys(range(len(batches)), 0), generator()
    for i in sorted(uses, key=lambda i: batches[i]):
        buffer.add([visit(i, EFFECTIVE)], batches[i])
    for n in sizes:
        drawn = [group.prompt_id for group in buffer.sample(n, rng)]
        order = sorted((uses[i], -batches[i]) for i in uses)
        assert [(uses[i], -batches[i]) for i in drawn] == order[:n]
        uses |= {i: uses[i] + 1 for i in drawn}


def test_equals_are_drawn_equally_often():
    counts, rng = np.zeros(5), generator(1)
    for _ in range(1000):
        buffer = ReplayBuffer(5)
        buffer.add((visit(i, EFFECTIVE) for i in range(5)), 0)
        counts[[group.prompt_id for group in buffer.sample(2, rng)]] += 1
    assert np.abs(counts - 400).max() < 4 * np.sqrt(1000 * 0.4 * 0.6)


class TestState:
    """A buffer alone: its state through a file."""

    @staticmethod
    def filled(capacity: int = 8, max_age: int | None = 5) -> ReplayBuffer:
        buffer = ReplayBuffer(capacity, max_age)
        for i in (4, 0, 7, 3, 9, 1, 0):  # prompt 0 twice: its second group is the newest
            logps = [np.float32([-i]), np.float32([-1.5, -i])]
            group = make_group(prompt_id=i, step=10 + i, owner=0, behavior_logps=logps, logged={"n": [i, "ä"]})
            buffer.add([group], 10 + i)
        return buffer

    @staticmethod
    def restored(state: dict[str, np.ndarray], path, capacity: int = 8, max_age: int | None = 5) -> ReplayBuffer:
        save_file(state, path)
        buffer = ReplayBuffer(capacity, max_age)
        buffer.load_state_dict(load_file(path))
        return buffer

    def test_what_follows_is_identical(self, tmp_path):
        """The next samples, what enters, and what leaves by capacity and age."""
        buffer, first, second = self.filled(capacity=6), generator(3), generator(3)
        copy = self.restored(buffer.state_dict(), tmp_path / "replay.safetensors", capacity=6)
        for n, exclude in [(3, []), (2, [4, 9]), (6, []), (1, [0]), (0, []), (4, [7, 99])]:
            drawn, again = buffer.sample(n, first, exclude), copy.sample(n, second, exclude)
            for a, b in zip(drawn, again, strict=True):
                assert (a.prompt_id, a.step, a.owner, a.effective) == (b.prompt_id, b.step, b.owner, b.effective)
                assert (a.rollouts.completions, a.rollouts.logged) == (b.rollouts.completions, b.rollouts.logged)
                for x, y in zip([a.rewards, *a.rollouts.behavior_logps], [b.rewards, *b.rollouts.behavior_logps]):
                    np.testing.assert_array_equal(x, y, strict=True)
        for one in (buffer, copy):
            one.add([make_group(prompt_id=i, step=20) for i in (3, 5, 6)], 20)
            one.expire(20)
        assert [(g.prompt_id, g.step) for g in copy.groups] == [(g.prompt_id, g.step) for g in buffer.groups]
        assert [g.prompt_id for g in copy.groups] == [9, 3, 5, 6]

    def test_a_group_that_was_replayed_is_restored_as_one_that_is_not_in_a_batch(self, tmp_path):
        """Origin and disposition are of a group in a batch, and decided anew when the group is sampled."""
        buffer = self.filled()
        buffer.groups[0].origin, buffer.groups[0].disposition = "replayed", "trained"
        copy = self.restored(buffer.state_dict(), tmp_path / "replay.safetensors")
        assert {(g.origin, g.disposition) for g in copy.groups} == {("fresh", None)}


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
            buffer.add((big(i) for i in range(start, start + 100)), 0)
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
def test_share_of_a_batch_by_hand(fraction, batch, processes, expected):
    assert replay_groups(fraction, batch, processes) == expected
