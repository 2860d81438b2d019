import pytest

from tests.factories import tiny_model, tiny_tokenizer
from trl_dataeff.difficulty.embedding import embed_dataset


@pytest.fixture
def embed():
    """`embed_dataset`, by default with a tiny policy; `embed.forwards` are the policy's forward passes."""

    def count(*args):
        call.forwards += 1

    def call(dataset, model=None, tokenizer=None, **options):
        if isinstance(model, str):
            return embed_dataset(dataset, model, progress=False, **options)
        tokenizer = tokenizer or tiny_tokenizer()
        model = tiny_model(getattr(tokenizer, "tokenizer", tokenizer)) if model is None else model
        with model.register_forward_pre_hook(count):
            return embed_dataset(dataset, model, tokenizer, progress=False, **options)

    call.forwards = 0
    return call
