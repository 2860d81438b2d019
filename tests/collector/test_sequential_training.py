"""`sequential_rollouts=True` in training: what is generated, what is trained on, what is counted."""

import numpy as np
import pandas as pd
import pytest

from tests.factories import (
    TRAINING_SETTINGS,
    Watched,
    add,
    dynamic,
    logged,
    mixed_reward,
    number,
    scripted_tool_calls,
    tool_dataset,
    tool_tokenizer,
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


def test_rows_of_a_stopped_group_are_its_completions_repeated(tmp_path):
    trainer = sequential(tmp_path, rewards=rarely_learnable_reward)
    repeated = 0
    for batch, tensors in zip(trainer.batches, trainer.tensors):
        stopped = {group.prompt_id for group in batch.generated if group.size == 2}
        for group, ids in zip(batch.trained, tensors["completion_ids"].view(8, 4, -1)):
            for tokens, row in zip(group.rollouts.completion_tokens, ids.tolist()):
                assert row[: len(tokens)] == tokens.tolist()
            if group.prompt_id in stopped:
                assert (ids[0] == ids[2]).all()
                assert (ids[1] == ids[3]).all()
                repeated += 1
    assert repeated


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


def test_tools_are_called_in_both_parts(tmp_path):
    def reward(prompts, completions, **kwargs):
        answers = [[m["content"] for m in c if m["role"] == "tool"] for c in completions]
        return [float(int(a[0]) % 2) if a and number(p) % 6 == 0 else 0.0 for p, a in zip(prompts, answers)]

    trainer = dynamic(
        tmp_path,
        trainer_class=scripted_tool_calls(Watched),
        rewards=reward,
        sequential_rollouts=True,
        max_steps=6,
        max_completion_length=150,
        trainer={"train_dataset": tool_dataset(), "processing_class": tool_tokenizer(), "tools": [add]},
    )
    groups = [group for batch in trainer.batches for group in batch.generated]
    assert {group.size for group in groups} == {2, 4}
    for group in groups:
        rollouts = group.rollouts
        assert len(rollouts.completions) == len(rollouts.tool_masks) == group.size
        for tokens, mask in zip(rollouts.completion_tokens, rollouts.tool_masks):
            assert len(tokens) == len(mask)
        assert [int(mask.sum()) for mask in rollouts.tool_masks] == group.lengths.tolist()
    called = [any(m["role"] == "tool" for m in c) for g in groups if g.size == 4 for c in g.rollouts.completions[2:]]
    assert any(called)


@pytest.mark.parametrize("group_size", [2, 3, 5])
def test_odd_and_smallest_groups(tmp_path, group_size):
    sizes = {"num_generations": group_size, "per_device_train_batch_size": 4 * group_size, "steps_per_generation": 2}
    trainer = sequential(tmp_path, rewards=rarely_learnable_reward, **sizes, max_steps=20, dynamic_sampling=True)
    seen = {group.size for batch in trainer.batches for group in batch.generated}
    if group_size > 2:  # a single completion says little
        assert seen == {group_size // 2, group_size}
    assert {len(tensors["advantages"]) for tensors in trainer.tensors} == {8 * group_size}
