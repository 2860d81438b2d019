"""
`trl-dataeff grpo`: read a recipe, train, save.

From Python: `train(parse(["--config", "recipe.yaml", "--max_steps", "20"]))`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_dataeff.cli.arguments import GRPOArguments
from trl_dataeff.cli.checks import message_of, problems_of_values
from trl_dataeff.cli.data import check_columns, load_data, load_reward
from trl_dataeff.cli.main import shipped_recipes
from trl_dataeff.cli.options import launch_parser
from trl_dataeff.cli.parser import read
from trl_dataeff.cli.recipe_file import Recipe
from trl_dataeff.config import DataEfficientGRPOConfig
from trl_dataeff.utils import UserError, closest, listed


if TYPE_CHECKING:
    from trl_dataeff.trainer import DataEfficientGRPOTrainer

#: Trackers that are extras of this package
TRACKER_EXTRAS = ("wandb", "trackio", "tensorboard")
#: What makes a recipe for a GPU run on a CPU
_FLAGS_FOR_CPU = "--use_cpu true --bf16 false --dtype float32 --use_vllm false"


def run(argv: list[str]) -> int:
    """
    Run the sub-command, here or through `accelerate launch`.

    Args:
        argv (`list[str]`):
            What follows `trl-dataeff grpo`.

    Returns:
        `int`: Exit code.

    Raises:
        UserError: If something in it is unknown or wrong.
    """
    set_by_launchers = ("LOCAL_RANK", "ACCELERATE_MIXED_PRECISION")
    is_launched = any(name in os.environ for name in set_by_launchers)
    if not is_launched:
        # First without looking at the machine: what is wrong with the recipe is said once, before processes start
        command = read(argv, portable=True)
        for warning in command.recipe.warnings:
            print(f"trl-dataeff: warning: {warning}", file=sys.stderr)
        check(command.arguments, command.recipe)
        if needs_launch(command.launch_options, command.arguments.training.use_cpu):
            return launch(command.launch_options, argv)
    train(parse(argv))
    return 0


def parse(argv: list[str]) -> GRPOArguments:
    """
    Return what a command line and its recipe say.

    Args:
        argv (`list[str]`):
            What follows `trl-dataeff grpo`.

    Returns:
        [`GRPOArguments`]: The arguments of a run.

    Raises:
        UserError: If something in them is unknown or wrong.
    """
    return read(argv).arguments


def train(arguments: GRPOArguments) -> DataEfficientGRPOTrainer:
    """
    Train and save the model.

    Args:
        arguments ([`GRPOArguments`]):
            What [`parse`] returns.

    Returns:
        [`DataEfficientGRPOTrainer`]: The trainer after training.

    Raises:
        UserError: If the arguments do not fit this machine, the data or each other.
        KeyboardInterrupt: After Ctrl-C. With `save_on_signal`, a checkpoint has been written.
        SystemExit: With `save_on_signal`, with code 143 after SIGTERM. A checkpoint has been written.
    """
    from trl_dataeff.cli.console import above_the_bar, show_progress

    training = arguments.training
    trainer = make_trainer(arguments)
    show_progress(trainer)
    say = trainer.accelerator.print
    try:
        with above_the_bar():
            trainer.train(resume_from_checkpoint=checkpoint_of(training))
    except (KeyboardInterrupt, SystemExit) as error:
        if trainer.stopped_by is not None:
            trainer.accelerator.end_training()
        elif trainer.is_world_process_zero():
            how = getattr(error, "__notes__", ["This run has no checkpoint to resume from."])
            print(f"trl-dataeff: stopped after step {trainer.state.global_step}. {how[-1]}", file=sys.stderr)
        raise
    say("✅ Training completed.")
    trainer.save_model(training.output_dir)
    say(f"💾 Model saved to {training.output_dir}.")
    say(f"📊 What the run did: trl-dataeff report {training.output_dir}")
    if training.push_to_hub:
        trainer.push_to_hub(dataset_name=arguments.script.dataset_name)
        say(f"🤗 Model pushed to the Hub in https://huggingface.co/{trainer.hub_model_id}.")
    trainer.accelerator.end_training()  # finishes trackers and destroys the process group
    return trainer


def make_trainer(arguments: GRPOArguments) -> DataEfficientGRPOTrainer:
    """
    Make the trainer: rewards, then data, then the model, so that what is quick to find wrong comes first.

    Args:
        arguments ([`GRPOArguments`]):
            What [`parse`] returns.

    Returns:
        [`DataEfficientGRPOTrainer`]: The trainer, ready to train.

    Raises:
        UserError: If the arguments do not fit this machine, the data or each other.
    """
    from datasets import Dataset
    from trl import get_peft_config, get_quantization_config

    from trl_dataeff.trainer import DataEfficientGRPOTrainer
    from trl_dataeff.validation import check_size

    script, training, model, mixture = arguments
    check(arguments)
    rewards: list[Any] = []
    if script.reward_model_name_or_path:
        rewards.append(script.reward_model_name_or_path)
    for name in script.reward_funcs or []:
        rewards.append(load_reward(name))
    try:
        evaluates = training.eval_strategy != "no"
        train_dataset, eval_dataset = load_data(script, mixture, evaluates)
        first_row = next(iter(train_dataset))
        check_columns(script.reward_funcs, first_row)
        if isinstance(train_dataset, Dataset):
            check_size(training, train_dataset)  # again when training starts, but then the model is loaded
        assert not isinstance(training.model_init_kwargs, str)  # TrainingArguments parses JSON text
        training.model_init_kwargs = {
            "revision": model.model_revision,
            "trust_remote_code": training.trust_remote_code,
            "attn_implementation": model.attn_implementation,
            "dtype": model.dtype,
            **(training.model_init_kwargs or {}),
        }
        return DataEfficientGRPOTrainer(
            model=os.path.expanduser(str(model.model_name_or_path)),
            reward_funcs=rewards,
            args=training,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            quantization_config=get_quantization_config(model),
            peft_config=get_peft_config(model),
        )
    except (ValueError, ImportError, OSError) as error:  # of Transformers, PEFT and TRL, about what they were given
        raise UserError(str(error)) from error


def check(arguments: GRPOArguments, recipe: Recipe | None = None) -> None:
    """
    Check the arguments on this machine, before data and model are loaded.

    Args:
        arguments ([`GRPOArguments`]):
            What [`parse`] returns.
        recipe ([`Recipe`], *optional*):
            The recipe that they come from, whose lines messages name.

    Raises:
        UserError: If something is wrong, with one message for each problem.
    """
    training = arguments.training
    problems = list(problems_of(arguments))
    problems += message_of(checkpoint_of, training)
    problems += _missing_trackers(training)
    problems += missing_model(arguments, None if recipe is None else recipe.path)
    try:
        Path(str(training.output_dir)).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=training.output_dir).close()
    except (OSError, ValueError) as error:  # ValueError: a null character
        problems.append(f"`output_dir` is {training.output_dir!r}, where nothing can be saved: {error}.")
    if recipe is not None:
        problems = [recipe.located(problem) for problem in problems]
    problems += _missing_gpu(training)  # of which no line of the recipe is the cause
    if problems:
        raise UserError(*problems)


def missing_model(arguments: GRPOArguments, path: Path | None) -> Iterator[str]:
    """
    Find a model that is named by a folder which does not exist.

    Args:
        arguments ([`GRPOArguments`]):
            What [`parse`] returns.
        path (`Path` or `None`):
            The recipe that they come from. One of the package says what it needs.

    Yields:
        `str`: At most one message.
    """
    model = os.path.expanduser(str(arguments.model.model_name_or_path))
    if model.startswith((".", "/")) and not os.path.isdir(model):
        yield (
            f"`model_name_or_path` is {model!r}, which is not a folder. Give one that exists, or a Hub id."
            f"{_where_needs_are_said(path)}"
        )


def _where_needs_are_said(path: Path | None) -> str:
    """Name the command that prints what a recipe of the package needs; empty for another one."""
    names = [name for name, shipped in shipped_recipes().items() if shipped == path]
    return "".join(f" `trl-dataeff recipes show {name}` says how to make it." for name in names)


def _missing_trackers(training: DataEfficientGRPOConfig) -> Iterator[str]:
    from transformers.integrations.integration_utils import (
        INTEGRATION_TO_CALLBACK,
        get_available_reporting_integrations,
    )

    installed = get_available_reporting_integrations()
    known = f"installed here: {', '.join(installed)}" if installed else "no tracker is installed here"
    for name in training.report_to or []:
        if name in installed:
            continue
        if name in TRACKER_EXTRAS:
            advice = f'Install it (in a clone: pip install ".[{name}]")'
        elif name in INTEGRATION_TO_CALLBACK:
            advice = "Install its package"
        else:
            advice = (
                f"It takes one of {listed(INTEGRATION_TO_CALLBACK)}.{closest(name, INTEGRATION_TO_CALLBACK)} Change it"
            )
        yield f"`report_to` is {name!r}; {known}. {advice}, or set `report_to` to 'none'."


def _missing_gpu(training: DataEfficientGRPOConfig) -> Iterator[str]:
    """Find a run that asks for a GPU on a machine without one, before Transformers names one field after the other."""
    import torch
    from transformers.utils import is_torch_xla_available

    if training.use_cpu or torch.accelerator.is_available() or is_torch_xla_available():
        return
    precisions = [name for name in ("bf16", "fp16", "tf32") if getattr(training, name)]
    if not precisions:
        return
    asked = [*precisions, "use_vllm"] if training.use_vllm else precisions
    flags = _FLAGS_FOR_CPU
    for name in ("fp16", "tf32"):
        if name in asked:
            flags += f" --{name} false"
    yield (
        f"The run asks for a GPU ({listed(asked)}), and torch finds none on this machine. To train on the CPU, "
        f"slowly, add {flags}"
    )


def problems_of(arguments: GRPOArguments) -> Iterator[str]:
    """
    Find what would be wrong on any machine, given a model and data that can be reached.

    Args:
        arguments ([`GRPOArguments`]):
            What [`parse`] returns.

    Yields:
        `str`: One message per problem.
    """
    values: dict[str, Any] = {}
    for part in arguments:
        values |= vars(part)
    yield from problems_of_values(values)


def checkpoint_of(training: DataEfficientGRPOConfig) -> str | bool | None:
    """
    Return what to resume from.

    Args:
        training ([`DataEfficientGRPOConfig`]):
            Its field `resume_from_checkpoint` is a folder, a word (`true` or `last`, `false` or `none`), or unset.

    Returns:
        `str`, `bool` or `None`: A folder, `True` for the latest complete checkpoint in `output_dir`, or `None` for a
            new run.

    Raises:
        UserError: If the folder does not exist.
    """
    words = {
        "none": None,
        "false": None,
        "true": True,
        "last": True,
    }
    wanted = os.path.expanduser(str(training.resume_from_checkpoint))
    if wanted.lower() in words:
        return words[wanted.lower()]
    if not os.path.isdir(wanted):
        raise UserError(
            f"The checkpoint {wanted!r} does not exist as a folder (`resume_from_checkpoint`). `last` "
            "stands for the latest complete one in `output_dir`."
        )
    return wanted


def needs_launch(launch_args: list[str], use_cpu: bool) -> bool:
    """
    Return whether training goes through `accelerate launch`.

    Args:
        launch_args (`list[str]`):
            Options of `accelerate launch` that were given.
        use_cpu (`bool`):
            Whether the run stays on the CPU.

    Returns:
        `bool`: Whether there are such options, accelerate is configured on this machine, or there are several devices.
    """
    import torch
    from accelerate.commands.config import default_config_file

    is_configured = os.path.isfile(default_config_file)
    has_devices = not use_cpu and torch.accelerator.device_count() > 1
    return bool(launch_args) or is_configured or has_devices


def launch(launch_args: list[str], command: list[str]) -> int:
    """
    Run `trl-dataeff grpo` through `accelerate launch`. If there is to be one process, this one becomes it.

    Args:
        launch_args (`list[str]`):
            Options of `accelerate launch`.
        command (`list[str]`):
            What follows `trl-dataeff grpo`.

    Returns:
        `int`: Exit code: 143, 137 or 130 if SIGTERM, SIGKILL or Ctrl-C ended a process, 1 if one failed.

    Raises:
        UserError: If the options do not fit together, or need a package that is not installed, such as DeepSpeed.
    """
    from accelerate.commands import launch as launcher
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    args = launch_parser().parse_args([*launch_args, "--module", "trl_dataeff.cli.grpo", *command])
    if os.name == "posix":
        launcher.simple_launcher = _become
    try:
        launcher.launch_command(args)
    except (ImportError, ValueError) as error:  # of accelerate, before it starts processes
        raise UserError(f"`accelerate launch` cannot start the run: {error}") from error
    except subprocess.CalledProcessError:  # the process has said on stderr what was wrong
        return 1
    except SignalException as error:  # torchrun has passed it on, and waited
        return int(128 + error.sigval)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        code = failure.exitcode
        if code < 0:
            code = 128 - code  # as a shell reports the signal that ended a process
        is_of_signal = code in (130, 137, 143)  # Ctrl-C, SIGKILL and SIGTERM
        return code if is_of_signal else 1
    return 0


def _become(args: Namespace) -> None:
    """Replace this process by the only one that `accelerate launch` would start, so that signals reach it."""
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    if args.num_processes > 1 and args.mpirun_hostfile is None:
        print(
            f"trl-dataeff: warning: `num_processes` is {args.num_processes}, and `accelerate launch` starts a single "
            "process, because this machine has fewer than two GPUs. To start them on the CPU, add --multi_gpu "
            "--use_cpu true.",
            file=sys.stderr,
        )
    command, environment = prepare_simple_launcher_cmd_env(args)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(command[0], command, environment)


if __name__ == "__main__":  # a process that `accelerate launch` or torchrun started
    from trl_dataeff.cli.main import main

    raise SystemExit(main(["grpo", *sys.argv[1:]]))
