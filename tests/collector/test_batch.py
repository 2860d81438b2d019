"""One generation batch, from hand-made rounds of rollouts to what is trained on."""

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.factories.groups import make_group, visit
from trl_dataeff.collector.batch import GenerationBatch, fill_batch, groups_missing
from trl_dataeff.collector.collector import RolloutCollector
from trl_dataeff.collector.rounds import RoundSizes, ZeroVarianceShare
from trl_dataeff.generation.recorder import GeneratedRound
from trl_dataeff.replay.buffer import ReplayBuffer
from trl_dataeff.rollouts.classification import GroupClassifier
from trl_dataeff.rollouts.distributed import Processes
from trl_dataeff.rollouts.group import EASY, EFFECTIVE, HARD, RolloutGroup
from trl_dataeff.selection import Selector
from trl_dataeff.selection.base import CheckedSelector


class InTurn(Selector):
    """Proposes prompts in turn; keeps what it has observed."""

    def __init__(self):
        self.next, self.groups = 0, []

    def propose(self, n, rng):
        self.next += n
        return np.arange(self.next - n, self.next) % self.context.num_prompts

    def observe(self, groups):
        self.groups += groups


class AtRandom(Selector):
    """Proposes prompts and so many references at random, the same on every process."""

    exact = True

    def __init__(self, references: int = 0):
        self.count = references

    def propose(self, n, rng):
        return torch.randperm(self.context.num_prompts, generator=rng)[:n].numpy()

    def references(self, rng):
        return self.propose(self.count, rng)


def collector(num_prompts: int = 40, **options) -> RolloutCollector:
    arguments = {"group_size": 4, "batch_groups": 2, "reward_names": ["reward"], "selector": InTurn()}
    arguments |= options
    if arguments["selector"] is not None:
        arguments["selector"] = CheckedSelector(arguments["selector"], options.get("processes", Processes()))
    run = RolloutCollector(classifier=GroupClassifier(np.array([1.0])), **arguments)
    run.bind(num_prompts)
    return run


def rounds(rewards: dict[int, list[float]]):
    def generate_groups(ids: np.ndarray) -> GeneratedRound:
        values = np.array([rewards[int(i)] for i in ids], dtype=np.float32).reshape(-1, 1)
        return GeneratedRound(values, np.ones(len(values), np.int32), np.zeros(len(values), bool))

    return generate_groups


def rounds_at_random(seed: int, effective: float, processes: Processes = Processes()):  # noqa: B008 (immutable)
    """Rollouts of groups that are effective with this probability; the prompt's tokens tell which group it is."""
    rng, calls = np.random.default_rng(seed), iter(range(10**6))

    def generate_groups(ids: np.ndarray) -> GeneratedRound:
        rewards = np.zeros((len(ids), 4), np.float32)
        rewards[rng.random(len(ids)) < effective, 0] = 1
        call = next(calls)
        own = [make_group(g=4, prompt_tokens=np.array([i, call])).rollouts for i in processes.share(ids)]
        return GeneratedRound(
            rewards.reshape(-1, 1), np.ones(rewards.size, np.int32), np.zeros(rewards.size, bool), rollouts=own
        )

    return generate_groups


def on_processes(world_size: int, work: Callable[[Processes], Any]) -> list[Any]:
    """What `work` returns on each of `world_size` threads that stand for processes."""
    barrier, values, local = threading.Barrier(world_size, timeout=20), [None] * world_size, threading.local()

    def all_gather(value):
        values[local.rank] = value
        barrier.wait()
        gathered = list(values)
        barrier.wait()
        return gathered

    def start(rank):
        local.rank = rank
        try:
            return work(Processes(rank, world_size))
        except BaseException:
            barrier.abort()
            raise

    target = "trl_dataeff.rollouts.distributed.all_gather"
    with mock.patch(target, all_gather), ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(start, range(world_size)))


N, BATCHES = 30, 6  # prompts, and generation batches


def prompts(groups: Iterable[RolloutGroup]) -> list[int]:
    return [group.prompt_id for group in groups]


class Collected(NamedTuple):
    """A generation batch on a process: leftover groups before it, the groups that the process trains on, and the
    prompts of their rollouts, which another process may have later.
    """

    batch: GenerationBatch
    before: list[RolloutGroup]
    own: list[RolloutGroup]
    held: list[int]


