"""Replay in training: what is generated, what is replayed, what it costs and what is logged."""

import functools

import numpy as np
import pandas as pd
import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback
from transformers.utils import logging

from tests.factories.comparison import messages
from tests.factories.configurations import DYNAMIC, FILL, SHARE
from tests.factories.tiny import chat_dataset, even_length_reward, logged, run, tiny_model
from tests.factories.tools import add, scripted_tool_calls, tool_arguments
from tests.factories.training import CountedRows, Watched, mixed_reward, number


def replaying(tmp_path, trainer_class=Watched, rewards=mixed_reward, **options):
    options = {**FILL, "steps_per_generation": 2, "max_steps": 16, **options}
    return run(tmp_path, trainer_class, rewards=rewards, **options)


def seen_by(reward, calls: list):
    """The reward function `reward`, which notes its rewards, by call."""

    @functools.wraps(reward)
    def noted(**kwargs):
        calls.append(reward(**kwargs))
        return calls[-1]

    return noted


class ChangesReward(TrainerCallback):
    """Does `act(trainer)` at the beginning of step `at`."""

    def __init__(self, at: int, act):
        self.at = at
        self.act = act

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.at:
            self.had_stored = self.trainer.collector.holds_rollouts
            self.act(self.trainer)


def no_reward(completions, **kwargs):
    return [0.0] * len(completions)


def until_step_6(completion_ids, trainer_state, **kwargs):
    return even_length_reward(completion_ids) if trainer_state.global_step < 6 else no_reward(completion_ids)


def exchange_function(trainer):
    trainer.reward_funcs[0] = no_reward


def exchange_functions(trainer):
    trainer.reward_funcs = [no_reward, no_reward]


def exchange_weights(trainer):
    trainer.reward_weights = torch.tensor([0.0, 1.0])


@pytest.mark.parametrize(
    ("reward", "act"),
    [
        (even_length_reward, exchange_function),
        (even_length_reward, exchange_functions),
        (even_length_reward, exchange_weights),
        (until_step_6, Watched.clear_replay_buffer),
    ],
)
@pytest.mark.parametrize("fields", [{}, {**DYNAMIC, "replay": "off", "rollout_margin": 3.0}], ids=["fill", "leftover"])
def test_no_step_trains_on_a_former_reward(tmp_path, caplog_transformers, reward, act, fields):
    """From step 6 on, every reward is 0, so no step has a gradient."""
    logging.warning_once.cache_clear()
    callback = ChangesReward(6, act)
    options = {"rewards": [reward, no_reward], "reward_weights": [1.0, 0.0], "trainer": {"callbacks": [callback]}}
    trainer = replaying(tmp_path, **options, **fields, max_steps=12, train=False)
    callback.trainer = trainer
    trainer.train()
    norms = [norm for _, norm in logged(trainer, "step", "grad_norm") if norm is not None]
    assert all(norms[:6])
    assert norms[6:] == [0.0] * 6
    assert callback.had_stored
    is_seen = act in (exchange_function, exchange_functions)
    assert len(messages(caplog_transformers, "Stored rollouts were dropped")) == is_seen


class Reward:
    """A method of an object is another object at each access."""

    def even_length_reward(self, completion_ids, **kwargs):
        return even_length_reward(completion_ids)


@pytest.mark.parametrize("is_another", [False, True])
def test_the_method_of_one_object_stays_the_same_reward(tmp_path, is_another):
    reward = Reward()
    other = Reward() if is_another else reward

    def exchange_method(trainer):
        trainer.reward_funcs[0] = other.even_length_reward
        num_stored.append(len(trainer.collector.buffer))

    num_stored = []
    callback = ChangesReward(6, exchange_method)
    trainer = replaying(
        tmp_path, rewards=[reward.even_length_reward], trainer={"callbacks": [callback]}, max_steps=7, train=False
    )
    callback.trainer = trainer
    trainer.train()
    ages = [6 - group.step for group in trainer.collector.buffer.groups]
    assert num_stored[0] > 0
    assert (max(ages) == 0) == is_another


