"""
Train with rewards of your own: a right answer, and a bonus for a short one.

    python examples/custom_reward.py \
        --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name openai/gsm8k --dataset_config main \
        --use_peft --lora_target_modules all-linear --lora_dropout 0 --learning_rate 2e-5 \
        --per_device_train_batch_size 16 --gradient_accumulation_steps 8 --num_generations 8 \
        --max_steps 300 --output_dir outputs/custom_reward

A reward function is TRL's: it takes the completions and the columns of the dataset by name, and returns a number for
each completion, or `None` where it has nothing to say. With selection and replay
(`--selection dots --replay fill`), two things matter:

- A prompt's success rate is the mean total reward of its group, scaled from `reward_range` to [0, 1]. Say what the
  range is if you know it; unset, it is the lowest and highest total that the run has seen.
- A bonus that differs between completions makes every group effective, even of prompts that are always answered right.
  Such groups are generated and trained on. Here, only right answers get the bonus, and only in steps of a half.
"""

from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config

from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer


def is_right(completion, answer):
    """Whether a completion ends with the last word of the answer: in GSM8K, the number after `####`."""
    text = completion[0]["content"].rstrip(" .")
    return text.split()[-1:] == answer.split()[-1:]


def accuracy(completions, answer, **kwargs):
    return [float(is_right(completion, gold)) for completion, gold in zip(completions, answer, strict=True)]


def brevity(completions, completion_ids, answer, **kwargs):
    """A half for a right answer in fewer than 100 tokens."""
    rewards = []
    for completion, ids, gold in zip(completions, completion_ids, answer, strict=True):
        is_short = len(ids) < 100
        rewards.append(0.5 if is_short and is_right(completion, gold) else 0.0)
    return rewards


def make_conversation(example):
    return {"prompt": [{"role": "user", "content": example["question"] + " End with the number alone."}]}


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, DataEfficientGRPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }
    training_args.reward_range = [0.0, 1.5]

    dataset = load_dataset(script_args.dataset_name, script_args.dataset_config, split=script_args.dataset_train_split)
    trainer = DataEfficientGRPOTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        reward_funcs=[accuracy, brevity],
        train_dataset=dataset.map(make_conversation),
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
