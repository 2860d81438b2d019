"""The cache of embeddings: when it is used, and that a damaged one is not."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from transformers import BertModel

from tests.factories import (
    VARIED_TEXTS,
    assert_embeddings_close,
    embedding_alone,
    needs_sentence_transformers,
    save_bert,
    tiny_lora,
    tiny_model,
    tiny_tokenizer,
    varied_dataset,
)
from trl_dataeff.difficulty.embedding import cache as embedding_cache
from trl_dataeff.difficulty.embedding import model as embedding_model


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


def test_another_transform_of_the_same_rows_is_embedded_anew(embed):
    dataset = varied_dataset()
    first = embed(dataset)
    dataset.set_transform(lambda rows: {"prompt": [text.upper() for text in rows["prompt"]]})
    assert not np.array_equal(embed(dataset), first)
    assert embed.forwards == 2


def test_layout_of_the_dataset_makes_no_difference(embed):
    embed(varied_dataset())
    embed(varied_dataset().select([5, 4, 3, 2, 1, 0]).select([5, 4, 3, 2, 1, 0]))
    assert embed.forwards == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"dataset": Dataset.from_dict({"prompt": [*VARIED_TEXTS[:-1], "12+31="]})},
        {"dataset": Dataset.from_dict({"prompt": VARIED_TEXTS[::-1]})},
        {"dataset": Dataset.from_dict({"prompt": VARIED_TEXTS[:-1]})},
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


def test_an_adapter_at_its_start_is_the_base_model(embed):
    base = embed(varied_dataset())
    for seed in (0, 1):
        np.testing.assert_array_equal(embed(varied_dataset(), model=tiny_lora(seed)), base)
    assert embed.forwards == 1


def test_an_adapter_that_was_trained_counts(embed):
    embed(varied_dataset())
    model, other = tiny_lora(0, lora_alpha=8), tiny_lora(0, lora_alpha=16)
    for each in (model, other):
        for name, parameter in each.named_parameters():
            if "lora_B" in name:
                parameter.data.fill_(0.05)
    tokenizer = tiny_tokenizer()
    expected = [embedding_alone(model, tokenizer(text)["input_ids"]) for text in VARIED_TEXTS]
    assert_embeddings_close(embed(varied_dataset(), model=model), expected)
    embed(varied_dataset(), model=other)
    assert embed.forwards == 3


def truncate(path):
    path.write_bytes(path.read_bytes()[:-7])


def rewrite(path, values=None, **metadata):
    with safe_open(path, "np") as file:
        stored, found = file.metadata(), file.get_tensor("embeddings")
    save_file({"embeddings": found if values is None else values(found)}, path, {**stored, **metadata})


def zero_a_row(path):
    rewrite(path, lambda values: values * (np.arange(len(values)) != 3)[:, None].astype(np.float16))


def other_shape(path):
    rewrite(path, lambda values: np.ascontiguousarray(values[:, :-1]))


def other_type(path):
    rewrite(path, lambda values: values.astype(np.float32))


def garbage(path):
    path.write_bytes(b"x" * 500)


def empty(path):
    path.write_bytes(b"")


def other_identity(path):
    rewrite(path, identity=json.dumps({"prompts_of": "0" * 64}))


def half_a_json(path):
    rewrite(path, identity='{"prompts')


def no_metadata(path):
    with safe_open(path, "np") as file:
        found = file.get_tensor("embeddings")
    save_file({"embeddings": found}, path)


@pytest.mark.parametrize(
    "damage",
    [truncate, zero_a_row, other_shape, other_type, garbage, empty, other_identity, half_a_json, no_metadata],
    ids=lambda f: f.__name__,
)
def test_a_damaged_cache_is_never_used(embed, damage, caplog_transformers):
    first = np.array(embed(varied_dataset()))
    (path,) = embed.folder.iterdir()
    damage(path)
    second = embed(varied_dataset())
    assert embed.forwards == 2
    assert "cannot be used" in caplog_transformers.text
    np.testing.assert_array_equal(first, second)
    embed(varied_dataset())
    assert embed.forwards == 2


def test_a_killed_run_leaves_nothing_that_looks_whole(embed, monkeypatch):
    def killed(path, write):
        path.parent.mkdir()
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
    assert len(list((tmp_path / "elsewhere" / "embeddings").iterdir())) == 1


@needs_sentence_transformers
def test_another_pooling_is_another_cache(embed, tmp_path):
    folder = save_bert(tmp_path / "bert", pooling_mode_mean_tokens=True)
    mean = np.array(embed(varied_dataset(), folder))
    (tmp_path / "bert" / "1_Pooling" / "config.json").write_text(
        '{"word_embedding_dimension": 24, "pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}'
    )
    assert not np.array_equal(mean, embed(varied_dataset(), folder))


@needs_sentence_transformers
def test_a_hit_does_not_load_the_model(embed, tmp_path, monkeypatch):
    folder = save_bert(tmp_path / "bert")
    embed(varied_dataset(), folder)
    monkeypatch.setattr(embedding_model, "_load", lambda *args: pytest.fail("loaded"))
    embed(varied_dataset(), folder)


@needs_sentence_transformers
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


def unwritable(folder: Path) -> Path:
    """A folder that cannot be made, though the tests may run as root."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text("")
    return folder / "cache"


