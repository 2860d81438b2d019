"""
Runs of random configurations, three steps each. With our features off, a run is TRL's or is refused as TRL refuses it.
With them, every generation batch keeps its rules: whole groups of prompts that differ, rewards and advantages that are
those of the completions, as many rollouts as a step may take, and a policy that stays finite.
"""

import random

import numpy as np
import pytest
import torch
from trl import GRPOTrainer

from tests.factories.comparison import OFF, all_finite, assert_identical
from tests.factories.tiny import chat_dataset, even_length_reward, letter_share_reward, logged, plain_dataset, run
from tests.factories.training import Watched, mixed_reward, partly_learnable_reward


STEPS = 3
G = 4
#: What decides how TRL trains
OF_TRL = {
    "per_device_train_batch_size": [4, 8, 16],
    "gradient_accumulation_steps": [1, 2, 3],
    "steps_per_generation": [None, 1, 2, 4],
    "num_iterations": [1, 2],
    "loss_type": ["dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"],
    "scale_rewards": ["group", "batch", "none"],
    "importance_sampling_level": ["token", "sequence"],
    "mask_truncated_completions": [False, True],
    "temperature": [1.0, 0.7],
    "max_completion_length": [4, 8],
    "shuffle_dataset": [True, False],
    "beta": [0.0, 0.0, 0.1],
    "seed": [1, 2, 3],
    "logging_steps": [1, 2],
    "remove_unused_columns": [False, True],
}
#: What we add
OF_OURS = {
    "selection": ["uniform", "dots", "greso"],
    "replay": ["fill", "share", "off"],
    "replay_fraction": [0.25, 0.5],
    "replay_order": ["newest", "random"],
    "replay_clip": ["proximal", "behavior"],
    "replay_ratio_cap": [2.0, None],
    "replay_max_age": [1, 5, None],
    "max_rollout_rounds": [1, 3],
    "rollout_margin": [1.0, 1.5],
    "compact_update": [True, False],
}
REWARDS = {
    "even": even_length_reward,
    "letters": letter_share_reward,
    "mixed": mixed_reward,
    "partly": partly_learnable_reward,
}
DATASETS = {
    "plain": lambda: plain_dataset(24),
    "few prompts": lambda: plain_dataset(9),
    "conversations": lambda: chat_dataset(24),
}
FEW = range(4)
MANY = [pytest.param(number, marks=pytest.mark.slow) for number in range(4, 64)]


def draw(rng: random.Random, fields: dict[str, list]) -> dict:
    return {name: rng.choice(values) for name, values in fields.items()}


def outcome(folder, trainer_class, **options):
    """The trained trainer, or the error that refused the configuration."""
    try:
        return run(folder, trainer_class, max_steps=STEPS, num_generations=G, **options)
    except ValueError as error:
        return error


@pytest.mark.parametrize("number", [*FEW, *MANY])
def test_off_is_trl_with_any_configuration(number, tmp_path):
    rng = random.Random(number)
    options = draw(rng, OF_TRL)
    options["rewards"] = rng.choice(list(REWARDS.values()))
    dataset = rng.choice(list(DATASETS.values()))
    expected = outcome(tmp_path / "a", GRPOTrainer, trainer={"train_dataset": dataset()}, **options)
    found = outcome(tmp_path / "b", Watched, trainer={"train_dataset": dataset()}, **options, **OFF)
    if isinstance(expected, ValueError):
        assert str(found) == str(expected)
        return
    assert_identical(expected, found, least=20, has_gradient=False)


