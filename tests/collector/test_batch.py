"""One generation batch, from rounds of hand-made groups to what is trained on."""

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.factories import generator, visit
from trl_dataeff.collector.rounds import GenerationBatch, RefillRounds, ZeroVarianceShare, fill_batch
from trl_dataeff.replay.buffer import ReplayBuffer
from trl_dataeff.rollouts.group import EASY, EFFECTIVE, HARD, RolloutGroup


def group(effective: bool, prompt_id: int = 0, kind: int = HARD) -> RolloutGroup:
    return visit(prompt_id, EFFECTIVE if effective else kind, step=0)


def reference(effective: bool, prompt_id: int) -> RolloutGroup:
    made = group(effective, prompt_id)
    made.origin = "reference"
    return made


def ids(groups: Iterable[RolloutGroup]) -> list[int]:
    return [id(g) for g in groups]


def prompts(groups: Iterable[RolloutGroup]) -> list[int]:
    return [g.prompt_id for g in groups]


def assert_accounted_for(batch: GenerationBatch, before: Iterable[RolloutGroup]) -> None:
    """
    Trained, leftover and dropped groups are disjoint, and together what the batch began with, generated and replayed. Each
    group says of itself in which of the three it is.
    """
    everything = ids(batch.trained) + ids(batch.leftover) + ids(batch.dropped)
    assert sorted(everything) == sorted(ids([*before, *batch.generated, *batch.replayed]))
    for disposition in ("trained", "leftover", "dropped"):
        assert {g.disposition for g in getattr(batch, disposition)} <= {disposition}
    assert all(g.effective for g in batch.leftover)


