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


#: By hand: rounds, what there is beside them, and prompts by what becomes of their groups, in order; how many are padding.
#: `+` is an effective group; an origin other than fresh stands before the prompt: leftover, replayed, reference (`f`)
BY_HAND = {
    "one round": (["1+ 2- 3+"], {"batch_groups": 3}, "1 2 3", "", "", 0),
    # as with several processes
    "a round that gives more than is missing": (["1- 2+ 3+ 4-"], {"batch_groups": 2}, "1 2", "3", "4", 0),
    "dynamic sampling": (
        ["1- 2+", "3+ 4+ 5-"],
        {"batch_groups": 3, "max_rounds": 3, "leftover": "7+"},
        *("l7 2 3", "4", "1 5", 0),
    ),
    "more leftover groups than a batch takes": (
        [],
        {"batch_groups": 2, "max_rounds": 3, "leftover": "7+ 8+ 9+"},
        *("l7 l8", "l9", "", 0),
    ),
    "a batch that stays short": (
        ["1- 2+ 3-", "4- 5-"],
        {"batch_groups": 3, "max_rounds": 2},
        *("2 1 3", "", "4 5", 2),
    ),
    "replay": (["1+ 2-"], {"batch_groups": 3, "replay_groups": 1, "buffer": "1+ 8+"}, "1 2 r8", "", "", 0),
    "excluded prompts": (
        ["1+ 2+"],
        {"batch_groups": 3, "replay_groups": 2, "buffer": "5+ 6+ 7+", "exclude": {5, 6, 9}},
        *("1 2 r7", "", "", 0),
    ),
    "the buffer has no other prompt": (
        ["1+", "2+"],
        {"batch_groups": 2, "replay_groups": 1, "buffer": "1+"},
        *("1 2", "", "", 0),
    ),
    "dynamic sampling and replay": (
        ["1- 2+ 3-"],
        {"batch_groups": 4, "max_rounds": 1, "replay_groups": 1, "buffer": "8+"},
        *("2 r8 1 3", "", "", 2),
    ),
    "a short batch is completed from the buffer first": (
        ["1- 2+ 3-"],
        {"batch_groups": 4, "max_rounds": 1, "replay_groups": 1, "buffer": "3+ 7+ 8+"},
        *("2 r7 r8 1", "", "3", 1),
    ),
    "references with a buffer": (
        ["1- 2+"],
        {"batch_groups": 2, "references": "5+ 6-", "buffer": "5+", "replay_groups": 1},
        *("1 2", "f5", "f6", 0),
    ),
    "references without a buffer": (
        ["1- 2+"],
        {"batch_groups": 4, "references": "5+ 6- 7+ 8+"},
        *("f5 f7 1 2", "", "f6 f8", 0),
    ),
}
LETTERS = {"fresh": "", "leftover": "l", "replayed": "r", "reference": "f"}


def read(text: str) -> list[RolloutGroup]:
    return [group(word[-1] == "+", int(word[:-1])) for word in text.split()]


def told(groups: Iterable[RolloutGroup]) -> str:
    return " ".join(f"{LETTERS[g.origin]}{g.prompt_id}" for g in groups)


@pytest.mark.parametrize("name", BY_HAND)
def test_small_batches_by_hand(name):
    rounds, options, trained, leftover, dropped, padded = BY_HAND[name]
    options, waiting = dict(options), iter(rounds)
    if "buffer" in options:
        buffer, stored = ReplayBuffer(9), read(options["buffer"])
        buffer.add(stored)
        options["buffer"] = buffer
    for what in {"leftover", "references"} & options.keys():
        options[what] = read(options[what])
    for made in options.get("references", []):
        made.origin = "reference"

    def roll_out(n, round_index):
        groups = read(next(waiting))
        assert len(groups) >= n
        return groups

    batch = fill_batch(roll_out, lambda missing: missing, rng=generator(2), **options)
    assert next(waiting, None) is None, "fewer rounds than expected"
    assert batch.rounds == len(rounds)
    replayed_in_any_order = sorted(told(batch.trained).split()) == sorted(trained.split())
    assert replayed_in_any_order if trained.count("r") > 1 else told(batch.trained) == trained
    assert (told(batch.leftover), told(batch.dropped), batch.padded) == (leftover, dropped, padded)


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
