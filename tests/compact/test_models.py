"""The compact update with models of several kinds: as TRL's, or what is not exact is off, with a warning."""

import copy

import numpy as np
import pytest
import torch
import trl.trainer.utils
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from trl import GRPOTrainer

from tests.compact.test_compaction import assert_same_weights
from tests.factories.comparison import messages
from tests.factories.tiny import logged, run, tiny_tokenizer
from tests.factories.training import SHARES_PROMPTS, CountedRows
from trl_dataeff.compact.exact import has_fused_head


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
GPT2_SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2, "n_positions": 256}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LAYERS = ["sliding_attention", "full_attention"]
#: Configurations, and what is switched off
MODELS = {
    "llama": (LlamaConfig, SIZES, ()),
    "llama, 16 layers": (LlamaConfig, {**SIZES, "num_hidden_layers": 16}, ()),
    "qwen2": (Qwen2Config, SIZES, ()),
    "qwen3": (Qwen3Config, {**SIZES, "head_dim": 8}, ()),
    "mistral, window of 6": (MistralConfig, {**SIZES, "sliding_window": 6}, ()),
    "gemma3": (Gemma3TextConfig, {**SIZES, "head_dim": 8, "sliding_window": 6, "layer_types": LAYERS}, ()),
    "experts": (Qwen3MoeConfig, {**SIZES, **EXPERTS, "head_dim": 8}, ()),
    "gpt2": (GPT2Config, {**GPT2_SIZES, **NO_DROPOUT}, ("padding of prompts",)),
    "gpt2 with dropout": (
        GPT2Config,
        {**GPT2_SIZES, **dict.fromkeys(NO_DROPOUT, 1e-9)},
        ("repeated differs", "padding of prompts"),
    ),
    "mamba": (MambaConfig, {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}, None),
    "falcon-h1": (FalconH1Config, {**SIZES, **MAMBA}, None),
}


def prompts_of_many_lengths(n: int = 24) -> Dataset:
    return Dataset.from_dict({"prompt": [f"{i:02d}:" + "1+" * (i % 7) + "2=" for i in range(n)]})


def reward(prompts, completion_ids, **kwargs):
    """A third of the prompts have zero variance."""
    return [float(sum(ids) % 2) if int(p[:2]) % 3 else 1.0 for p, ids in zip(prompts, completion_ids)]


def model_of(name: str):
    config_class, fields, _ = MODELS[name]
    tokenizer = tiny_tokenizer()
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_class(vocab_size=len(tokenizer), **fields, **ends))


def train(folder, trainer_class, model, peft_config=None, **options):
    trainer = {"model": copy.deepcopy(model), "train_dataset": prompts_of_many_lengths(), "peft_config": peft_config}
    batches = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "max_completion_length": 24}
    optimizer = {"optim": "sgd", "learning_rate": 0.1, "max_steps": 3, "num_generations": 8}
    return run(folder, trainer_class, rewards=reward, trainer=trainer, **{**batches, **optimizer, **options})


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_trl(name, tmp_path, caplog_transformers):
    model = model_of(name)
    # Dropout draws random numbers for each row, so that later samples differ
    steps = {"max_steps": 1} if "dropout" in name else {}
    plain = train(tmp_path / "a", GRPOTrainer, model, **steps)
    assert not messages(caplog_transformers, "compact_update")
    ours = train(tmp_path / "b", CountedRows, model, compact_update=True, **steps)
    assert_same_weights(plain, ours, tolerance=2e-5)
    switched_off = MODELS[name][2]
    warnings = messages(caplog_transformers, "compact_update")
    if switched_off is None:  # a state-space model: what is switched off depends on its kernels
        assert all("padding" in text for text in warnings)
    else:
        assert len(warnings) == len(switched_off)
        assert all(part in text for part, text in zip(switched_off, warnings, strict=True))
    tokens, saved = zip(*logged(ours, "dataeff/update/tokens", "dataeff/update/tokens_saved"))
    assert sum(ours.tokens_in_loss) == sum(tokens)
    widths = [t["prompt_ids"].size(1) + t["completion_ids"].size(1) for t in ours.tensors]
    assert [32 * width * (1 - share) for width, share in zip(widths, saved)] == pytest.approx(tokens)
    assert (max(saved) > 0.4) == (name != "experts"), "the loss of the router counts every row"


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("adapter", [None, LoraConfig(r=4, target_modules=["q_proj", "v_proj"])], ids=["all", "lora"])
def test_with_gradient_checkpointing_as_much_is_left_out(adapter, use_reentrant, tmp_path):
    model = model_of("llama")
    again = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant}}
    plain = train(tmp_path / "a", GRPOTrainer, model, peft_config=copy.deepcopy(adapter), **again)
    ours = train(tmp_path / "b", CountedRows, model, peft_config=copy.deepcopy(adapter), compact_update=True, **again)
    without = train(tmp_path / "c", CountedRows, model, peft_config=copy.deepcopy(adapter), compact_update=True)
    assert_same_weights(plain, ours)
    assert ours.tokens_in_loss == without.tokens_in_loss


