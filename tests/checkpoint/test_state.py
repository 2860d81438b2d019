"""What a checkpoint holds of the selection, and what is compared when a run is resumed from it."""

import json

import numpy as np
import pytest
import torch

from tests.factories.comparison import OFF
from tests.factories.configurations import FILL, make_trainer, train
from tests.factories.tiny import even_length_reward, logged, plain_dataset
from tests.factories.training import mixed_reward
from trl_dataeff.checkpoint.manifest import MANIFEST
from trl_dataeff.checkpoint.state import CheckpointError, load_run, load_state, save_run, save_state
from trl_dataeff.rollouts.distributed import Processes
from trl_dataeff.utils import FORMAT, hash_json


ATTENTION = {"selection": "dots", "selector_args": {"predictor": "attention"}}
NARROW = {"selection": "dots", "selector_args": {"predictor": "attention", "predictor_args": {"width": 8}}}


def test_state_is_what_was_saved(tmp_path):
    arrays = {"rng": np.arange(5, dtype=np.uint8), "strided": np.arange(6)[::2], "empty": np.zeros((0, 2))}
    state = {
        "half_used": False,
        "collector": {"counters": {"n": 3}, "scale": None, "selector": arrays},
        "leftover": {},
    }
    save_state(tmp_path, "state", state)
    found = load_state(tmp_path, "state")
    np.testing.assert_equal(found, state)
    assert found["collector"]["selector"]["rng"].dtype == np.uint8
    (tmp_path / "dataeff" / "state.safetensors").unlink()
    with pytest.raises(CheckpointError, match=rf"{tmp_path / 'dataeff'}"):
        load_state(tmp_path, "state")


def test_generation_batches_keep_lists_and_shared_scalars(tmp_path):
    count = torch.tensor(3)
    batches = [
        {"x": torch.ones(2, 3), "n": count, "num_images": [1, 2], "none": None},
        {"x": torch.zeros(2, 3), "n": count},
    ]
    save_run(tmp_path, {}, batches, rank=0, writes=True)
    _, (first, second) = load_run(tmp_path, Processes())
    assert torch.equal(first["x"], batches[0]["x"])
    assert first["num_images"] == [1, 2]
    assert first["none"] is None
    assert second["n"] == 3
    with pytest.raises(CheckpointError, match="batch-1"):
        load_run(tmp_path, Processes(rank=1, world_size=2))


def test_another_format_names_the_version_that_wrote_it(tmp_path):
    train(tmp_path, max_steps=1)
    path = tmp_path / "checkpoint-1" / MANIFEST
    content = {**json.loads(path.read_text()), "format": 99, "trl_dataeff": "7.0"}
    del content["hash"]
    path.write_text(json.dumps(content | {"hash": hash_json(content)}))
    with pytest.raises(CheckpointError, match=rf"99.* 7\.0.* {FORMAT}\b"):
        train(tmp_path, resume=str(path.parents[1]))


def test_a_dataset_with_another_prompt_is_rejected(tmp_path):
    train(tmp_path, max_steps=1)
    swapped = plain_dataset().select([1, 0, *range(2, 24)])
    changed = plain_dataset().map(lambda row: {"prompt": row["prompt"].replace("05:", "5:")})
    for dataset in (swapped, changed, plain_dataset(23)):
        size = len(dataset)
        with pytest.raises(CheckpointError, match=rf"\b24\b.*hash (\w+);.*\b{size}\b.* (?!\1)\w+\."):
            train(tmp_path, resume=True, trainer={"train_dataset": dataset})


def test_a_split_without_a_seed_is_named_as_the_cause(tmp_path):
    def split(seed):
        return plain_dataset(30).train_test_split(6, seed=seed)["train"]

    train(tmp_path, max_steps=1, trainer={"train_dataset": split(0)})
    # Without a seed each start of a script draws another one
    with pytest.raises(CheckpointError, match=r"train_test_split\(.*seed="):
        train(tmp_path, resume=True, trainer={"train_dataset": split(1)})
    resumed = train(tmp_path, resume=True, max_steps=2, trainer={"train_dataset": split(0)})
    assert resumed.state.global_step == 2


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ({}, {"selection": "greso"}, "selector .*'UniformSelector'.*'GresoSelector'"),
        ({"rollout_margin": 3.0}, {"num_generations": 8}, r"num_generations .*\b4\b.*\b8\b"),
        ({"rollout_margin": 3.0}, {"rewards": [mixed_reward, even_length_reward]}, "mixed_reward.*even_length"),
        ({"steps_per_generation": 4}, {"steps_per_generation": 8}, r"steps_per_generation .*\b4\b.*\b8\b"),
        (
            {"steps_per_generation": 4},
            {"steps_per_generation": 4, "gradient_accumulation_steps": 2},
            r"gradient_accumulation_steps .*\b1\b.*\b2\b",
        ),
        ({"selection": "dots"}, ATTENTION, "predictor .*'logistic'.*'attention'"),
        (NARROW, ATTENTION, "DotsSelector.*arguments"),
    ],
)
def test_settings_that_the_state_depends_on_are_compared(tmp_path, before, after, named):
    first = train(tmp_path, max_steps=3, save_steps=3, **before)
    assert first.collector.leftover or "rollout_margin" not in before
    with pytest.raises(CheckpointError, match=named):
        train(tmp_path, resume=str(tmp_path / "checkpoint-3"), **{**before, **after})


@pytest.mark.parametrize(
    ("missing", "options"),
    [
        ("checkpoint-3", {}),
        ("checkpoint-3/trainer_state.json", {}),
        (None, {"trainer": {"train_dataset": plain_dataset(23)}}),
        (None, {"selection": "greso", "selector_args": {}}),
        (None, ATTENTION),
    ],
)
def test_a_checkpoint_that_cannot_be_resumed_is_found_before_prompts_are_embedded(
    tmp_path, monkeypatch, missing, options
):
    train(tmp_path, "dots", max_steps=3, save_steps=3)
    if missing:
        (tmp_path / missing).rename(tmp_path / "elsewhere")
    again = make_trainer(tmp_path, "dots", **options)
    monkeypatch.setattr("trl_dataeff.trainer.embed_for", lambda *a, **kw: pytest.fail("embedded"))
    with pytest.raises(CheckpointError):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


@pytest.mark.parametrize("own", [OFF, FILL], ids=["off", "fill"])
def test_a_batch_may_be_split_into_other_micro_batches_between_two_generation_batches(tmp_path, own):
    whole, halved = (
        {**own, "learning_rate": 1e-3, "per_device_train_batch_size": size, "gradient_accumulation_steps": 16 // size}
        for size in (16, 8)
    )
    train(tmp_path, "off", max_steps=3, save_steps=3, **whole)
    ends = []
    for split in (whole, halved):
        options = {"max_steps": 6, "save_strategy": "no", **split}
        again = train(tmp_path, "off", resume=str(tmp_path / "checkpoint-3"), **options)
        ends.append(logged(again, "reward", "grad_norm"))
    assert len(ends[0]) == 6
    assert any(norm > 0 for _, norm in ends[0][3:])
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-3)
