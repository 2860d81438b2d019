"""
The same in a script: `resume_from_checkpoint=True`, and a checkpoint on SIGTERM.

    until python examples/preemption/train.py --output_dir outputs/preemption ...; do sleep 1; done

Further arguments as in `examples/gsm8k.py`. `job.sh` beside this file has a loop that tells a preemption from a mistake.
"""

from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config

from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer
from trl_dataeff.rewards import numeric_answer_reward


def make_conversation(example):
    return {"prompt": [{"role": "user", "content": example["question"]}]}


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, DataEfficientGRPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    training_args.save_on_signal = True  # SIGTERM and Ctrl-C: finish the step, save, and end with code 143 or 130

    dataset = load_dataset(script_args.dataset_name, script_args.dataset_config, split=script_args.dataset_train_split)
    trainer = DataEfficientGRPOTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        reward_funcs=numeric_answer_reward,
        train_dataset=dataset.map(make_conversation),
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=True)  # the latest complete checkpoint; if there is none, from step 0
    trainer.save_model(training_args.output_dir)
