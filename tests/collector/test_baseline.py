"""The tracked baseline in the collector: predictions before the rollout, admission to replay, ranges and state."""

from collections import deque

import numpy as np
import pytest
import torch

from tests.factories.collecting import Rates, collector, rounds
from trl_dataeff.collector.baseline import TrackedBaseline
from trl_dataeff.collector.state import collector_state, load_collector_state
from trl_dataeff.replay.buffer import ReplayBuffer
from trl_dataeff.rollouts.classification import GroupClassifier
from trl_dataeff.selection.base import Selector, SelectorContext
from trl_dataeff.selection.level import level_estimator


class Predicts(Rates):
    """Predicts one rate for every prompt, and says what that is worth."""

    def __init__(self, rate, strength=np.nan):
        super().__init__()
        self.rate, self.worth = rate, strength

    def predict(self, prompt_ids):
        return np.full(len(prompt_ids), self.rate, dtype=np.float32)

    def strength(self, prompt_ids):
        return np.full(len(prompt_ids), self.worth, dtype=np.float32)


def baseline(scale="none", prior=4.0, **options) -> TrackedBaseline:
    return TrackedBaseline(scale, prior=prior, **options)


def tracker(selector: Selector):
    context = SelectorContext(40, 2, 4)
    selector.context = context
    return level_estimator(context, 4.0)


def enter(run, rewards, ids, step=0):
    return run.enter(np.array(ids), rounds(rewards)(np.array(ids)), step)


def by_hand(rewards, p, s):
    return [r - (s * p + sum(rewards) - r) / (s + len(rewards) - 1) for r in rewards]


def test_predictions_are_on_the_scale_of_the_reward():
    """A success rate of 0.25 is a reward of 0 in the range from -1 to 3."""
    classifier = GroupClassifier(np.array([1.0]), reward_range=(-1, 3))
    run = collector(selector=Predicts(0.25, strength=2.0), baseline=baseline())
    run.classifier = classifier
    batch = enter(run, {0: [3, -1, -1, 3], 1: [-1, -1, -1, -1]}, [0, 1])
    expected = [by_hand([3, -1, -1, 3], 0.0, 2), by_hand([-1] * 4, 0.0, 2)]
    np.testing.assert_allclose(batch.advantages, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("says", "fixed", "s"), [(np.nan, None, 4.0), (7.0, None, 7.0), (7.0, 1.5, 1.5), (7.0, 0.0, 0.0)]
)
def test_the_strength_is_the_selectors_unless_it_is_set(says, fixed, s):
    run = collector(selector=Predicts(0.5, says), baseline=baseline(strength=fixed))
    run.classifier = GroupClassifier(np.array([1.0]), reward_range=(0, 1))
    batch = enter(run, {0: [1, 0, 0, 0], 1: [1, 1, 1, 1]}, [0, 1])
    np.testing.assert_allclose(batch.advantages, [by_hand([1, 0, 0, 0], 0.5, s), by_hand([1] * 4, 0.5, s)], rtol=1e-6)
    assert batch.metrics["baseline/strength"] == s


@pytest.mark.parametrize("worth", [-1.0, np.inf])
def test_a_strength_that_is_none_is_refused(worth):
    run = collector(selector=Predicts(0.5, worth), baseline=baseline())
    with pytest.raises(ValueError, match=rf"Predicts\.strength\(\) returned {worth}.*at least 0"):
        enter(run, {0: [1, 0, 0, 0], 1: [1, 1, 1, 1]}, [0, 1])


def test_several_functions_count_with_their_weights():
    run = collector(selector=Predicts(0.5, 4.0), baseline=baseline(), reward_names=["a", "b"])
    run.classifier = GroupClassifier(np.array([2.0, 0.5]), reward_range=(0, 2.5))
    ids, rewards = np.array([0, 1]), np.zeros((8, 2), dtype=np.float32)
    rewards[:, 0], rewards[:, 1] = [1, 0, 0, 0, 0, 0, 0, 0], [1, 1, 0, np.nan, 0, 0, 0, 0]
    generated = rounds({0: [0] * 4, 1: [0] * 4})(ids)
    generated.rewards = rewards
    batch = run.enter(ids, generated, 0)
    np.testing.assert_allclose(batch.advantages[0], by_hand([2.5, 0.5, 0, 0], 1.25, 4), rtol=1e-6)


def test_before_the_first_score_and_without_a_selector_it_is_leave_one_out():
    for options in ({"selector": None}, {"selector": Predicts(np.nan)}):
        run = collector(baseline=baseline(), **options)
        batch = run.enter(np.array([0, 1]), rounds({0: [1, 0, 0, 0], 1: [1] * 4})(np.array([0, 1])), 0)
        np.testing.assert_allclose(batch.advantages, [[1, -1 / 3, -1 / 3, -1 / 3], [0] * 4], atol=1e-7)
    run = collector(selector=Predicts(0.5, 4.0), baseline=baseline())
    batch = run.enter(np.array([0, 1]), rounds({0: [np.nan] * 4, 1: [np.nan] * 4})(np.array([0, 1])), 0)
    assert (batch.advantages == 0).all()


