"""
Damage of every kind to the files of a checkpoint: those that decide how a run continues are loaded with the right
content, or rejected with `CheckpointError`. Of all others a difference is a warning.
"""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.factories.configurations import train
from trl_dataeff.checkpoint.manifest import MANIFEST, check_checkpoint
from trl_dataeff.checkpoint.resume import resolve_run
from trl_dataeff.checkpoint.state import CheckpointError, load_run
from trl_dataeff.rollouts.distributed import Processes


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A checkpoint that has every kind of state: history, leftover groups, and a half-used generation batch."""
    folder = tmp_path_factory.mktemp("run")
    trainer = train(folder, "dynamic, leftover groups", max_steps=3, save_steps=3)
    assert trainer.collector.leftover
    checkpoint = folder / "checkpoint-3"
    names = {path.name.partition(".")[0] for path in (checkpoint / "dataeff").iterdir()}
    assert names == {"state", "batch-0", "manifest"}
    return checkpoint


def damage(path: Path, how: str, rng: random.Random) -> None:
    data = path.read_bytes()
    i = rng.randrange(len(data))
    if how == "copy":
        shutil.copy(path, path.with_name("copy-" + path.name))
    elif how == "flip":
        flipped = data[i] ^ (1 << rng.randrange(8))
        path.write_bytes(data[:i] + bytes([flipped]) + data[i + 1 :])
    elif how == "insert":
        path.write_bytes(data[:i] + b"x" + data[i:])
    elif how == "truncate":
        path.write_bytes(data[:i])
    else:
        path.unlink()
        if how == "folder":
            path.mkdir()
        elif how == "unreadable link":
            path.symlink_to(path)


#: Files without which the Trainer resumes
LEFT_OUT = ("optimizer.pt", "scheduler.pt", "rng_state.pth")


def decides(name: str) -> bool:
    """Whether the Trainer or we read a file when a run resumes."""
    return name.startswith("dataeff/") or name in (*LEFT_OUT, "trainer_state.json", "model.safetensors")


def content(checkpoint: Path) -> tuple:
    state, batches = load_run(checkpoint, Processes())
    return state, [{name: np.asarray(value) for name, value in batch.items()} for batch in batches]


def is_rejected(checkpoint: Path, expected: tuple) -> bool:
    """Or loaded with the right content: anything else fails the test."""
    try:
        assert resolve_run(str(checkpoint), checkpoint.parent).checkpoint == str(checkpoint)
        loaded = content(checkpoint)
    except CheckpointError as error:
        return str(checkpoint) in str(error)
    np.testing.assert_equal(loaded, expected, "wrong content without a word")
    return False


@pytest.mark.parametrize("how", [*["flip", "insert", "truncate"] * 5, "copy", "delete", "folder", "unreadable link"])
def test_no_damage_is_loaded_without_a_word(original, tmp_path, how):
    rng = random.Random(str(tmp_path))
    expected = content(original)
    names = [str(path.relative_to(original)) for path in sorted(original.rglob("*")) if path.is_file()]
    assert len(names) >= 10
    for name in names:
        target = tmp_path / name / "checkpoint-3"
        shutil.copytree(original, target)
        damage(target / name, how, rng)
        rejected = is_rejected(target, expected)
        if how == "copy" or not decides(name):
            assert not rejected, name
        elif name in LEFT_OUT and how == "delete":
            assert not rejected, "the Trainer resumes without it"
        elif not (how == "flip" and name == MANIFEST):  # a bit of which may not matter
            assert rejected, name


def test_our_files_of_two_checkpoints_are_not_mixed(tmp_path):
    train(tmp_path, "dynamic, leftover groups", max_steps=3)
    old = tmp_path / "checkpoint-2"
    new = tmp_path / "checkpoint-3"
    for name in ("dataeff/state.json", "dataeff/state.safetensors", MANIFEST):
        data = (new / name).read_bytes()
        assert (old / name).read_bytes() != data
        shutil.copy(old / name, new / name)
        with pytest.raises(CheckpointError, match="corrupt"):
            check_checkpoint(new)
        (new / name).write_bytes(data)
