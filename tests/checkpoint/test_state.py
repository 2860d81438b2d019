"""What a checkpoint holds of the selection, and what is compared when a run is resumed from it."""

import json
from pathlib import Path

import pytest
import torch

from tests.factories import even_length_reward, mixed_reward, plain_dataset, run
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer
from trl_dataeff.checkpoint.manifest import write_manifest
from trl_dataeff.checkpoint.state import CheckpointError, load_window, save_window


@pytest.fixture
def checkpoint(tmp_path):
    run(
        DataEfficientGRPOTrainer, DataEfficientGRPOConfig, tmp_path / "run",
        max_steps=2, save_strategy="steps", save_steps=2,
    )  # fmt: skip
    return tmp_path / "run" / "checkpoint-2"


def resume(checkpoint, **options):
    trainer = run(
        DataEfficientGRPOTrainer, DataEfficientGRPOConfig, checkpoint.parent, train=False, max_steps=3, **options
    )
    trainer.train(resume_from_checkpoint=str(checkpoint))


def test_another_dataset_is_refused(checkpoint):
    with pytest.raises(CheckpointError, match=r"for a dataset of 24 prompts .* the present one has 23 prompts"):
        resume(checkpoint, trainer={"train_dataset": plain_dataset(23)})


def test_a_checkpoint_without_selection_state_is_refused(checkpoint):
    (checkpoint / "dataeff" / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"is damaged: dataeff/state.json is missing"):
        resume(checkpoint)


@pytest.mark.parametrize("name", ["state.json", "arrays.safetensors"])
@pytest.mark.parametrize("damage", ["cut", "garbage", "gone"])
def test_damage_is_said(checkpoint, name, damage):
    path = checkpoint / "dataeff" / name
    if damage == "gone":
        path.unlink()
    else:
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] if damage == "cut" else b"\xff\x00" + data[2:])
    with pytest.raises(CheckpointError, match=r"is damaged"):
        resume(checkpoint)


def test_another_format_names_the_version_that_wrote_it(checkpoint):
    path = checkpoint / "dataeff" / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99, "trl_dataeff": "7.0"}))
    write_manifest(checkpoint, step=2, processes=1, resumable=True)
    with pytest.raises(CheckpointError, match=r"format 99, written by trl_dataeff 7\.0"):
        resume(checkpoint)


def test_changing_what_may_be_changed_is_no_mismatch(checkpoint):
    resume(checkpoint, logging_steps=2, max_rollout_rounds=7)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({}, {"selection": "greso"}, "selector = 'UniformSelector'; it is 'GresoSelector'"),
        ({"rollout_margin": 3.0}, {"num_generations": 8}, "num_generations = 4; it is 8"),
        ({"rollout_margin": 3.0}, {"rewards": [mixed_reward, even_length_reward]}, "reward_functions = "),
        ({"steps_per_generation": 4}, {"steps_per_generation": 8}, "steps_per_generation = 4; it is 8"),
    ],
)
def test_settings_that_the_state_depends_on_are_compared(tmp_path, before, after, message):
    options = {"dynamic_sampling": True, "rewards": mixed_reward, "save_strategy": "steps", "save_steps": 3, **before}
    first = run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, tmp_path, **{**options, "max_steps": 3})
    assert first.ledger.carried or "rollout_margin" not in before
    again = run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, tmp_path, train=False, **{**options, **after})
    with pytest.raises(CheckpointError, match=message):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_a_judge_that_is_silent_right_after_a_resume_does_not_end_the_run(checkpoint):
    resume(checkpoint, rewards=lambda completion_ids, **kwargs: [None] * len(completion_ids))


def test_the_state_is_there_when_the_trainer_says_that_a_checkpoint_is_whole(tmp_path, monkeypatch):
    """What is pushed to the Hub, or copied by another callback, has it."""
    seen = []
    written = DataEfficientGRPOTrainer._save_rng_state
    monkeypatch.setattr(
        DataEfficientGRPOTrainer,
        "_save_rng_state",
        lambda self, folder: (seen.append((Path(folder) / "dataeff" / "state.json").exists()), written(self, folder)),
    )
    run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    assert seen == [True, True]


def test_nothing_is_pickled(checkpoint):
    suffixes = {path.suffix for path in (checkpoint / "dataeff").iterdir()}
    assert suffixes <= {".json", ".safetensors"}


def test_windows_keep_lists_and_shared_scalars(tmp_path):
    count = torch.tensor(3)
    batches = [
        {"x": torch.ones(2, 3), "n": count, "num_images": [1, 2], "none": None},
        {"x": torch.zeros(2, 3), "n": count},
    ]
    save_window(tmp_path, 1, batches)
    first, second = load_window(tmp_path, 1, torch.device("cpu"))
    assert torch.equal(first["x"], batches[0]["x"])
    assert first["num_images"] == [1, 2]
    assert second["n"] == 3
    with pytest.raises(CheckpointError, match="as many processes as wrote it"):
        load_window(tmp_path, 0, torch.device("cpu"))
