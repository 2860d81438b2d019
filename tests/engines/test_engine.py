"""
With `use_vllm=True`: identical to TRL with everything off; the sampler's weights, log-probs and corrections otherwise.
"""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from peft import LoraConfig
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from tests.compact.test_compaction import assert_same_weights
from tests.factories.comparison import OFF, assert_identical, assert_same_end, history
from tests.factories.configurations import FILL, SHARE
from tests.factories.tiny import even_length_reward, logged
from tests.factories.tools import scripted_tool_calls, tool_arguments
from tests.factories.training import Checked, CountedRows, Watched, logp_differences, mixed_reward
from trl_dataeff import DataEfficientGRPOTrainer


REPLAY = {**SHARE, "per_device_train_batch_size": 16}
DYNAMIC = {"max_rollout_rounds": 4, "rewards": mixed_reward}
FILLED = {**FILL, "rewards": mixed_reward, "per_device_train_batch_size": 16}
TOOLS = {
    "max_completion_length": 100,  # room for a call, its result and some words
    "per_device_train_batch_size": 4,
    "num_generations": 2,
    "max_tool_calling_iterations": 1,
    "vllm_max_model_length": 1024,
    "trainer": tool_arguments(),
}
LORA = {"trainer": {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}, "learning_rate": 1e-2}
KINDS = {
    "plain": {},
    "steps_per_generation": {"steps_per_generation": 4},
    "num_iterations": {"num_iterations": 2},
    "lora": LORA,
}


@pytest.mark.parametrize("kind", [*KINDS, "tools"])
def test_off_is_grpo(kind, with_engine, tmp_path):
    """Tools in four steps, the others in eight."""
    tools = {**TOOLS, "rewards": even_length_reward, "max_steps": 4}
    options = tools if kind == "tools" else {"max_steps": 8, **KINDS[kind]}
    policy = scripted_tool_calls if kind == "tools" else lambda trainer_class: trainer_class
    reference = with_engine(tmp_path / "a", policy(GRPOTrainer), **options)
    ours = with_engine(tmp_path / "b", policy(DataEfficientGRPOTrainer), **options, **OFF)
    assert_identical(reference, ours)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["off", "dynamic", "replay", "fill"])
def test_log_probs_of_sampler_and_training_agree_after_updates(kind, method, with_engine, tmp_path):
    options = {"off": {}, "dynamic": DYNAMIC, "replay": REPLAY, "fill": FILLED}[method]
    trainer = with_engine(tmp_path, Watched, **options, **KINDS[kind])
    if all("old_per_token_logps" in tensors for tensors in trainer.tensors):
        assert max(logp_differences(trainer)) < 1e-4
    differences = [value for (value,) in logged(trainer, "sampling/sampling_logp_difference/max") if value is not None]
    assert max(differences) < 1e-4
    weights = dict(trainer.model.named_parameters())
    assert any(log.get("grad_norm") for log in trainer.state.log_history)
    assert all(value.isfinite().all() for value in weights.values())


@pytest.mark.parametrize("fields", [{}, {"steps_per_generation": 4}, {"num_iterations": 2}])
def test_one_sync_per_generation_batch_under_dynamic_sampling(fields, with_engine, tmp_path, monkeypatch):
    engine_class = grpo_trainer.VLLMGeneration  # the test double, or TRL's
    synced, plain = [], engine_class.sync_weights
    monkeypatch.setattr(engine_class, "sync_weights", lambda self: (synced.append(1), plain(self))[1])
    trainer = with_engine(tmp_path, Watched, **DYNAMIC, **fields)
    rounds = [batch.rounds for batch in trainer.batches]
    assert max(rounds) > 1
    assert len(synced) == sum(n > 0 for n in rounds)


def test_a_second_train_generates_with_the_present_weights(with_engine, tmp_path):
    """TRL counts steps to know whether to sync, and a second call of `train` begins with the first one's last step."""

    class Twice(Watched):
        def train(self, *args, **kwargs):
            super().train(*args, **kwargs)
            return super().train(*args, **kwargs)

    trainer = with_engine(tmp_path, Twice, max_steps=1, learning_rate=1e-1, rewards=even_length_reward)
    assert len(trainer.tensors) == 2
    assert max(logp_differences(trainer)) < 1e-4


@pytest.mark.parametrize("method", [DYNAMIC, REPLAY, FILLED, {**DYNAMIC, "steps_per_generation": 4, "max_steps": 8}])
def test_resume_is_exact(method, with_engine, tmp_path):
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, **method}
    whole = with_engine(tmp_path / "whole", **options)
    resumed = with_engine(tmp_path / "resumed", **options, resume=str(tmp_path / "whole" / "checkpoint-3"))
    assert history(resumed.state.log_history) == history(whole.state.log_history)
    assert_same_end(resumed, whole)


