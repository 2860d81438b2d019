"""`max_rollout_rounds` above 1 in training: what is generated, what is kept, what is logged."""

import numpy as np
import pandas as pd
import pytest
import torch

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


def test_what_is_trained_on_has_gradient_and_the_rows_never_change(tmp_path):
    trainer = dynamic(tmp_path, max_rollout_rounds=12)
    assert all(tensors["advantages"].shape == (16,) for tensors in trainer.tensors)
    for batch, tensors in zip(trainer.batches, trainer.tensors):
        for group, advantages in zip(batch.trained, tensors["advantages"].view(4, 4)):
            assert group.effective == bool(advantages.abs().max() > 0)
    assert all(group.effective for batch in trainer.batches for group in batch.trained)


def test_every_rollout_is_counted_and_accounted_for(tmp_path):
    trainer = dynamic(tmp_path)
    logs = logged(trainer, "dataeff/rollouts_generated", "dataeff/rollouts_trained", "dataeff/rollouts_discarded")
    generated, trained, discarded = logs[-1]
    assert generated == trainer.generated
    assert trained == sum(len(t["advantages"]) for t in trainer.tensors)
    assert generated == trained + discarded + 4 * len(trainer.collector.leftover)
    assert any(trainer.waiting)
    table = pd.read_parquet(tmp_path / "dataeff" / "groups.parquet")
    assert len(table) * 4 == generated
    assert table["disposition"].eq("dropped").sum() * 4 == discarded
    assert table["origin"].eq("fresh").all()
    dispositions = [b.dispositions[id(g)] for b in trainer.batches for g in b.generated]
    assert table["disposition"].tolist() == dispositions
    assert set(dispositions) == {"trained", "leftover", "dropped"}
    assert table["tokens"].sum() == logged(trainer, "dataeff/tokens_generated")[-1][0]


def test_without_an_effective_group_batches_are_completed_with_zero_variance_groups(tmp_path):
    trainer = dynamic(tmp_path, rewards=lambda completions, **kwargs: [0.0] * len(completions), max_rollout_rounds=3)
    assert trainer.state.global_step == 12
    for rounds, loss, grad in logged(trainer, "dataeff/rounds", "loss", "grad_norm"):
        assert (rounds, loss, grad) in {(3, 0, 0), (None, 0, 0)}
    assert all(len(t["advantages"]) == 16 for t in trainer.tensors)


def test_rewards_and_lengths_are_those_of_generated_rows_and_tokens_of_trained_ones(tmp_path):
    trainer = dynamic(tmp_path, logging_steps=1, steps_per_generation=1)
    tokens = 0
    rows = logged(trainer, "num_tokens", "completions/mean_length", "completions/max_length", "reward")
    assert any(b.dropped for b in trainer.batches)
    for tensors, (num_tokens, *_) in zip(trainer.tensors, rows, strict=True):
        tokens += int(tensors["completion_mask"].sum() + tensors["prompt_mask"].sum())
        assert num_tokens == tokens
    for batch, (_, *shown) in zip(trainer.batches, rows, strict=True):
        groups = batch.generated or batch.trained  # those of leftover groups if nothing was generated
        lengths = np.concatenate([g.lengths for g in groups])
        expected = lengths.mean(), lengths.max(), np.concatenate([g.rewards for g in groups]).mean()
        assert shown == pytest.approx(expected)