@pytest.mark.parametrize(
    ("fields", "is_said"), [({}, True), ({"replay": "off"}, False), ({**DYNAMIC, "replay": "off"}, True)]
)
def test_rewards_that_may_change_are_warned_of_with_groups_of_earlier_batches(
    tmp_path, caplog_transformers, fields, is_said
):
    replaying(tmp_path, rewards=[until_step_6, even_length_reward], **fields, train=False)
    found = messages(caplog_transformers, "`trainer_state`")
    assert len(found) == is_said
    assert all("until_step_6" in message and "even_length_reward" not in message for message in found)


def test_a_share_of_the_batch_is_not_generated_once_the_buffer_can_give_it(tmp_path):
    trainer = replaying(tmp_path, **SHARE, max_steps=20, replay_max_age=None)
    assert [(len(b.generated), len(b.replayed)) for b in trainer.batches] == [(4, 0)] + [(2, 2)] * 9
    assert trainer.generated == 88
    names = ("rollouts_generated", "rollouts_trained", "rollouts_replayed", "rollouts_discarded")
    assert logged(trainer, *(f"dataeff/{name}" for name in names))[-1] == (88, 160, 72, 0)
    assert len(pd.read_parquet(tmp_path / "dataeff" / "groups.parquet")) * 4 == 88


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"scale_rewards": "batch"},
        {"multi_objective_aggregation": "normalize_then_sum"},
        {"scale_rewards": "batch", **SHARE},
    ],
    ids=["each group", "over the batch", "normalised apart", "a share"],
)
def test_advantages_and_logged_rewards_are_those_of_all_generated_groups(tmp_path, fields):
    """By TRL's formulas, from what the reward functions returned."""
    even, share, weights = [], [], torch.tensor([1.0, 0.5])

    def length_reward(completion_ids, prompts, **kwargs):
        return [len(ids) / 8 if number(p) % 4 == 0 else 0.0 for p, ids in zip(prompts, completion_ids)]

    options = {
        "reward_weights": weights.tolist(),
        **fields,
        "rewards": [seen_by(mixed_reward, even), seen_by(length_reward, share)],
    }
    trainer = replaying(tmp_path, **options)
    metrics = [log for log in trainer.state.log_history if "reward" in log]
    compared = 0
    for i, (batch, tensors) in enumerate(zip(trainer.batches, trainer.tensors, strict=True)):
        rewards = torch.tensor([even[i], share[i]]).T.view(-1, 4, 2)  # of all generated groups, (n, 4, 2)
        over_batch = len(fields) > 0
        if "multi_objective_aggregation" in fields:
            totals = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)) @ weights
            expected = (totals - totals.mean()) / (totals.std() + 1e-4)
        else:
            totals = rewards @ weights
            deviation = totals.std() if over_batch else totals.std(1, keepdim=True)
            expected = (totals - totals.mean(1, keepdim=True)) / (deviation + 1e-4)
        deviations = totals.std() if over_batch else totals.std(1)
        assert metrics[i]["frac_reward_zero_std"] == pytest.approx((deviations < 1e-8).float().mean().item())
        assert metrics[i]["reward"] == pytest.approx((rewards @ weights).mean().item(), abs=1e-6)
        assert metrics[i]["reward_std"] == pytest.approx((rewards @ weights).std().item(), abs=1e-6)
        assert metrics[i]["rewards/length_reward/mean"] == pytest.approx(rewards[..., 1].mean().item(), abs=1e-6)
        if batch.replayed and (rewards @ weights).std() > 0:
            places = {id(group): place for place, group in enumerate(batch.generated)}
            for group, own in zip(batch.trained, tensors["advantages"].view(-1, 4), strict=True):
                if id(group) in places:
                    torch.testing.assert_close(own, expected[places[id(group)]], atol=1e-5, rtol=1e-4)
                    compared += 1
    assert compared >= 4


