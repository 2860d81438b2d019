"""`trl-dataeff grpo`: read a recipe, train, save.

From Python: `trainer = train(parse(["--config", "recipe.yaml", "--max_steps", "20"]))`.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from trl_dataeff.utils import UserError


if TYPE_CHECKING:
    from trl_dataeff.cli.arguments import GRPOArguments
    from trl_dataeff.trainer import DataEfficientGRPOTrainer


def run(argv: list[str]) -> int:
    """Run the sub-command with what follows its name, here or through `accelerate launch`, and return its exit code."""
    if not argv or {"-h", "--help", "--help-all", "--help_all"}.intersection(argv):
        from trl_dataeff.cli.help import full_help, short_help

        print(full_help() if {"--help-all", "--help_all"}.intersection(argv) else short_help())
        return 0
    from trl_dataeff.cli.checks import all_problems
    from trl_dataeff.cli.launch import launch, needs_launch
    from trl_dataeff.cli.parser import GRPOParser

    # First without looking at the machine: what is wrong with the recipe is said once, before processes are started.
    arguments, launch_args = GRPOParser(portable=True).parse(argv, all_problems)
    if needs_launch(launch_args, arguments.training.use_cpu):
        return launch(launch_args, argv)
    train(parse(argv))
    return 0


def parse(argv: list[str]) -> GRPOArguments:
    """
    Return what a command line (what follows `trl-dataeff grpo`) and its recipe say; wrong input is a [`UserError`]. Options
    of `accelerate launch` are checked and left out.
    """
    from trl_dataeff.cli.parser import GRPOParser

    return GRPOParser().parse(argv)[0]


def train(arguments: GRPOArguments) -> DataEfficientGRPOTrainer:
    """
    Train with what `parse` returns, save the model and, if `push_to_hub` is set, push it. A run that a signal stops writes a
    checkpoint and then raises `KeyboardInterrupt` or `SystemExit(143)`.
    """
    from trl_dataeff.cli.checks import checkpoint_of
    from trl_dataeff.cli.panel import progress_shown

    trainer = make_trainer(arguments)
    try:
        with progress_shown(trainer, arguments.script.plain):
            trainer.train(resume_from_checkpoint=checkpoint_of(arguments.training))
    except (KeyboardInterrupt, SystemExit):
        if trainer.stopped_by is not None:
            trainer.end()
        raise
    trainer.accelerator.print("✅ Training completed.")
    trainer.save_model(arguments.training.output_dir)
    trainer.accelerator.print(f"💾 Model saved to {arguments.training.output_dir}.")
    if arguments.training.push_to_hub:
        trainer.push_to_hub(dataset_name=arguments.script.dataset_name)
        trainer.accelerator.print(f"🤗 Model pushed to the Hub in https://huggingface.co/{trainer.hub_model_id}.")
    trainer.end()  # finishes trackers and destroys the process group
    return trainer


def make_trainer(arguments: GRPOArguments) -> DataEfficientGRPOTrainer:
    """Make the trainer: rewards, then data, then the model, so that what is quick to find wrong comes first."""
    from trl import get_peft_config, get_quantization_config

    from trl_dataeff.cli.checks import all_problems, check_model
    from trl_dataeff.cli.data import load_data
    from trl_dataeff.cli.rewards import check_rewards, load_rewards
    from trl_dataeff.trainer import DataEfficientGRPOTrainer

    script, training, model, _ = arguments
    if problems := all_problems(arguments):
        raise UserError(*(problem.message for problem in problems))
    assert model.model_name_or_path is not None
    check_model(model)
    rewards = load_rewards(script.reward_funcs, script.reward_model_name_or_path)
    train_dataset, eval_dataset = load_data(arguments)
    check_rewards(script.reward_funcs, next(iter(train_dataset)), "the dataset")
    assert not isinstance(training.model_init_kwargs, str)  # TrainingArguments parses JSON text
    training.model_init_kwargs = {
        "revision": model.model_revision,
        "trust_remote_code": training.trust_remote_code,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(training.model_init_kwargs or {}),
    }
    return DataEfficientGRPOTrainer(
        model=os.path.expanduser(model.model_name_or_path),
        reward_funcs=rewards,
        args=training,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
    )


if __name__ == "__main__":  # a process that `accelerate launch` or torchrun started
    from trl_dataeff.cli.main import main

    raise SystemExit(main(["grpo", *sys.argv[1:]]))
