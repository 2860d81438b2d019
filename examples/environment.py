"""
Train in an environment: guess a number between 1 and 100, told each time whether it is larger or smaller.

    python examples/environment.py \
        --model_name_or_path Qwen/Qwen3-0.6B \
        --use_peft --lora_target_modules all-linear --lora_dropout 0 --learning_rate 2e-5 \
        --per_device_train_batch_size 16 --gradient_accumulation_steps 4 --num_generations 8 \
        --max_completion_length 1024 --max_steps 200 --output_dir outputs/environment

`environment_factory` is TRL's. An environment prepares its own prompts, so nothing can be replayed or refilled, and
there is hardly anything to select by: training is that of `GRPOTrainer` with a faster update. The logs say under
`dataeff/` which share of the groups carried a gradient.
"""

from datasets import Dataset
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer


class GuessTheNumber:
    """One game. Its public methods are the model's tools; `reset` and `get_reward` are called by the trainer."""

    def reset(self, number: int, **kwargs) -> str:
        self.number = number
        self.guesses = 0
        self.found = False
        return "I am thinking of a number from 1 to 100. Use the tool to guess it in at most eight guesses."

    def guess(self, value: int) -> str:
        """
        Guess the number.

        Args:
            value: The guess, from 1 to 100.

        Returns:
            Whether the number is found, larger or smaller.
        """
        self.guesses += 1
        if value < self.number:
            return "larger"
        if value > self.number:
            return "smaller"
        if self.guesses <= 8:
            self.found = True
        return "found"

    def get_reward(self) -> float:
        return float(self.found)


if __name__ == "__main__":
    parser = TrlParser((DataEfficientGRPOConfig, ModelConfig))
    training_args, model_args = parser.parse_args_and_config()
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }

    games = [{"prompt": [{"role": "user", "content": ""}], "number": number} for number in range(1, 101)]
    trainer = DataEfficientGRPOTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=Dataset.from_list(games),
        environment_factory=GuessTheNumber,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