def collected(world_size: int, *, seed, effective, references, replays, max_age, per_step, **options) -> list[list]:
    """By process, its generation batches."""

    def work(processes):
        buffer = ReplayBuffer(99, max_age, rank=processes.rank, world_size=world_size) if replays else None
        run = collector(N, selector=AtRandom(references), buffer=buffer, processes=processes, seed=seed, **options)
        generate_groups = rounds_at_random(seed, effective, processes)
        batches = []
        for number in range(BATCHES):
            before = list(run.leftover)
            batch = run.collect(generate_groups, 64 * (number // per_step))  # ages are in generation batches
            own = run.own(batch.trained)
            held = [int(group.rollouts.prompt_tokens[0]) for group in own]
            batches.append(Collected(batch, before, own, held))
        return batches

    return on_processes(world_size, work)


def identity(group: RolloutGroup) -> int:
    """Which group it is, on whatever process: one that moves keeps its rewards."""
    return id(group.rewards)


def same(a: RolloutGroup, b: RolloutGroup) -> bool:
    return a.rewards is b.rewards


class ByTheRule:
    """What is stored, and what a batch has to be made of, once it is known what was generated for it."""

    def __init__(self, places: int, reserved: int, replays: bool, max_age: int | None, per_step: int):
        self.places, self.reserved, self.replays, self.max_age = places, reserved, replays, max_age
        self.stored: dict[int, list] = {}  # prompt -> group, batch, uses
        self.per_step, self.in_step = per_step, set[int]()

    def check(self, number: int, batch: GenerationBatch, before: list[RolloutGroup]) -> None:
        stored = {p: s for p, s in self.stored.items() if self.max_age is None or number - s[1] <= self.max_age}
        self.in_step = self.in_step if number % self.per_step else set()
        present = self.in_step | set(prompts([*before, *batch.generated]))
        candidates = sorted((s for p, s in stored.items() if p not in present), key=lambda s: (s[2], -s[1]))
        references = [g for g in batch.generated if batch.origins[g] == "reference" and g.effective]
        fresh = [g for g in batch.generated if batch.origins[g] == "fresh"]
        # A prompt with a leftover group has no second place while others are free
        references = [g for g in references if g.prompt_id not in prompts(before)]
        effective = [*before, *([] if self.replays else references[: self.places // 2])]
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
        assert all(same(stored[g.prompt_id][0], g) and g.prompt_id not in present for g in batch.replayed)
        assert sorted(map(identity, batch.trained)) == sorted(map(identity, [*taken, *batch.replayed]))
        assert len(batch.trained) == len(set(batch.trained)) == self.places

        self.in_step |= set(prompts([*batch.generated, *batch.trained]))
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
    rounds=st.sampled_from([RoundSizes(), RoundSizes(), RoundSizes(2), RoundSizes(4, margin=2.0)]),
    replays=st.booleans(),
    reserved=st.integers(0, 3),
    max_age=st.sampled_from([None, 1, 2, 3]),
    per_step=st.sampled_from([1, 1, 3]),
    references=st.sampled_from([0, 0, 6]),
    effective=st.sampled_from([0, 0.2, 0.5, 1]),
    seed=st.integers(0, 10**6),
)
def test_every_batch_is_made_by_the_rule(places, world_size, reserved, replays, rounds, **options):
    """
    Whatever comes together: no group is lost, each has one origin and one disposition, and the order is that of
    generation.
    """
    places, reserved = places * world_size, min(reserved, places - 1) * world_size if replays else 0
    own = {"batch_groups": places, "round_sizes": rounds, "reserved": reserved, "replays": replays}
    by_rank = collected(world_size, **own, **options)
    rule = ByTheRule(places, reserved, replays, options["max_age"], options["per_step"])
    for number, (batch, before, *_) in enumerate(by_rank[0]):
        rule.check(number, batch, before)
        everything = [*batch.trained, *batch.leftover, *batch.dropped]
        known = [*before, *batch.generated, *batch.replayed]
        assert sorted(map(identity, everything)) == sorted(map(identity, known))
        for disposition in ("trained", "leftover", "dropped"):
            assert {batch.dispositions[g] for g in getattr(batch, disposition)} <= {disposition}
        assert all(g.effective for g in batch.leftover)
        if rounds.most == 1 and not reserved and (replays or not options["references"]):
            assert sum(batch.origins[g] == "fresh" for g in batch.generated) == places
        order = {identity(g): i for i, g in enumerate([*before, *batch.generated])}
        places_in_order = [order.get(identity(g), 99) for g in batch.trained]
        assert world_size > 1 or places_in_order == sorted(places_in_order), "what is replayed comes last"
    for of_processes in zip(*by_rank, strict=True):  # one batch, as each process knows it
        batches = [each.batch for each in of_processes]
        assert len({(*prompts(batch.trained), -1, *prompts(batch.generated)) for batch in batches}) == 1
        counts = [sum(g.effective for g in each.own) for each in of_processes]
        assert max(counts) - min(counts) <= 1
        for each in of_processes:
            assert len(each.own) == places // world_size
            assert each.held == prompts(each.own)


def by_hand(groups: Sequence[RolloutGroup], leftover: int, num_stored: int, places: int, reserved: int) -> tuple:
    """
    Which of `groups`, of which so many are leftover ones, are trained on and which are beyond the places, and how many
    stored ones are replayed. Place by place: who may take it, in the order of their rights.
    """
    effective = [i for i, group in enumerate(groups) if group.effective]
    zero_variance = [i for i, group in enumerate(groups) if not group.effective]
    kept_for_stored = min(reserved, num_stored)
    trained: list[int] = []
    replayed = 0
    for place in range(places):
        is_kept = places - place <= kept_for_stored - replayed
        if effective and not is_kept:
            trained.append(effective.pop(0))
        elif reserved and zero_variance and not is_kept:
            trained.append(zero_variance.pop(0))
        elif replayed < num_stored:
            replayed += 1
        elif zero_variance:
            trained.append(zero_variance.pop(0))
    return sorted(trained), effective, replayed


def test_the_places_of_a_batch_by_enumeration():
    """Every combination of up to two leftover and three fresh groups, two stored ones, and three places."""
    counted = 0
    for leftover, places in itertools.product(range(3), range(1, 4)):
        for num_fresh, num_stored, reserved in itertools.product(range(4), range(3), range(places)):
            for kinds in itertools.product([EFFECTIVE, HARD], repeat=num_fresh):
                groups = [visit(i, kind) for i, kind in enumerate([*[EFFECTIVE] * leftover, *kinds])]
                before = groups[:leftover]
                fresh = groups[leftover:]
                found = fill_batch(before, fresh, num_stored, places=places, reserved=reserved)
                trained, overflow, replayed = by_hand(groups, leftover, num_stored, places, reserved)
                assert [groups.index(group) for group in found.trained] == trained
                assert [groups.index(group) for group in found.overflow] == overflow
                assert found.num_replayed == replayed
                counted += 1
    assert counted == 810


@pytest.mark.parametrize(
    ("leftover", "fresh", "num_stored", "reserved", "rounds", "max_rounds", "expected"),
    [
        (0, "", 0, 0, 0, 1, 4),
        (1, "", 3, 0, 0, 1, 3),  # stored groups do not replace what is generated,
        (1, "", 3, 2, 0, 1, 1),  # but where places are reserved
        (4, "", 0, 0, 0, 1, 0),
        (0, "ezzz", 0, 0, 1, 1, 0),  # a single round keeps zero-variance groups,
        (0, "ezzz", 0, 0, 1, 2, 3),  # several replace them,
        (0, "ezzzee", 0, 0, 2, 2, 0),  # until the last one
        (0, "ez", 1, 0, 1, 1, 2),  # a round was too small, as in a dataset with few prompts
        (0, "ez", 2, 0, 1, 1, 0),
    ],
)
def test_groups_that_a_round_has_to_give_by_hand(leftover, fresh, num_stored, reserved, rounds, max_rounds, expected):
    """Of four places; `e` is an effective group, `z` a zero-variance one."""
    groups = [visit(i, EFFECTIVE if kind == "e" else HARD) for i, kind in enumerate(fresh)]
    before = [visit(90 + i, EFFECTIVE) for i in range(leftover)]
    options = {"places": 4, "reserved": reserved, "rounds": rounds, "max_rounds": max_rounds}
    assert groups_missing(before, groups, num_stored, **options) == expected


def test_without_replay_a_single_round_leaves_nothing_over_that_another_loss_could_not_correct():
    options = {"seed": 0, "effective": 1, "references": 6, "replays": False, "max_age": None, "per_step": 1}
    assert not any(each.batch.leftover for own in collected(3, batch_groups=3, **options) for each in own)


def test_a_round_is_sized_by_the_places_that_are_missing():
    asked = []
    sizes = SimpleNamespace(most=3, size=lambda missing, **kwargs: asked.append(missing) or missing)
    run = collector(batch_groups=4, round_sizes=sizes)
    run.collect(rounds({i: [i % 2, 0, 0, 0] for i in range(9)}), 0)  # every second group is effective
    assert asked == [4, 2, 1]


REWARDS = {0: [0, 1, 1, 0], 1: [1, 1, 1, 1], 2: [0, 0.5, 1, 1], 3: [-3, 1, 1, 1], 4: [0, 2, 0, 0], 5: [1, 0, 0, 0]}


@pytest.mark.parametrize("most", [1, 4])
def test_rates_of_earlier_groups_follow_when_the_range_of_rewards_widens(most):
    """Those that the selector has observed, also in an earlier round of the same batch, and those in the buffer."""
    selector, buffer = InTurn(), ReplayBuffer(8)
    run = collector(6, selector=selector, buffer=buffer, round_sizes=RoundSizes(most))
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
    world_size=st.sampled_from([1, 2, 3, 8]),
    data=st.data(),
)
def test_a_rounds_size_keeps_its_bounds(batch_groups, most, share, margin, world_size, data):
    batch_groups *= world_size  # a batch spreads evenly over processes
    missing = data.draw(st.integers(1, batch_groups))
    num_prompts = batch_groups + data.draw(st.integers(0, 3 * batch_groups))
    n = RoundSizes(most, margin).size(
        missing, batch_groups=batch_groups, zero_share=share, world_size=world_size, num_prompts=num_prompts
    )
    assert n % world_size == 0
    assert missing <= n <= num_prompts
    if most == 1:
        assert n < missing + world_size
    else:
        assert n >= min(batch_groups / 4, num_prompts // world_size * world_size)
        assert n < 1.5 * batch_groups + world_size


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
    options = {"batch_groups": 16, "zero_share": share, "world_size": 1, "num_prompts": 1000}
    assert RoundSizes(2, margin).size(missing, **options) == expected
    assert RoundSizes(1, margin).size(missing, **options) == missing


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


class TheSame(Selector):
    """Proposes the first prompts, over and over."""

    exact = True

    def propose(self, n, rng):
        return np.arange(n)


@pytest.mark.parametrize(
    ("num_prompts", "taken", "others"),
    [(9, {0, 1}, {2, 3, 4, 5, 6, 7, 8}), (6, {0, 2}, {1, 3, 4, 5}), (5, {1, 2, 4}, {0, 3}), (4, {0, 1, 2, 3}, set())],
)
def test_a_prompt_of_the_batch_is_proposed_again_only_if_no_other_is_free(num_prompts, taken, others):
    run = collector(num_prompts, selector=TheSame())
    proposed = run.selector.propose(4, run.rng, taken)
    assert len(set(proposed.tolist())) == 4
    free_proposed = others.intersection(proposed.tolist())
    assert len(free_proposed) == min(4, len(others))


def test_a_leftover_group_and_a_fresh_one_have_different_prompts():
    """Three of four groups are effective in the first batch of two, and one is left over."""
    run = collector(selector=TheSame(), round_sizes=RoundSizes(most=2, margin=2.0))
    one = [1.0, 0.0, 0.0, 0.0]
    first = run.collect(rounds(dict.fromkeys(range(40), one)), 0)
    leftover = prompts(first.leftover)
    assert leftover
    second = run.collect(rounds(dict.fromkeys(range(40), one)), 1)
    assert not {*leftover}.intersection(prompts(second.generated))
    assert len({*prompts(second.trained)}) == 2
