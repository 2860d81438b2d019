import pytest

from tests.factories import tiny_model, tiny_tokenizer
from trl_dataeff.difficulty.embedding import Embedder, embed_dataset


@pytest.fixture
def embed(monkeypatch):
    """`embed_dataset`; counts forwards in `embed.forwards`."""
    forward = Embedder.embed

    def counted(self, prompts):
        call.forwards += 1
        return forward(self, prompts)

    def call(dataset, embedding="policy", model=None, tokenizer=None, **options):
        if embedding == "policy":
            tokenizer = tokenizer or tiny_tokenizer()
            options = {"policy": model or tiny_model(tokenizer), "tokenizer": tokenizer, **options}
        return embed_dataset(dataset, embedding, **{"progress": False, **options})

    call.forwards = 0
    monkeypatch.setattr(Embedder, "embed", counted)
    return call
