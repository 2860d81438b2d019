"""All tokens of a micro-batch in one sequence: hidden states and gradients are those of its padded rows."""

import copy
import itertools

import pytest
import torch
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tests.compact.test_models import EXPERTS, GPT2_SIZES, LAYERS, MAMBA, NO_DROPOUT, SIZES
from trl_dataeff.compact import packing
from trl_dataeff.compact.packing import Packing, can_pack, forward_packed, knows_attention


VOCABULARY = 40
WINDOWS = {"head_dim": 8, "sliding_window": 3, "layer_types": LAYERS}
MODELS = {
    "llama": (LlamaConfig, SIZES),
    "qwen2": (Qwen2Config, SIZES),
    "qwen2, windows": (Qwen2Config, {**SIZES, "use_sliding_window": True, "sliding_window": 3, "layer_types": LAYERS}),
    "qwen3": (Qwen3Config, {**SIZES, "head_dim": 8}),
    "gemma2": (Gemma2Config, {**SIZES, **WINDOWS, "attn_logit_softcapping": 2.0}),
    "gemma3": (Gemma3TextConfig, {**SIZES, **WINDOWS}),
    "mistral": (MistralConfig, {**SIZES, "sliding_window": 4}),
    "gpt2": (GPT2Config, {**GPT2_SIZES, **NO_DROPOUT}),
    "experts": (Qwen3MoeConfig, {**SIZES, **EXPERTS, "head_dim": 8}),
}
#: Prompts of 5, 5, 2, 5 and 2 tokens in 6 columns; completions of 4, 1, 7, none and 3 in 7
FIRST_ROWS = torch.tensor([0, 2])
PROMPT_OF_ROW = torch.tensor([0, 0, 1, 0, 1])
PROMPTS = [5, 5, 2, 5, 2]
COMPLETIONS = [4, 1, 7, 0, 3]
WIDTHS = (6, 7)


@pytest.fixture(autouse=True, params=[0, 10**9], ids=["many blocks", "one block"])
def price(request, monkeypatch):
    """Of a further block of completions."""
    monkeypatch.setitem(packing.PRICE_OF_A_BLOCK, "cpu", request.param)


def model_of(name: str, implementation: str = "sdpa"):
    config_class, fields = MODELS[name]
    torch.manual_seed(0)
    config = config_class(vocab_size=VOCABULARY, **fields, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).train()
    # The eager mask of Transformers and the kernel of experts have no float64
    return model if name == "experts" or implementation == "eager" else model.double()


def micro_batch(holes=True):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, VOCABULARY, (len(PROMPTS), sum(WIDTHS)), generator=generator)
    ids[[1, 3], : WIDTHS[0]] = ids[0, : WIDTHS[0]]
    ids[4, : WIDTHS[0]] = ids[2, : WIDTHS[0]]
    columns = torch.arange(sum(WIDTHS))
    starts = WIDTHS[0] - torch.tensor(PROMPTS)
    ends = WIDTHS[0] + torch.tensor(COMPLETIONS)
    mask = (columns >= starts[:, None]) & (columns < ends[:, None])
    if holes:
        mask[2, 8] = False  # within a completion
        mask[[0, 1, 3], 3] = False  # within a prompt
    return ids * mask, mask.long()


def packed_states(model, ids, mask):
    packed = Packing.of(ids, mask, WIDTHS[1], FIRST_ROWS, PROMPT_OF_ROW)
    return forward_packed(model.base_model.forward, model, packed).last_hidden_state


def gradient_of(model, states, mask):
    """Of a fixed function of the states that tokens which are attended to are predicted from."""
    is_scored = torch.cat([mask[:, WIDTHS[0] :], torch.zeros(len(mask), 1)], dim=1).bool()
    weights = torch.randn(states.shape, dtype=states.dtype, generator=torch.Generator().manual_seed(2))
    model.zero_grad()
    (states * weights)[is_scored].sum().backward()
    packing.end()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same(model, other=None, holes=True):
    ids, mask = micro_batch(holes)
    reference = other or model
    padded = reference.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    expected = gradient_of(reference, padded[:, WIDTHS[0] - 1 :], mask)
    states = packed_states(model, ids, mask)
    is_known = torch.cat([torch.ones(len(mask), 1), mask[:, WIDTHS[0] :]], dim=1).bool()
    # Transformers computes norms and softmax in float32
    tolerance = 1e-6 if states.dtype == torch.float64 else 1e-4
    assert relative(states[is_known], padded[:, WIDTHS[0] - 1 :][is_known]) < tolerance
    found = gradient_of(model, states, mask)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert relative(found[name], gradient) < 10 * tolerance, name


