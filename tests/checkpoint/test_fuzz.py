"""
Damage of every kind to every file of a checkpoint: it is loaded with the right content, or refused with
`CheckpointError`; never another error, never wrong content without a word.
"""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.factories import history, make_trainer
from trl_dataeff.checkpoint.manifest import MANIFEST, check_checkpoint
from trl_dataeff.checkpoint.resume import resolve_run
from trl_dataeff.checkpoint.state import CheckpointError, load_generation_batch, load_state


DAMAGES_PER_FILE = 24


def flip(data: bytearray, rng: random.Random) -> bytearray:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def flip_many(data: bytearray, rng: random.Random) -> bytearray:
    for _ in range(32):
        flip(data, rng)
    return data


def truncate(data: bytearray, rng: random.Random) -> bytearray:
    return data[: rng.randrange(len(data))]


def swap(data: bytearray, rng: random.Random) -> bytearray:
    i, j = rng.randrange(len(data)), rng.randrange(len(data))
    data[i], data[j] = data[j], data[i]
    return data


def swap_blocks(data: bytearray, rng: random.Random) -> bytearray:
    n = max(1, len(data) // 8)
    i, j = rng.randrange(len(data) - n + 1), rng.randrange(len(data) - n + 1)
    data[i : i + n], data[j : j + n] = data[j : j + n], data[i : i + n]
    return data


def zero(data: bytearray, rng: random.Random) -> bytearray:
    i = rng.randrange(len(data))
    data[i : i + 512] = bytes(len(data[i : i + 512]))
    return data


def insert(data: bytearray, rng: random.Random) -> bytearray:
    i = rng.randrange(len(data) + 1)
    data[i:i] = bytes([rng.randrange(256)])
    return data


def cut_out(data: bytearray, rng: random.Random) -> bytearray:
    i = rng.randrange(len(data))
    del data[i : i + 1 + rng.randrange(64)]
    return data


def twice(data: bytearray, rng: random.Random) -> bytearray:
    return data + data


def empty(data: bytearray, rng: random.Random) -> bytearray:
    return bytearray()


BYTES = (flip, flip_many, truncate, swap, swap_blocks, zero, insert, cut_out, twice, empty)
WHOLE_FILE = ("delete", "folder", "copy", "unreadable link")


def damage_file(path: Path, how: str) -> None:
    if how == "copy":
        shutil.copy(path, path.with_name("copy-" + path.name))
        return
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how == "unreadable link":
        path.symlink_to(path)


def content(checkpoint: Path) -> dict:
    """All that a resumed run would read, as values that can be compared."""
    scalars, files = load_state(checkpoint)
    arrays = {f"{name}.{key}": value for name, values in files.items() for key, value in values.items()}
    for i, batch in enumerate(load_generation_batch(checkpoint, 0, torch.device("cpu"))):
        arrays |= {f"{i}.{key}": np.asarray(value) for key, value in batch.items()}
    others = [p for p in checkpoint.iterdir() if p.is_file() and not p.name.startswith("copy-")]
    return {"scalars": scalars, "arrays": arrays, "bytes": {p.name: p.read_bytes() for p in others}}


def same(a: dict, b: dict) -> bool:
    return (
        a["scalars"] == b["scalars"]
        and a["bytes"] == b["bytes"]
        and a["arrays"].keys() == b["arrays"].keys()
        and all(np.array_equal(v, b["arrays"][k], equal_nan=v.dtype.kind == "f") for k, v in a["arrays"].items())
    )


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A checkpoint that has every kind of file: history, leftover groups, and a half-used generation batch."""
    folder = tmp_path_factory.mktemp("run")
    make_trainer(folder, "dynamic, surplus", max_steps=3, save_steps=3).train()
    checkpoint = folder / "checkpoint-3"
    names = {path.name for path in (checkpoint / "dataeff").iterdir()}
    assert names == {
        "state.json",
        "arrays.safetensors",
        "leftover.safetensors",
        "batch-0.safetensors",
        "manifest.json",
    }
    return checkpoint


def verdict(checkpoint: Path, expected: dict) -> str:
    """`refused`, or `right`: loaded with the right content. Anything else fails the test."""
    try:
        assert resolve_run(str(checkpoint), checkpoint.parent).checkpoint == str(checkpoint)
        loaded = content(checkpoint)
    except CheckpointError as error:
        return "refused" if str(checkpoint) in str(error) else f"refused, without saying which: {error}"
    assert same(loaded, expected), "wrong content without a word"
    return "right"


def test_no_damage_is_loaded_without_a_word(original, tmp_path):
    rng = random.Random(0)
    expected = content(original)
    names = [str(path.relative_to(original)) for path in sorted(original.rglob("*")) if path.is_file()]
    assert len(names) >= 10
    tried = {"refused": 0, "right": 0}
    target = tmp_path / "checkpoint-3"
    shutil.copytree(original, target)
    for name in names:
        path = target / name
        pristine = (original / name).read_bytes()
        for k in range(DAMAGES_PER_FILE):
            damage = BYTES[k % len(BYTES)]
            damaged = bytes(damage(bytearray(pristine), rng))
            path.write_bytes(damaged)
            outcome = verdict(target, expected)
            assert outcome == "refused" or damaged == pristine or name == MANIFEST, (name, damage.__name__)
            tried[outcome] += damaged != pristine
        path.write_bytes(pristine)
        for how in WHOLE_FILE:
            damage_file(path, how)
            outcome = verdict(target, expected)
            assert outcome == ("right" if how == "copy" else "refused"), (name, how)
            tried[outcome] += 1
            shutil.rmtree(target)
            shutil.copytree(original, target)
    print(f"\n{sum(tried.values())} damages to {len(names)} files: {tried}")
    assert sum(tried.values()) >= 200
    assert verdict(target, expected) == "right"


def test_files_of_two_checkpoints_are_not_mixed(tmp_path):
    make_trainer(tmp_path, "dynamic", max_steps=3).train()
    old, new = tmp_path / "checkpoint-2", tmp_path / "checkpoint-3"
    swapped = 0
    for path in sorted(p for p in new.rglob("*") if p.is_file()):
        other = old / path.relative_to(new)
        data = path.read_bytes()
        if not other.exists() or other.read_bytes() == data or path.name == "manifest.json":
            continue
        path.write_bytes(other.read_bytes())
        with pytest.raises(CheckpointError, match="is corrupt"):
            check_checkpoint(new)
        path.write_bytes(data)
        swapped += 1
    assert swapped >= 6
    shutil.copy(old / MANIFEST, new / MANIFEST)
    with pytest.raises(CheckpointError, match="is corrupt"):
        check_checkpoint(new)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "trainer_state.json", "rng_state.pth"])
def test_train_refuses_it_before_anything_is_loaded(original, tmp_path, name):
    target = tmp_path / "checkpoint-3"
    shutil.copytree(original, target)
    trainer = make_trainer(tmp_path, "dynamic, surplus", save_strategy="no")
    before = {k: v.clone() for k, v in trainer.model.state_dict().items()}
    path = target / name
    path.write_bytes(bytes(flip(bytearray(path.read_bytes()), random.Random(1))))
    with pytest.raises(CheckpointError, match=f"is corrupt: {name} is not what was written"):
        trainer.train(resume_from_checkpoint=str(target))
    with pytest.raises(CheckpointError, match=r"No checkpoint in .* can be resumed from:\n- .*is corrupt"):
        trainer.train(resume_from_checkpoint=True)
    assert all(torch.equal(v, before[k]) for k, v in trainer.model.state_dict().items())
    shutil.copy(original / name, path)
    trainer.train(resume_from_checkpoint=True)
    assert history(trainer.state.log_history)[-1]["step"] == 12
