"""Sequential groups: the probabilities, the decisions, and what the collector makes of them."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_dataeff.collector.collector import RolloutCollector
from trl_dataeff.collector.sequential import SequentialGroups, probability_of_difference, share_that_differs
from trl_dataeff.rollouts.capture import Round
from trl_dataeff.rollouts.classification import GroupClassifier
from trl_dataeff.rollouts.group import EFFECTIVE, RolloutGroup, Rollouts
from trl_dataeff.selection.base import Selector


def beta_binomial_of_agreement(a: float, b: float, h: int, m: int) -> float:
    """After h failures under Beta(a, b), the probability that one of m more completions succeeds: of the posterior's mass."""
    log_beta = lambda x, y: math.lgamma(x) + math.lgamma(y) - math.lgamma(x + y)  # noqa: E731
    return 1 - math.exp(log_beta(a, b + h + m) - log_beta(a, b + h))


shares = st.floats(0.001, 0.999)


@given(q=shares, strength=st.floats(0.05, 60), h=st.integers(0, 16), m=st.integers(1, 16))
def test_probability_is_that_of_the_beta_binomial_distribution(q, strength, h, m):
    expected = beta_binomial_of_agreement(strength * q, strength * (1 - q), h, m)
    got = probability_of_difference(np.array([q]), np.array([strength]), np.array([h]), m)
    assert got[0] == pytest.approx(expected, abs=1e-9)


@given(q=shares, shown=st.sampled_from([0.0, 1.0]))
def test_of_binary_rewards_those_differ_that_are_expected_to(q, shown):
    assert share_that_differs(np.array([q]), np.array([shown]))[0] == pytest.approx(abs(q - shown))


@pytest.mark.parametrize(
    ("expected", "shown", "share"),
    [(0.6, 0.2, 0.5), (0.1, 0.2, 0.5), (0.2, 0.2, 0.0), (1.0, 0.2, 1.0), (0.0, 0.2, 1.0)],
)
def test_of_graded_rewards_the_fewest_that_explain_the_mean(expected, shown, share):
    """From 0.2 to a mean of 0.6, half of the completions have to be at 1; to 0.1, half at 0."""
    assert share_that_differs(np.array([expected]), np.array([shown]))[0] == pytest.approx(share)


def half(rewards, predicted=float("nan"), prompt_id=0) -> RolloutGroup:
    classifier = GroupClassifier(np.ones(1), reward_range=(0.0, 1.0))
    array, truncated = np.array(rewards, dtype=np.float32)[None, :, None], np.zeros((1, len(rewards)), bool)
    rates, kinds = classifier.classify(array, truncated)
    n = len(rewards)
    return RolloutGroup(
        prompt_id, 0, 0, array[0], float(rates[0]), int(kinds[0]), np.ones(n, np.int32), truncated[0], 0.0,
        predicted=predicted, spread=float(classifier.spreads(array)[0]),
    )  # fmt: skip


def at_threshold(group_size: int, threshold: float) -> SequentialGroups:
    sequential = SequentialGroups(group_size)
    sequential.gained = np.array([threshold * 1e6, 1e6])
    return sequential


def test_a_group_continues_iff_its_completions_gain_as_many_effective_groups_as_others():
    """Beta(0.6, 5.4) before; after 4 failures 1 - prod (9.4 + j) / (10 + j)."""
    p = 1 - np.prod([(9.4 + j) / (10 + j) for j in range(4)])
    for threshold, goes_on in ((p / 4 * 0.999, [0]), (p / 4 * 1.001, [])):
        sequential = at_threshold(8, threshold)
        assert sequential.continuing([half([0] * 4, 0.1)], np.array([6.0])).tolist() == goes_on
        assert at_threshold(8, threshold).continuing([half([1] * 4, 0.9)], np.array([6.0])).tolist() == goes_on


def test_mixed_groups_always_continue():
    groups = [half([0, 0, 0, 0], 0.01), half([0, 0, 0, 1], 0.01), half([1, 1, 1, 1], 0.99), half([1, 1, 0, 1], 0.99)]
    assert at_threshold(8, 10.0).continuing(groups, np.full(4, 100.0)).tolist() == [1, 3]


