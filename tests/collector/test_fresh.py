"""An adaptive number of fresh groups: proposals alone, and whole generation batches by a collector."""

import copy
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.factories import generator
from trl_dataeff import DataEfficientGRPOConfig
from trl_dataeff.collector import make_collector
from trl_dataeff.collector.fresh import propose_for_target
from trl_dataeff.collector.state import collector_state, load_collector_state
from trl_dataeff.rollouts.capture import Round
from trl_dataeff.rollouts.distributed import Processes
from trl_dataeff.selection import Selector, make_selector
from trl_dataeff.selection.weights import log_chance_effective


def proposed(chances, stored=99, **options):
    """What is proposed of prompts 0, 1, 2, ... with these chances, and how many each proposal had."""
    sizes: list[int] = []

    def propose(n):
        sizes.append(n)
        return np.arange(sum(sizes) - n, sum(sizes))

    arguments = {"least": 1, "target": 2.0, "batch_groups": 12, "multiple": 1}
    available = (lambda ids: stored) if isinstance(stored, int) else (lambda ids: len(stored - set(ids.tolist())))
    return propose_for_target(propose, lambda ids: np.array(chances)[ids], available, **arguments | options), sizes


@pytest.mark.parametrize(
    ("chance", "options", "expected"),
    [
        (1.0, {}, 2),
        (0.5, {}, 4),
        (0.3, {}, 7),  # 2 / 0.3 = 6.7
        (0.1, {}, 12),  # 20: the batch is full
        (0.0, {}, 12),
        (0.5, {"least": 6}, 6),
        (0.5, {"multiple": 3}, 6),
        (0.5, {"target": 0.1}, 1),
        (0.5, {"stored": 5}, 7),  # 12 - 5
        (0.5, {"stored": 0}, 12),
        (0.1, {"target": 0.3}, 3),
    ],
)
def test_equal_chances_by_hand(chance, options, expected):
    proposal, sizes = proposed([chance] * 12, **options)
    assert proposal.ids.tolist() == list(range(expected))
    assert proposal.expected == pytest.approx(expected * chance)
    assert len(sizes) <= 2


@given(
    chances=st.lists(st.floats(0, 1), min_size=24, max_size=24),
    stored=st.sets(st.integers(0, 40)),
    least=st.integers(1, 12),
    target=st.floats(0.01, 12),
    multiple=st.sampled_from([1, 2, 3, 4]),
)
def test_the_target_is_reached_and_replay_can_fill_the_rest_unless_the_batch_is_full(
    chances, stored, least, target, multiple
):
    options = {"least": least, "target": target, "multiple": multiple, "stored": stored}
    proposal, sizes = proposed(chances, **options)
    n = len(proposal.ids)
    assert proposal.ids.tolist() == list(range(n))
    assert n == sum(sizes)
    assert n % multiple == 0
    assert least <= n <= 12
    assert proposal.expected == pytest.approx(sum(chances[:n]))
    if n < 12:
        assert sum(chances[:n]) >= target - 1e-9
        assert n + len(stored - set(range(n))) >= 12
    if len(sizes) > 1:  # no proposal without need
        before = n - sizes[-1]
        assert sum(chances[:before]) < target + 1e-9 or before + len(stored - set(range(before))) < 12


class Chances(Selector):
    """Proposes prompts in turn. Prompt i has an effective group with probability `chances[i]`, which it may know."""

    exact = True

    def __init__(self, chances, known=True):
        self.chances, self.known, self.next = chances, known, 0

    def propose(self, n, rng):
        ids = (self.next + np.arange(n)) % len(self.chances)
        self.next += n
        return ids

    def predict_effective(self, prompt_ids):
        return self.chances[prompt_ids] if self.known else super().predict_effective(prompt_ids)

    def state_dict(self):
        return {"next": np.array([self.next])}

    def load_state_dict(self, state):
        self.next = int(state["next"][0])


BATCH = 12


