"""Replayed rollouts with `use_vllm=True`: whose log-probs they have, and which correction applies to which row."""

import numpy as np
import pytest
import torch
from trl.trainer import grpo_trainer

from tests.factories import SHARE, Checked, Watched, logged


REPLAY = {**SHARE, "per_device_train_batch_size": 16}


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
@pytest.mark.parametrize("synced", [True, False])
def test_trls_correction_and_ours_never_both_apply_to_a_row(mode, synced, with_engine, tmp_path, monkeypatch):
    """
    Without the sync TRL's ratio is not 1, and a row that had both would show. With it TRL's metrics, over fresh rows, do not look
    like a sync that does not work: the sampler of replayed rows was another policy.
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
                if batch.origins[id(group)] != "fresh":
                    behavior = tensors["behavior_per_token_logps"][row, : len(tokens)]
                    np.testing.assert_allclose(behavior, expected, atol=1e-6)
                    seen += 1
                row += 1
    assert seen > 20
