"""`replay_fraction > 0` in training: what is generated, what is replayed, what it costs and what is logged."""

import copy
import itertools

import numpy as np
import pandas as pd
import pytest
import torch

from tests.factories import (
    TRAINING_SETTINGS,
    Watched,
    even_length_reward,
    letter_share_reward,
    logged,
    mixed_reward,
    number,
    plain_dataset,
    run,
    save_tiny,
    scripted_tool_calls,
    tiny_model,
    tool_dataset,
    tool_tokenizer,
)
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer


def replaying(tmp_path, trainer_class=Watched, rewards=even_length_reward, **options):
    options = {"replay": "share", "steps_per_generation": 2, **options}
    return run(trainer_class, DataEfficientGRPOConfig, tmp_path, rewards=rewards, **options)


def test_generation_shrinks_by_the_share_once_the_buffer_can_give_it(tmp_path):
    trainer = replaying(tmp_path, max_steps=20, replay_max_age=20)
    sizes = [(len(b.generated), len(b.replayed)) for b in trainer.batches]
    assert sizes[0] == (4, 0)
    assert sizes[1:] == [(2, 2)] * 9
    assert trainer.generated == 4 * sum(fresh for fresh, _ in sizes)
    assert all(b.rounds == 1 for b in trainer.batches)
    names = ("rollouts_generated", "rollouts_trained", "rollouts_replayed", "rollouts_discarded")
    assert logged(trainer, *(f"dataeff/{name}" for name in names))[-1] == (88, 160, 72, 0)
    assert len(pd.read_parquet(tmp_path / "dataeff" / "groups.parquet")) * 4 == 88


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_normalised_over_the_batch_fresh_advantages_are_those_of_a_batch_without_replay(tmp_path, aggregation):
    """By TRL's formula on the fresh rows alone."""
    options = {"scale_rewards": "batch", "multi_objective_aggregation": aggregation, "reward_weights": [1.0, 0.5]}
    options |= {"rewards": [even_length_reward, letter_share_reward], "selection": "uniform", "max_steps": 16}
    trainer = replaying(tmp_path, **options)
    compared = 0
    for batch, tensors in zip(trainer.batches, trainer.tensors, strict=True):
        fresh = torch.tensor([batch.origins[id(group)] == "fresh" for group in batch.trained])
        rewards = torch.from_numpy(np.stack([g.rewards for g in batch.trained]))[fresh]  # (n, G, 2)
        if batch.replayed and aggregation == "sum_then_normalize":
            totals = rewards @ torch.tensor([1.0, 0.5])
            expected = (totals - totals.mean(1, keepdim=True)) / (totals.std() + 1e-4)
        elif batch.replayed:
            each = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
            totals = each @ torch.tensor([1.0, 0.5])
            expected = totals / (totals.std() + 1e-4)
        if batch.replayed and totals.std() > 0:
            own = tensors["advantages"].view(-1, 4)[fresh]
            # TRL also takes the mean over the batch away, which is 0 up to rounding
            torch.testing.assert_close(own, expected, atol=1e-4, rtol=1e-3)
            compared += 1
    assert compared >= 4


@pytest.mark.parametrize(("per_batch", "per_step", "share", "resumed"), [(1, 4, 0.5, 4), (3, 2, 0.75, 4)])
def test_generation_batches_that_share_an_optimizer_step_have_no_rollout_in_common(
    tmp_path, per_batch, per_step, share, resumed
):
    """Several in a step, or three micro-batches, two of them a step: every second one begins within a step. Also after a resume."""
    options = {"per_device_train_batch_size": 16, "steps_per_generation": per_batch, "selection": "uniform"}
    options |= {"gradient_accumulation_steps": per_step, "replay_fraction": share, "replay_pause_ess": 0.0}
    options |= {"save_strategy": "steps", "save_steps": 1, "trainer": {"train_dataset": plain_dataset(200)}}
    batches: list[tuple[int, set]] = []

    class Noting(Watched):
        def _log(self, batch):
            batches.append((self.state.global_step, {(g.prompt_id, g.step, g.origin) for g in batch.trained}))
            super()._log(batch)

    trainer = replaying(tmp_path, Noting, max_steps=6, **options)
    whole = list(batches)
    assert any(origin == "replayed" for _, batch in whole for *_, origin in batch)
    first_rows = np.arange(len(whole)) * per_batch  # micro-batches; an optimizer step takes `per_step` of them
    for i, j in itertools.combinations(range(len(whole)), 2):
        if first_rows[j] // per_step <= (first_rows[i] + per_batch - 1) // per_step:
            assert not {key[:2] for key in whole[i][1]} & {key[:2] for key in whole[j][1]}
    trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{resumed}"))
    again = batches[len(whole) :]
    assert again == whole[len(whole) - len(again) :]


