"""Which stored groups are stale: by hand, in a buffer, and in training against forward passes of copies of the policy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.factories import Watched, even_length_reward, generator, run, visit
from trl_dataeff import DataEfficientGRPOConfig
from trl_dataeff.replay.buffer import ReplayBuffer
from trl_dataeff.replay.staleness import Staleness, row_sums
from trl_dataeff.rollouts.group import EFFECTIVE


def group(prompt_id=0, step=0, sums=None):
    made = visit(prompt_id, EFFECTIVE, step)
    made.ratio_sums = sums
    return made


def sums_of(ratios, clipped=0):
    w = np.array(ratios, float)
    return [len(w), w.sum(), (w**2).sum(), clipped, np.abs(np.log(w)).sum()]


def test_sums_of_rows_by_hand():
    ratio = torch.tensor([[2.0, 0.5, 9.0], [1.0, 1.0, 4.0]])
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    clipped = torch.tensor([[True, False, True], [False, False, True]])
    expected = [[2, 2.5, 4.25, 1, 2 * np.log(2)], [2, 5, 17, 1, np.log(4)]]
    np.testing.assert_allclose(row_sums(ratio.log(), ratio, clipped, mask), expected, rtol=1e-6)
    by_row = row_sums(ratio.log(), torch.tensor([[3.0], [1.0]]), clipped[:, :1], mask)
    np.testing.assert_allclose(by_row, [[2, 6, 18, 2, 2 * np.log(2)], [2, 2, 2, 0, np.log(4)]], rtol=1e-6)


@given(
    ratios=st.lists(st.floats(0.05, 20), min_size=1, max_size=20),
    min_ess=st.floats(0, 1),
    min_unclipped=st.floats(0, 1),
    data=st.data(),
)
def test_a_group_is_stale_by_its_own_tokens(ratios, min_ess, min_unclipped, data):
    clipped = data.draw(st.integers(0, len(ratios)))
    w = np.array(ratios) / np.sum(ratios)
    ess, unclipped = 1 / (w**2).sum() / len(ratios), (len(ratios) - clipped) / len(ratios)
    staleness = Staleness(None, min_ess, min_unclipped)
    if min(abs(ess - min_ess), abs(unclipped - min_unclipped)) > 1e-9:
        expected = ess < min_ess or unclipped < min_unclipped
        assert staleness.is_stale(group(sums=sums_of(ratios, clipped)), 1) == expected
    assert not staleness.is_stale(group(), 99), "nothing is known of it"
    assert not staleness.is_stale(group(sums=[0.0] * 5), 99), "all of its tokens are masked"
    assert not Staleness().is_stale(group(sums=sums_of(ratios, len(ratios))), 99)


def test_movement_per_step_by_hand():
    """Tokens weigh alike, whatever their group; earlier batches fade."""
    staleness = Staleness(max_movement=0.25, least_age=2)
    assert staleness.speed == 0
    staleness.observe([], 10)
    first = [group(step=6, sums=[10, 0, 0, 0, 4.0]), group(step=9, sums=[30, 0, 0, 0, 3.0])]
    staleness.observe(first, 11)  # at step 10 they were 4 and 1 steps old
    assert staleness.speed == pytest.approx(7 / 70)
    staleness.observe([], 12)
    assert staleness.speed == pytest.approx(0.1), "a batch without replay says nothing"
    assert [staleness.is_stale(group(step=12 - age), 12) for age in (1, 2, 3, 9)] == [False, False, True, True]
    staleness.observe([group(step=8, sums=[10, 0, 0, 0, 1.0])], 13)  # at step 12
    assert staleness.speed == pytest.approx((0.8 * 7 + 1) / (0.8 * 70 + 40))


def test_groups_of_the_last_batch_stay_however_fast_the_policy_moves():
    staleness = Staleness(max_movement=1e-6, least_age=3, moved=100.0, steps=1.0)
    assert [staleness.is_stale(group(step=9 - age), 9) for age in (3, 4)] == [False, True]


def test_the_state_continues_exactly():
    first = Staleness(0.1, moved=0.1 + 0.2, steps=1 / 3, step=7)
    second = Staleness(0.1)
    second.load_state(first.state())
    assert second == first


def filled(**limits) -> ReplayBuffer:
    buffer = ReplayBuffer(9, staleness=Staleness(**limits))
    buffer.expire(1)
    buffer.add(group(i, step=0) for i in range(4))
    return buffer


def test_a_buffer_removes_what_was_measured_as_stale_and_measures_anew():
    buffer = filled(min_ess=0.5, min_unclipped=0.5)
    rows = torch.tensor([sums_of([1, 1]), sums_of([1, 30, 1]), sums_of([1, 1], 1), sums_of([1, 1], 2)])
    buffer.measure(torch.tensor([0, 1, 2, 3]), rows)
    buffer.measure(torch.tensor([0, 2, 77]), torch.tensor([sums_of([1, 1], 2), sums_of([1]), sums_of([9, 1])]))
    assert buffer.groups[2].ratio_sums == pytest.approx(sums_of([1, 1, 1], 1))
    assert buffer.expire(2) == 2
    assert [g.prompt_id for g in buffer.groups] == [0, 2], "half of the tokens of 0 are clipped, a third of those of 2"
    assert all(g.ratio_sums is None for g in buffer.groups)
    assert buffer.expire(3) == 0


def test_a_buffer_removes_groups_by_age_in_movement():
    buffer = filled(max_movement=0.55)
    buffer.add([group(9, step=4)])
    buffer.measure(torch.tensor([0]), torch.tensor([sums_of([np.exp(0.1)])]))  # moved by 0.1 in a step
    assert buffer.expire(5) == 0, "5 steps are a movement of 0.5"
    assert buffer.expire(6) == 4
    assert [g.prompt_id for g in buffer.sample(1, generator())] == [9]


def steps_of(trainer_class, tmp_path, **options):
    fields = {"replay_fraction": 0.5, "replay_max_age": None, "learning_rate": 2e-2, "max_steps": 8, **options}
    return run(trainer_class, DataEfficientGRPOConfig, tmp_path, rewards=even_length_reward, **fields)


@pytest.mark.parametrize("steps", [1, 2])
def test_measures_are_those_of_the_policy_in_the_loss(tmp_path, monkeypatch, steps):
    """By prompt, |log w| and w of all tokens that a batch replays, from a forward pass of the model itself."""
    seen: list[dict[int, list]] = []
    measured: list[dict[int, list[float]]] = []

    class Forward(Watched):
        def _compute_loss(self, model, inputs):
            if "replayed_prompt" in inputs:
                ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
                attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
                with torch.no_grad():
                    logits = self.model(input_ids=ids, attention_mask=attention).logits[:, :-1]
                logps = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
                change = logps[:, -inputs["completion_ids"].size(1) :] - inputs["behavior_per_token_logps"]
                for prompt, row, mask in zip(
                    inputs["replayed_prompt"], change, inputs["completion_mask"], strict=True
                ):
                    seen[-1].setdefault(int(prompt), []).append(row[mask.bool()])
            return super()._compute_loss(model, inputs)

    plain = Staleness.observe

    def observe(self, groups, step):
        measured.append({g.prompt_id: list(g.ratio_sums) for g in groups})
        seen.append({})
        return plain(self, groups, step)

    monkeypatch.setattr(Staleness, "observe", observe)
    trainer = steps_of(Forward, tmp_path, steps_per_generation=steps, replay_min_ess=1e-9)
    checked = 0
    for batch, rows, sums in zip(trainer.batches[:-1], seen[:-1], measured[1:], strict=True):
        assert sums.keys() == rows.keys() - {-1} == {g.prompt_id for g in batch.replayed}
        for prompt, values in sums.items():
            change = torch.cat(rows[prompt]).double()
            w = change.exp()
            assert values[0] == len(w)
            expected = [w.sum().item(), (w**2).sum().item(), change.abs().sum().item()]
            assert [values[i] for i in (1, 2, 4)] == pytest.approx(expected, rel=1e-3, abs=1e-3)
            checked += expected[2] > 0.1
    assert checked >= 3


def test_stale_groups_leave_in_training_and_training_goes_on(tmp_path):
    trainer = steps_of(Watched, tmp_path, replay_max_movement=0.05, per_device_train_batch_size=16, max_steps=16)
    free = steps_of(Watched, tmp_path / "free", per_device_train_batch_size=16, max_steps=16)
    evicted = [batch.metrics["replay/evicted"] for batch in trainer.batches]
    assert sum(evicted) > 3
    assert not any(batch.metrics["replay/evicted"] for batch in free.batches)
    assert len(trainer.collector.buffer) < len(free.collector.buffer)
    assert sum(len(batch.replayed) for batch in trainer.batches[1:]) > 5
    for log in trainer.state.log_history[2:-1]:
        assert log["dataeff/replay/movement"] > 0
