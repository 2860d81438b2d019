"""`sequential_rollouts=True` in training: what is generated, what is trained on, what is counted."""

import numpy as np
import pandas as pd
import pytest

from tests.factories import (
    TRAINING_SETTINGS,
    dynamic,
    logged,
    mixed_reward,
    number,
)


def sequential(tmp_path, rewards=mixed_reward, **options):
    """A short run whose batches have 8 groups of 4."""
    options = {"dynamic_sampling": False, "steps_per_generation": 4, "max_steps": 24, **options}
    return dynamic(tmp_path, rewards=rewards, sequential_rollouts=True, **options)


def rarely_learnable_reward(prompts, completion_ids, **kwargs):
    """One prompt of six can be learned, the others never succeed."""
    return [float(sum(ids) % 2 == 0) if number(p) % 6 == 0 else 0.0 for p, ids in zip(prompts, completion_ids)]


def check_accounts(trainer, folder, group_size=4):
    """Whole batches are trained on, and all that was generated is counted, once."""
    sizes = [group.size for batch in trainer.batches for group in batch.generated]
    assert set(sizes) == {group_size // 2, group_size}, "no group was stopped"
    generated, tokens = logged(trainer, "dataeff/rollouts_generated", "dataeff/tokens_generated")[-1]
    assert generated == trainer.generated == sum(sizes)
    table = pd.read_parquet(folder / "dataeff" / "groups.parquet")
    assert table["completions"].tolist() == sizes
    assert table["tokens"].sum() == tokens == sum(g.tokens for batch in trainer.batches for g in batch.generated)
    for batch, tensors in zip(trainer.batches, trainer.tensors, strict=True):
        assert len(tensors["advantages"]) == 32
        for group, advantages in zip(batch.trained, tensors["advantages"].view(-1, group_size), strict=True):
            assert group.effective == bool(advantages.abs().max() > 0)
            assert group.size == len(group.rollouts) == group_size


def test_a_batch_keeps_its_size_and_stopped_groups_have_no_gradient(tmp_path):
    trainer = sequential(tmp_path, rewards=rarely_learnable_reward)
    check_accounts(trainer, tmp_path)
    last = trainer.collector.counters.values
    assert last["rollouts_trained"] == last["rollouts_generated"] < 24 * 8
    shares = [share for (share,) in logged(trainer, "dataeff/stopped_ratio")]
    assert shares == [np.mean([g.size < 4 for g in batch.generated]) for batch in trainer.batches]


def test_with_replay_and_dots(tmp_path):
    options = {
        "selection": "dots",
        "replay_fraction": 0.5,
        "selector_args": {"sharpness": 0.1},
        "rewards": rarely_learnable_reward,
    }
    trainer = sequential(tmp_path, **options, max_steps=48)
    check_accounts(trainer, tmp_path)
    assert {group.size for group in trainer.collector.buffer.groups} == {4}
    assert any(batch.replayed for batch in trainer.batches)


@pytest.mark.parametrize("setting", ["lora", "num_iterations", "scale_rewards batch", "conversational"])
def test_settings_train(setting, tmp_path):
    options = {
        "rewards": rarely_learnable_reward,
        "max_steps": 8,
        "dynamic_sampling": True,
        **TRAINING_SETTINGS[setting],
    }
    trainer = sequential(tmp_path, **options)
    assert all(np.isfinite(loss) for (loss,) in logged(trainer, "loss"))
    assert any(group.size == 2 for batch in trainer.batches for group in batch.generated)


@pytest.mark.parametrize("group_size", [2, 3, 5])
def test_odd_and_smallest_groups(tmp_path, group_size):
    sizes = {"num_generations": group_size, "per_device_train_batch_size": 4 * group_size, "steps_per_generation": 2}
    trainer = sequential(tmp_path, rewards=rarely_learnable_reward, **sizes, max_steps=20, dynamic_sampling=True)
    seen = {group.size for batch in trainer.batches for group in batch.generated}
    if group_size > 2:  # a single completion says little
        assert seen == {group_size // 2, group_size}
    assert {len(tensors["advantages"]) for tensors in trainer.tensors} == {8 * group_size}