def enter(stored: dict, groups: list) -> None:
    """By hand, the newest group of each prompt, if it is effective."""
    for group in groups:
        stored.pop(group.prompt_id, None)
        if group.effective:
            stored[group.prompt_id] = group


def test_replayed_groups_are_recent_effective_and_of_other_prompts(tmp_path):
    trainer = replaying(tmp_path, rewards=mixed_reward, max_steps=40, replay_max_age=20)
    rolled_out: dict[int, object] = {}
    assert sum(len(b.replayed) for b in trainer.batches) > 10
    for number_of_batch, batch in enumerate(trainer.batches):
        step = 2 * number_of_batch
        fresh = {g.prompt_id for g in batch.generated}
        assert all(batch.origins[id(g)] == "fresh" for g in batch.generated)
        for group in batch.replayed:
            assert group.prompt_id not in fresh
            assert group is rolled_out[group.prompt_id], "not the newest group of its prompt"
            assert 0 < step - group.step <= 20
        enter(rolled_out, batch.generated)


ALIGNMENT = {
    "aligned": {"steps_per_generation": 1},
    "aligned, batches share a step": {"steps_per_generation": 1, "gradient_accumulation_steps": 2},
    "aligned, micro-batches": {"steps_per_generation": 2, "gradient_accumulation_steps": 2},
    "misaligned": {"steps_per_generation": 2},
    "iterations": {"steps_per_generation": 1, "num_iterations": 2},
    "leftover": {"steps_per_generation": 2, "max_rollout_rounds": 4, "rollout_margin": 2.0},
}


