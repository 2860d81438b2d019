"""Features that have no test elsewhere."""

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import GRPOConfig, GRPOTrainer

from tests.factories import (
    DYNAMIC,
    OFF,
    SHARE,
    CountedRows,
    Watched,
    all_finite,
    assert_identical,
    even_length_reward,
    logged,
    run,
    tiny_tokenizer,
)
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer


def experts_model(tokenizer):
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32}
    sizes |= {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1, "initializer_range": 0.2}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3MoeConfig(**sizes, **experts, **ends)
    return Qwen3MoeForCausalLM(config)


def test_mixture_of_experts(tmp_path):
    tokenizer = tiny_tokenizer()

    def train(folder, trainer_class=DataEfficientGRPOTrainer, config_class=DataEfficientGRPOConfig, **options):
        trainer = {"model": experts_model(tokenizer), "processing_class": tokenizer}
        options = {"rewards": even_length_reward, "max_steps": 6} | options
        return run(trainer_class, config_class, tmp_path / folder, trainer=trainer, **options)

    reference = train("a", GRPOTrainer, GRPOConfig)
    ours = train("b", CountedRows, **{**OFF, "skip_zero_advantage": True})
    assert_identical(reference, ours)
    assert set(ours.in_loss) == {8}, "the loss of the router counts every row"
    assert all(value > 0 for (value,) in logged(ours, "aux_loss"))
    replaying = train("c", Watched, **SHARE, **DYNAMIC, per_device_train_batch_size=16)
    assert any(batch.replayed for batch in replaying.batches)
    assert all(value > 0 for (value,) in logged(replaying, "aux_loss"))
    assert all_finite(replaying)
