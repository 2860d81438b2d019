"""Prompts with images: generated in rounds, replayed with the images of their rows, and corrected with them."""

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoProcessor, LlavaForConditionalGeneration
from trl import GRPOTrainer

from tests.factories.comparison import OFF, all_finite, assert_identical
from tests.factories.tiny import logged, run
from tests.factories.training import Watched, mixed_reward, number
from tests.factories.vision import picture, picture_dataset, save_tiny_vision
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer
from trl_dataeff.generation.pregenerated import images_of
from trl_dataeff.generation.recorder import prompts_with_images
from trl_dataeff.utils import UserError


WHERE = ("image", "images", "message")
BOTH = {"replay": "share", "max_rollout_rounds": 4, "steps_per_generation": 2, "rollout_margin": 2.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_tiny_vision(tmp_path_factory.mktemp("vision"))


def reward(prompts, completion_ids, **kwargs):
    """`mixed_reward` for prompts with images in their messages."""
    texts = [next(part["text"] for part in prompt[-1]["content"] if part["type"] == "text") for prompt in prompts]
    return mixed_reward(texts, completion_ids)


def train(model, folder, where="image", trainer_class=Watched, **options):
    trainer = {"model": model, "processing_class": AutoProcessor.from_pretrained(model)}
    trainer |= {"train_dataset": picture_dataset(where), "peft_config": options.pop("peft_config", None)}
    defaults = {"model_init_kwargs": {"dtype": "float32"}, "rewards": reward, "max_steps": 6}
    return run(folder, trainer_class, trainer=trainer, **{**defaults, **options})


def color(pixels: torch.Tensor) -> list[float]:
    return pixels.mean(dim=(-2, -1)).numpy().round(3).tolist()


@pytest.mark.parametrize("where", WHERE)
def test_off_is_grpo(model, tmp_path, where):
    reference = train(model, tmp_path / "a", where, GRPOTrainer)
    assert_identical(reference, train(model, tmp_path / "b", where, DataEfficientGRPOTrainer, **OFF))


@pytest.mark.parametrize("where", WHERE)
def test_groups_are_trained_on_with_the_images_of_their_rows(model, tmp_path, where):
    trainer = train(model, tmp_path, where, max_steps=10, **BOTH)
    assert any(batch.replayed for batch in trainer.batches)
    assert any(batch.rounds > 1 for batch in trainer.batches)
    assert any(grad for (grad,) in logged(trainer, "grad_norm"))
    assert all_finite(trainer)
    processor, rows = trainer.processing_class.image_processor, trainer.train_dataset
    for batch, tensors in zip(trainer.batches, trainer.tensors, strict=True):
        prompts = prompts_with_images([rows[group.prompt_id] for group in batch.trained for _ in range(4)])
        expected = [image for images in images_of(prompts) for image in images]
        assert color(tensors["pixel_values"]) == color(processor(expected, return_tensors="pt")["pixel_values"])


@pytest.mark.parametrize("where", ["image", "images"])
def test_stored_log_probs_are_those_of_the_policy_that_sampled(model, tmp_path, where):
    """Against a forward pass with the images of a copy of the policy; other images give others."""
    trainer = train(model, tmp_path, where, learning_rate=3e-2, **BOTH)
    policy = LlavaForConditionalGeneration.from_pretrained(model, dtype=torch.float32).eval()
    checked, differing = set(), 0

    def score(prompt, tokens, images):
        ids = torch.from_numpy(np.concatenate([prompt, tokens])).long()[None]
        pixels = trainer.processing_class.image_processor(images, return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            logits = policy(ids, pixel_values=pixels).logits[0, :-1]
        return logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[-len(tokens) :, 0].numpy()

    leftover = {id(group) for batch in trainer.batches for group in batch.leftover_now}
    for batch, weights in zip(trainer.batches, trainer.weights, strict=True):
        policy.load_state_dict(weights, strict=False)
        for group in [group for group in batch.generated if group.effective]:
            (images,) = images_of(prompts_with_images([trainer.train_dataset[group.prompt_id]]))
            rollouts, others = group.rollouts, [picture(79)] * len(images)
            for tokens, logps in zip(rollouts.completion_tokens, rollouts.behavior_logps, strict=True):
                np.testing.assert_allclose(logps, score(rollouts.prompt_tokens, tokens, images), atol=1e-4)
                differing += not np.allclose(logps, score(rollouts.prompt_tokens, tokens, others), atol=1e-3)
            checked.add(id(group))
    assert checked & leftover
    assert checked - leftover
    assert differing > len(checked), "the model hardly looks at its images"


def test_log_probs_of_leftover_groups_leave_no_trace_in_the_logs(model, tmp_path):
    trainer = train(model, tmp_path, log_completions=True, **BOTH)
    assert any(batch.leftover_now for batch in trainer.batches)
    for batch, (mean,) in zip(trainer.batches, logged(trainer, "reward"), strict=True):
        assert mean == pytest.approx(np.mean([group.rewards for group in batch.generated or batch.trained]))
    *_, last = sorted((tmp_path / "completions").glob("*.parquet"))
    shown = [number(prompt[-1]["content"][1]["text"]) for prompt in pd.read_parquet(last)["prompt"]]
    assert shown == [group.prompt_id for group in trainer.batches[-1].trained for _ in range(4)]


def test_images_of_prompts():
    first, second = picture(1), picture(2)
    chat = [{"role": "user", "content": "00"}]
    assert images_of(prompts_with_images([{"prompt": chat, "image": first}, {"prompt": chat, "image": None}])) == [
        [first],
        None,
    ]
    assert images_of(prompts_with_images([{"prompt": chat, "images": [first, second]}])) == [[first, second]]
    array = np.asarray(first)  # as `with_format("numpy")` gives it
    assert images_of(prompts_with_images([{"prompt": chat, "image": array}])) == [[array]]
    for rows in ([{"prompt": chat, "images": []}], [{"prompt": chat}], [{"prompt": "00", "images": []}], []):
        assert prompts_with_images(rows) == [row["prompt"] for row in rows]
        assert images_of([row["prompt"] for row in rows]) is None


WITH_IMAGES = [{"image": None}, {"images": None}, {"images": ["a picture"]}, {"image": "a picture"}]


def test_images_beside_plain_text_are_refused_where_trl_refuses_them(tmp_path):
    trl = run(tmp_path, GRPOTrainer, train=False)
    for images in WITH_IMAGES:
        rows = [{"prompt": "00", **images}] * 4
        for generate in (trl._generate_and_score_completions, prompts_with_images):
            with pytest.raises(ValueError, match="conversation"):
                generate(rows)


def test_images_beside_plain_text_are_refused_before_the_model_is_loaded():
    dataset = picture_dataset()
    texts = [f"{i:02d}" for i in range(len(dataset))]
    dataset = dataset.remove_columns("prompt").add_column("prompt", texts)
    args = DataEfficientGRPOConfig("out", use_cpu=True, bf16=False, selection="dots")
    with pytest.raises(UserError, match=r"`image`.*conversation"):
        DataEfficientGRPOTrainer("no/such-model", reward, args, dataset)