@pytest.mark.parametrize("name", ALIGNMENT)
def test_stored_log_probs_are_those_of_the_policy_that_sampled(tmp_path, name):
    """Against a forward pass of a copy of the policy, made when each group was generated, one completion at a time."""
    samplers = []  # of each group, in the order of their generation

    class Copied(Watched):
        def _roll_out(self, ids, completions):
            samplers.extend([copy.deepcopy(self.model.state_dict())] * len(ids))
            return super()._roll_out(ids, completions)

    trainer = replaying(
        tmp_path,
        trainer_class=Copied,
        learning_rate=3e-2,
        per_device_train_batch_size=16,
        max_steps=6,
        **ALIGNMENT[name],
    )
    groups, checked = [g for b in trainer.batches for g in b.generated], 0
    policy = tiny_model().eval()
    for group, sampler in zip(groups, samplers, strict=True):
        if not group.effective:
            continue
        policy.load_state_dict(sampler)
        for tokens, logps in zip(group.rollouts.completion_tokens, group.rollouts.behavior_logps, strict=True):
            ids = torch.from_numpy(np.concatenate([group.rollouts.prompt_tokens, tokens])).long()[None]
            with torch.no_grad():
                expected = policy(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[-len(tokens) :, 0]
            np.testing.assert_allclose(logps, expected.numpy(), atol=1e-4)
            checked += 1
    assert checked >= 20


@pytest.mark.parametrize("name", [name for name in ALIGNMENT if name != "leftover"])
def test_replay_makes_no_forward_pass_that_trl_does_not_make(tmp_path, name):
    class Counted(DataEfficientGRPOTrainer):
        forwards = 0

        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            self.forwards += 1
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    counts = [
        replaying(tmp_path / str(share), trainer_class=Counted, replay_fraction=share, **ALIGNMENT[name]).forwards
        for share in (0.0, 0.5)
    ]
    assert counts[0] == counts[1] > 0


def test_rewards_and_lengths_are_logged_over_fresh_rollouts(tmp_path):
    trainer = replaying(tmp_path, steps_per_generation=1, per_device_train_batch_size=16)
    names = ("reward", "reward_std", "rewards/even_length_reward/mean", "completions/mean_length")
    rows = logged(trainer, *names, "completions/max_length", "completions/clipped_ratio", "num_tokens")
    tokens = 0
    assert sum(len(b.replayed) for b in trainer.batches) > 10
    for batch, row, tensors in zip(trainer.batches, rows, trainer.tensors, strict=True):
        rewards = np.concatenate([g.rewards[:, 0] for g in batch.generated])
        completions = [tokens for g in batch.generated for tokens in g.rollouts.completion_tokens]
        lengths = [len(tokens) for tokens in completions]
        cut_off = [tokens[-1] != trainer.processing_class.eos_token_id for tokens in completions]
        assert row[:4] == pytest.approx((rewards.mean(), rewards.std(ddof=1), rewards.mean(), np.mean(lengths)))
        assert row[4:6] == pytest.approx((max(lengths), np.mean(cut_off)))
        tokens += int(tensors["completion_mask"].sum() + tensors["prompt_mask"].sum())
        assert row[6] == tokens, "tokens are those that are trained on"


MORE = {
    "dynamic sampling": {"max_rollout_rounds": 4, "rollout_margin": 2.0},
    **{f"beta {loss}": {"beta": 0.1, "loss_type": loss} for loss in ("sapo", "vespo", "luspo")},
    "masked": {"mask_truncated_completions": True, "max_completion_length": 12},
    "high share": {"replay_fraction": 0.75},
    "two rewards": {"rewards": [even_length_reward, letter_share_reward], "reward_weights": [1.0, 0.5]},
    "normalize_then_sum": {
        "rewards": [even_length_reward, letter_share_reward],
        "multi_objective_aggregation": "normalize_then_sum",
    },
}


@pytest.mark.parametrize("setting", TRAINING_SETTINGS | MORE)
def test_settings_train_and_replay(setting, tmp_path):
    before = {}

    class Changed(Watched):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            before.update({n: p.detach().clone() for n, p in self.model.named_parameters() if p.requires_grad})

    options = dict((TRAINING_SETTINGS | MORE)[setting])
    if "beta" in options:  # the reference model is loaded by its path
        options["trainer"] = {"model": save_tiny(tmp_path / "model")}
    trainer = replaying(tmp_path, trainer_class=Changed, **options)
    for name, parameter in trainer.model.named_parameters():
        if name in before and "lora_A" not in name:
            assert not torch.equal(before[name], parameter), name
    assert all(np.isfinite(loss) for (loss,) in logged(trainer, "loss"))
    assert sum(len(b.replayed) for b in trainer.batches) >= 3


def test_with_dynamic_sampling_leftover_groups_are_stored_and_a_short_batch_completed_by_replay(tmp_path):
    trainer = replaying(
        tmp_path, rewards=mixed_reward, max_rollout_rounds=4, rollout_margin=2.0, max_rollout_rounds=2, max_steps=40
    )
    assert not trainer.collector.leftover
    stored, leftover, completed = {}, 0, 0
    for batch in trainer.batches:
        assert all(stored[g.prompt_id] is g for g in batch.replayed)
        enter(stored, batch.generated)
        leftover += len(batch.leftover_now)
        completed += len(batch.replayed) > 2
        fresh, step = {g.prompt_id for g in batch.generated}, batch.generated[0].step
        if batch.padded:  # nothing else was left that is young enough
            young = {i for i, g in stored.items() if i not in fresh and step - g.step <= trainer.args.replay_max_age}
            assert not young - {g.prompt_id for g in batch.replayed}
    assert leftover
    assert completed


def test_tools_are_replayed_with_their_masks(tmp_path):
    def add(a: int, b: int) -> int:
        """
        Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        return a + b

    def reward(prompts, completions, **kwargs):
        answers = [[m["content"] for m in c if m["role"] == "tool"] for c in completions]
        return [float(int(a[0]) % 2) if a and number(p) % 3 else 0.0 for p, a in zip(prompts, answers)]

    trainer = replaying(
        tmp_path,
        trainer_class=scripted_tool_calls(Watched),
        rewards=reward,
        max_steps=8,
        steps_per_generation=1,
        max_completion_length=150,
        per_device_train_batch_size=16,
        trainer={"train_dataset": tool_dataset(), "processing_class": tool_tokenizer(), "tools": [add]},
    )
    assert sum(len(b.replayed) for b in trainer.batches) >= 4
    for batch, tensors in zip(trainer.batches, trainer.tensors, strict=True):
        masks = [mask for g in batch.trained for mask in g.rollouts.tool_masks]
        assert any(not mask.all() for mask in masks)
        for row, mask in zip(tensors["tool_mask"], masks, strict=True):
            np.testing.assert_array_equal(row[: len(mask)].numpy(), mask)


def test_the_samplers_log_probs_need_no_forward_pass(tmp_path):
    def rollout_func(prompts, trainer):
        ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        completions = [torch.randint(6, 60, (5,)).tolist() for _ in prompts]
        return {
            "prompt_ids": ids,
            "completion_ids": completions,
            "logprobs": [[-4.0, None, -4.0, -4.0, -4.0] for _ in prompts],
        }

    trainer = replaying(
        tmp_path, steps_per_generation=1, trainer={"rollout_func": rollout_func}, per_device_train_batch_size=16
    )
    assert all(g.rollouts.behavior_logps is None for b in trainer.batches for g in b.generated)
    replayed = [t for t in trainer.tensors if "replayed" in t]
    assert len(replayed) >= 4
    for tensors in replayed:
        behavior = tensors["behavior_per_token_logps"][tensors["replayed"]]
        assert behavior[:, [0, 2, 3, 4]].eq(-4).all()
        assert behavior[:, 1].isnan().all(), "what the sampler could not score has ratio 1"


def advantages_by_hand(batch, weight) -> np.ndarray:
    """TRL's, by group: (r - mean) / (std + 1e-4); those of replayed groups times `weight`."""
    rewards = np.concatenate([group.rewards[:, 0] for group in batch.trained]).reshape(-1, 4).astype(float)
    advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-4)
    factors = [weight if batch.origins[id(group)] == "replayed" else 1.0 for group in batch.trained]
    return (advantages * np.array(factors)[:, None]).ravel()


@pytest.mark.parametrize(("weight", "dynamic"), [(None, False), (0.25, False), (None, True)])
def test_replayed_groups_count_by_the_share_of_effective_groups_or_as_chosen(tmp_path, weight, dynamic):
    """With dynamic sampling, which replaces zero-variance groups, they count fully."""
    options = {"replay_weight": weight, "dynamic_sampling": dynamic}
    trainer = replaying(tmp_path, rewards=mixed_reward, max_steps=20, replay_max_age=20, **options)
    effective, total, shares = 0.0, 0.0, []
    for batch, tensors in zip(trainer.batches, trainer.tensors, strict=True):
        effective = 0.8 * effective + sum(group.effective for group in batch.generated)
        total = 0.8 * total + len(batch.generated)
        shares.append(effective / total)
        by_default = 1.0 if dynamic else shares[-1]
        expected = advantages_by_hand(batch, by_default if weight is None else weight)
        assert tensors["advantages"].numpy() == pytest.approx(expected, abs=1e-4)
    assert sum(len(batch.replayed) for batch in trainer.batches) > 5
    assert dynamic or min(shares) < max(shares) < 1
