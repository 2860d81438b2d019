"""The collector without a trainer: what it tells the selector when the reward's range widens."""

import numpy as np
import pytest

from tests.factories.collecting import collector, rounds
from trl_dataeff.collector.rounds import Rounds
from trl_dataeff.replay.buffer import ReplayBuffer


def mean_places(rewards: dict[int, list[float]], low: float, high: float) -> dict[int, float]:
    return {i: float(np.mean([(r - low) / (high - low) for r in own])) for i, own in rewards.items()}


REWARDS = {0: [0, 1, 1, 0], 1: [1, 1, 1, 1], 2: [0, 0.5, 1, 1], 3: [-3, 1, 1, 1], 4: [0, 2, 0, 0], 5: [1, 0, 0, 0]}


def test_rates_of_earlier_groups_follow_when_the_range_widens():
    run = collector(buffer=ReplayBuffer(8))
    for step in range(3):
        run.enter(run.propose(2), rounds(REWARDS)(np.arange(2 * step, 2 * step + 2)), step)
    expected = mean_places(REWARDS, -3, 2)
    assert run.selector.rates == pytest.approx(expected, abs=1e-6)
    stored = {group.prompt_id: group.success_rate for group in run.buffer.groups}
    assert stored == pytest.approx({i: expected[i] for i in stored}, abs=1e-6)
    assert set(stored) == {0, 2, 3, 4, 5}


def test_so_do_those_of_earlier_rounds_of_the_same_batch():
    """Two rounds: in the second a reward of -3 occurs, and all groups are observed in its range."""
    run = collector(rounds=Rounds(4))
    rewards = {0: [1, 1, 1, 1], 1: [0, 1, 1, 1], 2: [-3, 1, 1, 1], 3: [0, 1, 0, 1]}
    run.collect(rounds(rewards), 0)
    seen = {i: rewards[i] for i in run.selector.rates}
    assert len(seen) > 2
    assert run.selector.rates == pytest.approx(mean_places(seen, -3, 1), abs=1e-6)


def test_groups_say_whether_rewards_had_been_graded_by_then():
    run = collector()
    for step in range(2):
        run.enter(run.propose(2), rounds(REWARDS)(np.arange(2 * step, 2 * step + 2)), step)
    groups = {group.prompt_id: group for group in run.selector.groups}
    assert [groups[i].graded for i in range(4)] == [False, False, True, True]
