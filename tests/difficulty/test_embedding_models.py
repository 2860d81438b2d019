"""Embeddings by pretrained models that are named by their path."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset

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
    # With a template, sentence-transformers takes a text for a message of the user
    folder, tokenizer = save_tiny(tmp_path / "tiny", chat_template=None), tiny_tokenizer(chat_template=None)
    chats = chat_dataset(4)
    contents = Dataset.from_dict({"prompt": [prompt[0]["content"] for prompt in chats["prompt"]]})
    for dataset, same in ((varied_dataset(), varied_dataset()), (chats, contents)):
        expected = embed(same, tokenizer=tokenizer)
        np.testing.assert_allclose(embed(dataset, folder), expected, rtol=2e-3, atol=1e-4)


@needs_sentence_transformers
def test_a_sentence_transformers_model_pools_normalises_and_cuts_as_it_says(embed, tmp_path):
    folder = save_bert(tmp_path / "bert", pooling_mode="lasttoken")
    expected = [bert_states(folder, text, limit=20)[-1] for text in VARIED_TEXTS]
    assert_embeddings_close(embed(varied_dataset(), folder), [e / np.linalg.norm(e) for e in expected])


@needs_sentence_transformers
def test_models_that_cannot_be_loaded(embed, tmp_path):
    (tmp_path / "empty").mkdir()
    weights = Path(save_bert(tmp_path / "cut off"), "model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    for name in ("no/such-model", "../not here/at all/x", str(tmp_path / "empty"), str(tmp_path / "cut off")):
        with pytest.raises(EmbeddingError, match=rf"'{re.escape(name)}' cannot be loaded"):
            embed(varied_dataset(), name)


def test_without_sentence_transformers_the_extra_is_named(embed, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(EmbeddingError, match=r"pip install sentence-transformers"):
        embed(varied_dataset(), save_bert(tmp_path / "bert"))
    assert embed(varied_dataset()).shape == (len(VARIED_TEXTS), 32)