def test_every_group_continues_before_a_round_was_seen():
    assert SequentialGroups(8).continuing([half([0] * 4, 0.0)] * 3, np.full(3, 50.0)).tolist() == [0, 1, 2]


@given(st.lists(st.floats(0.01, 0.99), min_size=6, max_size=6), st.sampled_from([1, 2, 3, 6]), st.floats(0.0, 0.2))
def test_the_number_is_rounded_up_by_the_groups_that_are_worth_most(predicted, multiple, threshold):
    groups = [half([0] * 4, p, i) for i, p in enumerate(predicted)]
    strengths = np.full(6, 4.0)
    alone = at_threshold(8, threshold).continuing(groups, strengths)
    chosen = at_threshold(8, threshold).continuing(groups, strengths, multiple)
    assert len(chosen) == math.ceil(len(alone) / multiple) * multiple
    assert set(alone) <= set(chosen)
    assert sorted(set(chosen)) == chosen.tolist()
    left = [p for i, p in enumerate(predicted) if i not in chosen]
    assert max(left, default=0) <= min([predicted[i] for i in chosen], default=1)


@pytest.mark.parametrize(("a", "b"), [(0.15, 0.85), (1.0, 1.0), (2.0, 6.0), (0.3, 0.1)])
def test_without_predictions_the_belief_is_the_population_of_first_halves(a, b):
    rng = np.random.default_rng(0)
    sequential = SequentialGroups(8, decay=1.0)
    for p in rng.beta(a, b, size=(40, 100)):
        rewards = rng.random((100, 4)) < p[:, None]
        sequential._observe_first([half(row.astype(float)) for row in rewards])
    mean, strength = sequential.population()
    assert mean == pytest.approx(a / (a + b), abs=0.02)
    assert strength == pytest.approx(a + b, rel=0.12)


def test_sums_fade_and_are_restored():
    sequential = SequentialGroups(4)
    whole = half([0, 1, 0, 1])
    sequential.observe([whole, half([0, 0])])
    assert sequential.threshold == pytest.approx(1 / 6)
    sequential.observe([half([0, 0])])
    assert sequential.threshold == pytest.approx(0.8 / (0.8 * 6 + 2))
    sequential.continuing([half([0, 1])], np.ones(1))
    other = SequentialGroups(4)
    other.load_state_dict(sequential.state_dict())
    assert other.state_dict() == sequential.state_dict()
    assert other.population() == sequential.population() != (0.5, 2.0)


# The collector


class InTurn(Selector):
    """Proposes prompts in turn; expects each to succeed as often as it does. Keeps what it observes."""

    def __init__(self, rates):
        self.rates, self.next, self.groups = np.array(rates, dtype=np.float32), 0, []

    def propose(self, n, rng):
        self.next += n
        return np.arange(self.next - n, self.next) % len(self.rates)

    def predict(self, prompt_ids):
        return self.rates[prompt_ids]

    def strength(self, prompt_ids):
        return np.full(len(prompt_ids), 20.0)

    def observe(self, groups):
        self.groups += groups


RATES = [0.0, 0.5, 1.0, 0.0, 0.6, 0.0, 0.4, 1.0]


class Script:
    """Rolls out prompts whose completions succeed as often as `rates` says; notes the calls."""

    def __init__(self, rates=RATES):
        self.rates = np.array(rates)
        self.rng, self.calls, self.rewards = np.random.default_rng(0), [], {}

    def __call__(self, ids, completions):
        self.calls.append((ids.tolist(), completions))
        rewards = (self.rng.random((len(ids), completions)) < self.rates[ids][:, None]).astype(np.float32)
        for i, row in zip(ids.tolist(), rewards):
            self.rewards.setdefault((len(self.calls), i), row)
        rollouts = [
            Rollouts(
                np.array([i]), [np.array([100 * i + j]) for j in range(completions)], [f"{i}"] * completions,
                logged={"reward": row.tolist()},
            )
            for i, row in zip(ids.tolist(), rewards)
        ]  # fmt: skip
        return Round(rewards.reshape(-1, 1), np.full(rewards.size, 3), np.zeros(rewards.size, bool), rollouts=rollouts)


