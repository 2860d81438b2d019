"""`ReplayLimit`: the law by hand, what it remembers, and that it reaches what is replayed."""

import math

import pytest

from tests.factories import Watched, even_length_reward, logged, run
from trl_dataeff import DataEfficientGRPOConfig
from trl_dataeff.replay.limit import ReplayLimit


@pytest.mark.parametrize(
    ("share", "groups"), [(0.0, 8), (0.1, 8), (0.2, 8), (0.225, 6), (0.25, 4), (0.275, 2), (0.3, 1), (0.9, 1)]
)
def test_as_many_up_to_the_share_and_in_proportion_fewer_to_one_at_one_and_a_half_times_the_share(share, groups):
    limit = ReplayLimit(8, 1, 0.2)
    assert limit.next() == 8, "nothing is known yet"
    limit.observe(share)
    assert limit.next() == groups
    assert limit.next() == groups, "without a new measurement nothing changes"


@pytest.mark.parametrize("share", [0.05, 0.21, 0.24, 0.29, 0.5])
def test_each_process_replays_as_many(share):
    limit = ReplayLimit(12, 3, 0.2)
    limit.observe(share)
    assert limit.next() % 3 == 0
    assert 3 <= limit.next() <= 12


def test_no_share_no_limit():
    limit = ReplayLimit(8, 1, None)
    limit.observe(0.9)
    assert limit.next() == 8


def test_nothing_to_replay_stays_nothing():
    limit = ReplayLimit(0, 1, 0.2)
    limit.observe(0.9)
    assert limit.next() == 0


def test_micro_batches_are_averaged_and_batches_fade_by_half():
    limit = ReplayLimit(8, 1, 0.2)
    for share in (0.1, math.nan, 0.5):
        limit.observe(share)
    limit.next()
    assert limit.measured == pytest.approx(0.3)
    limit.observe(0.1)
    limit.next()
    assert limit.measured == pytest.approx(0.2)


def test_state_goes_on_where_it_was():
    first, second = ReplayLimit(8, 1, 0.2), ReplayLimit(8, 1, 0.2)
    for share in (0.27, 0.24):
        first.observe(share)
        first.next()
    first.observe(0.28)
    second.load_state_dict(first.state_dict())
    assert second.next() == first.next()
    assert second.measured == first.measured
    empty = ReplayLimit(8, 1, 0.2)
    empty.load_state_dict(ReplayLimit(8, 1, 0.2).state_dict())
    assert math.isnan(empty.measured)


def replayed(tmp_path, learning_rate, **options):
    options = {"replay_fraction": 0.5, "steps_per_generation": 2, "learning_rate": learning_rate, **options}
    trainer = run(
        Watched,
        DataEfficientGRPOConfig,
        tmp_path,
        rewards=even_length_reward,
        max_steps=24,
        logging_steps=2,
        **options,
    )
    clipped = [row[0] for row in logged(trainer, "dataeff/replay/clipped_mass") if row[0] is not None]
    return [len(batch.replayed) for batch in trainer.batches[2:]], clipped


def test_a_policy_that_moves_fast_replays_less(tmp_path):
    slow, clipped = replayed(tmp_path / "slow", 1e-6)
    assert set(slow) == {2}
    assert max(clipped) < 0.5
    fast, clipped = replayed(tmp_path / "fast", 0.1)
    assert max(clipped) > 0.5
    assert 1 in fast
    unlimited, _ = replayed(tmp_path / "unlimited", 0.1, replay_max_clipped=None)
    assert set(unlimited) == {2}