@pytest.mark.parametrize("lowest", [0.1, -np.inf])
def test_rows_keep_their_scale_if_all_new_rewards_are_equal_or_some_are_infinite(tmp_path, lowest):
    """The deviation is then rounding noise, such as 7e-9 for rewards of 0.1, or infinite.

    Values over theirs are below sqrt(n).
    """

    def reward(prompts, completion_ids, **kwargs):
        right = [float(number(p) % 4 == 0 and sum(ids) % 2 == 0) for p, ids in zip(prompts, completion_ids)]
        return [lowest if number(p) % 4 == 2 else 0.1 + value for p, value in zip(prompts, right)]

    trainer = replaying(tmp_path, rewards=reward, scale_rewards="batch", max_steps=24)
    equal = [batch.replayed and not any(group.effective for group in batch.generated) for batch in trainer.batches]
    assert sum(map(bool, equal)) > 2
    for batch, tensors in zip(trainer.batches, trainer.tensors, strict=True):
        assert not tensors["advantages"].abs().max() >= len(tensors["advantages"]) ** 0.5
        whole = not any(np.isinf(group.rewards).any() for group in batch.trained)
        # Groups without log-probs were generated where an infinite reward made all advantages 0
        unknown = torch.zeros(len(batch.trained), dtype=torch.bool)
        if "replayed" in tensors:
            unknown = (tensors["replayed"] & tensors["behavior_per_token_logps"].isnan().all(1)).view(-1, 4).all(1)
        rows = tensors["advantages"].view(-1, 4)
        assert not rows[unknown].any()
        assert not whole or rows[torch.tensor([group.effective for group in batch.trained]) & ~unknown].any(1).all()


@pytest.mark.parametrize("fields", [{}, {**DYNAMIC, "replay": "off"}], ids=["replay", "dynamic sampling"])
def test_lengths_are_logged_of_all_generated_completions_and_tokens_of_trained_ones(tmp_path, fields):
    trainer = replaying(tmp_path, steps_per_generation=1, per_device_train_batch_size=16, **fields)
    names = ("completions/mean_length", "completions/max_length", "completions/clipped_ratio", "reward", "num_tokens")
    total = 0
    for batch, row, tensors in zip(trainer.batches, logged(trainer, *names), trainer.tensors, strict=True):
        groups = batch.generated or batch.trained  # those of leftover groups if nothing was generated
        completions = [tokens for g in groups for tokens in g.rollouts.completion_tokens]
        lengths, reward = [len(tokens) for tokens in completions], np.mean([g.rewards for g in groups])
        ends = {trainer.processing_class.eos_token_id, trainer.processing_class.pad_token_id}
        cut_off = [tokens[-1] not in ends for tokens in completions]
        total += int(tensors["completion_mask"].sum() + tensors["prompt_mask"].sum())
        assert row == pytest.approx((np.mean(lengths), max(lengths), np.mean(cut_off), reward, total))
    assert sum(len(b.replayed) + len(b.dropped) for b in trainer.batches) > 10


ALIGNMENT = {
    "aligned": {"steps_per_generation": 1},
    "aligned, micro-batches": {"steps_per_generation": 2, "gradient_accumulation_steps": 2},
    "misaligned": {"steps_per_generation": 2},
    "half a step": {"steps_per_generation": 1, "gradient_accumulation_steps": 2},
    "iterations": {"steps_per_generation": 1, "num_iterations": 2},
    "leftover": {**DYNAMIC, "steps_per_generation": 2, "rollout_margin": 2.0},
    "share": {"replay": "share", "steps_per_generation": 2},
}


