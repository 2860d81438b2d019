"""Embeddings by pretrained models that are named by their path."""

import sys
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from transformers import RobertaConfig, RobertaModel

from tests.factories import (
    VARIED_TEXTS,
    assert_embeddings_close,
    bert_states,
    chat_dataset,
    needs_sentence_transformers,
    save_bert,
    save_tiny,
    tiny_tokenizer,
    varied_dataset,
)
from trl_dataeff.difficulty.embedding import EmbeddingError


@needs_sentence_transformers
def test_an_encoder_by_path(embed, tmp_path):
    folder = save_bert(tmp_path / "bert")
    embeddings = embed(varied_dataset(), folder)
    assert_embeddings_close(embeddings, [bert_states(folder, text).mean(axis=0) for text in VARIED_TEXTS])
    joined = Dataset.from_list(
        [{"prompt": [{"role": "system", "content": "be"}, {"role": "user", "content": text}]} for text in VARIED_TEXTS]
    )
    assert_embeddings_close(
        embed(joined, folder), [bert_states(folder, f"be\n{text}").mean(axis=0) for text in VARIED_TEXTS]
    )


@needs_sentence_transformers
def test_a_decoder_by_path_is_the_policy_of_that_path(embed, tmp_path):
    folder = save_tiny(tmp_path / "tiny")
    for dataset in (varied_dataset(), chat_dataset(4)):
        np.testing.assert_allclose(embed(dataset, folder), embed(dataset), rtol=2e-3, atol=1e-4)


@needs_sentence_transformers
@pytest.mark.parametrize(
    ("config", "pooled"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, lambda states: states[0]),
        ({"pooling_mode_mean_tokens": True, "include_prompt": True}, lambda states: states.mean(axis=0)),
        ({"pooling_mode_lasttoken": True}, lambda states: states[-1]),
        ({"pooling_mode": "lasttoken"}, lambda states: states[-1]),
        ({"pooling_mode": "max"}, lambda states: states.max(axis=0)),
    ],
    ids=["cls", "mean", "last", "last, as written lately", "max"],
)
def test_sentence_transformers_pool_as_they_say(embed, tmp_path, config, pooled):
    folder = save_bert(tmp_path / "bert", **config)
    expected = [pooled(bert_states(folder, text, limit=20)) for text in VARIED_TEXTS]
    assert_embeddings_close(embed(varied_dataset(), folder), [e / np.linalg.norm(e) for e in expected])


@needs_sentence_transformers
def test_positions_of_roberta_start_behind_its_padding_index(embed, tmp_path, caplog_transformers):
    """514 positions are 512 tokens; one more is an index error in the model."""
    tokenizer = tiny_tokenizer(chat_template=None)
    size = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = RobertaConfig(vocab_size=len(tokenizer), max_position_embeddings=18, pad_token_id=0, **size)
    config.pad_token_id = 1
    RobertaModel(config).save_pretrained(tmp_path / "roberta")
    tokenizer.save_pretrained(tmp_path / "roberta")
    embed(varied_dataset(), str(tmp_path / "roberta"))
    assert "longer than the 16 tokens" in caplog_transformers.text


def test_models_that_cannot_be_loaded(embed, tmp_path):
    with pytest.raises(EmbeddingError, match=r"(?s)'no/such-model' cannot be loaded .*Give the id"):
        embed(varied_dataset(), "no/such-model")
    with pytest.raises(EmbeddingError, match="cannot be loaded"):
        embed(varied_dataset(), "../not here/at all/x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(EmbeddingError, match="cannot be loaded"):
        embed(varied_dataset(), str(tmp_path / "empty"))


@needs_sentence_transformers
def test_a_model_whose_file_is_cut_off(embed, tmp_path):
    folder = Path(save_bert(tmp_path / "bert"))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(EmbeddingError, match="cannot be loaded"):
        embed(varied_dataset(), str(folder))


def test_without_sentence_transformers_the_extra_is_named(embed, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(EmbeddingError, match=r"sentence-transformers.*pip install sentence-transformers"):
        embed(varied_dataset(), save_bert(tmp_path / "bert"))
    assert embed(varied_dataset()).shape == (len(VARIED_TEXTS), 32)
