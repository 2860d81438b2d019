"""`ReplaySwitch`: replay ends where too many replayed tokens are clipped."""

import math

import pytest

from tests.factories import logged
from tests.replay.test_training import replaying
from trl_dataeff.replay.switch import ReplaySwitch


@pytest.mark.parametrize("share", [0.16, 0.2, 0.3, 1.0])
def test_a_constant_share_above_the_limit_ends_replay_after_as_many_batches_as_the_mean_takes(share):
    switch = ReplaySwitch(0.15, decay=0.8)
    batches, ended = 0, False
    while not ended:
        switch.observe(clipped=share * 30, tokens=30)
        switch.observe(clipped=share * 10, tokens=10)  # a micro-batch more
        ended = switch.end_batch()
        batches += 1
    # share (1 - 0.8^n) > 0.15
    assert batches == math.floor(math.log(1 - 0.15 / share) / math.log(0.8)) + 1
    assert not switch.on
    switch.observe(0, 1000)
    assert not switch.end_batch(), "only once"
    assert not switch.on, "for good"


def test_a_share_up_to_the_limit_never_ends_replay():
    switch = ReplaySwitch(0.15)
    for _ in range(500):
        switch.observe(15, 100)
        assert not switch.end_batch()
    assert switch.share == pytest.approx(0.15)
    assert switch.on


def test_batches_without_replayed_tokens_do_not_count():
    switch = ReplaySwitch(0.5, decay=0.8)
    switch.observe(4, 10)
    switch.end_batch()
    before = switch.share
    assert before == pytest.approx(0.2 * 0.4)
    for _ in range(10):
        switch.observe(0, 0)
        switch.end_batch()
    assert switch.share == before


def test_without_a_limit_replay_never_ends():
    switch = ReplaySwitch(None)
    for _ in range(50):
        switch.observe(1, 1)
        assert not switch.end_batch()
    assert switch.on


def test_its_state_continues_within_a_batch():
    first, second = ReplaySwitch(0.15), ReplaySwitch(0.15)
    first.observe(3, 10)
    first.end_batch()
    first.observe(5, 10)
    second.load_state_dict(first.state_dict())
    for switch in (first, second):
        switch.observe(1, 10)
        switch.end_batch()
    assert first == second


def shares_by_hand(clipped: list[float], limit: float) -> int:
    """The batch that is the first without replay, from the share of each batch."""
    mean = 0.0
    for i, share in enumerate(clipped):
        mean = mean if math.isnan(share) else 0.9 * mean + 0.1 * share
        if mean > limit:
            return i + 1
    return len(clipped)


FAST = {"max_steps": 40, "replay_max_age": 20, "learning_rate": 0.01, "logging_steps": 1, "steps_per_generation": 1}
FAST |= {"per_device_train_batch_size": 16}


def test_in_training_replay_ends_where_the_policy_moves_too_fast(tmp_path, caplog_transformers):
    trainer = replaying(tmp_path, replay_max_clipped=0.3, **FAST)
    clipped = [log.get("dataeff/replay/clipped_share", math.nan) for log in trainer.state.log_history[:-1]]
    ends = shares_by_hand(clipped, 0.3)
    assert 2 < ends < len(trainer.batches) - 5, "the settings of this test do not show it"
    replayed = [len(batch.replayed) for batch in trainer.batches]
    assert replayed[0] == 0
    assert all(replayed[1:ends])
    assert not any(replayed[ends:])
    assert [len(batch.generated) for batch in trainer.batches[ends:]] == [4] * (len(replayed) - ends)
    said = [r.message for r in caplog_transformers.records if r.message.startswith("Replay ends")]
    assert len(said) == 1
    assert said[0].startswith(f"Replay ends at step {ends}: ")
    assert "`replay_max_clipped=0.3`" in said[0]


def test_a_resumed_run_knows_that_replay_has_ended(tmp_path):
    whole = replaying(tmp_path / "whole", replay_max_clipped=0.3, save_steps=8, save_strategy="steps", **FAST)
    assert not whole.collector.replay_switch.on
    resumed = replaying(tmp_path / "whole", replay_max_clipped=0.3, train=False, **FAST)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-32"))
    assert not any(batch.replayed for batch in resumed.batches)
    assert logged(resumed, "loss") == logged(whole, "loss")[-len(logged(resumed, "loss")) :]
