"""One generation batch, from hand-made rounds of rollouts to what is trained on."""

from collections.abc import Iterable
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.factories import visit
from tests.factories.collecting import AtRandom, InTurn, collector, on_processes, rounds, rounds_at_random
from tests.factories.training import as_it_is
from trl_dataeff.collector.rounds import Rounds, ZeroVarianceShare
from trl_dataeff.replay.buffer import ReplayBuffer
from trl_dataeff.rollouts.capture import Round
from trl_dataeff.rollouts.distributed import Processes
from trl_dataeff.rollouts.group import EASY, EFFECTIVE, HARD, RolloutGroup


N, BATCHES = 30, 6  # prompts, and generation batches


def prompts(groups: Iterable[RolloutGroup]) -> list[int]:
    return [group.prompt_id for group in groups]


def collected(world_size: int, *, seed, effective, references, replays, max_age, **options) -> list[list]:
    """By process, its generation batches as they were when they were collected."""

    def work(processes):
        buffer = ReplayBuffer(99, max_age, rank=processes.rank, world_size=world_size) if replays else None
        run = collector(N, selector=AtRandom(references), buffer=buffer, processes=processes, seed=seed, **options)
        roll_out, batches = rounds_at_random(seed, effective, processes), []
        for step in range(BATCHES):
            before = list(run.leftover)
            batch = as_it_is(run.collect(roll_out, step))
            batch.before, batch.own = before, run.own(batch.trained)
            # Another process may have them later
            batch.held = [int(group.rollouts.prompt_tokens[0]) for group in batch.own]
            batches.append(batch)
        return batches

    return on_processes(world_size, work)


