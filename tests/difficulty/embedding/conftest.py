import pytest

from tests.factories import tiny_model, tiny_tokenizer
from trl_dataeff.difficulty.embedding import embed_dataset
from trl_dataeff.difficulty.embedding.model import Embedder


@pytest.fixture
def embed(tmp_path, monkeypatch):
    """`embed_dataset` with a cache of its own; counts forwards in `embed.forwards`."""
    forward = Embedder.embed

    def counted(self, prompts):
        call.forwards += 1
        return forward(self, prompts)

    def call(dataset, embedding="policy", model=None, tokenizer=None, **options):
        if embedding == "policy":
            tokenizer = tokenizer or tiny_tokenizer()
            options = {"policy": model or tiny_model(tokenizer), "tokenizer": tokenizer, **options}
        return embed_dataset(dataset, embedding, **{"cache_dir": tmp_path / "cache", "progress": False, **options})

    call.forwards = 0
    call.folder = tmp_path / "cache"
    monkeypatch.setattr(Embedder, "embed", counted)
    return call
