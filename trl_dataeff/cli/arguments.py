"""Makes the arguments of a run from the values of all fields, and finds all that the configurations refuse."""

from __future__ import annotations

import warnings
from dataclasses import fields
from typing import Any, NamedTuple

from accelerate.utils import patch_environment
from trl import DatasetMixtureConfig, ModelConfig

from trl_dataeff.cli.checks import problems_of_batches
from trl_dataeff.cli.data import DataEfficientGRPOScriptArguments
from trl_dataeff.cli.options import fields_in, grpo_parser
from trl_dataeff.config import DataEfficientGRPOConfig
from trl_dataeff.utils import UserError, listed


#: Fields of which a value can be rejected because of the machine, and values that are valid on every machine
MACHINE: dict[str, Any] = {
    "use_cpu": True,
    "tf32": None,
    "deepspeed": None,
    "ddp_backend": None,
}


class GRPOArguments(NamedTuple):
    """What a recipe and the command line say, in the order in which `train` takes it."""

    script: DataEfficientGRPOScriptArguments
    training: DataEfficientGRPOConfig
    model: ModelConfig
    dataset: DatasetMixtureConfig


def make_arguments(
    values: dict[str, Any], num_processes: int | None, wrong: set[str]
) -> tuple[GRPOArguments | None, list[str]]:
    """
    Make the arguments of a run, and find all that the configurations refuse. They themselves name only the first.

    Args:
        values (`dict[str, Any]`):
            All fields and their values.
        num_processes (`int` or `None`):
            Processes that will train; `None`: those that are there, on this machine.
        wrong (`set[str]`):
            Fields whose values are known to be wrong.

    Returns:
        `tuple[GRPOArguments | None, list[str]]`: The arguments, with defaults for all fields that are wrong (`None` if
            they cannot be made), and one message for each refusal.
    """
    values = _with_defaults(values, wrong)
    refusals: list[str] = []
    if num_processes is not None:
        refusals += problems_of_batches(values, num_processes)
        wrong = wrong | fields_in(refusals)
        values = _with_defaults(values, wrong)
    while True:
        try:
            return _arguments(values, num_processes), refusals
        except UserError as error:
            found = list(error.messages)
        except RecursionError:
            found = ["A value is nested too deeply."]
        except OSError as error:  # of a file that a field names
            names = [name for name, value in values.items() if value is not None and value == error.filename]
            found = [f"{listed(names)}: {error}." if names else str(error)]
        except (ValueError, TypeError, ImportError) as error:
            found = [str(error)]
        named = fields_in(found)
        if named.isdisjoint(wrong):
            refusals += found
        if named <= wrong:
            return None, refusals
        wrong = wrong | named
        values = _with_defaults(values, named)


def _with_defaults(values: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """Return the values with the defaults of some fields."""
    if not names:
        return values
    defaults = vars(grpo_parser().parse_args([]))
    return values | {name: defaults[name] for name in names}


def _arguments(values: dict[str, Any], num_processes: int | None) -> GRPOArguments:
    """
    Make the arguments of a run.

    Args:
        values (`dict[str, Any]`):
            All fields and their values.
        num_processes (`int` or `None`):
            Processes that count, where the machine is not to be looked at; `None`: those that are there.

    Returns:
        [`GRPOArguments`]: The arguments.
    """
    if num_processes is None:
        training = _make(DataEfficientGRPOConfig, values)
    else:
        training = _portable_configuration(values, num_processes)
    return GRPOArguments(
        _make(DataEfficientGRPOScriptArguments, values),
        training,
        _make(ModelConfig, values),
        _make(DatasetMixtureConfig, values),
    )


def _portable_configuration(values: dict[str, Any], num_processes: int) -> DataEfficientGRPOConfig:
    """Make the configuration of training for another machine, on which this many processes will train."""

    class Launched(DataEfficientGRPOConfig):
        world_size = num_processes

    # Training reads everything once more, with its warnings. Where the environment names a rank, accelerate would make
    # the process group already here, for CPUs
    with warnings.catch_warnings(action="ignore"), patch_environment(LOCAL_RANK=-1, PMI_SIZE=1):
        training: DataEfficientGRPOConfig = _make(Launched, values | MACHINE)
    training.__class__ = DataEfficientGRPOConfig
    for name in MACHINE:
        setattr(training, name, values[name])
    return training


def _make(arguments_type: Any, values: dict[str, Any]) -> Any:
    """Make a dataclass of those values that are its fields."""
    names = [argument.name for argument in fields(arguments_type) if argument.init]
    return arguments_type(**{name: values[name] for name in names})
