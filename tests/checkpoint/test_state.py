"""What a checkpoint holds of the selection, and what is compared when a run is resumed from it."""

import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.factories import FILL, OFF, even_length_reward, logged, mixed_reward, plain_dataset, run
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer
from trl_dataeff.checkpoint.manifest import MANIFEST
from trl_dataeff.checkpoint.state import (
    CheckpointError,
    load_generation_batch,
    load_state,
    save_generation_batch,
    save_state,
)
from trl_dataeff.utils import FORMAT, hash_json


ours = partial(run, DataEfficientGRPOTrainer, DataEfficientGRPOConfig)


@pytest.fixture
def checkpoint(tmp_path):
    ours(tmp_path / "run", max_steps=2, save_strategy="steps", save_steps=2)
    return tmp_path / "run" / "checkpoint-2"


def resume(checkpoint, **options):
    trainer = ours(checkpoint.parent, train=False, max_steps=3, **options)
    trainer.train(resume_from_checkpoint=str(checkpoint))


def test_a_dataset_of_the_same_size_with_another_prompt_is_rejected(checkpoint):
    prompts = plain_dataset()["prompt"]
    swapped = plain_dataset().select([1, 0, *range(2, 24)])
    changed = plain_dataset().map(lambda row: {"prompt": row["prompt"].replace("05:", "5:")})
    assert sorted(swapped["prompt"]) == sorted(prompts)
    for dataset in (swapped, changed, plain_dataset(23)):
        with pytest.raises(
            CheckpointError, match=r"for a dataset of 24 prompts .*resume with the same dataset"
        ) as error:
            resume(checkpoint, trainer={"train_dataset": dataset})
        assert ("this one has 23 prompts" in str(error.value)) is (len(dataset) == 23)


def test_state_is_what_was_saved(tmp_path):
    scalars = {"counters": {"rounds": 3}, "reward_scale": None, "loop": {"loss": [0.5]}}
    arrays = {"arrays": {"rng": np.arange(5, dtype=np.uint8), "strided": np.arange(6)[::2]}, "leftover": {}}
    save_state(tmp_path, scalars, arrays)
    found, files = load_state(tmp_path)
    assert found == {"files": ["arrays", "leftover"], **scalars}
    np.testing.assert_equal(files, arrays)
    assert files["arrays"]["rng"].dtype == np.uint8
    (tmp_path / "dataeff" / "leftover.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"The selection state in .* cannot be read .*earlier checkpoint"):
        load_state(tmp_path)


def test_another_format_names_the_version_that_wrote_it(checkpoint):
    path = checkpoint / MANIFEST
    content = {**json.loads(path.read_text()), "format": 99, "trl_dataeff": "7.0"}
    del content["hash"]
    path.write_text(json.dumps(content | {"hash": hash_json(content)}))
    with pytest.raises(CheckpointError, match=r"format 99, written by trl_dataeff 7\.0") as error:
        resume(checkpoint)
    assert f"which reads format {FORMAT}. Resume with that version" in str(error.value)


DOTS = {"selection": "dots", "save_strategy": "steps", "save_steps": 3}


def dots(**arguments) -> dict:
    return {**DOTS, "selector_args": arguments}


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({}, {"selection": "greso"}, "selector = 'UniformSelector'; now it is 'GresoSelector'"),
        ({"rollout_margin": 3.0}, {"num_generations": 8}, "num_generations = 4; now it is 8"),
        ({"rollout_margin": 3.0}, {"rewards": [mixed_reward, even_length_reward]}, "reward_functions = "),
        ({"steps_per_generation": 4}, {"steps_per_generation": 8}, "steps_per_generation = 4; now it is 8"),
        (
            {"steps_per_generation": 4},
            {"steps_per_generation": 4, "gradient_accumulation_steps": 2},
            "gradient_accumulation_steps = 1; now it is 2",
        ),
        (dots(), dots(predictor="attention"), "predictor = 'logistic'; now it is 'attention'. Resume with the former"),
        (
            dots(predictor="attention", predictor_args={"width": 8}),
            dots(predictor="attention", predictor_args={"width": 16}),
            "The run began with `predictor_args` = {'width': 8}; now it is {'width': 16}. Resume with",
        ),
    ],
)
def test_settings_that_the_state_depends_on_are_compared(tmp_path, before, after, message):
    options = {"max_rollout_rounds": 4, "rewards": mixed_reward, "save_strategy": "steps", "save_steps": 3, **before}
    first = ours(tmp_path, **{**options, "max_steps": 3})
    assert first.collector.leftover or "rollout_margin" not in before
    again = ours(tmp_path, train=False, **{**options, **after})
    with pytest.raises(CheckpointError, match=re.escape(message)):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


@pytest.mark.parametrize("own", [OFF, FILL], ids=["off", "fill"])
def test_a_batch_may_be_split_into_other_micro_batches_between_two_generation_batches(tmp_path, own):
    options = {"rewards": mixed_reward, "learning_rate": 1e-3, **own}
    whole, halved = (
        {**options, "per_device_train_batch_size": size, "gradient_accumulation_steps": 16 // size} for size in (16, 8)
    )
    saves = {"save_strategy": "steps", "save_steps": 3}
    ours(tmp_path, **whole, **saves, max_steps=3)
    ends = []
    for split in (whole, halved):
        again = ours(tmp_path, train=False, **split, max_steps=6)
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        ends.append(logged(again, "reward", "grad_norm"))
    assert len(ends[0]) == 6
    assert any(norm > 0 for _, norm in ends[0][3:])
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-3)


@pytest.mark.parametrize(
    ("missing", "options"),
    [
        ("checkpoint-3", {}),
        ("checkpoint-3/optimizer.pt", {}),
        (None, {"trainer": {"train_dataset": plain_dataset(23)}}),
        (None, {"selection": "greso"}),
        (None, {"selector_args": {"predictor": "attention"}}),
    ],
)
def test_a_checkpoint_that_cannot_be_resumed_is_found_before_prompts_are_embedded(
    tmp_path, monkeypatch, missing, options
):
    ours(tmp_path, **DOTS, max_steps=3)
    if missing:
        (tmp_path / missing).rename(tmp_path / "elsewhere")
    again = ours(tmp_path, train=False, **{**DOTS, **options})
    monkeypatch.setattr("trl_dataeff.trainer.embed_for", lambda *a, **kw: pytest.fail("embedded"))
    with pytest.raises(CheckpointError):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_the_state_is_there_when_the_trainer_says_that_a_checkpoint_is_complete(tmp_path, monkeypatch):
    """What is pushed to the Hub, or copied by another callback, has it."""
    seen = []
    written = DataEfficientGRPOTrainer._save_rng_state
    monkeypatch.setattr(
        DataEfficientGRPOTrainer,
        "_save_rng_state",
        lambda self, folder: (seen.append((Path(folder) / "dataeff" / "state.json").exists()), written(self, folder)),
    )
    ours(tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    assert seen == [True, True]


def test_generation_batches_keep_lists_and_shared_scalars(tmp_path):
    count = torch.tensor(3)
    batches = [
        {"x": torch.ones(2, 3), "n": count, "num_images": [1, 2], "none": None},
        {"x": torch.zeros(2, 3), "n": count},
    ]
    save_generation_batch(tmp_path, 1, batches)
    first, second = load_generation_batch(tmp_path, 1, torch.device("cpu"))
    assert torch.equal(first["x"], batches[0]["x"])
    assert first["num_images"] == [1, 2]
    assert second["n"] == 3
    with pytest.raises(CheckpointError, match="as many processes as wrote it"):
        load_generation_batch(tmp_path, 0, torch.device("cpu"))
