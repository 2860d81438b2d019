"""Log-probabilities of the policy that sampled a group."""

from types import SimpleNamespace

import numpy as np
import torch

from tests.factories import make_group, tiny_model
from trl_dataeff.replay.logprobs import behavior_tensors, keep_behavior_logps


class FakeTrainer:
    """As much of a trainer as `keep_behavior_logps` uses; counts forwards."""

    def __init__(self, rank: int):
        self.accelerator = SimpleNamespace(process_index=rank, num_processes=2, device=torch.device("cpu"))
        self.args = SimpleNamespace(per_device_train_batch_size=8, gradient_checkpointing_kwargs=None, use_vllm=False)
        self.model, self._tokenizer = tiny_model(), SimpleNamespace(pad_token_id=0)
        self.forwards = 0

    def _get_per_token_logps_and_entropies(self, model, ids, mask, keep, batch_size):
        self.forwards += 1
        return -ids[:, -keep:].float(), None, None


def test_processes_make_equally_many_forwards_for_their_surplus():
    """A sharded model's forward is a collective: a process without surplus has to take part."""
    for rank, expected in ((0, 3), (1, 3)):
        groups = [make_group(owner=0) for _ in range(3)] + [make_group(owner=1)]
        for group in groups:
            if group.owner != rank:
                group.rollouts = None
        trainer = FakeTrainer(rank)
        keep_behavior_logps(trainer, groups, spare=make_group(owner=rank))
        assert trainer.forwards == expected
        for group in groups:
            if group.owner == rank:
                for logps, tokens in zip(group.rollouts.behavior_logps, group.rollouts.completion_tokens, strict=True):
                    np.testing.assert_array_equal(logps, -tokens.astype(np.float32))


def test_the_samplers_own_logps_come_first():
    sampled = [np.array([-0.5], np.float32), np.array([-0.5, -0.25], np.float32)]
    policy = [np.array([-9.0], np.float32), np.array([-9.0, -9.0], np.float32)]
    carried = make_group(sampling_logps=sampled, behavior_logps=policy)
    batch = behavior_tensors([make_group(), carried], [carried], torch.zeros(4, 2))
    assert batch["replayed"].tolist() == [False, False, True, True]
    np.testing.assert_array_equal(batch["behavior_per_token_logps"][3], [-0.5, -0.25])
    assert batch["behavior_per_token_logps"][:2].isnan().all()