def simulated(chances, known=True, world_size=1, **fields):
    """A collector, and a function that gives its next generation batch."""
    options = {"fresh_groups": "adaptive", "effective_target": 0.25, "replay_max_age": None, **fields}
    config = DataEfficientGRPOConfig(
        "out", use_cpu=True, bf16=False, per_device_train_batch_size=BATCH * 4, num_generations=4,
        gradient_accumulation_steps=1, **options,
    )  # fmt: skip
    collector = make_collector(
        config, selector=Chances(chances, known), num_prompts=len(chances), reward_names=["r"],
        reward_weights=np.ones(1), refills=config.dynamic_sampling, replays=True, processes=Processes(),
    )  # fmt: skip

    def next_batch(step):
        def roll_out(ids, completions):
            rng = np.random.default_rng([step, int(ids[0])])
            rewards = np.zeros((len(ids), 4), np.float32)
            rewards[:, 0] = rng.random(len(ids)) < chances[ids]
            return Round(rewards.reshape(-1, 1), np.ones(4 * len(ids), np.int32), np.zeros(4 * len(ids), bool))

        return collector.collect(roll_out, step)

    return collector, next_batch


def spread(n=400, seed=0):
    return np.random.default_rng(seed).uniform(0.2, 0.9, n)


@pytest.mark.parametrize("known", [True, False])
def test_batches_are_full_and_have_as_many_effective_fresh_groups_as_asked_for(known):
    chances = spread()
    _, next_batch = simulated(chances, known)
    fresh, effective, expected = [], [], []
    for step in range(120):
        batch = next_batch(step)
        m = batch.metrics
        assert len(batch.trained) == BATCH == m["fresh_groups"] + m["replayed_groups"]
        assert m["fresh_groups"] == len(batch.generated)
        assert m["effective_groups"] == sum(g.effective for g in batch.trained)
        if known:
            assert m["effective_expected"] == pytest.approx(chances[[g.prompt_id for g in batch.generated]].sum())
        assert m["effective_expected"] >= 3 - 1e-9 or m["fresh_groups"] == BATCH
        fresh.append(len(batch.generated))
        effective.append(sum(g.effective for g in batch.generated))
        expected.append(m["effective_expected"])
    assert fresh[0] == BATCH
    assert set(fresh[3:]) >= {5, 6}
    assert max(fresh[10:]) < BATCH
    assert 3 <= np.mean(expected[3:]) < 3.7, "more than a group too many"
    assert np.mean(effective[3:]) == pytest.approx(np.mean(expected[3:]), abs=4 * math.sqrt(0.25 * 6 / 117))


@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize(
    "fields", [{}, {"fresh_groups": "fixed", "replay_fraction": 0.75}, {"dynamic_sampling": True}]
)
def test_no_group_is_replayed_more_often_than_allowed(most, fields):
    _, next_batch = simulated(spread(), replay_max_uses=most, **fields)
    uses: dict[int, int] = {}
    groups, effective, replayed = [], 0, 0
    for step in range(80):
        batch = next_batch(step)
        groups += batch.generated  # so that no id occurs twice
        assert len(batch.trained) == BATCH
        for group in batch.replayed:
            uses[id(group)] = uses.get(id(group), 0) + 1
            assert group.uses == uses[id(group)]
        replayed += len(batch.replayed)
        assert replayed <= most * effective, "uses per new effective group"
        effective += sum(group.effective for group in batch.generated)
    assert max(uses.values()) == most


@pytest.mark.parametrize(("most", "fresh"), [(1, BATCH / 1.55), (2, BATCH / 2.1), (None, 2.0)])
def test_a_low_limit_leaves_room_for_more_fresh_groups(most, fresh):
    """By hand: each fresh group gives 0.55 effective ones, each of which is used `most` times more. The target takes two."""
    _, next_batch = simulated(spread(), replay_max_uses=most, effective_target=1 / BATCH)
    assert np.mean([len(next_batch(step).generated) for step in range(60)][5:]) == pytest.approx(fresh, abs=0.6)


