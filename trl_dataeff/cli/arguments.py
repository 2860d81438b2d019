"""The fields that `trl-dataeff grpo` takes: those of `trl grpo`, and ours."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from trl import DatasetMixtureConfig, ModelConfig
from trl.scripts.grpo import GRPOScriptArguments

from trl_dataeff.config import DataEfficientGRPOConfig


@dataclass
class DataEfficientGRPOScriptArguments(GRPOScriptArguments):
    r"""
    Script arguments of `trl-dataeff grpo`.

    Takes every argument of TRL's GRPO script and those below, which shape a dataset that was not made for TRL.

    Args:
        prompt_column (`str`, *optional*):
            Column that becomes `prompt`, for a dataset that has it under another name.
        prompt_template (`str`, *optional*):
            Text of the prompt. `{column}` stands for that column of the row; braces around anything else stay as they
            are, so that `\boxed{}` can be written as it is.
        prompt_as_chat (`bool`, *optional*, defaults to `False`):
            Make a text prompt the user's message of a conversation, so that the model's chat template is applied.
        system_prompt (`str`, *optional*):
            System message in front of every prompt. Implies `prompt_as_chat`.
        answer_column (`str`, *optional*):
            Column that reward functions get as `answer` and as `solution`.
    """

    dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "Hub id, local folder (of data files, or from `save_to_disk`), or local .parquet, .jsonl, .json or "
            ".csv file. Ignored if `datasets` is given."
        },
    )
    reward_funcs: list[str] | None = field(
        default=None,
        metadata={
            "help": "Reward functions: `exact_answer_reward`, `numeric_answer_reward`, `math_verify_reward`, TRL's "
            "`accuracy_reward`, `reasoning_accuracy_reward`, `think_format_reward`, `get_soft_overlong_punishment` "
            "(`max_completion_len=1280`, `soft_punish_cache=256`), or any dotted path (`my_rewards.brevity`, looked "
            "up from the current folder)."
        },
    )
    prompt_column: str | None = field(
        default=None, metadata={"help": "Column that becomes `prompt`, e.g. `question` of GSM8K."}
    )
    prompt_template: str | None = field(
        default=None,
        metadata={
            "help": "Text of the prompt; `{column}` stands for that column of the row, e.g. '{question} Answer with a "
            "number.'. Other braces stay as they are."
        },
    )
    prompt_as_chat: bool = field(
        default=False,
        metadata={
            "help": "Make a text prompt the user's message of a conversation, so that the model's chat template is "
            "applied. Instruct models want it."
        },
    )
    system_prompt: str | None = field(
        default=None,
        metadata={"help": "System message in front of every prompt. Implies `prompt_as_chat`."},
    )
    answer_column: str | None = field(
        default=None,
        metadata={"help": "Column that reward functions get as `answer` and as `solution`."},
    )


class GRPOArguments(NamedTuple):
    """What a recipe and the command line say, in the order in which `train` takes it."""

    script: DataEfficientGRPOScriptArguments
    training: DataEfficientGRPOConfig
    model: ModelConfig
    dataset: DatasetMixtureConfig


class PortableConfig(DataEfficientGRPOConfig):
    """
    A [`DataEfficientGRPOConfig`] that is checked without looking at this machine, so that a recipe for a GPU can be
    validated on a laptop. What depends on the machine is left out: whether it has bf16 or TF32, DeepSpeed's own
    configuration, and the number of processes, which is taken to be one.
    """

    _LEFT_OUT: dict[str, Any] = {"use_cpu": True, "tf32": None, "deepspeed": None}  # noqa: RUF012

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in self._LEFT_OUT}
        self.__dict__.update(self._LEFT_OUT)
        super().__post_init__()
        self.__dict__.update(given)

    @cached_property
    def _setup_devices(self) -> torch.device:
        return torch.device("cpu")

    @property
    def world_size(self) -> int:
        return 1


TYPES = (DataEfficientGRPOScriptArguments, DataEfficientGRPOConfig, ModelConfig, DatasetMixtureConfig)
PORTABLE_TYPES = (DataEfficientGRPOScriptArguments, PortableConfig, ModelConfig, DatasetMixtureConfig)