def test_metrics_of_the_loss_are_means_over_tokens_however_rows_are_dealt(tmp_path):
    """As TRL's are if an optimizer step is a single micro-batch."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    trainer = {"model": model_of("llama"), "train_dataset": prompts_of_many_lengths(), "peft_config": lora}

    def every_group_has_a_gradient(completion_ids, **kwargs):
        return [float(i % 8) for i in range(len(completion_ids))]

    def metrics(folder, trainer_class, rows, **options):
        batches = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 32 // rows}
        fields = {"num_generations": 8, "max_completion_length": 24, "beta": 0.1, "max_steps": 3, "num_iterations": 2}
        arguments = {**trainer, "model": copy.deepcopy(trainer["model"])}
        options = {**batches, **fields, "learning_rate": 3e-2, **options}
        instance = run(folder, trainer_class, rewards=every_group_has_a_gradient, trainer=arguments, **options)
        return np.array(logged(instance, "entropy", "kl", "clip_ratio/region_mean", "loss"))

    whole = metrics(tmp_path / "a", GRPOTrainer, 32)
    ours = metrics(tmp_path / "b", CountedRows, 8, compact_update=True)
    assert (whole[:, [0, 3]] != 0).all()
    assert (whole[:, [1, 2]] != 0).any(axis=0).all()
    np.testing.assert_allclose(ours, whole, rtol=2e-4, atol=1e-6)


def test_a_models_own_gradient_checkpointing(tmp_path):
    model = model_of("llama")
    model.gradient_checkpointing_enable()
    plain = train(tmp_path / "a", GRPOTrainer, model)
    ours = train(tmp_path / "b", CountedRows, model, compact_update=True)
    assert_same_weights(plain, ours)


FACTORS = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 16}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, **FACTORS}
ROPES = {
    "dynamic": (LlamaConfig, {"max_position_embeddings": 16, "rope_parameters": DYNAMIC_ROPE}),
    "longrope": (
        Phi3Config,
        {"max_position_embeddings": 32, "original_max_position_embeddings": 16, "rope_parameters": LONG_ROPE},
    ),
}


@pytest.mark.parametrize("name", ROPES)
def test_positions_that_depend_on_the_width_exclude_cutting(tmp_path, name):
    config_class, fields = ROPES[name]
    tokenizer = tiny_tokenizer()
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(vocab_size=len(tokenizer), **SIZES, **fields, **ends))
    plain = train(tmp_path / "a", GRPOTrainer, model)
    ours = train(tmp_path / "b", CountedRows, model, compact_update=True)
    assert_same_weights(plain, ours)
    assert max(logged(ours, "dataeff/update/tokens_saved"))[0] > 0.3, "rows without a gradient are left out"


ADAPTERS = {
    "prompt tuning": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "activated lora": LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        target_modules=["q_proj"],
        alora_invocation_tokens=tiny_tokenizer()(":")["input_ids"],
    ),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_that_work_on_whole_rows(tmp_path, name):
    model = model_of("llama")
    plain = train(tmp_path / "a", GRPOTrainer, model, peft_config=copy.deepcopy(ADAPTERS[name]))
    ours = train(tmp_path / "b", CountedRows, model, peft_config=ADAPTERS[name], compact_update=True)
    assert_same_weights(plain, ours)


def trained_like(model):
    """The model with logits that are four times as large: a pretrained model is surer than one of random weights."""
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(4.0)
    return model


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama, 16 layers", "llama", "gpt2"])
def test_in_bfloat16_what_changes_no_more_than_rounding_is_left_out(name, weights, tmp_path, caplog_transformers):
    """With many layers, rounding changes log-probs by several hundredths; learned positions change them by more."""
    model = trained_like(model_of(name)).to(weights)
    ours = train(tmp_path, CountedRows, model, compact_update=True, bf16=True, max_steps=1)
    switched_off = MODELS[name][2]
    warnings = messages(caplog_transformers, "compact_update")
    assert len(warnings) == len(switched_off)
    assert all(part in text for part, text in zip(switched_off, warnings, strict=True))
    (saved,) = logged(ours, "dataeff/update/tokens_saved")
    assert max(saved) > 0.4


class MeansOfChunks(torch.nn.Module):
    """Adds the mean of each chunk of 40 tokens to its tokens, if there are so many."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, states, *args, **kwargs):
        states = self.layer(states, *args, **kwargs)
        whole = states.size(1) // 40 * 40
        chunks = states[:, :whole].unflatten(1, (-1, 40))
        mixed = (chunks + chunks.mean(2, keepdim=True)).flatten(1, 2)
        return torch.cat([mixed, states[:, whole:]], dim=1)


