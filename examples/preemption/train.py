"""
The same in a script: `resume_from_checkpoint=True`, and a checkpoint on SIGTERM.

    while python examples/preemption/train.py --output_dir outputs/preemption ...; [ $? -eq 143 ]; do sleep 1; done

The loop repeats a run that SIGTERM has stopped, and ends after Ctrl-C, a mistake, or the last step. Further arguments
as in `examples/gsm8k.py`; `job.sh` beside this file has a loop for Slurm, which also repeats a run that was killed.
"""

from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config

from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer
from trl_dataeff.rewards import numeric_answer_reward


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
    # SIGTERM and Ctrl-C: finish the step, save, and end with code 143 or 130
    training_args.save_on_signal = True

    dataset = load_dataset(script_args.dataset_name, script_args.dataset_config, split=script_args.dataset_train_split)
    trainer = DataEfficientGRPOTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        reward_funcs=numeric_answer_reward,
        train_dataset=dataset.map(make_conversation),
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    # From the latest complete checkpoint; if there is none, from step 0
    trainer.train(resume_from_checkpoint=True)
    trainer.save_model(training_args.output_dir)