class ByTheRule:
    """What is stored, and what a batch has to be made of, once it is known what was generated for it."""

    def __init__(self, places: int, reserved: int, replays: bool, max_age: int | None):
        self.places, self.reserved, self.replays, self.max_age = places, reserved, replays, max_age
        self.stored: dict[int, list] = {}  # prompt -> group, batch, uses

    def check(self, number: int, batch: SimpleNamespace) -> None:
        origins = batch.origins
        stored = {p: s for p, s in self.stored.items() if self.max_age is None or number - s[1] <= self.max_age}
        present = set(prompts([*batch.before, *batch.generated]))
        candidates = sorted((s for p, s in stored.items() if p not in present), key=lambda s: (s[2], -s[1]))
        references = [g for g in batch.generated if origins[id(g)] == "reference" and g.effective]
        fresh = [g for g in batch.generated if origins[id(g)] == "fresh"]
        effective = [*batch.before, *([] if self.replays else references[: self.places // 2])]
        effective += [g for g in fresh if g.effective]
        zero_variance = [g for g in fresh if not g.effective]

        wanted = self.places - min(self.reserved, len(candidates))
        taken = effective[:wanted]
        if self.reserved:
            taken += zero_variance[: wanted - len(taken)]
        replayed = min(self.places - len(taken), len(candidates)) if self.replays else 0
        taken += zero_variance[: self.places - len(taken) - replayed]
        chosen = [(stored[p][2], -stored[p][1]) for p in prompts(batch.replayed)]
        assert sorted(chosen) == [(s[2], -s[1]) for s in candidates[:replayed]]
        assert all(stored[g.prompt_id][0] is g and g.prompt_id not in present for g in batch.replayed)
        assert {id(g) for g in batch.trained} == {id(g) for g in [*taken, *batch.replayed]}
        assert len(batch.trained) == len({id(g) for g in batch.trained}) == self.places

        for p in prompts(batch.replayed):
            stored[p][2] += 1
        for g in batch.generated if self.replays else []:
            stored.pop(g.prompt_id, None)
            if g.effective:
                stored[g.prompt_id] = [g, number, 0]
        self.stored = stored


@given(
    places=st.integers(1, 4),
    world_size=st.sampled_from([1, 1, 1, 3]),
    rounds=st.sampled_from([Rounds(), Rounds(), Rounds(2), Rounds(4, margin=2.0)]),
    replays=st.booleans(),
    reserved=st.integers(0, 3),
    max_age=st.sampled_from([None, 1, 2, 3]),
    references=st.sampled_from([0, 0, 6]),
    effective=st.sampled_from([0, 0.2, 0.5, 1]),
    seed=st.integers(0, 10**6),
)
def test_every_batch_is_made_by_the_rule(places, world_size, reserved, replays, rounds, **options):
    """Whatever comes together: no group is lost, each has one origin and one disposition, and the order is that of generation."""
    places, reserved = places * world_size, min(reserved, places - 1) * world_size if replays else 0
    own = {"batch_groups": places, "rounds": rounds, "reserved": reserved, "replays": replays}
    by_rank = collected(world_size, **own, **options)
    rule = ByTheRule(places, reserved, replays, options["max_age"])
    for number, batch in enumerate(by_rank[0]):
        rule.check(number, batch)
        everything = [*batch.trained, *batch.leftover, *batch.dropped]
        assert sorted(map(id, everything)) == sorted(map(id, [*batch.before, *batch.generated, *batch.replayed]))
        for disposition in ("trained", "leftover", "dropped"):
            assert {batch.dispositions[id(g)] for g in getattr(batch, disposition)} <= {disposition}
        assert all(g.effective for g in batch.leftover)
        if rounds.most == 1 and not reserved and (replays or not options["references"]):
            assert sum(batch.origins[id(g)] == "fresh" for g in batch.generated) == places
        order = {id(g): i for i, g in enumerate([*batch.before, *batch.generated])}
        places_in_order = [order.get(id(g), 99) for g in batch.trained]
        assert world_size > 1 or places_in_order == sorted(places_in_order), "what is replayed comes last"
    for batches in zip(*by_rank, strict=True):  # one batch, as each process knows it
        assert len({(*prompts(batch.trained), -1, *prompts(batch.generated)) for batch in batches}) == 1
        counts = [sum(g.effective for g in batch.own) for batch in batches]
        assert max(counts) - min(counts) <= 1
        for batch in batches:
            assert len(batch.own) == places // world_size
            assert batch.held == prompts(batch.own)


@pytest.mark.parametrize("reserved", [0, 3])
def test_three_processes_collect_what_one_does(reserved):
    options = {"batch_groups": 6, "reserved": reserved, "replays": True, "max_age": None, "references": 0}
    alone, *three = (collected(n, seed=5, effective=0.6, **options)[0] for n in (1, 3))
    for one, several in zip(alone, *three, strict=True):
        assert prompts(several.generated) == prompts(one.generated)
        assert sorted(prompts(several.trained)) == sorted(prompts(one.trained))
    assert sum(len(batch.replayed) for batch in alone) > 5


#: By hand: rounds, what there is beside them, and prompts by what becomes of their groups: trained, leftover, dropped.
#: `+` is an effective group; an origin other than fresh stands before the prompt: leftover, replayed, reference (`f`)
BY_HAND = {
    "one round": (["1+ 2- 3+"], {}, "1 2 3 | | "),
    "one group": (["1-"], {}, "1 | | "),
    "leftover groups first": (["1- 2+"], {"leftover": "7+"}, "l7 1 2 | | "),
    "dynamic sampling": (["1- 2+", "3+ 4+ 5-"], {"most": 3, "leftover": "7+", "sizes": [2, 3]}, "l7 2 3 | 4 | 1 5"),
    "more leftover groups than a batch takes": ([], {"most": 3, "leftover": "7+ 8+ 9+"}, "l7 l8 | l9 | "),
    "a batch that stays short": (["1- 2+ 3-", "4- 5-"], {"most": 2, "sizes": [3, 2]}, "1 2 3 | | 4 5"),
    "fill": (["1- 2+ 3-"], {"buffer": "8+"}, "1 2 r8 | | 3"),
    "fill, one group": (["1-"], {"buffer": "8+"}, "r8 | | 1"),
    "fill, an empty buffer": (["1- 2+ 3-"], {"buffer": ""}, "1 2 3 | | "),
    "fill, no room": (["1+ 2+"], {"buffer": "8+"}, "1 2 | | "),
    "fill, only zero-variance groups": (["1- 2- 3-"], {"buffer": "7+ 8+"}, "1 r8 r7 | | 2 3"),
    "fill, a prompt that is in the batch": (["1- 2-"], {"buffer": "1+ 2+"}, "1 2 | | "),
    "fill after dynamic sampling": (["1- 2+", "3-"], {"most": 2, "sizes": [2, 1], "buffer": "8+"}, "2 r8 | | 1 3"),
    "share": (["1+ 2-"], {"reserved": 1, "buffer": "8+"}, "1 2 r8 | | "),
    "share keeps zero-variance groups": (["1- 2-"], {"reserved": 1, "buffer": "7+ 8+"}, "1 2 r8 | | "),
    "share, an empty buffer": (["1- 2+ 3-"], {"reserved": 1, "buffer": ""}, "1 2 3 | | "),
    "share, the buffer has no other prompt": (["1+", "2-"], {"reserved": 1, "buffer": "1+"}, "1 2 | | "),
    "references with a buffer": (["1- 2+"], {"references": "5+ 6-", "buffer": "8+"}, "2 r8 | f5 | f6 1"),
    "references without a buffer": (["1- 2+"], {"references": "5+ 6- 7+ 8+"}, "f5 f7 1 2 | | f6 f8"),
}
LETTERS = {"fresh": "", "leftover": "l", "replayed": "r", "reference": "f"}


def read(text: str) -> dict[int, list[float]]:
    """The rewards of each prompt."""
    return {int(word[:-1]): [float(word[-1] == "+"), 0.0, 0.0, 0.0] for word in text.split()}


def told(groups: Iterable[RolloutGroup]) -> str:
    return " ".join(f"{LETTERS[group.origin]}{group.prompt_id}" for group in groups)


@pytest.mark.parametrize("name", BY_HAND)
def test_small_batches_by_hand(name):
    texts, options, expected = BY_HAND[name]
    references, told_sizes = options.get("references", ""), iter(options.get("sizes", []))
    run = collector(
        selector=InTurn([p for text in texts for p in read(text)], read(references)),
        batch_groups=len(expected.split("|")[0].split()),
        # The sizes of dynamic sampling are tested below
        rounds=SimpleNamespace(most=options.get("most", 1), size=lambda missing, **kwargs: next(told_sizes, missing)),
        reserved=options.get("reserved", 0),
        buffer=ReplayBuffer(9) if "buffer" in options else None,
    )
    for batch, prompt in enumerate(read(options.get("buffer", ""))):
        run.buffer.add([visit(prompt, EFFECTIVE)], batch)
    run.leftover, run.batches = [visit(prompt, EFFECTIVE) for prompt in read(options.get("leftover", ""))], 3
    roll_out, sizes = rounds(read(" ".join([*texts, references]))), []
    batch = run.collect(lambda ids: (sizes.append(len(ids)), roll_out(ids))[1], 1)
    assert sizes[bool(references) :] == [len(text.split()) for text in texts]
    assert batch.rounds == len(texts)
    fates = [part.strip() for part in expected.split("|")]
    assert [told(batch.trained), told(batch.leftover), told(batch.dropped)] == fates


def test_a_group_of_the_batch_before_is_never_too_old():
    """However many optimizer steps a generation batch takes."""
    run = collector(buffer=ReplayBuffer(9, max_age=1), batch_groups=1, selector=InTurn([1, 2, 3]))
    batches = [run.collect(rounds(read("1+ 2- 3-")), step) for step in (0, 64, 128)]
    assert [told(batch.trained) for batch in batches[1:]] == ["r1", "3"]


REWARDS = {0: [0, 1, 1, 0], 1: [1, 1, 1, 1], 2: [0, 0.5, 1, 1], 3: [-3, 1, 1, 1], 4: [0, 2, 0, 0], 5: [1, 0, 0, 0]}


@pytest.mark.parametrize("most", [1, 4])
def test_rates_of_earlier_groups_follow_when_the_range_of_rewards_widens(most):
    """Those that the selector has observed, also in an earlier round of the same batch, and those in the buffer."""
    selector, buffer = InTurn(), ReplayBuffer(8)
    run = collector(6, selector=selector, buffer=buffer, rounds=Rounds(most))
    for step in range(3):
        run.collect(rounds(REWARDS), step)
    for groups in (selector.groups, buffer.groups):
        expected = [np.mean([(reward + 3) / 5 for reward in REWARDS[group.prompt_id]]) for group in groups]
        np.testing.assert_allclose(selector.context.success_rates(groups), expected, atol=1e-6)
    assert set(prompts(selector.groups)) == {0, 1, 2, 3, 4, 5}
    assert set(prompts(buffer.groups)) == {0, 2, 3, 4, 5}


@given(
    batch_groups=st.integers(1, 600),
    most=st.sampled_from([1, 3]),
    share=st.floats(0, 1),
    margin=st.floats(1, 3),
    multiple=st.sampled_from([1, 2, 3, 8]),
    data=st.data(),
)
def test_a_rounds_size_keeps_its_bounds(batch_groups, most, share, margin, multiple, data):
    batch_groups *= multiple  # a batch spreads evenly over processes
    missing = data.draw(st.integers(1, batch_groups))
    num_prompts = batch_groups + data.draw(st.integers(0, 3 * batch_groups))
    n = Rounds(most, margin).size(
        missing, batch_groups=batch_groups, zero_share=share, multiple=multiple, num_prompts=num_prompts
    )
    assert n % multiple == 0
    assert missing <= n <= num_prompts
    if most == 1:
        assert n < missing + multiple
    else:
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
    """ceil(margin * missing / (1 - share)) within [16 / 4, 1.5 * 16]; a single round has what is missing."""
    options = {"batch_groups": 16, "zero_share": share, "multiple": 1, "num_prompts": 1000}
    assert Rounds(2, margin).size(missing, **options) == expected
    assert Rounds(1, margin).size(missing, **options) == missing


def test_running_share_weighs_by_size_and_fades():
    share = ZeroVarianceShare(decay=0.5)
    assert share.value == 0.0
    share.observe([visit(0, HARD)] * 3 + [visit(0, EFFECTIVE)])
    assert share.value == 0.75
    share.observe([visit(0, EFFECTIVE)] * 2)
    assert share.value == pytest.approx(1.5 / 4)
    share.observe([])
    assert share.value == pytest.approx(1.5 / 4)
    share.observe([visit(0, EASY)])
    assert share.value == pytest.approx(1.375 / 2)


def test_with_everything_off_processes_may_share_a_group():
    """As TRL's dataloader splits it: one group of four completions, two of them on each process."""
    run = collector(0, selector=None, batch_groups=1, generates_apart=False, processes=Processes(1, 2))
    batch = run.collect(lambda ids: Round(np.array([[0.0], [1], [1], [0]]), np.ones(4), np.zeros(4)), 0)
    assert prompts(batch.trained) == [-1]
    assert batch.trained[0].success_rate == 0.5
