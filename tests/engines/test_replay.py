"""Replayed rollouts with `use_vllm=True`: whose log-probs they have, and which correction applies to which row."""

import numpy as np
import pytest
import torch
from trl.trainer import grpo_trainer

from tests.factories import SHARE, Watched, logged


REPLAY = {**SHARE, "per_device_train_batch_size": 16}


class Recomputed(Watched):
    """Computes the loss of each micro-batch a second time, from what the batch says of its rows."""

    def __init__(self, *args, **kwargs):
        self.losses, self.rows, self.corrected = [], 0, 0
        super().__init__(*args, **kwargs)

    def _compute_loss(self, model, inputs):
        given = dict(inputs)
        loss = super()._compute_loss(model, inputs)
        self.losses.append((loss.item(), self._expected(given)))
        return loss

    @torch.no_grad()
    def _expected(self, inputs) -> float:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        mask = inputs["completion_mask"]
        logps = super()._get_per_token_logps_and_entropies(self.model, ids, attention, mask.size(1))[0]
        loss = 0.0
        for row, advantage in enumerate(inputs["advantages"].tolist()):
            replayed = "replayed" in inputs and bool(inputs["replayed"][row])
            self.rows += 1
            self.corrected += replayed
            old = inputs["behavior_per_token_logps" if replayed else "old_per_token_logps"][row]
            correction = 1.0 if replayed else inputs["importance_sampling_ratio"][row]
            ratio = (logps[row] - old).exp()
            objective = torch.minimum(
                ratio * advantage, ratio.clamp(1 - self.epsilon_low, 1 + self.epsilon_high) * advantage
            )
            if replayed and advantage < 0:
                objective = objective.clamp(min=self.args.replay_ratio_cap * advantage)
            loss -= (objective * correction)[mask[row].bool()].sum().item()
        scale = self.current_gradient_accumulation_steps / self.args.steps_per_generation
        return loss / (inputs["num_items_in_batch"].item() * scale)


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
@pytest.mark.parametrize("synced", [True, False])
def test_trls_correction_and_ours_never_both_apply_to_a_row(mode, synced, with_engine, tmp_path, monkeypatch):
    """Without the sync TRL's ratio is not 1, and a row that had both would show."""
    if not synced:
        monkeypatch.setattr(grpo_trainer.VLLMGeneration, "sync_weights", lambda self: None)
    options = {"vllm_importance_sampling_mode": mode, "replay_ratio_cap": 2.0, "learning_rate": 1e-2}
    trainer = with_engine(tmp_path, Recomputed, **{**REPLAY, **options})
    losses = np.array(trainer.losses)
    np.testing.assert_allclose(losses[:, 0], losses[:, 1], rtol=1e-4, atol=1e-5)
    assert 0 < trainer.corrected < trainer.rows
    ratios = torch.cat([t["importance_sampling_ratio"][~t["replayed"]] for t in trainer.tensors if "replayed" in t])
    assert ((ratios - 1).abs() > 1e-2).any() == (not synced)


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


def test_trls_metrics_of_sampling_cover_fresh_rows(with_engine, tmp_path):
    """Else the ratio of replayed rows, whose sampler was another policy, looks like a sync that does not work."""
    trainer = with_engine(tmp_path, Watched, **{**REPLAY, "learning_rate": 1e-2})
    assert sum(t["replayed"].sum().item() for t in trainer.tensors if "replayed" in t) > 20
    ratios = logged(trainer, *(f"sampling/importance_sampling_ratio/{name}" for name in ("min", "mean", "max")))
    np.testing.assert_allclose(ratios, np.ones((6, 3)), atol=1e-3)
    assert max(*logged(trainer, "sampling/sampling_logp_difference/max"))[0] < 1e-4