def test_a_folder_that_cannot_be_written_is_replaced_by_the_fallback(embed, tmp_path, caplog_transformers):
    first = embed(varied_dataset())
    options = {"cache_dir": unwritable(tmp_path / "file"), "fallback_dir": tmp_path / "run" / "_embeddings"}
    np.testing.assert_array_equal(embed(varied_dataset(), **options), first)
    (said,) = [m for m in caplog_transformers.messages if "cannot be cached" in m]
    assert str(options["cache_dir"]) in said
    assert f"They are kept in {options['fallback_dir']}." in said
    assert "TRL_DATAEFF_CACHE" in said
    forwards = embed.forwards
    np.testing.assert_array_equal(embed(varied_dataset(), **options), first)
    assert embed.forwards == forwards, "a resumed run embeds again"


def test_where_no_folder_can_be_written_embeddings_are_kept_in_memory(embed, tmp_path, caplog_transformers):
    first = embed(varied_dataset())
    options = {"cache_dir": unwritable(tmp_path / "a"), "fallback_dir": unwritable(tmp_path / "b")}
    second = embed(varied_dataset(), **options)
    np.testing.assert_array_equal(second, first)
    assert second.dtype == np.float16
    assert not second.flags.writeable
    (said,) = [m for m in caplog_transformers.messages if "cannot be cached" in m]
    assert "They are kept in the memory of each process (" in said


def test_a_cache_folder_that_may_not_be_looked_into_is_no_error(embed, tmp_path, monkeypatch):
    first = embed(varied_dataset())
    exists = Path.exists

    def forbidden(self, **kwargs):
        if "secret" in str(self):
            raise PermissionError(13, "Permission denied")
        return exists(self, **kwargs)

    monkeypatch.setattr(Path, "exists", forbidden)
    (tmp_path / "secret").write_text("")
    np.testing.assert_array_equal(embed(varied_dataset(), cache_dir=tmp_path / "secret" / "cache"), first)


def test_without_a_home_folder_embeddings_are_kept(embed, monkeypatch, caplog_transformers):
    def homeless(self):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TRL_DATAEFF_CACHE")
    monkeypatch.setattr(Path, "expanduser", homeless)
    assert embed(varied_dataset(), cache_dir=None).shape == (len(VARIED_TEXTS), 32)
    assert "there is no home folder" in caplog_transformers.text


def test_a_full_disk_is_no_error(embed, tmp_path, monkeypatch, caplog_transformers):
    def full(tensors, path, metadata):
        if path.parent == embed.folder:
            path.write_bytes(b"half of it")
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        save_file(tensors, path, metadata)

    monkeypatch.setattr(embedding_cache, "save_file", full)
    embed(varied_dataset(), fallback_dir=tmp_path / "run")
    assert not list(embed.folder.iterdir())
    assert len(list((tmp_path / "run").iterdir())) == 1
    assert "No space left on device" in caplog_transformers.text
