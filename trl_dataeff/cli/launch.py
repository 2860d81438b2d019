"""Options of `accelerate launch`, and training through it where there is something to launch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from argparse import ArgumentError, ArgumentParser, Namespace
from types import FrameType
from typing import Any

from transformers.utils import logging

from trl_dataeff.utils import UserError, closest


MODULE = "trl_dataeff.cli.grpo"
logger = logging.get_logger(__name__)
_SCRIPT = "<script>"  # stands for the script that `accelerate launch` expects behind its options
_STOPPED = (130, 143)  # exit codes after Ctrl-C and SIGTERM


def needs_launch(launch_args: list[str], use_cpu: bool) -> bool:
    """
    Return whether training goes through `accelerate launch`: for its options, its default configuration on this machine, or
    several devices; but not if a launcher gave this process a rank.
    """
    if "LOCAL_RANK" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ:
        return False
    if launch_args:
        return True
    import torch
    from accelerate.commands.config import default_config_file

    return os.path.isfile(default_config_file) or (not use_cpu and torch.accelerator.device_count() > 1)


def launch_parser() -> ArgumentParser:
    """Return the parser of `accelerate launch`, with TRL's option for a configuration that TRL ships (`fsdp2`, `zero3`, ...)."""
    from accelerate.commands.launch import launch_command_parser

    parser: ArgumentParser = launch_command_parser()
    parser.exit_on_error = False
    parser.add_argument("--accelerate_config")
    return parser


def launch_option(parser: ArgumentParser, key: str, value: Any) -> list[str] | None:
    """Return a recipe's `key: value` as an option of `accelerate launch`, or `None` if it has no such option."""
    option = parser._option_string_actions.get(f"--{key}")
    if option is not None and option.nargs == 0:  # a switch
        return [f"--{key}"] if value is True else []
    return None if option is None else [f"--{key}", str(value)]


def check_launch_options(parser: ArgumentParser, args: list[str], fields: list[str]) -> None:
    """Raise a [`UserError`] for what `accelerate launch` would reject. An unknown option is compared with our `fields` too."""
    try:
        parsed, unknown = parser.parse_known_args([*args, _SCRIPT])
    except ArgumentError as error:
        raise UserError(f"`accelerate launch` says: {error}.") from error
    if unknown:
        hint = closest(unknown[0], [*(f"--{name}" for name in fields), *parser._option_string_actions])
        raise UserError(f"`{unknown[0]}` is not an option of `trl-dataeff grpo` or `accelerate launch`.{hint}")
    token = parsed.training_script  # the first value that no option has taken
    if token != _SCRIPT:
        option = f"--config {token}" if token.endswith((".yaml", ".yml")) else "--learning_rate 1e-6"
        raise UserError(f"{token!r} stands alone: every value follows its option, as in `{option}`.")


def launch(launch_args: list[str], command: list[str]) -> int:
    """
    Run `trl-dataeff grpo` with the arguments `command` through `accelerate launch`, and return its exit code: that of its
    process, 143 or 130 if SIGTERM or Ctrl-C ended the run, 1 if one of several processes failed. If there is one process,
    this one becomes it. Options of `accelerate launch` in `command` have no effect there.
    """
    from accelerate.commands import launch as launcher
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    try:
        launch_args = resolve_accelerate_config_argument(launch_args)
    except ValueError as error:
        raise UserError(str(error)) from error
    args = launcher.launch_command_parser().parse_args([*launch_args, "--module", MODULE, *command])
    if os.name == "posix":
        launcher.simple_launcher = _become
    former = signal.signal(signal.SIGTERM, _forward)  # torchrun sets its own
    try:
        launcher.launch_command(args)
    except subprocess.CalledProcessError as error:  # the process has said on stderr what was wrong
        return _exit_code(error.returncode)
    except SignalException as error:  # torchrun has passed it on, and waited
        return int(128 + error.sigval)
    except ChildFailedError as error:
        code = _exit_code(error.get_first_failure()[1].exitcode)
        return code if code in _STOPPED else 1
    finally:
        signal.signal(signal.SIGTERM, former)
    return 0


def _exit_code(code: int) -> int:
    """The exit code of a process as a shell reports it: 128 + the number of the signal that ended it."""
    return 128 - code if code < 0 else code


def _forward(number: int, frame: FrameType | None) -> None:
    """Pass a signal on to the processes that a launcher has started and waits for."""
    import psutil

    children = psutil.Process().children()
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            child.send_signal(number)
    if not children:
        raise SystemExit(128 + number)


def _become(args: Namespace) -> None:
    """
    Replace this process by the only one that `accelerate launch` would start, so that signals and exit code are its own:
    accelerate would wait for a process that no signal reaches.
    """
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    if (args.num_processes or 1) > 1 and args.mpirun_hostfile is None:
        logger.warning(
            f"`num_processes` is {args.num_processes}, but `accelerate launch` starts one process: it sees fewer than "
            "two GPUs, or its configuration says so. `--multi_gpu` starts all of them, with `--use_cpu true` on the CPU."
        )
    command, environment = prepare_simple_launcher_cmd_env(args)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(command[0], command, environment)
