"""With everything switched off, training is that of `GRPOTrainer`, to the last bit."""

import random

import numpy as np
import pytest
from datasets import Dataset, IterableDataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from tests.factories import (
    OFF,
    add,
    assert_identical,
    chat_dataset,
    even_length_reward,
    letter_share_reward,
    plain_dataset,
    run,
    save_tiny,
    scripted_tool_calls,
    text_of,
    tiny_tokenizer,
    tool_dataset,
    tool_tokenizer,
)
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer, Selector


async def async_reward(completions, **kwargs):
    return [float(len(text_of(c)) % 3) for c in completions]


def sometimes_none_reward(prompts, completions, **kwargs):
    """Applies to every second prompt only."""
    return [None if int(text_of(p)[:2]) % 2 else len(set(text_of(c))) / 8 for p, c in zip(prompts, completions)]


def answer_reward(completions, answer, **kwargs):
    """Reads a column of the dataset."""
    return [float(a in text_of(c)) + 0.1 * len(text_of(c)) for c, a in zip(completions, answer)]


CASES = {
    "plain prompts": {},
    "conversational prompts": {"trainer": {"train_dataset": chat_dataset()}},
    "accumulation, aligned": {"gradient_accumulation_steps": 2},
    "generation over two steps": {"steps_per_generation": 2, "gradient_accumulation_steps": 1},
    "misaligned": {"steps_per_generation": 4, "gradient_accumulation_steps": 2},
    "several generation batches a step": {"steps_per_generation": 1, "gradient_accumulation_steps": 2},
    "num_iterations": {"num_iterations": 2},
    "num_iterations, misaligned": {"num_iterations": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 3},
    "epochs with a rest": {"trainer": {"train_dataset": plain_dataset(7)}},
    "one epoch": {"max_steps": -1, "num_train_epochs": 1},
    "dataset order": {"shuffle_dataset": False, "trainer": {"train_dataset": plain_dataset(7)}},
    "another seed": {"seed": 7},
    "lora": {"trainer": {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)}},
    "lora with beta": {"beta": 0.1, "trainer": {"peft_config": LoraConfig(r=4, target_modules=["q_proj"])}},
    "scale_rewards batch": {"scale_rewards": "batch"},
    "scale_rewards none, dr_grpo": {"scale_rewards": "none", "loss_type": "dr_grpo"},
    "normalize_then_sum": {
        "multi_objective_aggregation": "normalize_then_sum",
        "rewards": [even_length_reward, letter_share_reward],
    },
    "two rewards, weights, None": {
        "rewards": [letter_share_reward, sometimes_none_reward],
        "reward_weights": [0.3, 1.7],
    },
    "async reward": {"rewards": [async_reward, even_length_reward]},
    "a column of the dataset": {"rewards": answer_reward},
    "unused columns removed": {"remove_unused_columns": True},
    "evaluation": {
        "eval_strategy": "steps",
        "eval_steps": 3,
        "per_device_eval_batch_size": 8,
        "num_generations_eval": 2,
        "trainer": {"eval_dataset": plain_dataset(5)},
    },
    "streaming": {
        "trainer": {"train_dataset": IterableDataset.from_generator(lambda: iter(plain_dataset()))},
    },
    "mask truncated": {"mask_truncated_completions": True},
}


@pytest.mark.parametrize("case", CASES)
def test_off_is_grpo(case, tmp_path):
    options = CASES[case]
    reference = run(GRPOTrainer, GRPOConfig, tmp_path / "a", **options)
    ours = run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, tmp_path / "b", **options, **OFF)
    assert_identical(reference, ours)


def test_off_is_grpo_with_a_reference_model(tmp_path):
    model = save_tiny(tmp_path / "model")
    options = {"beta": 0.2, "trainer": {"model": model, "processing_class": tiny_tokenizer()}}
    reference = run(GRPOTrainer, GRPOConfig, tmp_path / "a", **options)
    ours = run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, tmp_path / "b", **options, **OFF)
    assert_identical(reference, ours)
    assert all(log["kl"] >= 0 for log in ours.state.log_history if "kl" in log)


def test_off_is_grpo_with_tools(tmp_path):
    def options():
        return {
            "max_completion_length": 150,
            "max_steps": 6,  # one and a half epochs
            "trainer": {"train_dataset": tool_dataset(8), "processing_class": tool_tokenizer(), "tools": [add]},
        }

    reference = run(scripted_tool_calls(GRPOTrainer), GRPOConfig, tmp_path / "a", **options())
    ours = run(
        scripted_tool_calls(DataEfficientGRPOTrainer), DataEfficientGRPOConfig, tmp_path / "b", **options(), **OFF
    )
    assert_identical(reference, ours)
    assert any(log.get("tools/call_frequency") for log in ours.state.log_history), "no tool was called"


def test_off_is_grpo_with_a_rollout_func(tmp_path):
    def rollout_func(prompts, trainer):
        generator = random.Random(str(prompts) + str(trainer.state.global_step))
        ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        completions = [[generator.randrange(6, 60) for _ in range(5)] for _ in prompts]
        return {
            "prompt_ids": ids,
            "completion_ids": completions,
            "logprobs": None,
            "luck": [sum(c) % 3 for c in completions],
        }

    def luck_reward(completions, luck, **kwargs):
        return [float(value) for value in luck]

    options = {"rewards": luck_reward, "trainer": {"rollout_func": rollout_func}}
    reference = run(GRPOTrainer, GRPOConfig, tmp_path / "a", **options)
    ours = run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, tmp_path / "b", **options, **OFF)
    assert_identical(reference, ours)


class _CountingEnvironment:
    def reset(self, **kwargs):
        return "Say something."

    def get_reward(self) -> float:
        _CountingEnvironment.calls += 1
        return float(_CountingEnvironment.calls * 7 % 5)

    calls = 0


def test_prompts_owned_by_an_environment(tmp_path):
    def options():
        _CountingEnvironment.calls = 0
        return {
            "rewards": None,
            "max_completion_length": 12,
            "trainer": {
                "train_dataset": None,
                "environment_factory": _CountingEnvironment,
                "processing_class": tool_tokenizer(),
            },
        }

    reference = run(GRPOTrainer, GRPOConfig, tmp_path / "a", **options())
    ours = run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, tmp_path / "b", **options(), **OFF)
    assert_identical(reference, ours)


def test_prompts_come_from_the_selector_not_from_the_dataloader(tmp_path):
    """The dataloader runs ahead of training; what is trained on is what the selector proposes when it is asked."""
    dataset = plain_dataset(24)

    class Fixed(Selector):
        def propose(self, n, rng):
            return np.array([3, 11])

    seen = set()

    def watching_reward(prompts, completions, **kwargs):
        seen.update(prompts)
        return even_length_reward([c.encode() for c in completions])

    run(
        DataEfficientGRPOTrainer,
        DataEfficientGRPOConfig,
        tmp_path,
        rewards=watching_reward,
        trainer={"train_dataset": dataset, "selector": Fixed()},
        max_steps=2,
        selection="auto",
    )
    assert seen == {dataset[3]["prompt"], dataset[11]["prompt"]}


def test_dataset_from_dict_is_left_as_it_is(tmp_path):
    dataset = Dataset.from_dict({"prompt": [f"{i:02d}" for i in range(8)], "answer": ["1"] * 8})
    before = dataset.to_list()
    run(DataEfficientGRPOTrainer, DataEfficientGRPOConfig, tmp_path, max_steps=2, trainer={"train_dataset": dataset})
    assert dataset.to_list() == before