@pytest.mark.parametrize("number", [*FEW, *MANY])
def test_any_configuration_keeps_the_rules_of_a_batch(number, tmp_path):
    rng = random.Random(1000 + number)
    options = {**draw(rng, OF_TRL), **draw(rng, OF_OURS)}
    reward = rng.choice(list(REWARDS.values()))
    dataset = rng.choice(list(DATASETS.values()))()
    trainer = outcome(tmp_path, Watched, rewards=reward, trainer={"train_dataset": dataset}, **options)
    if isinstance(trainer, ValueError):
        # Refused before anything was generated, by a message that names a field
        assert any(f"`{name}" in str(trainer) for name in options), str(trainer)
        return
    assert trainer.state.global_step == STEPS
    assert all_finite(trainer)
    (counted,) = logged(trainer, "dataeff/rollouts_generated")[-1]
    assert counted == trainer.generated
    if trainer.collector is not None:  # else the batches are TRL's
        check_batches(trainer, reward, dataset)


def check_batches(trainer: Watched, reward, dataset) -> None:
    config = trainer.args
    places = config.generation_batch_size // G
    assert len(trainer.batches) == len(trainer.tensors) > 0
    generated = 0
    for batch, tensors in zip(trainer.batches, trainer.tensors, strict=True):
        prompts = [group.prompt_id for group in batch.trained]
        assert len(prompts) == places
        num_in_batch = len({group.prompt_id for group in [*batch.trained, *batch.generated]})
        assert len(set(prompts)) == places or num_in_batch == len(dataset)
        generated += sum(len(group.lengths) for group in batch.generated)
        assert batch.rounds <= config.max_rollout_rounds or config.replay != "off"
        if config.max_rollout_rounds == 1:
            assert len(batch.generated) <= places + len(batch.leftover)
        for group in batch.trained:
            check_group(group, config, reward, dataset)
        check_rows(tensors, batch, config)
    assert generated == trainer.generated


def check_group(group, config, reward, dataset) -> None:
    """
    Its rewards are those that the reward function gives its completions for its prompt, and it is effective if a
    completion that the loss counts has an advantage.
    """
    rewards = group.rewards[:, 0]
    has_advantage = abs(rewards - rewards.mean()) > 1e-6
    counts = ~group.truncated if config.mask_truncated_completions else np.ones(G, dtype=bool)
    assert group.effective == (has_advantage & counts).any()
    if group.rollouts is None:  # nothing is replayed, and no group is replaced
        return
    prompt = dataset[group.prompt_id]["prompt"]
    completions = group.rollouts.completions
    ids = [tokens.tolist() for tokens in group.rollouts.completion_tokens]
    expected = reward(prompts=[prompt] * G, completions=completions, completion_ids=ids)
    assert rewards.tolist() == pytest.approx(expected)


def check_rows(tensors: dict, batch, config) -> None:
    """The rows that TRL trains on are those of the batch's groups, with the advantages of their rewards."""
    advantages = tensors["advantages"].double().view(-1, G)  # micro-batches are shuffled later
    rewards = torch.from_numpy(np.stack([group.rewards[:, 0] for group in batch.trained])).double()
    expected = rewards - rewards.mean(dim=1, keepdim=True)
    if config.scale_rewards == "group":
        expected = expected / (rewards.std(dim=1, keepdim=True) + 1e-4)
    if config.scale_rewards == "batch":
        generated = torch.from_numpy(np.stack([group.rewards[:, 0] for group in batch.generated])).double()
        expected = expected / (generated.std() + 1e-4)
        # Those of earlier batches keep the deviation of the groups trained on
        is_fresh = torch.tensor([batch.origins[group] == "fresh" for group in batch.trained])
        expected = expected[is_fresh]
        advantages = advantages[is_fresh]
    torch.testing.assert_close(advantages, expected, rtol=1e-4, atol=1e-5)
    trained = set()
    for group in batch.trained:
        if group.rollouts is None:
            return
        trained.update(tuple(tokens.tolist()) for tokens in group.rollouts.completion_tokens)
    for row, mask in zip(tensors["completion_ids"], tensors["completion_mask"], strict=True):
        tokens = tuple(row[mask.bool()].tolist())
        assert tokens in trained or tokens == ()  # a masked completion
