"""
Fine-tune a language model on GSM8K with LoRA, on one GPU. Only the imports differ from a script for TRL.

    python examples/gsm8k.py \
        --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dtype bfloat16 \
        --dataset_name openai/gsm8k --dataset_config main \
        --use_peft --lora_target_modules all-linear --lora_dropout 0 --learning_rate 2e-5 \
        --per_device_train_batch_size 16 --gradient_accumulation_steps 8 --num_generations 8 \
        --max_completion_length 512 --max_steps 300 --eval_strategy steps --eval_steps 50 \
        --output_dir outputs/gsm8k

With vLLM, add `--use_vllm --vllm_mode colocate`. For selection and replay, add `--selection dots --replay fill` and
another `--output_dir`, then run `trl-dataeff report` on both folders.
"""

from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config

from trl_dataeff import DataEfficientGRPOConfig as GRPOConfig
from trl_dataeff import DataEfficientGRPOTrainer as GRPOTrainer
from trl_dataeff.rewards import numeric_answer_reward


SYSTEM_PROMPT = r"Please reason step by step, and put your final answer within \boxed{}."


def make_conversation(example):
    question = {"role": "user", "content": example["question"]}
    return {"prompt": [{"role": "system", "content": SYSTEM_PROMPT}, question]}


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }

    dataset = load_dataset(script_args.dataset_name, script_args.dataset_config).map(make_conversation)
    held_out = dataset[script_args.dataset_test_split]

    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        reward_funcs=numeric_answer_reward,  # compares with the number after #### in the column `answer`
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=held_out.select(range(min(200, len(held_out)))),
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
