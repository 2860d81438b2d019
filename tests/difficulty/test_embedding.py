"""Embeddings of prompts: their values, their cache, and that a run is the same with them as without."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertModel, RobertaConfig, RobertaModel

from tests.factories import CHAT_TEMPLATE, chat_dataset, plain_dataset, save_tiny, tiny_model, tiny_tokenizer
from trl_dataeff.difficulty.embedding import EmbeddingError, embed_dataset, length_batches
from trl_dataeff.difficulty.embedding import cache as embedding_cache
from trl_dataeff.difficulty.embedding import model as embedding_model
from trl_dataeff.difficulty.embedding.identity import folder_identity
from trl_dataeff.difficulty.embedding.model import Embedder


TEXTS = ["1+1=", "a", "What is the third prime number after 12?", "xy" * 30, "0", "12+30="]


def varied_dataset() -> Dataset:
    return Dataset.from_dict({"prompt": TEXTS})


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


def alone(model, ids) -> np.ndarray:
    """A prompt's embedding by a plain forward of its own: no padding, the model's own list of hidden states."""
    training = model.training
    model.eval()
    with torch.no_grad():
        outputs = model(input_ids=torch.tensor([ids]), output_hidden_states=True)
    model.train(training)
    return outputs.hidden_states[-1][0].mean(dim=0).numpy()


def assert_close(embeddings, expected):
    np.testing.assert_allclose(np.asarray(embeddings, dtype=np.float32), np.stack(expected), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("batch_tokens", [1, 50, 8192])
def test_the_mean_of_last_hidden_states_whatever_is_padded(embed, side, batch_tokens):
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = side
    model = tiny_model(tokenizer)
    embeddings = embed(varied_dataset(), model=model, tokenizer=tokenizer, batch_tokens=batch_tokens)
    assert embeddings.dtype == np.float16
    assert not embeddings.flags.writeable
    assert_close(embeddings, [alone(model, tokenizer(text)["input_ids"]) for text in TEXTS])
    assert embed.forwards == {1: 6, 50: 3, 8192: 1}[batch_tokens]


def test_conversations_go_through_the_chat_template(embed):
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer)
    dataset = chat_dataset(5)
    texts = [f"<|user|>{prompt[0]['content']}<eos><|assistant|>" for prompt in dataset["prompt"]]
    expected = [alone(model, tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    assert_close(embed(dataset, model=model, tokenizer=tokenizer), expected)


def test_template_arguments_reach_the_template(embed):
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer)
    template = "{{ think }}{{ tools | length if tools else 0 }}" + CHAT_TEMPLATE
    options = {"chat_template": template, "chat_template_kwargs": {"think": "yes"}, "tools": [{"name": "f"}]}
    embeddings = embed(chat_dataset(2), model=model, tokenizer=tokenizer, **options)
    texts = [f"yes1<|user|>{prompt[0]['content']}<eos><|assistant|>" for prompt in chat_dataset(2)["prompt"]]
    assert_close(embeddings, [alone(model, tokenizer(text)["input_ids"]) for text in texts])
    embed(chat_dataset(2), model=model, tokenizer=tokenizer, **{**options, "chat_template_kwargs": {"think": "no"}})
    assert embed.forwards == 2


def test_text_parts_of_multimodal_prompts_are_embedded(embed):
    parts = [{"type": "image"}, {"type": "text", "text": "What is"}, {"type": "text", "text": "it?"}]
    dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": parts}]}])
    plain = Dataset.from_list([{"prompt": [{"role": "user", "content": "What is\nit?"}]}])
    np.testing.assert_array_equal(embed(dataset), embed(plain))


class Processor:
    """A processor whose template, as those of vision models, takes the content of a message in parts."""

    chat_template = (
        "{% for m in messages %}{% for part in m.content %}[{{ part.type }}:{{ part.text }}]{% endfor %}{% endfor %}"
    )

    def __init__(self):
        self.tokenizer = tiny_tokenizer(chat_template=None)


def test_the_template_of_a_processor(embed):
    processor = Processor()
    model = tiny_model(processor.tokenizer)
    expected = [
        alone(model, processor.tokenizer(f"[text:{prompt[0]['content']}]")["input_ids"])
        for prompt in chat_dataset(3)["prompt"]
    ]
    assert_close(embed(chat_dataset(3), model=model, tokenizer=processor), expected)


def test_prompts_without_tokens_have_an_embedding(embed):
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer)
    stand_in = alone(model, [tokenizer.eos_token_id])
    assert_close(
        embed(Dataset.from_dict({"prompt": ["", "1+1=", ""]}), model=model, tokenizer=tokenizer)[[0, 2]],
        [stand_in, stand_in],
    )
    assert_close(embed(Dataset.from_dict({"prompt": [[], []]}), model=model, tokenizer=tokenizer)[:1], [stand_in])


def test_long_prompts_are_cut_with_one_warning(embed, caplog_transformers):
    tokenizer = tiny_tokenizer()
    tokenizer.model_max_length = 10
    model = tiny_model(tokenizer)
    for _ in range(2):  # the second time from the cache
        caplog_transformers.clear()
        embeddings = embed(varied_dataset(), model=model, tokenizer=tokenizer)
        assert [r.getMessage().split(":")[0] for r in caplog_transformers.records if r.levelname == "WARNING"] == [
            "2 of 6 prompts are longer than the 10 tokens that the embedding model ('policy') takes"
        ]
    assert_close(embeddings, [alone(model, tokenizer(text)["input_ids"][:10]) for text in TEXTS])


def test_a_transform_may_make_the_prompts(embed):
    dataset = Dataset.from_dict({"question": TEXTS})
    dataset.set_transform(lambda rows: {"prompt": [text.upper() for text in rows["question"]]})
    upper = Dataset.from_dict({"prompt": [text.upper() for text in TEXTS]})
    np.testing.assert_array_equal(embed(dataset), embed(upper))
    assert embed.forwards == 1


def test_other_columns_are_not_read(embed):
    dataset = varied_dataset().add_column("other", [0] * len(TEXTS)).with_format("torch")
    np.testing.assert_array_equal(embed(dataset), embed(varied_dataset()))


# The cache


def test_a_second_run_makes_no_forward(embed):
    first = embed(varied_dataset())
    assert embed.forwards == 1
    second = embed(Dataset.from_list(varied_dataset().to_list()), batch_tokens=10)
    assert embed.forwards == 1
    np.testing.assert_array_equal(first, second)


def one_value_changed(seed=0):
    model = tiny_model()
    model.model.embed_tokens.weight.data[50, 7] += 0.001
    return model


@pytest.mark.parametrize(
    "changes",
    [
        {"dataset": Dataset.from_dict({"prompt": [*TEXTS[:-1], "12+31="]})},
        {"dataset": Dataset.from_dict({"prompt": TEXTS[::-1]})},
        {"dataset": Dataset.from_dict({"prompt": TEXTS[:-1]})},
        {"model": tiny_model(seed=1)},
        {"model": one_value_changed()},
        {"model": tiny_model().to(torch.bfloat16)},
        {"tokenizer": tiny_tokenizer(chat_template="other")},
    ],
    ids=["text", "order", "length", "weights", "value", "dtype", "template"],
)
def test_what_is_changed_is_embedded_anew(embed, changes):
    embed(varied_dataset())
    changes = dict(changes)
    embed(changes.pop("dataset", varied_dataset()), **changes)
    assert embed.forwards == 2
    embed(varied_dataset())
    assert embed.forwards == 2, "the former cache is gone"


def test_one_prompt_among_many_is_noticed(embed):
    texts = [f"{i:04d}" for i in range(3000)]
    embed(Dataset.from_dict({"prompt": texts}))
    forwards = embed.forwards
    texts[1234] = "9999"
    embed(Dataset.from_dict({"prompt": texts}))
    assert embed.forwards == 2 * forwards


def lora(seed, **options):
    torch.manual_seed(seed)
    return get_peft_model(tiny_model(), LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5, **options))


def test_an_adapter_at_its_start_is_the_base_model(embed):
    base = embed(varied_dataset())
    for seed in (0, 1):
        np.testing.assert_array_equal(embed(varied_dataset(), model=lora(seed)), base)
    assert embed.forwards == 1


def test_an_adapter_that_was_trained_counts(embed):
    embed(varied_dataset())
    model, other = lora(0, lora_alpha=8), lora(0, lora_alpha=16)
    for each in (model, other):
        for name, parameter in each.named_parameters():
            if "lora_B" in name:
                parameter.data.fill_(0.05)
    tokenizer = tiny_tokenizer()
    expected = [alone(model, tokenizer(text)["input_ids"]) for text in TEXTS]
    assert_close(embed(varied_dataset(), model=model), expected)
    embed(varied_dataset(), model=other)
    assert embed.forwards == 3


def files(embed):
    return next(embed.folder.glob("*.npy")), next(embed.folder.glob("*.json"))


def truncate(array, info):
    array.write_bytes(array.read_bytes()[:-7])


def remove(array, info):
    array.unlink()


def zero_a_row(array, info):
    values = np.load(array)
    values[3] = 0
    np.save(array, values)


def other_shape(array, info):
    np.save(array, np.load(array)[:, :-1])


def garbage(array, info):
    array.write_bytes(b"\x93NUMPY\x01\x00v\x00{'descr'((" + b"x" * 500)


def other_identity(array, info):
    stored = json.loads(info.read_text())
    stored["identity"]["prompts_of"] = "0" * 64
    info.write_text(json.dumps(stored))


def half_a_json(array, info):
    info.write_text(info.read_text()[:50])


def a_list(array, info):
    info.write_text("[]")


@pytest.mark.parametrize(
    "damage",
    [truncate, remove, zero_a_row, other_shape, garbage, other_identity, half_a_json, a_list],
    ids=lambda f: f.__name__,
)
def test_a_damaged_cache_is_never_used(embed, damage, caplog_transformers):
    first = np.array(embed(varied_dataset()))
    damage(*files(embed))
    second = embed(varied_dataset())
    assert embed.forwards == 2
    assert "cannot be used" in caplog_transformers.text
    np.testing.assert_array_equal(first, second)
    embed(varied_dataset())
    assert embed.forwards == 2


def test_a_killed_run_leaves_nothing_that_looks_whole(embed, monkeypatch):
    def killed(path, write):
        write(path.with_name(f".{path.name}.tmp"))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(embedding_cache, "write_atomically", killed)
        with pytest.raises(KeyboardInterrupt):
            embed(varied_dataset())
    assert [path.name[0] for path in embed.folder.iterdir()] == ["."]
    first = embed.forwards
    embed(varied_dataset())
    assert embed.forwards == 2 * first


def test_the_environment_names_the_folder(embed, tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_DATAEFF_CACHE", str(tmp_path / "elsewhere"))
    embed(varied_dataset(), cache_dir=None)
    assert len(list((tmp_path / "elsewhere" / "embeddings").iterdir())) == 2


# Training must not notice


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


def draw_all():
    return random.random(), np.random.random(), torch.rand(1).item()  # noqa: NPY002


def test_random_states_modes_and_parameters_are_left_alone(embed, tmp_path):
    model = lora(0)
    model.train()
    model.base_model.model.model.layers[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    grads = [parameter.requires_grad for parameter in model.parameters()]
    for embedding in ("policy", save_bert(tmp_path / "bert", without="pooler")):
        seed_all(5)
        expected = draw_all()
        seed_all(5)
        dataset = varied_dataset()
        dataset.set_transform(lambda rows: rows if draw_all() else None)
        embed(dataset, embedding, model=model)
        assert draw_all() == expected
    assert embed.forwards == 2
    assert modes == [module.training for module in model.modules()]
    assert grads == [parameter.requires_grad for parameter in model.parameters()]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.is_grad_enabled()


def test_modes_come_back_after_an_error(embed):
    model = tiny_model().train()
    model.model.norm.weight.data[3] = torch.nan
    with pytest.raises(EmbeddingError, match="not finite"):
        embed(varied_dataset(), model=model)
    assert all(module.training for module in model.modules())
    assert torch.is_grad_enabled()
    assert not list(embed.folder.iterdir())


# Pretrained models


def save_bert(folder: Path, without: str = "none", **modules) -> str:
    """A small BERT whose tokens are single characters. `modules`: what sentence-transformers writes beside it."""
    tokenizer = tiny_tokenizer(chat_template=None)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    size = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertModel(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=80, **size))
    torch.set_rng_state(state)
    kept = {name: value for name, value in model.state_dict().items() if without not in name}
    model.save_pretrained(folder, state_dict=kept)
    tokenizer.save_pretrained(folder)
    if modules:
        kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")])]
        listed = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds]
        (folder / "modules.json").write_text(json.dumps(listed))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(modules))
        (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 20}')
    return str(folder)


def bert_states(folder, text, limit=None):
    model = BertModel.from_pretrained(folder).eval()
    with torch.no_grad():
        ids = torch.tensor([tiny_tokenizer()(text)["input_ids"][:limit]])
        return model(ids).last_hidden_state[0].numpy()


def test_an_encoder_by_path(embed, tmp_path):
    folder = save_bert(tmp_path / "bert")
    embeddings = embed(varied_dataset(), folder)
    assert_close(embeddings, [bert_states(folder, text).mean(axis=0) for text in TEXTS])
    joined = Dataset.from_list(
        [{"prompt": [{"role": "system", "content": "be"}, {"role": "user", "content": text}]} for text in TEXTS]
    )
    assert_close(embed(joined, folder), [bert_states(folder, f"be\n{text}").mean(axis=0) for text in TEXTS])


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
    expected = [pooled(bert_states(folder, text, limit=20)) for text in TEXTS]
    assert_close(embed(varied_dataset(), folder), [e / np.linalg.norm(e) for e in expected])


def test_another_pooling_is_another_cache(embed, tmp_path):
    folder = save_bert(tmp_path / "bert", pooling_mode_mean_tokens=True)
    mean = np.array(embed(varied_dataset(), folder))
    (tmp_path / "bert" / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    assert not np.array_equal(mean, embed(varied_dataset(), folder))


def test_a_hit_does_not_load_the_model(embed, tmp_path, monkeypatch):
    folder = save_bert(tmp_path / "bert")
    embed(varied_dataset(), folder)
    monkeypatch.setattr(embedding_model.AutoModel, "from_pretrained", lambda *a, **k: pytest.fail("loaded"))
    embed(varied_dataset(), folder)


def test_weights_changed_in_place_are_embedded_anew(embed, tmp_path):
    folder = save_bert(tmp_path / "bert")
    embed(varied_dataset(), folder)
    times = {path: path.stat().st_mtime_ns for path in Path(folder).iterdir()}
    model = BertModel.from_pretrained(folder)
    model.embeddings.word_embeddings.weight.data[50, 7] += 0.001
    model.save_pretrained(folder)
    for path, time in times.items():  # as a copy that keeps the time of change
        os.utime(path, ns=(time, time))
    embed(varied_dataset(), folder)
    assert embed.forwards == 2


def test_the_time_of_change_counts(tmp_path):
    """Of a large file only samples are read."""
    folder = Path(save_bert(tmp_path / "bert"))
    before = folder_identity(folder)
    assert folder_identity(folder) == before
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert folder_identity(folder) != before


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


# What cannot be embedded


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


def test_datasets_that_cannot_be_embedded(embed):
    with pytest.raises(EmbeddingError, match=r"no column 'prompt'.*\['question'\]"):
        embed(Dataset.from_dict({"question": ["a"]}))
    with pytest.raises(EmbeddingError, match="no rows"):
        embed(Dataset.from_dict({"prompt": []}))
    with pytest.raises(EmbeddingError, match="row 1 is of type NoneType"):
        embed(Dataset.from_dict({"prompt": ["a", None]}))
    broken = tiny_tokenizer(chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(EmbeddingError, match=r"row 0 .*roles must alternate"):
        embed(chat_dataset(2), tokenizer=broken)


def test_policies_that_are_missing_or_sharded(embed):
    with pytest.raises(EmbeddingError, match="needs the arguments `policy` and `tokenizer`"):
        embed_dataset(plain_dataset(2))
    sharded = tiny_model()
    next(sharded.parameters()).ds_id = 0
    with pytest.raises(EmbeddingError, match=r"ZeRO-3 .*Set `dots_embedding` to the id"):
        embed(varied_dataset(), model=sharded)
    with pytest.raises(EmbeddingError, match=r"FSDP .*Set `dots_embedding` to the id"):
        embed(varied_dataset(), model=tiny_model().to("meta"))


def test_a_folder_that_cannot_be_written(embed, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EmbeddingError, match=r"cannot be written .*TRL_DATAEFF_CACHE"):
        embed(varied_dataset(), cache_dir=tmp_path / "file" / "cache")
    assert embed.forwards == 0


def test_a_full_disk_is_said_before_anything_is_written(embed, monkeypatch):
    monkeypatch.setattr(embedding_cache.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 100}))
    with pytest.raises(EmbeddingError, match="GB free"):
        embed(varied_dataset())
    assert not list(embed.folder.iterdir())


# Batches and processes


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 100))
def test_batches_hold_every_prompt_once_within_the_budget(lengths, budget):
    lengths = np.array(lengths)
    batches = length_batches(lengths, budget)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * lengths[batch].max() <= budget
    longest = [lengths[batch].max() for batch in batches]
    assert longest == sorted(longest, reverse=True)


def test_two_processes_give_what_one_gives(embed, tmp_path):
    script = Path(__file__).with_name("embedding_run.py")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        script,
        tmp_path,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=script.parents[2])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    reports = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    expected = embed(plain_dataset(23), batch_tokens=50)
    for rank, report in enumerate(reports):
        np.testing.assert_array_equal(np.load(tmp_path / f"rank-{rank}.npy"), expected)
        assert report["forwards"] == -(-embed.forwards // 2)
        assert report["again"] == 0
        assert report["lost"] == report["forwards"], "both embed again if one finds no cache"
        assert "see different prompts" in report["different"]
        assert "under FSDP" in report["sharded"]


@pytest.mark.slow
def test_memory_of_100_000_prompts(tmp_path):
    """Beyond the memory map; a second run does no more than read."""
    script = Path(__file__).with_name("embedding_memory.py")
    command = [sys.executable, script, tmp_path]
    environment = {**os.environ, "PYTHONPATH": str(script.parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, env=environment)
    assert done.returncode == 0, done.stderr[-6000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["map"] == 100_000 * 384 * 2
    assert report["first_grown"] - report["map"] < 4e8
    assert report["second_s"] < 0.2 * report["first_s"]
