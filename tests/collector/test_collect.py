"""One generation batch, from rounds of made-up groups to what is trained on."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.factories import visit
from trl_dataeff.replay.buffer import ReplayBuffer
from trl_dataeff.rollouts.capture import ZeroVarianceShare, collect, round_size
from trl_dataeff.rollouts.group import EFFECTIVE, HARD, RolloutGroup


def group(effective: bool, prompt_id: int = 0) -> RolloutGroup:
    return visit(prompt_id, EFFECTIVE if effective else HARD, step=0)


@given(
    batch=st.integers(1, 8),
    carried=st.integers(0, 12),
    max_rounds=st.integers(1, 5),
    outcomes=st.lists(st.booleans(), max_size=60),
    over=st.integers(0, 6),
)
def test_collect_keeps_every_group_once_and_fills_the_window(batch, carried, max_rounds, outcomes, over):
    outcomes = iter(outcomes)
    sizes = []

    def roll_out(n, round_index):
        assert round_index == len(sizes)
        sizes.append(n)
        return [group(next(outcomes, False)) for _ in range(n)]

    kept = [group(True) for _ in range(carried)]
    result = collect(roll_out, lambda missing: missing + over, batch_groups=batch, carried=kept, max_rounds=max_rounds)
    assert len(result.trained) == batch
    everything = [id(g) for g in result.trained + result.surplus + result.dropped]
    assert sorted(everything) == sorted(id(g) for g in kept + result.fresh)
    assert all(g.effective for g in result.surplus)
    assert not any(g.effective for g in result.dropped)
    assert result.padded == sum(not g.effective for g in result.trained)
    assert result.rounds == len(sizes) <= max_rounds
    assert [id(g) for g in result.trained[: min(carried, batch)]] == [id(g) for g in kept[:batch]]
    if result.padded:  # only when rounds ran out, and with nothing effective left aside
        assert result.rounds == max_rounds
        assert not result.surplus
    if carried >= batch:
        assert result.rounds == 0
    in_order = [g for g in kept + result.fresh if g.effective]
    assert [id(g) for g in result.surplus] == [id(g) for g in in_order[batch:]]
    assert {id(g) for g in result.fresh_surplus} == {id(g) for g in result.surplus} - {id(g) for g in kept}


@given(
    batch=st.integers(1, 8),
    share=st.integers(0, 7),
    buffered=st.sets(st.integers(0, 12)),
    max_rounds=st.sampled_from([None, 1, 3]),
    draws=st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60),
)
def test_a_window_with_replay(batch, share, buffered, max_rounds, draws):
    """Whatever the rounds give: the window is full, no prompt is fresh and replayed, and no group is lost."""
    share = min(share, batch - 1)
    buffer, draws, sizes = ReplayBuffer(99), iter(draws), []
    stored = [group(True, i) for i in sorted(buffered)]
    buffer.add(stored)

    def roll_out(n, round_index):
        sizes.append(n)
        return [group(*next(draws, (False, 20 + i))) for i in range(n)]

    result = collect(
        roll_out,
        lambda missing: missing,
        batch_groups=batch,
        max_rounds=max_rounds,
        buffer=buffer,
        replay_groups=share,
        rng=torch.Generator().manual_seed(0),
    )
    assert len(result.trained) == batch
    assert sizes[0] == batch - min(share, len(buffered))
    everything = [id(g) for g in result.trained + result.surplus + result.dropped]
    assert sorted(everything) == sorted(id(g) for g in result.fresh + result.replayed)
    fresh, replayed = [g.prompt_id for g in result.fresh], [g.prompt_id for g in result.replayed]
    assert len(set(replayed)) == len(replayed)
    assert not set(fresh) & set(replayed)
    assert {id(g) for g in result.replayed} <= {id(g) for g in stored}
    assert {id(g) for g in result.stale} == {id(g) for g in result.replayed}
    assert {id(g) for g in result.fresh_trained} == {id(g) for g in result.trained} - {id(g) for g in stored}
    if max_rounds is None:
        assert not result.dropped
        assert not result.padded
        assert len(replayed) <= share
    if len(replayed) > share:  # only where rounds ran out
        assert result.rounds >= max_rounds
    if result.padded:  # only when nothing else was left
        assert len(replayed) == len(set(buffered) - set(fresh))


def test_rounds_go_on_while_what_is_left_cannot_fill_the_window():
    """The one round that is allowed gives nothing effective, and its prompts are those that could have been replayed."""
    buffer, sizes = ReplayBuffer(9), []
    buffer.add([group(True, i) for i in range(2)])

    def roll_out(n, round_index):
        sizes.append(n)
        return [group(False, i) for i in range(n)]

    result = collect(
        roll_out,
        lambda missing: missing,
        batch_groups=4,
        max_rounds=1,
        buffer=buffer,
        replay_groups=2,
        rng=torch.Generator(),
    )
    assert sizes == [2, 4]
    assert len(result.trained) == result.padded == 4


@pytest.mark.parametrize("replay", [True, False])
def test_references_leave_room_for_what_is_chosen(replay):
    """Many effective references: they go into the buffer, or open at most half of the window; none waits for the next."""
    references = [group(i % 2 == 0, i) for i in range(40)]
    chosen = []

    def roll_out(n, round_index):
        chosen.extend(group(True, 100 + i) for i in range(n))
        return chosen

    result = collect(
        roll_out,
        lambda missing: missing,
        batch_groups=8,
        references=references,
        buffer=ReplayBuffer(9) if replay else None,
        rng=torch.Generator(),
    )
    assert len(chosen) == (8 if replay else 4)
    assert {id(g) for g in chosen} <= {id(g) for g in result.trained}
    assert len(result.surplus) == (20 if replay else 0)
    everything = [id(g) for g in result.trained + result.surplus + result.dropped]
    assert sorted(everything) == sorted(id(g) for g in references + chosen)


def test_no_round_follows_a_full_window():
    rounds = []
    collect(lambda n, r: rounds.append(n) or [group(True)] * n, lambda m: m, batch_groups=4, max_rounds=9)
    assert rounds == [4]


@given(
    batch=st.integers(1, 600),
    share=st.floats(0, 1),
    margin=st.floats(1, 3),
    multiple=st.sampled_from([1, 2, 3, 8]),
    data=st.data(),
)
def test_round_size_keeps_its_bounds(batch, share, margin, multiple, data):
    batch *= multiple  # a window spreads evenly over processes
    missing = data.draw(st.integers(1, batch))
    pool = batch + data.draw(st.integers(0, 3 * batch))
    n = round_size(
        missing, batch_groups=batch, zero_share=share, margin=margin, low=0.25, high=1.5, multiple=multiple, pool=pool
    )
    assert n % multiple == 0
    assert missing <= n <= pool
    assert n >= min(batch / 4, pool // multiple * multiple)
    assert n < 1.5 * batch + multiple


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
def test_round_size_by_hand(missing, share, margin, expected):
    """ceil(margin * missing / (1 - share)) within [16 / 4, 1.5 * 16]."""
    options = {"batch_groups": 16, "low": 0.25, "high": 1.5, "multiple": 1, "pool": 1000}
    assert round_size(missing, zero_share=share, margin=margin, **options) == expected


def test_running_share_weighs_by_size_and_fades():
    share = ZeroVarianceShare(decay=0.5)
    assert share.value == 0.0
    share.observe([group(False)] * 3 + [group(True)])
    assert share.value == 0.75
    share.observe([group(True)] * 2)
    assert share.value == pytest.approx(1.5 / 4)
    share.observe([])
    assert share.value == pytest.approx(1.5 / 4)
