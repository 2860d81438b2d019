"""Training here, or through `accelerate launch`.

Training stays in this process unless there is something to launch: an option of `accelerate launch`, a default
configuration of accelerate on this machine, or several devices (which accelerate would use all).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from argparse import ArgumentError, Namespace
from pathlib import Path
from types import FrameType
from typing import Any

from trl_dataeff.cli.errors import UserError, closest
from trl_dataeff.fields import Problem


#: Option of TRL's command: a file, or the name of a configuration that TRL ships (`fsdp2`, `zero3`, ...).
ACCELERATE_CONFIG = "--accelerate_config"
MODULE = "trl_dataeff.cli.grpo"
_SCRIPT = "<script>"  # stands for the script that `accelerate launch` expects behind its options
_STOPPED = (130, 143)  # exit codes after Ctrl-C and SIGTERM


def needs_launch(launch_args: list[str], use_cpu: bool) -> bool:
    """Return whether training goes through `accelerate launch`: not if a launcher gave this process a rank."""
    if "LOCAL_RANK" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ:
        return False
    if launch_args:
        return True
    from accelerate.commands.config import default_config_file

    return os.path.isfile(default_config_file) or (not use_cpu and device_count() > 1)


def device_count() -> int:
    """Return the number of accelerators (of any vendor) that this process sees."""
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def launch_options() -> list[str]:
    """Return the names of the options of `accelerate launch`."""
    return [name for name in vars(_parse([])[0]) if not name.startswith("training_script")]


def launch_option(key: str, value: Any) -> list[str] | None:
    """Return a recipe's `key: value` as an option of `accelerate launch`, or `None` if it has no such option."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    try:
        parsed, unknown = _parse([f"--{key}", text])
    except ArgumentError:  # the value is wrong, see `check_launch_args`
        return [f"--{key}", text]
    if unknown:
        return None
    if parsed.training_script == _SCRIPT:
        return [f"--{key}", str(value)]
    return [f"--{key}"] if text == "true" else []  # it has taken no value


def check_launch_args(args: list[str], fields: list[str]) -> list[Problem]:
    """
    Return the options of `accelerate launch` with an invalid value; raise a [`UserError`] for unknown options, with a hint
    at one of the `fields` of training.
    """
    try:
        parsed, unknown = _parse(args)
    except ArgumentError as error:
        name = str(error.argument_name).split("/")[0].lstrip("-")
        return [Problem(f"`{name}` is an option of `accelerate launch`, which says: {error.message}.", (name,))]
    if unknown:
        hint = closest(
            f"--{unknown[0].strip('-').replace('-', '_')}", [f"--{name}" for name in (*fields, *launch_options())]
        )
        raise UserError(f"`{unknown[0]}` is not an option of `trl-dataeff grpo` or `accelerate launch`.{hint}")
    token = parsed.training_script
    if token == _SCRIPT:
        return []
    if Path(token).suffix in (".yaml", ".yml"):
        raise UserError(f"{token!r} stands alone. A recipe is given as `--config {token}`.")
    raise UserError(f"{token!r} stands alone: every value follows its option, as in `--learning_rate 1e-6`.")


def _parse(args: list[str]) -> tuple[Namespace, list[str]]:
    """What `accelerate launch` makes of its options, and those that it has not. A value that no option has taken is the script."""
    from accelerate.commands.launch import launch_command_parser

    parser = launch_command_parser()
    parser.exit_on_error = False
    parser.add_argument(ACCELERATE_CONFIG)
    known, unknown = parser.parse_known_args([*args, _SCRIPT])
    return known, unknown


def launch(launch_args: list[str], command: list[str]) -> int:
    """
    Run `trl-dataeff grpo` through `accelerate launch` and return its exit code: that of its process, 143 or 130 if SIGTERM
    or Ctrl-C ended the run, 1 if one of several processes failed. If there is one process, this one becomes it.

    Args:
        launch_args (`list[str]`): options of `accelerate launch`.
        command (`list[str]`): what follows `trl-dataeff grpo`; options of `accelerate launch` in it have no effect there.
    """
    from accelerate.commands import launch as launcher
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    from trl_dataeff.rollouts.capture import temporarily

    try:
        launch_args = resolve_accelerate_config_argument(launch_args)
    except ValueError as error:
        raise UserError(str(error)) from error
    args = launcher.launch_command_parser().parse_args([*launch_args, "--module", MODULE, *command])
    # accelerate's own waits for a process that no signal reaches
    simple_launcher = _become if os.name == "posix" else launcher.simple_launcher
    with _ForwardSignals() as signals, temporarily(launcher, simple_launcher=simple_launcher):
        try:
            launcher.launch_command(args)
        except subprocess.CalledProcessError as error:  # the process has said on stderr what was wrong
            return signals.exit_code(error.returncode)
        except SignalException as error:  # torchrun has passed it on, and waited
            return 128 + error.sigval
        except ChildFailedError as error:
            code = signals.exit_code(error.get_first_failure()[1].exitcode)
            return code if code in _STOPPED else 1
    return 0


def _become(args: Namespace) -> None:
    """Replace this process by the only one that `accelerate launch` would start: signals and exit code are its own."""
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    command, environment = prepare_simple_launcher_cmd_env(args)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(command[0], command, environment)


class _ForwardSignals:
    """
    While this context is entered, SIGTERM goes on to the processes that this one has started, which is then waited for, and
    Ctrl-C, which reaches them from the terminal, does not end it. For launchers that do neither; torchrun handles signals itself.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._former: dict[int, Any] = {}

    def __enter__(self) -> _ForwardSignals:
        if os.name == "posix" and threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._forward) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        import psutil

        self.received = number
        children = psutil.Process().children()
        if not children:
            self.__exit__()
            signal.raise_signal(number)
        for child in children:
            if number != signal.SIGINT or os.getpgid(child.pid) != os.getpgrp():
                with contextlib.suppress(psutil.Error):
                    child.send_signal(number)

    def exit_code(self, code: int) -> int:
        """That of the command, from a process's own: 128 + the number of a signal that ended it or was passed on to it."""
        if self.received is not None:
            return 128 + self.received
        return 128 - code if code < 0 else code
