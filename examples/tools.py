"""
Train a model to use a tool: a calculator for products that are too large to do in the head.

    python examples/tools.py \
        --model_name_or_path Qwen/Qwen3-0.6B \
        --use_peft --lora_target_modules all-linear --lora_dropout 0 --learning_rate 2e-5 \
        --per_device_train_batch_size 16 --gradient_accumulation_steps 4 --num_generations 8 \
        --max_completion_length 512 --max_steps 200 --output_dir outputs/tools

`tools` is TRL's. With `--selection dots --replay fill`, prompts are selected and groups are replayed as without tools:
what a tool answered is stored with the completion, masked out of the loss, and a replayed group calls no tool again.
"""

import random

from datasets import Dataset
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer
from trl_dataeff.rewards import numeric_answer_reward


def multiply(a: int, b: int) -> int:
    """
    Multiply two whole numbers.

    Args:
        a: The first factor.
        b: The second factor.

    Returns:
        The product.
    """
    return a * b


def make_dataset(n: int, seed: int = 0) -> Dataset:
    """Products of numbers of two to six digits: the short ones need no tool, the long ones do."""
    rng = random.Random(seed)
    digits_of_factors = [(rng.randint(2, 6), rng.randint(2, 6)) for _ in range(n)]
    rows = []
    for digits_of_a, digits_of_b in digits_of_factors:
        a = random_number(rng, digits_of_a)
        b = random_number(rng, digits_of_b)
        question = {"role": "user", "content": f"What is {a} times {b}?"}
        rows.append({"prompt": [question], "answer": str(a * b)})
    return Dataset.from_list(rows)


def random_number(rng: random.Random, digits: int) -> int:
    return rng.randrange(10 ** (digits - 1), 10**digits)


if __name__ == "__main__":
    parser = TrlParser((DataEfficientGRPOConfig, ModelConfig))
    training_args, model_args = parser.parse_args_and_config()
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }

    trainer = DataEfficientGRPOTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        reward_funcs=numeric_answer_reward,
        train_dataset=make_dataset(1000),
        tools=[multiply],
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