def test_tools_are_replayed_with_the_samplers_log_probs(with_engine, tmp_path):
    trainer = with_engine(tmp_path, scripted_tool_calls(Watched), **{**REPLAY, **TOOLS, "max_steps": 4})
    assert any("replayed" in tensors for tensors in trainer.tensors)
    for group in trainer.collector.buffer.groups:
        lengths = [len(tokens) for tokens in group.rollouts.completion_tokens]
        assert [len(values) for values in group.rollouts.sampling_logps] == lengths
    masks = [mask for group in trainer.collector.buffer.groups for mask in group.rollouts.tool_masks]
    assert any(not mask.all() for mask in masks), "no tool has answered"


def test_a_prompt_that_leaves_room_for_one_token(with_engine, tmp_path):
    trainer = with_engine(tmp_path, Watched, vllm_max_model_length=8, max_steps=1)
    assert trainer.tensors[0]["completion_ids"].shape[1] == 1


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
@pytest.mark.parametrize("synced", [True, False])
def test_trls_correction_and_ours_never_both_apply_to_a_row(mode, synced, with_engine, tmp_path, monkeypatch):
    """Without the sync TRL's ratio is not 1, and a row that had both would show. With it TRL's metrics, over fresh
    rows, do not look like a sync that does not work: the sampler of replayed rows was another policy.
    """
    if not synced:
        monkeypatch.setattr(grpo_trainer.VLLMGeneration, "sync_weights", lambda self: None)
    options = {"vllm_importance_sampling_mode": mode, "replay_ratio_cap": 2.0, "learning_rate": 1e-2}
    trainer = with_engine(tmp_path, Checked, **{**REPLAY, **options})
    assert trainer.checked >= 2
    ratios = torch.cat([t["importance_sampling_ratio"][~t["replayed"]] for t in trainer.tensors if "replayed" in t])
    assert len(ratios) > 20
    assert ((ratios - 1).abs() > 1e-2).any() == (not synced)
    names = ("importance_sampling_ratio/min", "importance_sampling_ratio/max", "sampling_logp_difference/max")
    metrics = np.array(logged(trainer, *(f"sampling/{name}" for name in names)))
    assert np.allclose(metrics, [1, 1, 0], atol=[1e-3, 1e-3, 1e-4]) == synced


def test_replayed_rows_keep_their_samplers_log_probs(with_engine, tmp_path):
    sampled = {}  # by the tokens of a completion, when it was generated

    class Noted(Watched):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            completions, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            for prompt, ids, values in zip(prompt_ids, completions, logprobs):
                sampled[tuple(prompt), tuple(ids), self.state.global_step] = values
            return completions, logprobs

    trainer = with_engine(tmp_path, Noted, **REPLAY)
    seen = 0
    for batch, tensors in zip(trainer.batches, trainer.tensors):
        row = 0
        for group in batch.trained:
            prompt = tuple(group.rollouts.prompt_tokens.tolist())
            for tokens in group.rollouts.completion_tokens:
                expected = sampled[prompt, tuple(tokens.tolist()), group.step]
                got = tensors["sampling_per_token_logps"][row, : len(tokens)]
                np.testing.assert_allclose(got, expected, atol=1e-6)
                if batch.origins[group] != "fresh":
                    behavior = tensors["behavior_per_token_logps"][row, : len(tokens)]
                    np.testing.assert_allclose(behavior, expected, atol=1e-6)
                    seen += 1
                row += 1
    assert seen > 20


