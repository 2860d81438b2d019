"""
Train with a selector of your own: a curriculum that goes on to harder questions when the present ones are solved.

    python examples/custom_selector.py \
        --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name openai/gsm8k --dataset_config main \
        --use_peft --lora_target_modules all-linear --lora_dropout 0 --learning_rate 2e-5 \
        --per_device_train_batch_size 16 --gradient_accumulation_steps 8 --num_generations 8 \
        --max_steps 300 --output_dir outputs/custom_selector

The levels come from the dataset: here, the number of lines of the worked solution. `docs/selectors.md` has the
contract, and the test suite that every selector can be run through.
"""

import numpy as np
import torch
from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config

from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer, Selector
from trl_dataeff.rewards import numeric_answer_reward


class CurriculumSelector(Selector):
    """Draws prompts from the open levels, and opens another one when the running success rate exceeds `goal`.

    Args:
        levels (`np.ndarray`): Level of each prompt, integers `(N,)`.
        goal (`float`, *optional*, defaults to `0.7`): Success rate that opens the next level.
    """

    def __init__(self, levels, goal=0.7):
        self.levels = levels
        self.goal = goal

    def bind(self, context):
        super().bind(context)
        if len(self.levels) != context.num_prompts:
            raise ValueError(
                f"There are levels of {len(self.levels)} prompts, and the dataset has {context.num_prompts}."
            )
        # As many prompts are open as can be asked for at once: those of a batch, and half as many again in a round
        needed = min(2 * context.batch_groups, context.num_prompts)
        prompts_up_to_level = np.cumsum(np.bincount(self.levels))
        self.level = int(np.searchsorted(prompts_up_to_level, needed))  # the highest one that is open
        self.success = 0.0  # running mean

    def propose(self, n, rng):
        open_ids = np.flatnonzero(self.levels <= self.level)
        if len(open_ids) < n:
            open_ids = np.arange(len(self.levels))
        order = torch.randperm(len(open_ids), generator=rng).numpy()
        return open_ids[order[:n]]

    def observe(self, groups):
        rates = [group.success_rate for group in groups if not np.isnan(group.success_rate)]
        if rates:
            self.success = 0.8 * self.success + 0.2 * float(np.mean(rates))
        if self.success > self.goal and self.level < self.levels.max():
            self.level += 1
            self.success = 0.0

    def state_dict(self):
        return {"level": np.array(self.level), "success": np.array(self.success)}

    def load_state_dict(self, state):
        self.level = state["level"].item()
        self.success = state["success"].item()

    def metrics(self):
        return {"level": self.level, "success": self.success}


def make_conversation(example):
    return {"prompt": [{"role": "user", "content": example["question"]}]}


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, DataEfficientGRPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }

    dataset = load_dataset(script_args.dataset_name, script_args.dataset_config, split=script_args.dataset_train_split)
    levels = np.array([len(answer.splitlines()) for answer in dataset["answer"]])

    trainer = DataEfficientGRPOTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        reward_funcs=numeric_answer_reward,
        train_dataset=dataset.map(make_conversation),
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
        selector=CurriculumSelector(levels),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
