"""What counts as rounding: how a model is rounded otherwise, and what follows from its effect."""

from types import SimpleNamespace

import pytest
import torch

from tests.factories.tiny import tiny_model
from trl_dataeff.compact.rounding import computing_type, embeddings_rounded_otherwise


IDS = torch.tensor([[3, 4, 5, 6]])


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_rounded_otherwise_within_the_context_alone(dtype):
    model = tiny_model().to(dtype)
    embeddings = []
    model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: embeddings.append(output))
    expected = logits(model)
    with embeddings_rounded_otherwise(model, dtype):
        model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: embeddings.append(output))
        changed = logits(model)
    assert not torch.equal(changed, expected)
    assert torch.equal(logits(model), expected)
    before = embeddings[0].double()
    after = embeddings[2].double()
    assert (after / before - 1).abs().max() <= 1.5 * torch.finfo(dtype).eps
    with pytest.raises(KeyError), embeddings_rounded_otherwise(model, dtype):
        raise KeyError
    assert torch.equal(logits(model), expected)


class Unnamed(torch.nn.Module):
    """A model that does not say which module embeds its tokens."""

    def get_input_embeddings(self):
        raise NotImplementedError


@pytest.mark.parametrize("model", [Unnamed(), torch.nn.Linear(1, 1)])
def test_a_model_that_does_not_name_its_embeddings_is_left_as_it_is(model):
    with embeddings_rounded_otherwise(model, torch.float32):
        pass


@pytest.mark.parametrize(
    ("weights", "mixed_precision", "computed_in"),
    [
        (torch.float32, "no", torch.float32),
        (torch.float32, "bf16", torch.bfloat16),
        (torch.float32, "fp16", torch.float16),
        (torch.bfloat16, "no", torch.bfloat16),
        (torch.float16, "no", torch.float16),
    ],
)
def test_the_type_is_that_of_the_weights_or_of_the_mixed_precision(weights, mixed_precision, computed_in):
    trainer = SimpleNamespace(accelerator=SimpleNamespace(mixed_precision=mixed_precision))
    model = torch.nn.Linear(2, 2).to(weights)
    model.register_parameter("packed", torch.nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False))
    first = torch.nn.Sequential(model)
    assert computing_type(trainer, first) == computed_in
