"""Embeddings by pretrained models that are named by their path."""

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
    save_bert,
    save_tiny,
    tiny_tokenizer,
    varied_dataset,
)
from trl_dataeff.difficulty.embedding import EmbeddingError


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


def test_a_decoder_by_path_is_the_policy_of_that_path(embed, tmp_path):
    folder = save_tiny(tmp_path / "tiny")
    for dataset in (varied_dataset(), chat_dataset(4)):
        np.testing.assert_array_equal(embed(dataset, folder), embed(dataset))


@pytest.mark.parametrize(
    ("config", "pooled"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, lambda states: states[0]),
        ({"pooling_mode_mean_tokens": True, "include_prompt": True}, lambda states: states.mean(axis=0)),
        ({"pooling_mode_lasttoken": True}, lambda states: states[-1]),
        ({"pooling_mode": "lasttoken"}, lambda states: states[-1]),
    ],
    ids=["cls", "mean", "last", "last, as written lately"],
)
def test_sentence_transformers_pool_as_they_say(embed, tmp_path, config, pooled):
    folder = save_bert(tmp_path / "bert", **config)
    expected = [pooled(bert_states(folder, text, limit=20)) for text in VARIED_TEXTS]
    assert_embeddings_close(embed(varied_dataset(), folder), [e / np.linalg.norm(e) for e in expected])


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
    with pytest.raises(EmbeddingError, match=r"'no/such-model' cannot be loaded .*Give the id"):
        embed(varied_dataset(), "no/such-model")
    with pytest.raises(EmbeddingError, match="cannot be loaded"):
        embed(varied_dataset(), "../not here/at all/x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(EmbeddingError, match=r"no config\.json"):
        embed(varied_dataset(), str(tmp_path / "empty"))
    folder = Path(save_bert(tmp_path / "bert"))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(EmbeddingError, match="cannot be loaded"):
        embed(varied_dataset(), str(folder))


def test_a_model_that_lacks_weights_is_refused(embed, tmp_path):
    folder = save_bert(tmp_path / "bert", without="layer.1.attention")
    with pytest.raises(EmbeddingError, match=r"lack 10 tensors, such as 'encoder\.layer\.1"):
        embed(varied_dataset(), folder)


def test_a_pooling_that_is_not_known(embed, tmp_path):
    folder = save_bert(tmp_path / "bert", pooling_mode_max_tokens=True, pooling_mode_mean_tokens=True)
    with pytest.raises(EmbeddingError, match=r"'max_tokens\+mean'; known are mean, cls, last"):
        embed(varied_dataset(), folder)
