"""`trl-dataeff grpo`: read a recipe, train, save; from Python: `train(parse(["--config", "recipe.yaml", "--max_steps", "20"]))`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_dataeff.cli.data import REWARDS, check_columns, load_data, load_reward
from trl_dataeff.cli.parser import GRPOArguments, launch_parser, read
from trl_dataeff.config import DataEfficientGRPOConfig
from trl_dataeff.utils import UserError, listed


if TYPE_CHECKING:
    from trl_dataeff.trainer import DataEfficientGRPOTrainer


def run(argv: list[str]) -> int:
    """Run the sub-command with what follows its name, here or through `accelerate launch`, and return its exit code."""
    launched = os.environ.keys() & {"LOCAL_RANK", "ACCELERATE_MIXED_PRECISION"}  # a launcher has started this process
    if not launched:
        # First without looking at the machine: what is wrong with the recipe is said once, before processes are started.
        arguments, launch_args = read(argv or ["--help"], portable=True)
        check(arguments)
        if needs_launch(launch_args, arguments.training.use_cpu):
            return launch(launch_args, argv)
    train(parse(argv))
    return 0


def parse(argv: list[str]) -> GRPOArguments:
    """Return what a command line (what follows `trl-dataeff grpo`) and its recipe say; wrong input is a [`UserError`]."""
    return read(argv)[0]


def train(arguments: GRPOArguments) -> DataEfficientGRPOTrainer:
    """
    Train with what `parse` returns, and save the model. With `save_on_signal`, a run that a signal stops writes a checkpoint and
    then raises `KeyboardInterrupt` or `SystemExit(143)`.
    """
    from trl_dataeff.cli.console import show_progress

    trainer = make_trainer(arguments)
    show_progress(trainer)
    say = trainer.accelerator.print
    try:
        trainer.train(resume_from_checkpoint=checkpoint_of(arguments.training))
    except (KeyboardInterrupt, SystemExit):
        if trainer.stopped_by is not None:
            trainer.accelerator.end_training()
        raise
    say("✅ Training completed.")
    trainer.save_model(arguments.training.output_dir)
    say(f"💾 Model saved to {arguments.training.output_dir}.")
    say(f"📊 What the run did: trl-dataeff report {arguments.training.output_dir}")
    if arguments.training.push_to_hub:
        trainer.push_to_hub(dataset_name=arguments.script.dataset_name)
        say(f"🤗 Model pushed to the Hub in https://huggingface.co/{trainer.hub_model_id}.")
    trainer.accelerator.end_training()  # finishes trackers and destroys the process group
    return trainer


def make_trainer(arguments: GRPOArguments) -> DataEfficientGRPOTrainer:
    """Make the trainer: rewards, then data, then the model, so that what is quick to find wrong comes first."""
    from trl import get_peft_config, get_quantization_config

    from trl_dataeff.trainer import DataEfficientGRPOTrainer

    script, training, model, mixture = arguments
    check(arguments)
    rewards: list[Any] = [script.reward_model_name_or_path] if script.reward_model_name_or_path else []
    rewards += [load_reward(name) for name in script.reward_funcs or []]
    try:
        train_dataset, eval_dataset = load_data(script, mixture, training.eval_strategy != "no")
        check_columns(script.reward_funcs, next(iter(train_dataset)))
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


def check(arguments: GRPOArguments) -> None:
    """Raise a [`UserError`] for what is wrong on this machine, before data and model are loaded."""
    from transformers.integrations.integration_utils import get_available_reporting_integrations

    training = arguments.training
    found = [*problems_of(arguments), *_message_of(checkpoint_of, training)]
    installed = get_available_reporting_integrations()
    for name in training.report_to or []:
        if name not in installed:
            known = f"installed here: {', '.join(installed)}" if installed else "no tracker is installed here"
            found.append(f"`report_to` is {name!r}; {known}. Install its package, or set `report_to` to 'none'.")
    model = os.path.expanduser(str(arguments.model.model_name_or_path))
    if model.startswith((".", "/")) and not os.path.isdir(model):
        found.append(f"`model_name_or_path` is {model!r}, which is not a folder. Give one that exists, or a Hub id.")
    try:
        Path(str(training.output_dir)).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=training.output_dir).close()
    except OSError as error:
        found.append(f"`output_dir` is {training.output_dir!r}, where nothing can be saved: {error}.")
    if found:
        raise UserError(*found)


def problems_of(arguments: GRPOArguments) -> Iterator[str]:
    """What would be wrong with these arguments on any machine, given a model and data that can be reached."""
    from trl_dataeff.validation import resolve_selector

    script, training, model, mixture = arguments
    names, weights = script.reward_funcs or [], training.reward_weights
    n = len(names) + bool(script.reward_model_name_or_path)
    if os.getcwd() not in sys.path:  # for rewards and a selector by dotted path
        sys.path.insert(0, os.getcwd())
    if not n:
        yield f"No reward: set `reward_funcs` to one or more of {listed(REWARDS)}, or to the dotted path of a function."
    for name in names:
        yield from _message_of(load_reward, name)
    if n and weights is not None and len(weights) != n:
        yield f"`reward_weights` has {len(weights)} numbers for {n} rewards (a reward model comes first). Give one for each."
    if not script.dataset_name and not mixture.datasets:
        yield "No dataset: set `dataset_name` to a Hub id, a folder or a file, or give a mixture under `datasets`."
    if not model.model_name_or_path:
        yield "No model: set `model_name_or_path` to a Hub id or a local folder."
    yield from _message_of(resolve_selector, training)


def _message_of(function: Any, *args: Any) -> Iterator[str]:
    try:
        function(*args)
    except (ValueError, ImportError) as error:
        yield str(error)


def checkpoint_of(training: DataEfficientGRPOConfig) -> str | bool | None:
    """Return what to resume from: a checkpoint, `True` for the latest complete one (given as `true` or `last`), or `None`."""
    wanted = os.path.expanduser(str(training.resume_from_checkpoint))
    words = {"none": None, "false": None, "true": True, "last": True}
    if wanted.lower() not in words and not os.path.isdir(wanted):
        raise UserError(
            f"The checkpoint {wanted!r} does not exist as a folder (`resume_from_checkpoint`). `last` "
            "stands for the latest complete one in `output_dir`."
        )
    return words.get(wanted.lower(), wanted)


def needs_launch(launch_args: list[str], use_cpu: bool) -> bool:
    """Return whether training goes through `accelerate launch`: for its options, its default configuration, or several devices."""
    import torch
    from accelerate.commands.config import default_config_file

    has_devices = not use_cpu and torch.accelerator.device_count() > 1
    return bool(launch_args) or os.path.isfile(default_config_file) or has_devices


def launch(launch_args: list[str], command: list[str]) -> int:
    """
    Run `trl-dataeff grpo` with the arguments `command` through `accelerate launch`, and return its exit code: 143, 137 or 130
    if SIGTERM, SIGKILL or Ctrl-C ended a process, 1 if one failed. If there is one process, this one becomes it.
    """
    from accelerate.commands import launch as launcher
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    args = launch_parser().parse_args([*launch_args, "--module", "trl_dataeff.cli.grpo", *command])
    if os.name == "posix":
        launcher.simple_launcher = _become
    try:
        launcher.launch_command(args)
    except subprocess.CalledProcessError:  # the process has said on stderr what was wrong
        return 1
    except SignalException as error:  # torchrun has passed it on, and waited
        return int(128 + error.sigval)
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        code = 128 - code if code < 0 else code  # as a shell reports the signal that ended a process
        return code if code in (130, 137, 143) else 1  # after Ctrl-C, SIGKILL and SIGTERM
    return 0


def _become(args: Namespace) -> None:
    """Replace this process by the only one that `accelerate launch` would start and wait for, so that signals reach it."""
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    command, environment = prepare_simple_launcher_cmd_env(args)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(command[0], command, environment)


if __name__ == "__main__":  # a process that `accelerate launch` or torchrun started
    from trl_dataeff.cli.main import main

    raise SystemExit(main(["grpo", *sys.argv[1:]]))