@given(
    batch_groups=st.integers(1, 6),
    multiple=st.integers(1, 3),
    max_rounds=st.sampled_from([None, 1, 2, 4]),
    share=st.integers(0, 5),
    buffered=st.none() | st.sets(st.integers(0, 9)),
    waiting=st.lists(st.integers(0, 9), max_size=8),
    referred=st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=8),
    draws=st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=40),
)
def test_every_group_has_one_origin_and_one_disposition(
    batch_groups, multiple, max_rounds, share, buffered, waiting, referred, draws
):
    """Of anything that can come together: leftover groups, references, rounds that give more than was missing, replay."""
    buffer, draws = None if buffered is None else ReplayBuffer(99), iter(draws)
    if buffer is not None:
        buffer.add(group(True, i) for i in sorted(buffered))
    leftover, references = [group(True, i) for i in waiting], [reference(*r) for r in referred]
    fresh: list[RolloutGroup] = []

    def roll_out(n, round_index):
        groups = [group(*next(draws, (False, 20 + i))) for i in range(n)]
        fresh.extend(groups)
        return groups

    batch = fill_batch(
        roll_out,
        lambda missing: -(-missing // multiple) * multiple,
        batch_groups=batch_groups,
        max_rounds=max_rounds,
        leftover=leftover,
        references=references,
        buffer=buffer,
        replay_groups=0 if buffer is None else min(share, batch_groups - 1),
        rng=generator(),
    )
    assert len(batch.trained) == batch_groups
    assert_accounted_for(batch, leftover)
    assert ids(batch.generated) == ids(references + fresh)
    for origin, groups in (("leftover", leftover), ("reference", references), ("fresh", fresh)):
        assert all(g.origin == origin for g in groups)
    assert set(ids(batch.trained_now)) == set(ids(batch.trained)) & set(ids(references + fresh))
    assert set(ids(batch.trained_stale)) == set(ids(batch.trained)) - set(ids(references + fresh))
    assert set(ids(batch.leftover_now)) == set(ids(batch.leftover)) - set(ids(leftover))
    assert not set(prompts(batch.replayed)) & set(prompts(leftover + references + fresh))
    assert batch.padded == (0 if max_rounds is None else sum(not g.effective for g in batch.trained))
    assert all(not g.effective or g.origin == "reference" for g in batch.dropped)
    assert len(set(prompts(batch.replayed))) == len(batch.replayed)
    assert set(prompts(batch.replayed)) <= (buffered or set())
    if batch.padded:  # only when nothing effective was left aside, or could be replayed
        assert batch.rounds >= max_rounds
        assert not [g for g in batch.leftover if g.origin != "reference"]
        assert len(batch.replayed) == len((buffered or set()) - set(prompts(leftover + references + fresh)))
    if buffer is not None:
        assert not any(g.origin == "reference" for g in batch.trained)
        assert not any(g.effective for g in batch.dropped)


class TestByHand:
    """Origins and dispositions of every group of small batches; groups are named by their prompts."""

    def fill(self, rounds: list[list[tuple[int, bool]]], **options) -> GenerationBatch:
        """`rounds`: for each round, `(prompt, effective)` of its groups, which must be all that are asked for."""
        waiting = iter(rounds)

        def roll_out(n, round_index):
            groups = [group(effective, prompt_id) for prompt_id, effective in next(waiting)]
            assert len(groups) >= n
            return groups

        batch = fill_batch(roll_out, lambda missing: missing, rng=generator(), **options)
        assert next(waiting, None) is None, "fewer rounds than expected"
        return batch

    def told(self, batch: GenerationBatch) -> dict[str, list[tuple[int, str]]]:
        """Prompts and origins by disposition, in order."""
        return {
            name: [(g.prompt_id, g.origin) for g in getattr(batch, name)]
            for name in ("trained", "leftover", "dropped")
        }

    def buffer(self, *prompt_ids: int) -> ReplayBuffer:
        buffer = ReplayBuffer(9)
        buffer.add(group(True, i) for i in prompt_ids)
        return buffer

    def test_one_round_trained_on_as_it_is(self):
        batch = self.fill([[(1, True), (2, False), (3, True)]], batch_groups=3)
        assert self.told(batch) == {
            "trained": [(1, "fresh"), (2, "fresh"), (3, "fresh")],
            "leftover": [],
            "dropped": [],
        }
        assert (batch.rounds, batch.padded) == (1, 0)

    def test_a_round_that_gives_more_than_is_missing(self):
        """As with several processes. Of what is beyond the batch, effective groups are left over and others dropped."""
        batch = self.fill([[(1, False), (2, True), (3, True), (4, False)]], batch_groups=2)
        assert self.told(batch) == {
            "trained": [(1, "fresh"), (2, "fresh")],
            "leftover": [(3, "fresh")],
            "dropped": [(4, "fresh")],
        }
        assert batch.padded == 0

    def test_dynamic_sampling_with_leftover_groups(self):
        rounds = [[(1, False), (2, True)], [(3, True), (4, True), (5, False)]]
        batch = self.fill(rounds, batch_groups=3, max_rounds=3, leftover=[group(True, 7)])
        assert self.told(batch) == {
            "trained": [(7, "leftover"), (2, "fresh"), (3, "fresh")],
            "leftover": [(4, "fresh")],
            "dropped": [(1, "fresh"), (5, "fresh")],
        }
        assert prompts(batch.trained_stale) == [7]
        assert prompts(batch.trained_now) == [2, 3]
        assert prompts(batch.leftover_now) == [4]
        assert (batch.rounds, batch.padded) == (2, 0)

    def test_excluded_prompts_are_not_replayed(self):
        buffer = self.buffer(5, 6, 7)
        batch = self.fill([[(1, True), (2, True)]], batch_groups=3, buffer=buffer, replay_groups=2, exclude={5, 6, 9})
        assert self.told(batch)["trained"] == [(1, "fresh"), (2, "fresh"), (7, "replayed")]

    def test_a_batch_that_stays_short_is_padded(self):
        rounds = [[(1, False), (2, True), (3, False)], [(4, False), (5, False)]]
        batch = self.fill(rounds, batch_groups=3, max_rounds=2)
        assert self.told(batch) == {
            "trained": [(2, "fresh"), (1, "fresh"), (3, "fresh")],
            "leftover": [],
            "dropped": [(4, "fresh"), (5, "fresh")],
        }
        assert (batch.rounds, batch.padded) == (2, 2)

    def test_replay(self):
        batch = self.fill([[(1, True), (2, False)]], batch_groups=3, buffer=self.buffer(1, 8), replay_groups=1)
        assert self.told(batch) == {
            "trained": [(1, "fresh"), (2, "fresh"), (8, "replayed")],
            "leftover": [],
            "dropped": [],
        }
        assert prompts(batch.replayed) == prompts(batch.trained_stale) == [8]
        assert batch.padded == 0

    def test_replay_gives_way_to_a_round_where_the_buffer_has_no_other_prompt(self):
        batch = self.fill([[(1, True)], [(2, True)]], batch_groups=2, buffer=self.buffer(1), replay_groups=1)
        assert self.told(batch) == {"trained": [(1, "fresh"), (2, "fresh")], "leftover": [], "dropped": []}
        assert batch.rounds == 2

    def test_dynamic_sampling_with_replay_completes_a_short_batch_from_the_buffer_and_then_with_padding(self):
        options = {"batch_groups": 4, "max_rounds": 1, "replay_groups": 1}
        batch = self.fill([[(1, False), (2, True), (3, False)]], buffer=self.buffer(8), **options)
        assert self.told(batch) == {
            "trained": [(2, "fresh"), (8, "replayed"), (1, "fresh"), (3, "fresh")],
            "leftover": [],
            "dropped": [],
        }
        assert batch.padded == 2
        batch = self.fill([[(1, False), (2, True), (3, False)]], buffer=self.buffer(3, 7, 8), **options)
        assert sorted(self.told(batch)["trained"]) == [(1, "fresh"), (2, "fresh"), (7, "replayed"), (8, "replayed")]
        assert self.told(batch)["dropped"] == [(3, "fresh")]
        assert batch.padded == 1

    def test_references_with_a_buffer_are_left_over_for_it(self):
        references = [reference(True, 5), reference(False, 6)]
        batch = self.fill(
            [[(1, False), (2, True)]], batch_groups=2, references=references, buffer=self.buffer(5), replay_groups=1
        )
        assert self.told(batch) == {
            "trained": [(1, "fresh"), (2, "fresh")],
            "leftover": [(5, "reference")],
            "dropped": [(6, "reference")],
        }
        assert prompts(batch.generated) == [5, 6, 1, 2]
        assert prompts(batch.leftover_now) == [5]
        assert batch.rounds == 1

    def test_references_without_a_buffer_are_up_to_half_of_the_batch(self):
        references = [reference(i != 6, i) for i in (5, 6, 7, 8)]
        batch = self.fill([[(1, False), (2, True)]], batch_groups=4, references=references)
        assert self.told(batch) == {
            "trained": [(5, "reference"), (7, "reference"), (1, "fresh"), (2, "fresh")],
            "leftover": [],
            "dropped": [(6, "reference"), (8, "reference")],
        }
        assert prompts(batch.trained_now) == [5, 7, 1, 2]
        assert batch.padded == 0

    def test_a_group_that_is_used_again_gets_another_origin(self):
        buffer = self.buffer()
        first = self.fill([[(1, True), (2, True)]], batch_groups=1)
        assert self.told(first)["leftover"] == [(2, "fresh")]
        second = self.fill([], batch_groups=1, max_rounds=1, leftover=first.leftover)
        assert self.told(second)["trained"] == [(2, "leftover")]
        buffer.add(second.trained)
        third = self.fill([[(3, True)]], batch_groups=2, buffer=buffer, replay_groups=1)
        assert self.told(third)["trained"] == [(3, "fresh"), (2, "replayed")]
        assert third.replayed[0] is first.generated[1]


def test_rounds_go_on_while_what_is_left_cannot_fill_the_batch():
    """The one round that is allowed gives nothing effective, and its prompts are those that could have been replayed."""
    buffer, sizes = ReplayBuffer(9), []
    buffer.add([group(True, i) for i in range(2)])

    def roll_out(n, round_index):
        sizes.append(n)
        return [group(False, i) for i in range(n)]

    batch = fill_batch(
        roll_out,
        lambda missing: missing,
        batch_groups=4,
        max_rounds=1,
        buffer=buffer,
        replay_groups=2,
        rng=torch.Generator(),
    )
    assert sizes == [2, 4]
    assert len(batch.trained) == batch.padded == 4


@given(
    batch_groups=st.integers(1, 600),
    share=st.floats(0, 1),
    margin=st.floats(1, 3),
    multiple=st.sampled_from([1, 2, 3, 8]),
    data=st.data(),
)
def test_a_rounds_size_keeps_its_bounds(batch_groups, share, margin, multiple, data):
    batch_groups *= multiple  # a batch spreads evenly over processes
    missing = data.draw(st.integers(1, batch_groups))
    num_prompts = batch_groups + data.draw(st.integers(0, 3 * batch_groups))
    n = RefillRounds(margin=margin).size(
        missing, batch_groups=batch_groups, zero_share=share, multiple=multiple, num_prompts=num_prompts
    )
    assert n % multiple == 0
    assert missing <= n <= num_prompts
    assert n >= min(batch_groups / 4, num_prompts // multiple * multiple)
    assert n < 1.5 * batch_groups + multiple


@pytest.mark.parametrize(
    ("missing", "share", "margin", "expected"),
    [
        (16, 0.0, 1.0, 16),
        (8, 0.5, 1.0, 16),
        (8, 0.5, 1.25, 20),
        (1, 0.0, 1.0, 4),
        (16, 0.9, 1.0, 24),
        (2, 1.0, 1.0, 24),
    ],
)
def test_a_rounds_size_by_hand(missing, share, margin, expected):
    """ceil(margin * missing / (1 - share)) within [16 / 4, 1.5 * 16]."""
    rounds = RefillRounds(margin=margin)
    size = rounds.size(missing, batch_groups=16, zero_share=share, multiple=1, num_prompts=1000)
    assert size == expected


def test_running_share_weighs_by_size_and_fades():
    share = ZeroVarianceShare(decay=0.5)
    assert share.value == 0.0
    share.observe([group(False)] * 3 + [group(True)])
    assert share.value == 0.75
    share.observe([group(True)] * 2)
    assert share.value == pytest.approx(1.5 / 4)
    share.observe([])
    assert share.value == pytest.approx(1.5 / 4)
    share.observe([group(False, kind=EASY)])
    assert share.value == pytest.approx(1.375 / 2)