def test_completions_table_holds_what_is_trained_on(tmp_path):
    def reward(prompts, completions, completion_ids, log_extra, log_metric, **kwargs):
        log_extra("echo", [f"{p}|{c}" for p, c in zip(prompts, completions)])
        log_metric("calls", 1.0)
        return mixed_reward(prompts, completion_ids)

    trainer = dynamic(tmp_path, rewards=reward, log_completions=True, num_completions_to_print=1, max_steps=4)
    assert any(b.dropped for b in trainer.batches)
    for path in sorted((tmp_path / "completions").glob("*.parquet")):
        table = pd.read_parquet(path)
        assert len(table) == 16
        assert (table["echo"] == table["prompt"] + "|" + table["completion"]).all()
        groups = table.groupby(np.arange(16) // 4)["reward"].nunique()
        assert (groups == 2).sum() >= 1
    assert all(calls == 1.0 for (calls,) in logged(trainer, "calls"))


@pytest.mark.parametrize("setting", ["lora", "misaligned", "num_iterations", "off-policy mask", "vespo"])
def test_settings_train_also_on_their_leftover_groups(setting, tmp_path):
    before = {}

    class Changed(Watched):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            before.update({n: p.detach().clone() for n, p in self.model.named_parameters() if p.requires_grad})

    trainer = dynamic(tmp_path, trainer_class=Changed, rollout_margin=2.0, **TRAINING_SETTINGS[setting])
    for name, parameter in trainer.model.named_parameters():
        if name in before and "lora_A" not in name:
            assert not torch.equal(before[name], parameter), name
    assert all(np.isfinite(loss) for (loss,) in logged(trainer, "loss"))
    assert any(trainer.waiting)
    assert any("replayed" in tensors for tensors in trainer.tensors)


def test_what_was_cut_off_does_not_make_a_group_effective(tmp_path):
    """With masking, a group can differ in completions that are not trained on alone: it has no gradient."""
    trainer = dynamic(tmp_path, mask_truncated_completions=True, max_rollout_rounds=8, max_completion_length=12)
    for batch, tensors in zip(trainer.batches, trainer.tensors):
        trained = tensors["completion_mask"].sum(dim=1) * tensors["advantages"].abs() > 0
        for group, rows in zip(batch.trained, trained.view(4, 4)):
            assert group.effective == bool(rows.any())
    assert any(g.effective for b in trainer.batches for g in b.generated)
    assert any(not g.effective and len(np.unique(g.rewards)) > 1 for b in trainer.batches for g in b.generated)


def test_infinite_rewards_are_no_gradient_and_one_warning(tmp_path, caplog_transformers):
    def infinite_reward(completion_ids, **kwargs):
        return [float("inf") if sum(ids) % 2 else 1.0 for ids in completion_ids]

    trainer = dynamic(tmp_path, rewards=infinite_reward, max_steps=4, max_rollout_rounds=2)
    assert not any(np.isinf(g.rewards).any() and g.effective for b in trainer.batches for g in b.generated)
    assert len([r for r in caplog_transformers.records if "`infinite_reward` returned an infinite" in r.message]) == 1


def test_async_weighted_and_silent_rewards(tmp_path):
    async def sometimes(prompts, completions, **kwargs):
        return [None if number(p) % 3 else len(c) / 8 for p, c in zip(prompts, completions)]

    def never_for_some(prompts, completion_ids, **kwargs):
        return [
            float("nan") if number(p) % 4 == 1 else m for p, m in zip(prompts, mixed_reward(prompts, completion_ids))
        ]

    trainer = dynamic(tmp_path, rewards=[sometimes, never_for_some], reward_weights=[0.5, 2.0])
    for batch in trainer.batches:
        for group in batch.generated:
            totals = np.array(
                [np.nan if np.isnan(row).all() else np.nansum(row * [0.5, 2.0]) for row in group.rewards]
            )
            distinct = set(np.round(totals[~np.isnan(totals)], 6))
            assert group.effective == (len(distinct) > 1)
    assert any(np.isnan(g.rewards).all() for b in trainer.batches for g in b.generated)


def test_tools_are_called_in_rounds_and_not_again(tmp_path):
    calls = []

    def counted_add(a: int, b: int) -> int:
        """
        Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        calls.append((a, b))
        return add(a, b)

    counted_add.__name__ = "add"

    def reward(prompts, completions, **kwargs):
        """Sees the messages of the tool; some groups have zero variance."""
        answers = [[m["content"] for m in c if m["role"] == "tool"] for c in completions]
        return [float(int(a[0]) % 2) if a and number(p) % 3 else 0.0 for p, a in zip(prompts, answers)]

    trainer = dynamic(
        tmp_path,
        trainer_class=scripted_tool_calls(Watched),
        rewards=reward,
        max_steps=3,
        steps_per_generation=1,
        max_completion_length=150,
        trainer={"train_dataset": tool_dataset(), "processing_class": tool_tokenizer(), "tools": [counted_add]},
    )
    messages = [m for b in trainer.batches for g in b.generated if g.rollouts for m in sum(g.rollouts.completions, [])]
    assert any(b.dropped for b in trainer.batches)
    assert calls
    assert sum(len(b.generated) for b in trainer.batches) * 4 >= len(calls) > 0
    assert any(m["role"] == "tool" for m in messages)
    table = trainer._logs["completion"]  # what the last batch trained on, with the messages of the tool
    assert any(m["role"] == "tool" for completion in table for m in completion)
    for tensors in trainer.tensors:  # tokens of the tool are masked
        assert (tensors["tool_mask"] * tensors["completion_mask"]).sum() < tensors["completion_mask"].sum()


def test_rollout_func_fields_reach_the_rewards(tmp_path):
    def rollout_func(prompts, trainer):
        ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        completions = [torch.randint(6, 60, (5,)).tolist() for _ in prompts]
        return {
            "prompt_ids": ids,
            "completion_ids": completions,
            "logprobs": [[-4.0] * 5 for _ in prompts],
            "luck": [sum(c) % 2 for c in completions],
        }

    def luck_reward(prompts, completion_ids, luck, **kwargs):
        assert luck == [sum(c) % 2 for c in completion_ids]
        return [float(v) if number(p) % 2 else 0.0 for p, v in zip(prompts, luck)]

    trainer = dynamic(tmp_path, rewards=luck_reward, rollout_margin=2.0, trainer={"rollout_func": rollout_func})
    assert any(b.dropped for b in trainer.batches)
    assert any(b.leftover for b in trainer.batches)
    for batch, tensors in zip(trainer.batches, trainer.tensors):
        assert "sampling_per_token_logps" in tensors
        for group in batch.leftover:  # the sampler's log-probs are the behavior policy: no forward pass for them
            assert group.rollouts.behavior_logps is None