@pytest.mark.parametrize("name", ALIGNMENT)
def test_stored_log_probs_are_those_of_the_policy_that_sampled(tmp_path, name):
    """Against a forward pass of a copy of the policy, one completion at a time."""
    options = {"learning_rate": 3e-2, "per_device_train_batch_size": 16, "max_steps": 6, **ALIGNMENT[name]}
    trainer = replaying(tmp_path, rewards=even_length_reward, **options)
    policy, checked = tiny_model().eval(), 0
    for batch, weights in zip(trainer.batches, trainer.weights, strict=True):
        policy.load_state_dict(weights)
        rollouts = [group.rollouts for group in batch.generated if group.effective]
        rows = [(r.prompt_tokens, *row) for r in rollouts for row in zip(r.completion_tokens, r.behavior_logps)]
        for prompt, tokens, logps in rows:
            ids = torch.from_numpy(np.concatenate([prompt, tokens])).long()[None]
            with torch.no_grad():
                expected = policy(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[-len(tokens) :, 0]
            if not np.isnan(logps).all():  # of a row without an advantage, which skips the passes
                np.testing.assert_allclose(logps, expected.numpy(), atol=1e-4)
                checked += 1
    assert checked >= 20


@pytest.mark.parametrize("name", list(ALIGNMENT)[:-2])
def test_replay_makes_no_forward_pass_that_trl_does_not_make(tmp_path, name):
    """Where no row is skipped: with replay, fewer rows have no gradient."""
    rows = []
    for replay in ("off", "fill"):
        options = {**ALIGNMENT[name], "replay": replay, "compact_update": False}
        trainer = replaying(tmp_path / replay, CountedRows, **options)
        rows.append((trainer.in_loss, trainer.old_logps_rows))
    assert rows[0] == rows[1]
    assert rows[0][0]


LEFTOVER = {**DYNAMIC, "replay": "off", "rollout_margin": 2.0}
BOTH_KINDS = {  # of rollouts of an earlier policy
    "lora": {"trainer": {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}},
    "accumulation": {"steps_per_generation": 4, "gradient_accumulation_steps": 2},
    "several batches a step": {"steps_per_generation": 2, "gradient_accumulation_steps": 4},
    "num_iterations": {"num_iterations": 2, "max_steps": 32},
    "off-policy mask": {"off_policy_mask_threshold": 0.5},
    "vespo": {"loss_type": "vespo"},
}
SETTINGS = {
    **BOTH_KINDS,
    **{f"leftover, {name}": {**LEFTOVER, **options} for name, options in BOTH_KINDS.items()},
    **{loss: {"loss_type": loss} for loss in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "luspo", "sapo")},
    **{f"beta {loss}": {"beta": 0.1, "loss_type": loss} for loss in ("dapo", "sapo", "vespo", "luspo")},
    "conversational": {"trainer": {"train_dataset": chat_dataset()}},
    "sequence level": {"importance_sampling_level": "sequence", "loss_type": "grpo"},
    "proximal clip": {"replay_clip": "proximal"},
    "scale_rewards batch": {"scale_rewards": "batch"},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "greso": {"selection": "greso"},
    "entropy mask": {"top_entropy_quantile": 0.5},
    "dynamic sampling": {"max_rollout_rounds": 2},
    "share": SHARE,
    "masked": {"mask_truncated_completions": True, "max_completion_length": 12},
    "normalize_then_sum": {  # all totals are equal, and advantages are not
        **{**SHARE, "num_iterations": 2, "max_steps": 24},
        "rewards": [even_length_reward, lambda **kwargs: [2 - 2 * r for r in even_length_reward(**kwargs)]],
        "reward_weights": [1.0, 0.5],
        "multi_objective_aggregation": "normalize_then_sum",
    },
    "two rewards that cancel out": {
        "rewards": [mixed_reward, lambda **kwargs: [1 - reward for reward in mixed_reward(**kwargs)]],
        **{"multi_objective_aggregation": "normalize_then_sum", "learning_rate": 0.0},
    },
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_train_on_rollouts_of_an_earlier_policy(setting, tmp_path):
    trainer = replaying(tmp_path, **SETTINGS[setting])
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad and "lora_A" not in name:
            assert torch.equal(trainer.weights[0][name], parameter) == ("learning_rate" in SETTINGS[setting]), name
    assert all(np.isfinite(loss) for (loss,) in logged(trainer, "loss"))
    assert sum(len(b.trained_stale) for b in trainer.batches) >= 3
    assert any("replayed" in tensors for tensors in trainer.tensors)
    if trainer.args.replay == "fill" and trainer.args.max_rollout_rounds == 1:  # with a KL term, too
        assert all(len(batch.dropped) == len(batch.replayed) for batch in trainer.batches)


@pytest.mark.parametrize("accumulation", [1, 2], ids=["old log-probs", "those of the loss"])
def test_rows_whose_advantage_is_0_but_for_rounding_have_no_log_probs(accumulation, tmp_path):
    rows = {0: ((1, 0, 1, 0), (0, 1, 1, 0)), 1: ((1, 0, 0, 0), (1, 1, 1, 1))}  # of groups, by reward function

    def reward_of(function):
        return lambda prompts, **kwargs: [float(rows[number(p) % 2][function][i % 4]) for i, p in enumerate(prompts)]

    trainer = replaying(
        tmp_path,
        rewards=[reward_of(0), reward_of(1)],
        multi_objective_aggregation="normalize_then_sum",
        gradient_accumulation_steps=accumulation,
        compact_update=True,
    )
    advantages = torch.cat([tensors["advantages"] for tensors in trainer.tensors])
    assert ((advantages.abs() > 0) & (advantages.abs() < 1e-6)).any(), "the test shows nothing"
    *before, _ = trainer.batches
    logps = [values for batch in before for group in batch.generated for values in group.rollouts.behavior_logps]
    assert any(np.isnan(values).all() for values in logps)
    assert not any((values == 0).all() for values in logps)


def test_tools_are_called_once_and_replayed_with_their_masks(tmp_path):
    calls = []

    @functools.wraps(add)
    def counted(a, b):
        calls.append((a, b))
        return add(a, b)

    def reward(prompts, completions, **kwargs):
        """Sees the messages of the tool; some groups have zero variance."""
        answers = [[m["content"] for m in c if m["role"] == "tool"] for c in completions]
        return [float(int(a[0]) % 2) if a and number(p) % 3 else 0.0 for p, a in zip(prompts, answers)]

    options = {"max_steps": 6, "steps_per_generation": 1, "max_completion_length": 100}
    trainer = replaying(
        tmp_path, scripted_tool_calls(Watched), reward, trainer=tool_arguments(tool=counted), **options
    )
    assert any(b.replayed for b in trainer.batches)
    assert any(b.dropped for b in trainer.batches)
    generated = [g.rollouts for b in trainer.batches for g in b.generated]
    answers = [m for r in generated for completion in r.completions for m in completion if m["role"] == "tool"]
    assert len(calls) == len(answers) > 0
    for batch, tensors in zip(trainer.batches, trainer.tensors, strict=True):
        masks = [mask for g in batch.trained for mask in g.rollouts.tool_masks]
        assert any(not mask.all() for mask in masks)
        for row, mask in zip(tensors["tool_mask"], masks, strict=True):
            np.testing.assert_array_equal(row[: len(mask)].numpy(), mask)


@pytest.mark.parametrize("fields", [{}, LEFTOVER], ids=["replayed", "leftover"])
@pytest.mark.parametrize("threshold", [None, 100.0])
def test_the_log_probs_of_a_rollout_func_count_where_trls_loss_reads_them(tmp_path, fields, threshold):
    """Elsewhere they may be anything. What else it returns reaches the rewards."""

    def rollout_func(prompts, trainer):
        completions = [torch.randint(6, 60, (5,)).tolist() for _ in prompts]
        return {
            "prompt_ids": [trainer.processing_class(prompt)["input_ids"] for prompt in prompts],
            "completion_ids": completions,
            "logprobs": [[-4.0, None, -4.0, -4.0, -4.0] for _ in prompts],
            "luck": [sum(c) % 2 for c in completions],
        }

    def luck_reward(prompts, completion_ids, luck, **kwargs):
        assert luck == [sum(c) % 2 for c in completion_ids]
        return [float(v) if number(p) % 2 else 0.0 for p, v in zip(prompts, luck)]

    fields = {**fields, "off_policy_mask_threshold": threshold}
    trainer = replaying(tmp_path, rewards=luck_reward, trainer={"rollout_func": rollout_func}, **fields)
    reads = threshold is not None
    assert {("sampling_per_token_logps" in tensors) for tensors in trainer.tensors} == {reads}
    stale = [t for t in trainer.tensors if "replayed" in t]
    assert len(stale) >= 2
    for tensors in stale:
        behavior = tensors["behavior_per_token_logps"][tensors["replayed"]]
        assert behavior[:, [0, 2, 3, 4]].eq(-4).all() == reads
        assert behavior[:, 1].isnan().all() == reads, "what the sampler could not score has ratio 1"
