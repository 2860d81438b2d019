"""When replay pauses: by hand, and in training."""

import math

import numpy as np
import pytest
import torch

from tests.factories import Watched, even_length_reward, logged, run
from trl_dataeff import DataEfficientGRPOConfig
from trl_dataeff.replay.pause import DECAY, MOST, ReplayPause, token_sums


def sums(*ratios: list[float]) -> torch.Tensor:
    """What a micro-batch shows on each process."""
    return torch.tensor([[len(r), float(np.sum(r)), float(np.square(r).sum())] for r in ratios])


def test_sums_of_tokens_by_hand():
    """Not of tokens that are masked, or whose sampler's log-prob is not known; and no token counts without bound."""
    w = torch.tensor([[2.0, 0.5, 7.0, 3.0], [1.0, 1e5, 1e-5, 4.0]]).double()
    behavior = torch.full_like(w, -1.0)
    behavior[1, 0] = math.nan
    mask = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 0]])
    counted = np.array([2.0, 0.5, 3.0, MOST, 1 / MOST])
    expected = [5, counted.sum(), (counted**2).sum()]
    np.testing.assert_allclose(token_sums(behavior.nan_to_num(-1.0) + w.log(), behavior, mask), expected, rtol=1e-5)
    np.testing.assert_allclose(token_sums(behavior + w.log(), torch.full_like(w, math.nan), mask), [0, 0, 0])


def test_the_effective_sample_size_of_generation_batches_by_hand():
    """Each counts as one, however many tokens it replays; within one all tokens of all processes count alike."""
    pause = ReplayPause(0.9)
    pause.begin_batch()
    assert pause.ess == 1
    assert not pause.active
    batches = [[1.0, 3.0, 0.5, 2.0, 2.0], [1.0, 0.1], [1.0]]
    pause.observe(sums(batches[0][:3], []))
    pause.observe(sums([], batches[0][3:]))
    assert pause.ess == 1, "the present batch is not over"
    pause.begin_batch()
    w = np.array(batches[0])
    assert pause.ess == pytest.approx(w.sum() ** 2 / (len(w) * (w**2).sum()))
    pause.observe(sums(*([x] for x in batches[1])))
    pause.begin_batch()
    pause.begin_batch()  # nothing was replayed
    pause.observe(sums(batches[2]))
    restored = ReplayPause(0.9)
    restored.load_state(pause.state())
    for own in (pause, restored):
        own.begin_batch()
        weights = np.array([DECAY**2, DECAY, 1.0])
        first, second = (weights @ [np.mean(np.power(b, k)) for b in batches] / weights.sum() for k in (1, 2))
        assert own.ess == pytest.approx(first**2 / second)
        assert own.active == (first**2 / second < 0.9)


def test_nothing_is_forgotten_or_overflows_while_nothing_is_replayed():
    pause = ReplayPause(0.9)
    pause.observe(sums([0.1, 3.0]))
    pause.begin_batch()
    before = pause.ess
    for _ in range(10_000):
        pause.begin_batch()
    assert pause.ess == before
    pause.observe(torch.tensor([[3.0, math.inf, math.inf], [1.0, 1.0, 1.0]]))
    pause.observe(torch.tensor([[3.0, math.nan, math.nan]]))
    pause.begin_batch()
    assert pause.ess == before, "what is not finite does not count"


def paused_run(tmp_path, **options):
    options = {"replay_fraction": 0.5, "steps_per_generation": 2, "max_steps": 24, **options}
    return run(Watched, DataEfficientGRPOConfig, tmp_path, rewards=even_length_reward, **options)


def test_while_it_pauses_one_group_is_replayed_and_the_others_are_generated(tmp_path):
    """What decides is what the loss has seen of the batches before, which `dataeff/replay/ess` logs by micro-batch."""
    options = {"selection": "dots", "replay_pause_ess": 0.98, "replay_max_age": None}
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
