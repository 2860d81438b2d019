"""The page docs/compatibility.md, and features that have no test elsewhere."""

import re
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import GRPOConfig, GRPOTrainer

from tests.factories import OFF, Watched, all_finite, assert_identical, even_length_reward, logged, run, tiny_tokenizer
from tests.factories.compatibility import FEATURES, STATES
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer


ROOT = Path(__file__).parents[1]
ROWS = [row for rows in FEATURES.values() for row in rows]


def test_the_page_is_current():
    import importlib.util

    spec = importlib.util.spec_from_file_location("compatibility_page", ROOT / "docs" / "compatibility.py")
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    page = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    assert page == program.page(), "python docs/compatibility.py --write"


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_every_state_is_known_and_every_test_exists(row):
    name, off, on, tests = row
    assert {off, on} <= {*STATES, "-"}
    assert tests or {off, on} == {"passed on"}, f"{name}: no test"
    for test in tests:
        path, function = test.split("::")
        assert re.search(rf"^def {function}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), test


def experts_model(tokenizer):
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        router_aux_loss_coef=0.1,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3MoeForCausalLM(config)


def test_mixture_of_experts(tmp_path):
    tokenizer = tiny_tokenizer()

    def train(folder, trainer_class=DataEfficientGRPOTrainer, config_class=DataEfficientGRPOConfig, **options):
        trainer = {"model": experts_model(tokenizer), "processing_class": tokenizer}
        options = {"rewards": even_length_reward, "max_steps": 6, **options}
        return run(trainer_class, config_class, tmp_path / folder, trainer=trainer, **options)

    reference = train("a", GRPOTrainer, GRPOConfig)
    ours = train("b", **OFF)
    assert_identical(reference, ours)
    assert all(value > 0 for (value,) in logged(ours, "aux_loss"))
    options = {"replay_fraction": 0.5, "dynamic_sampling": True, "per_device_train_batch_size": 16}
    replaying = train("c", Watched, **options)
    assert any(batch.replayed for batch in replaying.batches)
    assert all(value > 0 for (value,) in logged(replaying, "aux_loss"))
    assert all_finite(replaying)
