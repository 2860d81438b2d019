"""Prompts and models to embed, and their embeddings calculated one at a time."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertModel

from tests.factories.tiny import tiny_model, tiny_tokenizer


needs_sentence_transformers = pytest.mark.skipif(
    find_spec("sentence_transformers") is None, reason="needs sentence-transformers"
)

VARIED_TEXTS = ["1+1=", "a", "What is the third prime number after 12?", "xy" * 30, "0", "12+30="]


def varied_dataset() -> Dataset:
    return Dataset.from_dict({"prompt": VARIED_TEXTS})


def embedding_alone(model, ids) -> np.ndarray:
    """A prompt's embedding by a plain forward of its own: no padding, the model's own list of hidden states."""
    training = model.training
    model.eval()
    with torch.no_grad():
        outputs = model(input_ids=torch.tensor([ids]), output_hidden_states=True)
    model.train(training)
    return outputs.hidden_states[-1][0].mean(dim=0).numpy()


def assert_embeddings_close(embeddings, expected):
    np.testing.assert_allclose(np.asarray(embeddings, dtype=np.float32), np.stack(expected), atol=2e-3, rtol=2e-3)


def tiny_lora(seed, **options):
    torch.manual_seed(seed)
    return get_peft_model(tiny_model(), LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5, **options))


def save_bert(folder: Path, without: str = "none", **modules) -> str:
    """A small BERT whose tokens are single characters. `modules`: what sentence-transformers writes beside it."""
    tokenizer = tiny_tokenizer(chat_template=None)
    tokenizer.padding_side = "right"  # as those of encoders
    state = torch.get_rng_state()
    torch.manual_seed(3)
    size = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertModel(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=80, **size))
    torch.set_rng_state(state)
    kept = {name: value for name, value in model.state_dict().items() if without not in name}
    model.save_pretrained(folder, state_dict=kept)
    tokenizer.save_pretrained(folder)
    if modules:
        kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")])]
        listed = [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (path, kind) in enumerate(kinds)
        ]
        (folder / "modules.json").write_text(json.dumps(listed))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 24, **modules}))
        (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 20}')
    return str(folder)


def bert_states(folder, text, limit=None):
    model = BertModel.from_pretrained(folder).eval()
    with torch.no_grad():
        ids = torch.tensor([tiny_tokenizer()(text)["input_ids"][:limit]])
        return model(ids).last_hidden_state[0].numpy()