def relative(found, expected) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("holes", [True, False], ids=["holes", "no holes"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_states_and_gradients_are_those_of_padded_rows(name, implementation, holes):
    if (name, implementation) == ("gemma2", "sdpa"):
        pytest.skip("SDPA has no softcap")
    assert_same(model_of(name, implementation), holes=holes)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_layers_that_are_computed_again_in_the_backward_pass(name, use_reentrant):
    model = model_of(name)
    plain = copy.deepcopy(model)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    plain.enable_input_require_grads()
    assert_same(model, plain)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_flex_attention_leaves_packed_rows_to_another_function(name):
    model = model_of(name, "eager")
    other = copy.deepcopy(model)
    model.set_attn_implementation("flex_attention")
    assert_same(model, other)
    assert model.config._attn_implementation == "flex_attention"


def test_tokens_are_computed_once_and_without_padding():
    ids, mask = micro_batch()
    packed = Packing.of(ids, mask, WIDTHS[1], FIRST_ROWS, PROMPT_OF_ROW)
    assert packed.num_tokens == 5 + 2 + sum(COMPLETIONS)
    expected = [*ids[0, 1:6], *ids[2, 4:6], *ids[2, 6:13], *ids[0, 6:10], *ids[4, 6:9], *ids[1, 6:7]]
    assert packed.ids[0].tolist() == [int(token) for token in expected]
    positions = [*range(1, 6), *range(4, 6), *range(6, 13), *range(6, 10), *range(6, 9), *range(6, 7)]
    assert packed.positions[0].tolist() == positions


@pytest.mark.parametrize("price", [50, 2000], indirect=True)
def test_attention_computes_little_padding(price):
    """Of all ways to cut rows into blocks, the cheapest one."""
    lengths = torch.tensor([30, 28, 12, 11, 2, 2, 1])
    blocks = packing._blocks(lengths, prompt_width=10)
    assert [row for block in blocks for row in range(block.start, block.stop)] == list(range(len(lengths)))

    def cost(ends):
        starts = [0, *ends[:-1]]
        pairs = [(end - start) * int(lengths[start]) * (10 + int(lengths[start])) for start, end in zip(starts, ends)]
        return sum(pairs) + packing.PRICE_OF_A_BLOCK["cpu"] * len(ends)

    places = range(1, len(lengths))
    every_way = [
        [*ends, len(lengths)] for number in range(len(lengths)) for ends in itertools.combinations(places, number)
    ]
    assert cost([block.stop for block in blocks]) == min(map(cost, every_way))
    assert 1 < len(blocks) < len(lengths)


def test_other_sequences_are_computed_as_before_also_in_between():
    model = model_of("gemma3")
    ids, mask = micro_batch()
    number = 5 + 2 + sum(COMPLETIONS)
    as_long = torch.randint(2, VOCABULARY, (1, number), generator=torch.Generator().manual_seed(3))
    before = [model(input_ids=ids, attention_mask=mask).logits, model(input_ids=as_long).logits]
    generated = model.generate(ids[:1, 1:6], max_new_tokens=5, do_sample=False)
    assert packed_states(model, ids, mask).requires_grad
    for _ in range(2):
        now = [model(input_ids=ids, attention_mask=mask).logits, model(input_ids=as_long).logits]
        torch.testing.assert_close(now, before, rtol=0, atol=0)
        assert model.generate(ids[:1, 1:6], max_new_tokens=5, do_sample=False).tolist() == generated.tolist()
        packing.end()
    assert model.config._attn_implementation == "sdpa"


def test_a_backward_pass_leaves_a_model_as_it_was():
    model = model_of("llama")
    states = packed_states(model, *micro_batch())
    assert model.config._attn_implementation != "sdpa"
    states.sum().backward()
    assert model.config._attn_implementation == "sdpa"


def test_an_implementation_that_is_set_in_between_stays():
    model = model_of("llama")
    packed_states(model, *micro_batch())
    model.set_attn_implementation("eager")
    packing.end()
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_one_backward_pass_of_two_micro_batches(use_reentrant):
    model = model_of("llama")
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    expected = None
    for together in (False, True):
        model.zero_grad()
        total = 0
        for holes in (True, False):
            states = packed_states(model, *micro_batch(holes))
            if together:
                total = total + states.square().sum()
            else:
                states.square().sum().backward()
        if together:
            total.backward()
        found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        if expected is not None:
            torch.testing.assert_close(found, expected)
        expected = found


def test_attention_of_a_script_is_not_known():
    model = model_of("llama")
    assert knows_attention(model)
    AttentionInterface.register("of_a_script", sdpa_attention_forward)
    model.set_attn_implementation("of_a_script")
    assert not knows_attention(model)


@pytest.mark.parametrize("price", [10**9], indirect=True)
@pytest.mark.parametrize("window", [None, 20])
def test_no_mask_is_made_of_whole_rows(monkeypatch, window, price):
    """As long rows would need much memory for it."""
    fields = {} if window is None else {"sliding_window": window}
    config = MistralConfig(vocab_size=VOCABULARY, **{**SIZES, "sliding_window": None, **fields})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    monkeypatch.setattr(packing.Block, "mask", None)
    packed_states(model, *micro_batch(holes=False)).sum().backward()


def test_a_layer_that_is_computed_again_too_late_is_an_error_and_no_other_gradient():
    model = model_of("llama")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ids, mask = micro_batch()
    states = packed_states(model, ids, mask)
    packing.end()
    with pytest.raises(RuntimeError):
        states.sum().backward()


def test_attention_of_a_models_own_is_found():
    model = model_of("llama")
    forward = type(model.model.layers[1].self_attn).forward

    def own(self, *args, **kwargs):
        kept = self.config
        self.config = copy.deepcopy(kept)
        self.config._attn_implementation = "sdpa"
        try:
            return forward(self, *args, **kwargs)
        finally:
            self.config = kept

    for layer in model.model.layers:
        layer.self_attn.forward = own.__get__(layer.self_attn)
    with pytest.raises(RuntimeError):
        packed_states(model, *micro_batch())
    packing.end()


@pytest.mark.parametrize(
    ("config", "packs"),
    [
        (LlamaConfig(**SIZES), True),
        (GPT2Config(**GPT2_SIZES), True),
        (MambaConfig(hidden_size=32, num_hidden_layers=2, state_size=8), False),
        (FalconH1Config(**SIZES, **MAMBA), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_which_models_can(config, packs):
    assert can_pack(AutoModelForCausalLM.from_config(config)) is packs