def test_with_dynamic_sampling_the_target_is_met_by_rounds():
    _, next_batch = simulated(spread(), dynamic_sampling=True, max_rollout_rounds=9, effective_target=0.4)
    batches = [next_batch(step) for step in range(30)]
    assert all(batch.metrics["fresh_groups"] == 5 for batch in batches[2:]), "of 12: 4.8"
    assert all(batch.padded == 0 for batch in batches[2:])
    assert not any("effective_expected" in batch.metrics for batch in batches)


@pytest.mark.parametrize("fields", [{}, {"dynamic_sampling": True}])
def test_what_follows_a_resume_is_identical(fields):
    """Through the collector's state: uses, the share of effective groups, and the order of the buffer."""
    fields = {"replay_max_uses": 2, "known": False, **fields}
    first, next_of_first = simulated(spread(), **fields)
    for step in range(7):
        next_of_first(step)
    for group in first.buffer.groups:
        group.rollouts = _ROLLOUTS
    state = copy.deepcopy(collector_state(first))
    second, next_of_second = simulated(spread(), **fields)
    load_collector_state(second, *state)
    assert any(group.uses for group in second.buffer.groups)
    for step in range(7, 20):
        a, b = next_of_first(step), next_of_second(step)
        assert [(g.prompt_id, g.origin, g.uses) for g in a.trained] == [
            (g.prompt_id, g.origin, g.uses) for g in b.trained
        ]
        assert a.metrics == b.metrics


class _Rollouts:
    """As little as can be packed."""

    prompt_tokens, completion_tokens = np.zeros(1, np.int32), [np.zeros(1, np.int32)] * 4
    completions, logged = ["x"] * 4, {}
    tool_masks = sampling_logps = behavior_logps = None


_ROLLOUTS = _Rollouts()


def test_without_predictions_of_its_own_a_selector_has_those_of_independent_completions():
    class Rates(Chances):
        def predict(self, prompt_ids):
            return np.array([0.0, 0.5, 1.0, np.nan], np.float32)[prompt_ids]

        def predict_effective(self, prompt_ids):
            return Selector.predict_effective(self, prompt_ids)

    selector = Rates(spread())
    selector.bind(type("Context", (), {"group_size": 4})())
    np.testing.assert_allclose(selector.predict_effective(np.arange(4)), [0, 1 - 2 / 16, 0, np.nan])
    assert not np.isnan(spread()).any()


@pytest.mark.parametrize("wrong", [np.array([0.5]), np.full(12, 1.5), np.full(12, -0.1)])
def test_wrong_probabilities_are_refused(wrong):
    collector, next_batch = simulated(spread())
    collector.selector.predict_effective = lambda ids: wrong
    with pytest.raises(ValueError, match=r"Chances.predict_effective\(\) of 12 prompts returned"):
        next_batch(0)


@pytest.mark.parametrize("objective", ["effective", "target"])
def test_dots_predicts_what_its_weights_are_made_of(objective):
    from trl_dataeff.selection.base import SelectorContext
    from trl_dataeff.testing.data import make_groups

    selector, rng = make_selector("dots", {"objective": objective, "sharpness": 2.0, "threshold": None}), generator()
    embeddings = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    selector.bind(SelectorContext(60, 12, 8, embed=lambda: embeddings))
    assert np.isnan(selector.predict_effective(np.arange(60))).all()
    for number in range(3):
        ids = selector.propose(12, rng)
        selector.observe(make_groups(ids, np.where(embeddings[ids, 0] > 0, 0.5, number % 2)))
    chances = selector.predict_effective(np.arange(60))
    assert ((chances > 0) & (chances <= 1)).all()
    if objective == "effective":
        np.testing.assert_allclose(2 * np.log(chances), selector.log_weights().numpy(), rtol=1e-12)
        np.testing.assert_allclose(selector.predict_effective(np.array([7, 3])), chances[[7, 3]], rtol=1e-6)
        assert chances[embeddings[:, 0] > 0.5].mean() > chances[embeddings[:, 0] < -0.5].mean() + 0.1
    else:
        import torch

        by_expert = log_chance_effective(torch.from_numpy(selector.success.estimates).double(), 8).exp().numpy()
        np.testing.assert_allclose(chances, selector.success.weights @ by_expert, rtol=1e-6)