@pytest.mark.parametrize("scale", ["group", "none"])
def test_replay_takes_what_was_not_predicted(scale):
    """Prompts that were predicted at 0.6: all of their completions fail, or one, or all succeed."""
    run = collector(selector=Predicts(0.6, 4.0), baseline=baseline(scale), buffer=ReplayBuffer(8), batch_groups=3)
    run.classifier = GroupClassifier(np.array([1.0]), reward_range=(0, 1))
    rewards = {0: [0, 0, 0, 0], 1: [1, 1, 1, 0], 2: [1, 1, 1, 1]}
    enter(run, rewards, [0, 1, 2])
    assert [group.prompt_id for group in run.buffer.groups] == [0, 1]  # 2: as was predicted, more or less
    assert run.zero_share.value == pytest.approx(1 / 3)
    surprises = {i: by_hand(own, 0.6, 4) for i, own in rewards.items()}
    b = (4 * 0.6 + 0) / 7
    expected = abs(surprises[0][0]) / (np.sqrt(max(b * (1 - b), 1 / 4)) + 1e-4)
    assert run.buffer.groups[0].surprise == pytest.approx(expected)
    run.selector.rate = 0.02
    enter(run, {0: [0] * 4, 5: [0] * 4, 6: [1, 0, 0, 0]}, [0, 5, 6], step=1)
    assert [group.prompt_id for group in run.buffer.groups] == [1, 6]


def test_truncated_completions_do_not_admit_a_group_if_they_are_masked():
    surprises = []
    for masked in (False, True):
        run = collector(selector=Predicts(0.9, 9.0), baseline=baseline(masks_truncated=masked))
        run.classifier = GroupClassifier(np.array([1.0]), reward_range=(0, 1), masks_truncated=masked)
        generated = rounds({0: [0] * 4, 1: [0] * 4})(np.array([0, 1]))
        generated.truncated = np.array([True] * 4 + [False] * 4)
        surprises.append([group.surprise for group in run.enter(np.array([0, 1]), generated, 0).generated])
    assert surprises[0][0] == surprises[0][1] == surprises[1][1] > 0.5
    assert surprises[1][0] == 0


def test_what_was_predicted_of_stored_groups_follows_when_the_range_widens():
    """In units of the reward it stays the same, so that a replayed group keeps its advantages."""
    run = collector(selector=Predicts(0.5, 4.0), baseline=baseline(), buffer=ReplayBuffer(8))
    first = enter(run, {0: [0, 1, 0, 0], 1: [1, 1, 1, 0]}, [0, 1])
    before = first.advantages.copy()
    enter(run, {2: [-3, 1, 0, 0], 3: [5, 1, 1, 0]}, [2, 3], step=1)
    assert [group.predicted for group in run.buffer.groups[:2]] == pytest.approx([3.5 / 8] * 2)
    np.testing.assert_allclose(run.baseline.advantages(first.trained, run.classifier), before, rtol=1e-6)


def test_graded_rewards_are_scaled_by_the_variance_that_groups_have():
    """Rewards that differ by 0.1 in a range of 10: advantages are of the order of 1, not of 0.01."""
    rng = np.random.default_rng(0)
    run = collector(selector=Predicts(0.5, 4.0), baseline=baseline("group"))
    run.classifier = GroupClassifier(np.array([1.0]), reward_range=(0, 10))
    for step in range(30):
        values = 5 + 0.1 * rng.choice([-1.0, 0.0, 1.0], size=(2, 4))
        batch = enter(run, {0: values[0].tolist(), 1: values[1].tolist()}, [0, 1], step)
    assert 0.2 < np.abs(batch.advantages).mean() < 2
    assert baseline()._variance.tolist() == [0, 0]
    binary = collector(selector=Predicts(0.5, 4.0), baseline=baseline("group"))
    enter(binary, {0: [1, 0, 0, 1], 1: [1, 1, 1, 0]}, [0, 1])
    assert binary.baseline._variance[0] == pytest.approx(binary.baseline._variance[1])


def test_a_selector_without_predictions_gets_those_of_the_prompts_own_rewards():
    selector = Rates()
    run = collector(selector=selector, baseline=baseline(tracker=tracker(selector)))
    first = enter(run, {0: [1, 1, 1, 1], 1: [0, 0, 0, 0]}, [0, 1])
    assert np.isnan([group.predicted for group in first.generated]).all()
    for step in range(1, 6):
        enter(run, {0: [1, 1, 1, 1], 1: [0, 0, 0, 0]}, [0, 1], step)
    rates, strengths = run.baseline.predict(selector, np.array([0, 1, 2]))
    assert rates[0] > 0.85
    assert rates[1] < 0.15
    assert 0.3 < rates[2] < 0.7
    assert strengths[0] > strengths[2] > 0
    later = enter(run, {0: [1, 1, 1, 1], 2: [0, 0, 0, 0]}, [0, 2], 6)
    assert np.abs(later.advantages[0]).max() < 0.1 < np.abs(later.advantages[1]).min()


@pytest.mark.parametrize("tracks", [True, False])
def test_state_restores_the_next_predictions(tracks):
    def make():
        selector = Rates() if tracks else Predicts(0.3, 2.0)
        return collector(selector=selector, baseline=baseline("group", tracker=tracker(selector) if tracks else None))

    run, rewards = make(), {0: [1, 0, 1, 1], 1: [0, 0.5, 0, 0], 2: [1, 0, 0, 0]}
    for step in range(4):
        enter(run, rewards, [step % 2, 2], step)
    restored = make()
    load_collector_state(restored, *collector_state(run))
    for step in range(4, 7):
        a, b = (enter(c, rewards, [step % 2, 2], step).advantages for c in (run, restored))
        np.testing.assert_array_equal(a, b)


def test_the_batch_and_the_log_get_the_advantages():
    run = collector(selector=Predicts(0.5, 4.0), baseline=baseline())
    batch = enter(run, {0: [0, 0, 0, 0], 1: [1, 1, 1, 0]}, [0, 1])
    tensors, logs = {"advantages": torch.zeros(8)}, {"advantages": deque([9.0, *[0.0] * 8], maxlen=20)}
    run.advantage_weights.apply(tensors, batch, logs)
    assert tensors["advantages"].tolist() == batch.advantages.ravel().tolist()
    assert list(logs["advantages"]) == [9.0, *batch.advantages.ravel().tolist()]
