"""Embeddings of prompts by the policy and by pretrained models: their values, and that making them changes nothing."""

import json
import math
import re
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.utils import DistributedType
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertModel, LlavaProcessor

from tests.factories.tiny import CHAT_TEMPLATE, chat_dataset, plain_dataset, run, save_tiny, tiny_model, tiny_tokenizer
from tests.factories.vision import save_tiny_vision
from trl_dataeff.difficulty import embedding
from trl_dataeff.difficulty.embedding import EmbeddingError, embed_dataset


needs_sentence_transformers = pytest.mark.skipif(
    find_spec("sentence_transformers") is None, reason="needs sentence-transformers"
)

TEXTS = ["1+1=", "a", "What is the third prime number after 12?", "xy" * 30, "0", "12+30="]
VARIED = Dataset.from_dict({"prompt": TEXTS})


def embedding_alone(model, ids) -> np.ndarray:
    """A prompt's embedding by a plain forward of its own: no padding, the model's own list of hidden states."""
    with torch.no_grad():
        outputs = model(input_ids=torch.tensor([ids]), output_hidden_states=True)
    return outputs.hidden_states[-1][0].mean(dim=0).numpy()


def assert_embeddings_close(embeddings, expected):
    np.testing.assert_allclose(np.asarray(embeddings, dtype=np.float32), np.stack(expected), atol=2e-3, rtol=2e-3)


def tiny_lora():
    torch.manual_seed(0)
    return get_peft_model(tiny_model(), LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5))


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
        kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
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


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("batch_tokens", [1, 50, 8192])
def test_the_mean_of_last_hidden_states_whatever_is_padded(embed, monkeypatch, side, batch_tokens):
    monkeypatch.setattr(embedding, "BATCH_TOKENS", batch_tokens)
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = side
    model = tiny_model(tokenizer)
    embeddings = embed(VARIED, model=model, tokenizer=tokenizer)
    assert embeddings.dtype == np.float16
    assert_embeddings_close(embeddings, [embedding_alone(model, tokenizer(text)["input_ids"]) for text in TEXTS])
    assert embed.forwards == {1: 6, 50: 3, 8192: 1}[batch_tokens]


