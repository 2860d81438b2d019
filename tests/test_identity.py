"""With everything switched off, training is that of `GRPOTrainer`, to the last bit."""

import random

import pytest
import torch
from datasets import IterableDataset
from peft import LoraConfig
from trl import GRPOTrainer

from tests.factories.comparison import OFF, assert_identical
from tests.factories.tiny import chat_dataset, even_length_reward, letter_share_reward, plain_dataset, run, text_of
from tests.factories.tools import scripted_tool_calls, tool_arguments, tool_tokenizer
from trl_dataeff import DataEfficientGRPOTrainer


async def async_reward(completions, **kwargs):
    return [float(len(text_of(c)) % 3) for c in completions]


def sometimes_none_reward(prompts, completions, **kwargs):
    """Applies to every second prompt only."""
    return [None if int(text_of(p)[:2]) % 2 else len(set(text_of(c))) / 8 for p, c in zip(prompts, completions)]


def answer_reward(completions, answer, **kwargs):
    return [float(a in text_of(c)) + 0.1 * len(text_of(c)) for c, a in zip(completions, answer)]


def luck_reward(completions, luck, **kwargs):
    return [float(value) for value in luck]


def rollout_func(prompts, trainer):
    generator = random.Random(str(prompts) + str(trainer.state.global_step))
    completions = [[generator.randrange(6, 60) for _ in range(5)] for _ in prompts]
    return {
        "prompt_ids": [trainer.processing_class(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": completions,
        "logprobs": None,
        "luck": [sum(c) % 3 for c in completions],
    }


class Environment:
    """Owns the prompt, and rewards by chance."""

    def reset(self, **kwargs):
        return "Say something."

    def get_reward(self) -> float:
        return float(torch.randint(5, ()))


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
    "streaming": {"trainer": {"train_dataset": IterableDataset.from_generator(lambda: iter(plain_dataset()))}},
    "mask truncated": {"mask_truncated_completions": True},
    "beta": {"beta": 0.2},
    "bf16_full_eval": {"bf16_full_eval": True},
    "tools": {
        "wrap": scripted_tool_calls,
        "max_completion_length": 100,
        "max_steps": 6,  # one and a half epochs
        "trainer": tool_arguments(8),
    },
    "a rollout_func": {"rewards": luck_reward, "trainer": {"rollout_func": rollout_func}},
    "an environment": {
        "rewards": None,
        "max_completion_length": 12,
        "trainer": {
            "train_dataset": None,
            "environment_factory": Environment,
            "processing_class": tool_tokenizer(),
        },
    },
}


@pytest.mark.parametrize("case", CASES)
def test_off_is_grpo(case, tmp_path):
    options = dict(CASES[case])
    wrap = options.pop("wrap", lambda trainer_class: trainer_class)
    reference = run(tmp_path / "a", wrap(GRPOTrainer), **options)
    ours = run(tmp_path / "b", wrap(DataEfficientGRPOTrainer), **options, **OFF)
    assert_identical(reference, ours)
    for shown in {"beta": ["kl"], "tools": ["tools/call_frequency"]}.get(case, []):
        assert any(log.get(shown) for log in ours.state.log_history)