def test_a_layer_that_mixes_tokens_of_long_sequences_is_found(tmp_path, caplog_transformers):
    """No row is long enough for it, but the sequence of all tokens is."""
    model = model_of("llama")
    model.model.layers[0].mlp = MeansOfChunks(model.model.layers[0].mlp)
    short = {"max_completion_length": 16}
    plain = train(tmp_path / "a", GRPOTrainer, model, **short)
    ours = train(tmp_path / "b", CountedRows, model, compact_update=True, **short)
    assert_same_weights(plain, ours, tolerance=2e-5)
    if SHARES_PROMPTS:
        (warning,) = messages(caplog_transformers, "switched off, because")
        assert "repeated prompts" in warning


@pytest.mark.parametrize("name", ["gpt2", "falcon-h1"])
def test_a_reference_of_another_architecture(name, tmp_path):
    """What was checked is the policy."""
    model = model_of("llama")
    model.save_pretrained(tmp_path / "policy")  # which TRL loads as a reference
    model.config._name_or_path = str(tmp_path / "policy")
    weights = []
    for trainer_class in (GRPOTrainer, CountedRows):
        own = {} if trainer_class is GRPOTrainer else {"compact_update": True}
        options = {"optim": "sgd", "learning_rate": 0.1, "max_steps": 3, "num_generations": 8, "beta": 0.5}
        batches = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "max_completion_length": 24}
        trainer = {"model": copy.deepcopy(model), "train_dataset": prompts_of_many_lengths()}
        made = run(
            tmp_path / trainer_class.__name__,
            trainer_class,
            rewards=reward,
            train=False,
            trainer=trainer,
            **{**options, **batches, **own},
        )
        made.ref_model = model_of(name).eval()
        if has_fused_head():
            trl.trainer.utils.add_fused_lm_head(made.ref_model)
        made.train()
        weights.append(made)
    assert_same_weights(*weights, tolerance=2e-5)