@pytest.mark.parametrize("think", ["yes", "no"])
def test_conversations_go_through_the_chat_template_with_its_arguments(embed, think):
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer)
    template = "{{ think }}{{ tools | length if tools else 0 }}" + CHAT_TEMPLATE
    options = {"chat_template": template, "think": think, "tools": [{"name": "f"}]}
    texts = [f"{think}1<|user|>{prompt[0]['content']}<eos><|assistant|>" for prompt in chat_dataset(2)["prompt"]]
    expected = [embedding_alone(model, tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    assert_embeddings_close(embed(chat_dataset(2), model=model, tokenizer=tokenizer, template=options), expected)


def test_text_parts_of_multimodal_prompts_are_embedded(embed):
    parts = [{"type": "image"}, {"type": "text", "text": "What is"}, {"type": "text", "text": "it?"}]
    dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": parts}]}])
    plain = Dataset.from_list([{"prompt": [{"role": "user", "content": "What is\nit?"}]}])
    np.testing.assert_array_equal(embed(dataset), embed(plain))


def test_the_template_of_a_processor(embed, tmp_path):
    """As those of vision models, it takes the content of a message in parts."""
    template = "{% for part in messages[0].content %}[{{ part.type }}:{{ part.text }}]{% endfor %}"
    processor = LlavaProcessor.from_pretrained(save_tiny_vision(tmp_path))
    tokenizer = processor.tokenizer
    model = tiny_model(tokenizer)
    texts = [f"[text:{prompt[0]['content']}]" for prompt in chat_dataset(3)["prompt"]]
    expected = [embedding_alone(model, tokenizer(text)["input_ids"]) for text in texts]
    embeddings = embed(chat_dataset(3), model, processor, template={"chat_template": template})
    assert_embeddings_close(embeddings, expected)


def test_a_prompt_without_tokens_has_an_embedding_and_long_prompts_are_cut(embed):
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer)
    embeddings = embed(Dataset.from_dict({"prompt": ["1+1=", ""]}), model=model, tokenizer=tokenizer)
    assert_embeddings_close(embeddings[1:], [embedding_alone(model, [tokenizer.eos_token_id])])
    model.config.max_position_embeddings = 10
    embeddings = embed(VARIED, model=model, tokenizer=tokenizer)
    expected = [embedding_alone(model, tokenizer(text)["input_ids"][:10]) for text in TEXTS]
    assert_embeddings_close(embeddings, expected)


def test_a_transform_may_make_the_prompts_and_other_columns_are_not_read(embed):
    dataset = Dataset.from_dict({"question": TEXTS})
    dataset.set_transform(lambda rows: {"prompt": rows["question"]})
    other = VARIED.add_column("other", [0] * len(TEXTS)).with_format("torch")
    for same in (dataset, other):
        np.testing.assert_array_equal(embed(same), embed(VARIED))


@pytest.mark.parametrize("model", ["policy", pytest.param("bert", marks=needs_sentence_transformers)])
def test_the_random_state_is_left_alone(embed, tmp_path, model):
    model = tiny_lora() if model == "policy" else save_bert(tmp_path / "bert", without="pooler")
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    embed(VARIED, model)
    assert torch.rand(1) == expected


def test_mode_and_parameters_are_left_alone_even_by_an_error(embed):
    model = tiny_lora().train()
    broken = tiny_model().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    embed(VARIED, model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    broken.model.norm.weight.data[3] = torch.nan
    with pytest.raises(EmbeddingError, match="finite"):
        embed(VARIED, broken)
    assert all(module.training for module in [*model.modules(), *broken.modules()])
    assert torch.is_grad_enabled()


def test_values_too_large_for_float16_are_cut(embed):
    model = tiny_model()
    model.model.norm.weight.data[0] = 1e9
    embeddings = embed(VARIED, model)
    assert np.abs(embeddings[:, 0]).max() == np.finfo(np.float16).max


@pytest.mark.parametrize(
    ("dataset", "names"),
    [
        (Dataset.from_dict({"question": ["a"]}), r"\['question'\]"),
        (Dataset.from_dict({"prompt": []}), "rows"),
        (Dataset.from_dict({"prompt": ["a", None]}), r"row 1 .*NoneType"),
        (chat_dataset(2), r"row 0 .*alternate"),
    ],
)
def test_datasets_that_cannot_be_embedded(embed, dataset, names):
    broken = tiny_tokenizer(chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(EmbeddingError, match=names):
        embed(dataset, tokenizer=broken)


def process(rank: int, count: int, kind: DistributedType = DistributedType.NO) -> SimpleNamespace:
    return SimpleNamespace(
        process_index=rank,
        num_processes=count,
        is_main_process=False,
        device=torch.device("cpu"),
        distributed_type=kind,
    )


def test_policies_whose_parameters_are_elsewhere(embed):
    sharded = tiny_model()
    next(sharded.parameters()).ds_id = 0
    fsdp = process(0, 1, DistributedType.FSDP)
    for model, accelerator in ((sharded, None), (tiny_model().to("meta"), None), (tiny_model(), fsdp)):
        with pytest.raises(EmbeddingError, match="`prompt_embedding`"):
            embed(VARIED, model, accelerator=accelerator)


def test_under_deepspeed_which_moves_it_later_the_policy_embeds_on_the_device(embed, monkeypatch):
    zero2 = process(0, 1, DistributedType.DEEPSPEED)
    devices = []
    monkeypatch.setattr("torch.nn.Module.to", lambda module, device: devices.append(device))
    embed(VARIED, accelerator=zero2)
    assert devices == [zero2.device]


def test_each_of_two_processes_embeds_its_share(embed, monkeypatch):
    monkeypatch.setattr(embedding, "BATCH_TOKENS", 50)
    dataset = plain_dataset(23)
    expected = embed(dataset)
    forwards = embed.forwards
    parts = []

    def gather_from_those_so_far(own):
        parts.append(own)
        return parts

    monkeypatch.setattr(embedding, "all_gather", gather_from_those_so_far)
    for rank in (0, 1):
        with suppress(EmbeddingError):  # of the first one, which lacks the share of the second
            embeddings = embed(dataset, accelerator=process(rank, 2))
    np.testing.assert_array_equal(embeddings, expected)
    assert embed.forwards - forwards == 2 * math.ceil(forwards / 2)


# Pretrained models by their path


@needs_sentence_transformers
def test_an_encoder_by_path(embed, tmp_path):
    folder = save_bert(tmp_path / "bert")
    embeddings = embed(VARIED, folder)
    assert_embeddings_close(embeddings, [bert_states(folder, text).mean(axis=0) for text in TEXTS])
    conversations = [[{"role": "system", "content": "be"}, {"role": "user", "content": text}] for text in TEXTS]
    embeddings = embed(Dataset.from_dict({"prompt": conversations}), folder)
    assert_embeddings_close(embeddings, [bert_states(folder, f"be\n{text}").mean(axis=0) for text in TEXTS])


@needs_sentence_transformers
def test_a_decoder_by_path_is_the_policy_of_that_path(embed, tmp_path):
    # With a template, sentence-transformers takes a text for a message of the user
    folder = save_tiny(tmp_path / "tiny", chat_template=None)
    tokenizer = tiny_tokenizer(chat_template=None)
    chats = chat_dataset(4)
    contents = Dataset.from_dict({"prompt": [prompt[0]["content"] for prompt in chats["prompt"]]})
    for dataset, same in ((VARIED, VARIED), (chats, contents)):
        expected = embed(same, tokenizer=tokenizer)
        np.testing.assert_allclose(embed(dataset, folder), expected, rtol=2e-3, atol=1e-4)


@needs_sentence_transformers
def test_a_sentence_transformers_model_pools_normalises_and_cuts_as_it_says(embed, tmp_path):
    folder = save_bert(tmp_path / "bert", pooling_mode="lasttoken")
    expected = [bert_states(folder, text, limit=20)[-1] for text in TEXTS]
    assert_embeddings_close(embed(VARIED, folder), [e / np.linalg.norm(e) for e in expected])


@needs_sentence_transformers
def test_models_that_cannot_be_loaded(embed, tmp_path):
    (tmp_path / "empty").mkdir()
    weights = Path(save_bert(tmp_path / "cut off"), "model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    for name in ("no/such-model", "../not here/at all/x", str(tmp_path / "empty"), str(tmp_path / "cut off")):
        with pytest.raises(EmbeddingError, match=rf"'{re.escape(name)}'"):
            embed(VARIED, name)


def test_without_sentence_transformers_the_extra_is_named(embed, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(EmbeddingError, match="install"):
        embed(VARIED, save_bert(tmp_path / "bert"))
    assert embed(VARIED).shape == (len(TEXTS), 32)


# In training


def train(folder, **options):
    fields = {"selection": "dots", "save_strategy": "steps", "save_steps": 2, "max_steps": 4, **options}
    return run(folder, **fields).selector.embeddings


@pytest.mark.parametrize("what", ["kept", "lost", "corrupt"])
def test_a_resumed_run_takes_the_embeddings_it_began_with(tmp_path, caplog_transformers, what):
    """Without the file they are made anew, by a policy that may have changed, and a warning says so if they differ."""
    first = np.array(train(tmp_path))
    (path,) = tmp_path.glob("_*/embeddings-*.npy")  # which `push_to_hub` leaves out
    if what == "lost":
        path.unlink()
    elif what == "corrupt":
        path.write_bytes(path.read_bytes()[:100])
    other = tiny_model(seed=1)  # another policy than the one that embedded
    again = train(tmp_path, resume=str(tmp_path / "checkpoint-2"), trainer={"model": other})
    assert np.array_equal(first, again) is (what == "kept")
    assert ("embeddings differ" in caplog_transformers.text) is (what != "kept")
    new = train(tmp_path, trainer={"model": tiny_model(seed=1)})
    assert not np.array_equal(first, new), "a new run does not take those of another one"
