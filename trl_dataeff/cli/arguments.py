"""Constructs the configurations of a run from the values of all fields, so that they say what they refuse."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple

from accelerate.utils import patch_environment
from trl import DatasetMixtureConfig, ModelConfig, get_peft_config

from trl_dataeff.cli.data import DataEfficientGRPOScriptArguments
from trl_dataeff.config import DataEfficientGRPOConfig
from trl_dataeff.utils import UserError


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


def make_arguments(values: dict[str, Any], num_processes: int | None) -> GRPOArguments:
    """
    Construct the configurations of a run. No model and no data are loaded.

    Args:
        values (`dict[str, Any]`):
            All fields and their values.
        num_processes (`int` or `None`):
            Processes that will train, where the machine is not to be looked at; `None`: those that are there.

    Returns:
        [`GRPOArguments`]: The arguments of the run.

    Raises:
        UserError: If values are refused, with what each configuration says. Those of other libraries name the first
            problem that they find.
    """
    makers: list[Callable[[dict[str, Any]], Any]] = [
        partial(_construct, DataEfficientGRPOScriptArguments),
        partial(_training_configuration, num_processes),
        _model_configuration,
        partial(_construct, DatasetMixtureConfig),
    ]
    parts: list[Any] = []
    refusals: list[str] = []
    for make in makers:
        try:
            parts.append(make(values))
        except UserError as error:
            refusals += error.messages
        except ZeroDivisionError as error:
            refusals.append(f"TRL divides by a batch or group size that is 0: {error}.")
        except (ValueError, TypeError, ImportError, OSError) as error:
            refusals.append(str(error))
    if refusals:
        raise UserError(*refusals)
    return GRPOArguments(*parts)


def _construct(arguments_type: Any, values: dict[str, Any]) -> Any:
    """Construct a dataclass from those values that are its fields."""
    names = [argument.name for argument in fields(arguments_type) if argument.init]
    return arguments_type(**{name: values[name] for name in names})


def _model_configuration(values: dict[str, Any]) -> ModelConfig:
    model: ModelConfig = _construct(ModelConfig, values)
    get_peft_config(model)  # for what PEFT refuses. The quantization configuration needs bitsandbytes
    return model


def _training_configuration(num_processes: int | None, values: dict[str, Any]) -> DataEfficientGRPOConfig:
    if num_processes is not None:
        return _portable_configuration(values, num_processes)
    training: DataEfficientGRPOConfig = _construct(DataEfficientGRPOConfig, values)
    return training


def _portable_configuration(values: dict[str, Any], num_processes: int) -> DataEfficientGRPOConfig:
    """Make the configuration of training for another machine, on which this many processes will train."""

    class Launched(DataEfficientGRPOConfig):
        world_size = num_processes

    # Training reads everything once more, with its warnings. Where the environment names a rank, accelerate would make
    # the process group already here, for CPUs
    with warnings.catch_warnings(action="ignore"), patch_environment(LOCAL_RANK=-1, PMI_SIZE=1):
        training: DataEfficientGRPOConfig = _construct(Launched, values | MACHINE)
    training.__class__ = DataEfficientGRPOConfig
    for name in MACHINE:
        setattr(training, name, values[name])
    return training
