"""When replay pauses: by hand, and in training."""

import math

import numpy as np
import pytest
import torch

from tests.factories import Watched, even_length_reward, logged, run
from trl_dataeff import DataEfficientGRPOConfig
from trl_dataeff.replay.pause import DECAY, ReplayPause


def statistics(*ratios: list[float]) -> torch.Tensor:
    """What a micro-batch shows on each process; of its other numbers nothing depends on."""
    rows = [[len(r), sum(r), float(np.square(r).sum()), 9.0, 9.0, 9.0, 9.0] for r in ratios]
    return torch.tensor(rows).flatten()


def test_the_effective_sample_size_of_all_tokens_by_hand():
    pause = ReplayPause(0.9)
    assert pause.ess == 1
    assert not pause.active
    first, second = [1.0, 3.0, 0.5], [2.0, 2.0]
    pause.observe(statistics(first, []))
    pause.observe(statistics([], second))
    w = np.array(first + second)
    assert pause.ess == pytest.approx(w.sum() ** 2 / (len(w) * (w**2).sum()))
    pause.begin_batch()
    pause.observe(statistics([1.0], [0.1]))
    w, weights = np.concatenate([w, [1.0, 0.1]]), np.array([DECAY] * 5 + [1.0] * 2)
    expected = (weights @ w) ** 2 / (weights.sum() * (weights @ w**2))
    assert pause.ess == pytest.approx(expected)
    assert pause.active == (expected < 0.9)
    restored = ReplayPause(0.9)
    restored.load_state(pause.state())
    assert restored.ess == pause.ess


def test_it_ends_once_the_policy_is_slow_again():
    pause = ReplayPause(0.9)
    pause.observe(statistics([0.1, 3.0, 1.0, 0.2]))
    batches = 0
    while pause.active:
        pause.begin_batch()
        pause.observe(statistics([1.0, 1.1]))
        batches += 1
    assert 2 <= batches <= math.ceil(10 / (1 - DECAY))


def paused_run(tmp_path, **options):
    options = {"replay_fraction": 0.5, "steps_per_generation": 2, "max_steps": 24, **options}
    return run(Watched, DataEfficientGRPOConfig, tmp_path, rewards=even_length_reward, **options)


@pytest.mark.parametrize("fresh_groups", ["fixed", "adaptive"])
def test_while_it_pauses_one_group_is_replayed_and_the_others_are_generated(tmp_path, fresh_groups):
    """What decides is what the loss has seen of the batches before, which `dataeff/replay/ess` logs by micro-batch."""
    options = {"selection": "dots", "fresh_groups": fresh_groups, "replay_pause_ess": 0.98, "replay_max_age": None}
    trainer = paused_run(tmp_path, per_device_train_batch_size=16, max_steps=32, **options)
    paused = [bool(batch.metrics["replay/paused"]) for batch in trainer.batches]
    assert 3 <= sum(paused) < len(paused)
    assert not paused[0]
    for batch, pausing in zip(trainer.batches, paused, strict=True):
        assert len(batch.trained) == 8
        if pausing:
            assert len(batch.replayed) <= 1
            assert len(batch.generated) >= 7
    assert any(len(b.replayed) > 1 for b in trainer.batches)
    assert [bool(p) for (p,) in logged(trainer, "dataeff/replay/paused")] == paused


def test_a_slow_policy_never_pauses_it(tmp_path):
    """The same as without the limit, to the last weight."""
    states = []
    for limit in (0.0, 0.9):
        trainer = paused_run(tmp_path / str(limit), learning_rate=1e-5, replay_pause_ess=limit)
        assert ("replay/paused" in trainer.batches[-1].metrics) == bool(limit)
        assert any(batch.replayed for batch in trainer.batches)
        states.append(trainer.model.state_dict())
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=0, atol=0)
