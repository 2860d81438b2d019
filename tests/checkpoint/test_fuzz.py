"""
Damage of every kind to the files of a checkpoint: our own are loaded with the right content, or rejected with
`CheckpointError`. Of the Trainer's files the sizes are checked: what keeps its size is not noticed.
"""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.factories import make_trainer
from trl_dataeff.checkpoint.manifest import MANIFEST, check_checkpoint
from trl_dataeff.checkpoint.resume import resolve_run
from trl_dataeff.checkpoint.state import CheckpointError, load_run
from trl_dataeff.rollouts.distributed import Processes


DAMAGES_PER_FILE = 16


def flip(data: bytearray, rng: random.Random) -> bytearray:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def truncate(data: bytearray, rng: random.Random) -> bytearray:
    return data[: rng.randrange(len(data))]


def swap_blocks(data: bytearray, rng: random.Random) -> bytearray:
    n = max(1, len(data) // 8)
    i, j = rng.randrange(len(data) - n + 1), rng.randrange(len(data) - n + 1)
    data[i : i + n], data[j : j + n] = data[j : j + n], data[i : i + n]
    return data


def insert(data: bytearray, rng: random.Random) -> bytearray:
    i = rng.randrange(len(data) + 1)
    data[i:i] = bytes([rng.randrange(256)])
    return data


SAME_SIZE = (flip, swap_blocks)
BYTES = (*SAME_SIZE, truncate, insert)
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


def content(checkpoint: Path) -> tuple:
    """All that a resumed run would read, as values that can be compared."""
    state, batches = load_run(checkpoint, Processes())
    return state, [{name: np.asarray(value) for name, value in batch.items()} for batch in batches]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A checkpoint that has every kind of state: history, leftover groups, and a half-used generation batch."""
    folder = tmp_path_factory.mktemp("run")
    trainer = make_trainer(folder, "dynamic, leftover groups", max_steps=3, save_steps=3)
    trainer.train()
    assert trainer.collector.leftover
    checkpoint = folder / "checkpoint-3"
    names = {path.name.partition(".")[0] for path in (checkpoint / "dataeff").iterdir()}
    assert names == {"state", "batch-0", "manifest"}
    return checkpoint


def verdict(checkpoint: Path, expected: tuple) -> str:
    """`rejected`, or `right`: loaded with the right content. Anything else fails the test."""
    try:
        assert resolve_run(str(checkpoint), checkpoint.parent).checkpoint == str(checkpoint)
        loaded = content(checkpoint)
    except CheckpointError as error:
        return "rejected" if str(checkpoint) in str(error) else f"rejected, without saying which: {error}"
    np.testing.assert_equal(loaded, expected, "wrong content without a word")
    return "right"


def test_no_damage_is_loaded_without_a_word(original, tmp_path):
    rng, expected = random.Random(0), content(original)
    names = [str(path.relative_to(original)) for path in sorted(original.rglob("*")) if path.is_file()]
    assert len(names) >= 10
    tried = {"rejected": 0, "right": 0}
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
            unseen = damaged == pristine or name == MANIFEST or (damage in SAME_SIZE and "dataeff" not in name)
            assert outcome == "rejected" or unseen, (name, damage.__name__)
            tried[outcome] += damaged != pristine
        path.write_bytes(pristine)
        for how in WHOLE_FILE:
            damage_file(path, how)
            outcome = verdict(target, expected)
            assert outcome == ("right" if how == "copy" else "rejected"), (name, how)
            tried[outcome] += 1
            shutil.rmtree(target)
            shutil.copytree(original, target)
    assert sum(tried.values()) >= 150
    assert verdict(target, expected) == "right"


def test_our_files_of_two_checkpoints_are_not_mixed(tmp_path):
    make_trainer(tmp_path, "dynamic, leftover groups", max_steps=3).train()
    old, new = tmp_path / "checkpoint-2", tmp_path / "checkpoint-3"
    for name in ("dataeff/state.json", "dataeff/state.safetensors", MANIFEST):
        data = (new / name).read_bytes()
        assert (old / name).read_bytes() != data
        shutil.copy(old / name, new / name)
        with pytest.raises(CheckpointError, match="is corrupt"):
            check_checkpoint(new)
        (new / name).write_bytes(data)