class Private(DataEfficientGRPOTrainer):
    """
    Has no method that gets TRL's batch, so that TRL's pass for old log-probs may be left out.

    Attributes:
        without_gradient: rows of each pass for old log-probs.
        prepared: each generation batch with the groups that its rows belong to, where groups are used again.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.without_gradient = []
        self.prepared = []
        self.model.register_forward_pre_hook(self._count, with_kwargs=True)
        if self._dataeff_correction is not None:
            prepare = self._dataeff_correction.prepare
            self._dataeff_correction.prepare = partial(self._note_prepared, prepare)

    def _count(self, module, args, kwargs):
        is_for_logps = "labels" in kwargs or kwargs.get("use_cache") is False  # the latter below TRL 1.15
        if is_for_logps and not torch.is_grad_enabled():
            self.without_gradient.append(len(kwargs["input_ids"]))

    def _note_prepared(self, prepare, batch, groups, **kwargs):
        metrics = prepare(batch, groups, **kwargs)
        self.prepared.append((batch, groups))
        return metrics


MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@pytest.mark.parametrize(("mode", "accumulated"), [*((mode, 1) for mode in MODES), (MODES[0], 2), (MODES[2], 2)])
def test_the_ratio_that_the_loss_computes_is_trls(mode, accumulated, with_engine, tmp_path, monkeypatch):
    """
    Without the sync it is not 1, and some are beyond the bounds. TRL's pass for old log-probs is left out once the
    model was checked. Metrics are over all micro-batches of a step.
    """
    monkeypatch.setattr(grpo_trainer.VLLMGeneration, "sync_weights", lambda self: None)
    options = {"vllm_importance_sampling_mode": mode, "rewards": even_length_reward, "max_steps": 8}
    options |= {"vllm_importance_sampling_clip_min": 0.8, "vllm_importance_sampling_clip_max": 1.2}
    options |= {"optim": "sgd", "learning_rate": 0.3, "loss_type": "dr_grpo"}
    options |= {"per_device_train_batch_size": 8 // accumulated, "gradient_accumulation_steps": accumulated}
    plain = with_engine(tmp_path / "a", GRPOTrainer, **options)
    ours = with_engine(tmp_path / "b", Private, **options, compact_update=True)
    assert sum(ours.without_gradient) == 8
    assert_same_weights(plain, ours, 1e-5)
    names = [f"sampling/importance_sampling_ratio/{statistic}" for statistic in ("min", "mean", "max")]
    names.append("sampling/sampling_logp_difference/max")
    expected = np.array(logged(plain, *names))
    found = np.array(logged(ours, *names))
    assert (np.abs(expected[:, :3] - 1) > 0.1).any()
    # Ours is over the rows that the update computes: those of groups with a gradient
    whole = [share == 1 for (share,) in logged(ours, "dataeff/effective_ratio")]
    assert sum(whole) >= 2
    np.testing.assert_allclose(found[whole], expected[whole], rtol=1e-4, atol=1e-4)


def test_in_a_training_loop_of_ones_own_each_micro_batch_logs_the_metrics_of_its_ratio(with_engine, tmp_path):
    trainer = with_engine(tmp_path, Private, rewards=even_length_reward, compact_update=True, max_steps=4)
    values = trainer._metrics["train"]["sampling/importance_sampling_ratio/mean"]
    before = len(values)
    trainer.model.train()
    for rows in itertools.islice(trainer.get_train_dataloader(), 3):
        inputs = trainer._prepare_inputs(rows)
        assert "importance_sampling_ratio" not in inputs
        trainer.accelerator.backward(trainer.compute_loss(trainer.model, inputs))
        trainer._step += 1  # which TRL's training step does
    assert len(values) == before + 3


def test_a_subclass_that_may_read_the_ratio_finds_it(with_engine, tmp_path):
    """TRL's pass is made for it."""
    trainer = with_engine(tmp_path, CountedRows, rewards=even_length_reward, compact_update=True, max_steps=2)
    assert sum(trainer.old_logps_rows) == 2 * 8
    assert all("importance_sampling_ratio" in tensors for tensors in trainer.tensors)


@pytest.mark.parametrize("synced", [True, False])
def test_metrics_of_the_ratio_that_the_loss_computes_are_over_fresh_rows(synced, with_engine, tmp_path, monkeypatch):
    """The sampler of replayed rows was another policy. Over them, a sync that works would look as if it did not."""
    if not synced:
        monkeypatch.setattr(grpo_trainer.VLLMGeneration, "sync_weights", lambda self: None)
    options = {**REPLAY, "compact_update": True, "learning_rate": 1e-2}
    trainer = with_engine(tmp_path, Private, **options)
    assert trainer.without_gradient == [16]
    assert any(batch["replayed"].any() for batch, _ in trainer.prepared if "replayed" in batch)
    names = ("importance_sampling_ratio/min", "importance_sampling_ratio/max", "sampling_logp_difference/max")
    metrics = np.array(logged(trainer, *(f"sampling/{name}" for name in names)))
    assert np.allclose(metrics, [1, 1, 0], atol=[1e-3, 1e-3, 1e-4]) == synced


@pytest.mark.parametrize("trainer_class", [Private, Watched])
def test_what_the_mask_excluded_stays_out_when_it_is_replayed(trainer_class, with_engine, tmp_path, monkeypatch):
    """In the loss, or in TRL's pass where a subclass may read what that computes."""
    monkeypatch.setattr(grpo_trainer.VLLMGeneration, "sync_weights", lambda self: None)
    options = {**FILLED, "vllm_importance_sampling_clip_max": 1.01, "vllm_importance_sampling_clip_min": 0.99}
    noting = type("Noting", (trainer_class, Private), {}) if trainer_class is Watched else Private
    trainer = with_engine(tmp_path, noting, **options, learning_rate=1e-2, max_steps=12)
    in_loss = trainer_class is Private
    seen = 0
    in_batch = ["importance_sampling_ratio" in batch for batch, _ in trainer.prepared]
    assert in_batch == sorted(in_batch, reverse=True)  # TRL's pass is made until the model was checked
    assert in_batch[-1] == (not in_loss)
    for batch, groups in trainer.prepared:
        for member in groups:
            if member.origin == "replayed":
                excluded = torch.tensor(member.rollouts.excluded)
                assert not batch["advantages"][member.rows][excluded].any()
                seen += int(excluded.sum())
    assert seen > 3
