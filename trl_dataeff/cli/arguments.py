"""The script arguments of `trl-dataeff grpo`: those of `trl grpo`, and what shapes a dataset that was not made for TRL."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from trl.scripts.grpo import GRPOScriptArguments


if TYPE_CHECKING:
    from trl import DatasetMixtureConfig, ModelConfig

    from trl_dataeff.config import DataEfficientGRPOConfig

#: Switches of fault tolerance that this command sets; they are off in Python
ON_BY_DEFAULT = ("save_on_signal", "skip_nonfinite_steps", "vllm_reconnect")


@dataclass
class DataEfficientGRPOScriptArguments(GRPOScriptArguments):
    """Script arguments of `trl-dataeff grpo`: every argument of TRL's GRPO script, and those below."""

    dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "Hub id, local folder (of data files, or from `save_to_disk`), or local .parquet, .jsonl, .json or "
            ".csv file; ignored if `datasets` is given."
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
            "number.'; other braces stay as they are."
        },
    )
    prompt_as_chat: bool = field(
        default=False,
        metadata={
            "help": "Turn a text prompt into the user's message of a conversation, so that the model's chat template is "
            "applied; use it for instruct models."
        },
    )
    system_prompt: str | None = field(
        default=None,
        metadata={"help": "System message before every prompt; implies `prompt_as_chat`."},
    )
    answer_column: str | None = field(
        default=None,
        metadata={"help": "Column that is passed to reward functions as `answer` and as `solution`."},
    )
    plain: bool = field(
        default=False, metadata={"help": "Print one line per log instead of the live panel, also in a terminal."}
    )


class GRPOArguments(NamedTuple):
    """What a recipe and the command line say, in the order in which `train` takes it."""

    script: DataEfficientGRPOScriptArguments
    training: DataEfficientGRPOConfig
    model: ModelConfig
    dataset: DatasetMixtureConfig
