"""Embeddings of prompts by the policy: their values, and that a run is the same with them as without."""

from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import LlavaProcessor

from tests.factories import (
    CHAT_TEMPLATE,
    VARIED_TEXTS,
    assert_embeddings_close,
    chat_dataset,
    embedding_alone,
    launched,
    needs_sentence_transformers,
    plain_dataset,
    run,
    save_bert,
    tiny_lora,
    tiny_model,
    tiny_tokenizer,
    varied_dataset,
)
from tests.factories.vision import save_tiny_vision
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer
from trl_dataeff.difficulty.embedding import EmbeddingError


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("batch_tokens", [1, 50, 8192])
def test_the_mean_of_last_hidden_states_whatever_is_padded(embed, side, batch_tokens):
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = side
    model = tiny_model(tokenizer)
    embeddings = embed(varied_dataset(), model=model, tokenizer=tokenizer, batch_tokens=batch_tokens)
    assert embeddings.dtype == np.float16
    assert_embeddings_close(
        embeddings, [embedding_alone(model, tokenizer(text)["input_ids"]) for text in VARIED_TEXTS]
    )
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
    model, tokenizer = tiny_model(processor.tokenizer), processor.tokenizer
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
    embeddings = embed(varied_dataset(), model=model, tokenizer=tokenizer)
    expected = [embedding_alone(model, tokenizer(text)["input_ids"][:10]) for text in VARIED_TEXTS]
    assert_embeddings_close(embeddings, expected)


def test_a_transform_may_make_the_prompts_and_other_columns_are_not_read(embed):
    dataset = Dataset.from_dict({"question": VARIED_TEXTS})
    dataset.set_transform(lambda rows: {"prompt": rows["question"]})
    other = varied_dataset().add_column("other", [0] * len(VARIED_TEXTS)).with_format("torch")
    for same in (dataset, other):
        np.testing.assert_array_equal(embed(same), embed(varied_dataset()))


@pytest.mark.parametrize("model", ["policy", pytest.param("bert", marks=needs_sentence_transformers)])
def test_the_random_state_is_left_alone(embed, tmp_path, model):
    model = tiny_lora(0) if model == "policy" else save_bert(tmp_path / "bert", without="pooler")
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    embed(varied_dataset(), model)
    assert torch.rand(1) == expected


def test_mode_and_parameters_are_left_alone_even_by_an_error(embed):
    model, broken = tiny_lora(0).train(), tiny_model().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    embed(varied_dataset(), model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    broken.model.norm.weight.data[3] = torch.nan
    with pytest.raises(EmbeddingError, match="not finite"):
        embed(varied_dataset(), broken)
    assert all(module.training for module in [*model.modules(), *broken.modules()])
    assert torch.is_grad_enabled()


def test_values_too_large_for_float16_are_cut(embed):
    model = tiny_model()
    model.model.norm.weight.data[0] = 1e9
    embeddings = embed(varied_dataset(), model)
    assert np.abs(embeddings[:, 0]).max() == np.finfo(np.float16).max


@pytest.mark.parametrize(
    ("dataset", "names"),
    [
        (Dataset.from_dict({"question": ["a"]}), r"'prompt'.*\['question'\]"),
        (Dataset.from_dict({"prompt": []}), "no rows"),
        (Dataset.from_dict({"prompt": ["a", None]}), r"row 1 .*NoneType"),
        (chat_dataset(2), r"row 0 .*roles must alternate"),
    ],
)
def test_datasets_that_cannot_be_embedded(embed, dataset, names):
    broken = tiny_tokenizer(chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(EmbeddingError, match=names):
        embed(dataset, tokenizer=broken)


def test_policies_whose_parameters_are_elsewhere(embed):
    sharded = tiny_model()
    next(sharded.parameters()).ds_id = 0
    for model in (sharded, tiny_model().to("meta")):
        with pytest.raises(EmbeddingError, match=r"FSDP.*ZeRO-3 .*or set `prompt_embedding` to the id"):
            embed(varied_dataset(), model)


def test_two_processes_give_what_one_gives(embed, tmp_path_factory):
    reports = launched(Path(__file__).with_name("embedding_run.py"), 2, tmp_path_factory)
    expected = embed(plain_dataset(23), batch_tokens=50)
    for report in reports:
        np.testing.assert_array_equal(np.array(report["embeddings"], np.float16), expected)
        assert report["forwards"] == -(-embed.forwards // 2)
        assert "under FSDP" in report["sharded"]


def train(folder, resume=None, **options):
    fields = {"selection": "dots", "save_strategy": "steps", "save_steps": 2, "max_steps": 4, **options}
    trainer = run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, folder, train=False, **fields)
    trainer.train(resume_from_checkpoint=resume)
    return trainer.selector.embeddings


@pytest.mark.parametrize("what", ["kept", "lost", "corrupt"])
def test_a_resumed_run_takes_the_embeddings_it_began_with(tmp_path, caplog_transformers, what):
    """Without the file they are made anew, by a policy that may have changed, and a warning says so if they differ."""
    first = np.array(train(tmp_path))
    (path,) = (tmp_path / "dataeff").glob("embeddings-*.npy")
    if what == "lost":
        path.unlink()
    elif what == "corrupt":
        path.write_bytes(path.read_bytes()[:100])
    other = tiny_model(seed=1)  # another policy than the one that embedded
    again = train(tmp_path, resume=str(tmp_path / "checkpoint-2"), trainer={"model": other})
    assert np.array_equal(first, again) is (what == "kept")
    assert ("embeddings differ from those of the run that is resumed" in caplog_transformers.text) is (what != "kept")
    new = train(tmp_path, trainer={"model": tiny_model(seed=1)})
    assert not np.array_equal(first, new), "a new run does not take those of another one"
