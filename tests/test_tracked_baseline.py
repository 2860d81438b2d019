"""`advantage_baseline="tracked"` in training: what is trained on, what is logged, and what is refused."""

import numpy as np
import pytest

from tests.factories import even_length_reward, messages, run
from tests.factories.training import Watched, mixed_reward
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer
from trl_dataeff.fields import FieldError


TRACKED = {"advantage_baseline": "tracked", "rewards": mixed_reward, "reward_range": [0, 1]}


def expected(group, scale) -> list[float]:
    """Advantages of a group of 0/1 rewards by the formula, completion by completion."""
    rewards = group.rewards[:, 0].tolist()
    out = []
    for i, own in enumerate(rewards):
        others = rewards[:i] + rewards[i + 1 :]
        s, p = (0, 0) if np.isnan(group.predicted) else (group.strength, group.predicted)
        b = (s * p + sum(others)) / (s + len(others))
        deviation = np.sqrt(max(b * (1 - b), 1 / len(rewards))) if s else np.std(rewards, ddof=1)
        out.append((own - b) / ((deviation + 1e-4) if scale == "group" else 1.0))
    return out


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize(
    "options", [{"selection": "uniform"}, {"selection": "dots", "replay_fraction": 0.5}], ids=["uniform", "dots"]
)
def test_training_takes_the_tracked_advantages(tmp_path, scale, options):
    fields = {**TRACKED, **options, "scale_rewards": scale, "replay_weight": 1.0, "num_generations": 2}
    trainer = run(Watched, DataEfficientGRPOConfig, tmp_path, **fields)
    predicted = 0
    for batch, tensors in zip(trainer.batches, trainer.tensors, strict=True):
        wanted = [a for group in batch.trained for a in expected(group, scale)]
        np.testing.assert_allclose(tensors["advantages"].tolist(), wanted, rtol=1e-4, atol=1e-5)
        predicted += sum(not np.isnan(group.predicted) for group in batch.trained)
    np.testing.assert_allclose(list(trainer._logs["advantages"]), wanted, rtol=1e-4, atol=1e-5)  # of the last batch
    assert predicted >= 20
    zero_variance = [g for batch in trainer.batches for g in batch.trained if not g.effective]
    assert any(max(map(abs, expected(group, scale))) > 0.05 for group in zero_variance)
    replayed = [group for batch in trainer.batches for group in batch.replayed]
    assert all(group.surprise >= 0.5 for group in replayed)
    assert bool(replayed) == ("replay_fraction" in options)
    log = next(log for log in reversed(trainer.state.log_history) if "dataeff/baseline/strength" in log)
    assert log["dataeff/baseline/strength"] > 0
    assert 0 <= log["dataeff/baseline/informative_ratio"] <= 1


def test_a_run_says_that_it_is_on(tmp_path, caplog_transformers):
    run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, tmp_path, train=False, advantage_baseline="tracked")
    (notice,) = messages(caplog_transformers, "Data efficiency is on")
    assert "a tracked baseline (advantage_baseline='tracked', scale_rewards='group')" in notice
    assert "`advantage_baseline='group'` training is that of GRPOTrainer" in notice


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequential_rollouts": True}, "`sequential_rollouts=True` are both set.*Set `sequential_rollouts=False`"),
        ({"dynamic_sampling": True}, "`dynamic_sampling=True` are both set.*drops them.*Set `dynamic_sampling=False`"),
        (
            {"multi_objective_aggregation": "normalize_then_sum"},
            "`multi_objective_aggregation` is 'normalize_then_sum'.*'sum_then_normalize', or `advantage_baseline` to",
        ),
        ({"baseline_strength": -1.0}, "`baseline_strength` is -1.0; it takes a number >= 0 or nothing"),
    ],
)
def test_what_cannot_be_combined_is_refused_before_a_model_is_loaded(tmp_path, options, message):
    with pytest.raises(FieldError, match=message):
        DataEfficientGRPOConfig(str(tmp_path), advantage_baseline="tracked", **options)


def test_the_groups_mean_is_the_default_and_has_no_state(tmp_path):
    trainer = run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, tmp_path, rewards=even_length_reward, max_steps=1)
    assert trainer.args.advantage_baseline == "group"
    assert trainer.collector.baseline is None