def collector(group_size: int = 8, **options) -> RolloutCollector:
    arguments = {
        "batch_groups": 8,
        "reward_names": ["reward"],
        "num_prompts": 8,
        "selector": InTurn(RATES),
        "sequential": SequentialGroups(group_size),
    }
    classifier = GroupClassifier(np.ones(1), reward_range=(0.0, 1.0))
    return RolloutCollector(classifier=classifier, group_size=group_size, **arguments | options)


@pytest.mark.parametrize("group_size", [2, 3, 8])
def test_completions_are_generated_in_two_calls_and_joined(group_size):
    run, script = collector(group_size=group_size), Script()
    for step in range(4):
        run.collect(script, step)
    first, rest = group_size // 2, group_size - group_size // 2
    assert [n for _, n in script.calls] == [first, rest] * 4
    assert all(len(ids) == 8 for ids, _ in script.calls[::2])
    assert script.calls[1][0] == list(range(8)), "every group continues in the first round"
    assert all(group.size in (first, group_size) for group in run.selector.groups)
    sizes = {group.prompt_id: group.size for group in run.selector.groups[-8:]}
    assert all(sizes[i] == first for i, rate in enumerate(RATES) if rate in (0, 1))
    for step in range(4):
        for group in run.selector.groups[8 * step : 8 * step + 8]:
            parts = [script.rewards.get((2 * step + part, group.prompt_id), np.zeros(0)) for part in (1, 2)]
            assert group.rewards[:, 0].tolist() == np.concatenate(parts).tolist()
            assert group.success_rate == pytest.approx(group.rewards.mean())
            assert group.effective == (0 < group.rewards.mean() < 1)
            assert group.tokens == 3 * group.size
            assert group.rollouts.logged["reward"] == group.rewards[:, 0].tolist()


def test_what_is_trained_on_always_has_whole_groups():
    run, script = collector(), Script()
    for step in range(4):
        batch = run.collect(script, step)
        assert len(batch.trained) == 8
        for group, generated in zip(batch.trained, batch.generated, strict=True):
            assert group.size == len(group.rollouts) == 8
            assert group.prompt_id == generated.prompt_id
            assert group.rewards.tolist() == np.resize(generated.rewards, (8, 1)).tolist()
            assert len(group.rollouts.logged["reward"]) == len(group.lengths) == len(group.truncated) == 8
            assert generated.disposition == "trained"
            if generated.size < 8:
                assert group.kind == generated.kind != EFFECTIVE
    assert any(group.size == 4 for group in run.selector.groups)


def test_a_widening_range_reaches_halves_and_whole_groups_once():
    """The reward of -1 occurs in a second half: rates of groups that were stopped before it are mapped, too."""
    halves = iter([[[0, 0, 0, 0], [1, 1, 0, 1]], [[1, -1, 1, 1]]])

    def roll_out(ids, completions):
        rewards = np.array(next(halves), dtype=np.float32).reshape(-1, 1)
        return Round(rewards, np.ones(len(rewards), np.int32), np.zeros(len(rewards), bool))

    run = collector(batch_groups=2, selector=InTurn([0.0, 0.5]), num_prompts=2)
    run.classifier = GroupClassifier(np.ones(1))
    run.sequential.gained = np.array([100.0, 100.0])
    run.collect(roll_out, 0)
    rates = {group.prompt_id: group.success_rate for group in run.selector.groups}
    assert rates == pytest.approx({0: 0.5, 1: (6 * 1 + 0.5 + 0) / 8})
    np.testing.assert_allclose(run.sequential.rates, [0.5 + 0.875, 2])  # of first halves, in the new range


def test_what_only_one_half_has_is_unknown_in_the_other():
    tokens = [np.array([1, 2]), np.array([3])]
    first = Rollouts(np.array([7]), tokens, ["a", "b"], sampling_logps=[np.array([-1.0, -2.0]), np.array([-3.0])])
    rest = Rollouts(
        np.array([7]), tokens, ["c", "d"], tool_masks=[np.array([1, 0]), np.array([1])], logged={"x": [1, 2]}
    )
    first.extend(rest)
    assert len(first) == len(first.completions) == 4
    assert [mask.tolist() for mask in first.tool_masks] == [[1, 1], [1], [1, 0], [1]]
    assert [np.isnan(logps).all() for logps in first.sampling_logps] == [False, False, True, True]
    assert first.logged == {"x": [None, None, 1, 2]}
    assert first.behavior_logps is None
