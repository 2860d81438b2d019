"""Help that is read from the top: what most runs set first, our own fields apart, the hundreds of others on demand."""

from __future__ import annotations

from argparse import SUPPRESS, Action, ArgumentDefaultsHelpFormatter, ArgumentParser
from dataclasses import fields
from typing import Any, NamedTuple

from trl import GRPOConfig, ModelConfig

from trl_dataeff.config import DataEfficientGRPOConfig


USAGE = """\
usage: trl-dataeff grpo --config RECIPE [--field VALUE ...] [accelerate launch options]

Train a language model with GRPO (TRL's GRPOTrainer), and generate only rollouts that produce a gradient.

A recipe is a YAML file of the fields below; a field on the command line overrides the recipe. RECIPE is a file, or a
name from `trl-dataeff recipes list`.

examples:
  # a recipe that comes with the package, for 20 steps
  trl-dataeff grpo --config Qwen2.5-0.5B-Instruct/gsm8k/uniform --max_steps 20

  # your own data, without a recipe: a file with the columns `prompt` and `answer`
  trl-dataeff grpo --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name train.jsonl \\
      --prompt_as_chat --reward_funcs numeric_answer_reward --use_peft --output_dir out

  # four GPUs; the options of `accelerate launch` are passed on
  trl-dataeff grpo --config recipe.yaml --num_processes 4 --accelerate_config zero2
"""

ESSENTIALS = (
    "model_name_or_path",
    "output_dir",
    "num_generations",
    "max_completion_length",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "learning_rate",
    "max_steps",
    "num_train_epochs",
    "use_vllm",
    "vllm_mode",
    "use_cpu",
    "logging_steps",
    "save_steps",
    "resume_from_checkpoint",
    "report_to",
    "push_to_hub",
)
REWARDS = ("reward_funcs", "reward_weights", "reward_model_name_or_path", "scale_rewards")
DATASET = (
    "dataset_name",
    "dataset_config",
    "dataset_train_split",
    "dataset_test_split",
    "dataset_streaming",
    "prompt_column",
    "prompt_template",
    "prompt_as_chat",
    "system_prompt",
    "answer_column",
    "datasets",
    "streaming",
    "test_split_size",
)
FAULT_TOLERANCE = ("save_on_signal", "skip_nonfinite_steps", "vllm_reconnect", "reward_timeout")
LORA = ("use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "load_in_4bit", "load_in_8bit")

LAUNCH = """\
launch:
  --num_processes N, --accelerate_config fsdp2|zero2|zero3|multi_gpu|FILE, --mixed_precision bf16 and every other option
  of `accelerate launch` start several processes. Without any, one process trains, or one per GPU if there are several.
"""


class Group(NamedTuple):
    """A section of the help; `short`: also shown by `--help`, not only by `--help-all`."""

    title: str
    description: str
    names: tuple[str, ...]
    short: bool = True


def own_fields(*prefixes: str) -> tuple[str, ...]:
    """Return our fields that start with one of the prefixes, or those that start with none, if no prefix is given."""
    inherited = {f.name for f in fields(GRPOConfig)}
    names = [f.name for f in fields(DataEfficientGRPOConfig) if f.name not in inherited]
    every = ("replay_", "dots_", "greso_", "history_", "exploration", *FAULT_TOLERANCE)
    return tuple(n for n in names if (n.startswith(prefixes) if prefixes else not n.startswith(every)))


def groups() -> list[Group]:
    """Return the sections of the help, in order."""
    model = tuple(f.name for f in fields(ModelConfig) if f.name not in (*LORA, *ESSENTIALS))
    return [
        Group("essentials", "What most runs set.", ESSENTIALS),
        Group("data efficiency", "Which prompts are selected, and which rollouts are kept.", own_fields()),
        Group("fault tolerance", "The first three are on by default in this command.", own_fields(*FAULT_TOLERANCE)),
        Group("replay", "Training on recent rollouts again.", own_fields("replay_")),
        Group(
            "DOTS",
            "With `selection` 'dots': prompts by predicted success rate.",
            own_fields("dots_", "history_", "exploration"),
        ),
        Group(
            "GRESO", "With `selection` 'greso': skip prompts with repeated zero-variance groups.", own_fields("greso_")
        ),
        Group("rewards", "What a completion is worth; several rewards are added up.", REWARDS),
        Group("dataset", "One dataset, or a mixture (`datasets:` in a recipe).", DATASET),
        Group("LoRA and quantisation", "Train adapters instead of the whole model.", LORA),
        Group("model", "How the model is loaded.", model, short=False),
    ]


class HelpFormatter(ArgumentDefaultsHelpFormatter):
    """One spelling per option, and a default only where there is one to tell."""

    def __init__(self, prog: str, **kwargs: Any):
        super().__init__(prog, max_help_position=32, **kwargs)

    def _format_action_invocation(self, action: Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return ", ".join(action.option_strings[:1]) or super()._format_action_invocation(action)
        return (
            f"{action.option_strings[0]} {self._format_args(action, self._get_default_metavar_for_optional(action))}"
        )

    def _get_default_metavar_for_optional(self, action: Action) -> str:
        return getattr(action.type, "__name__", "value").removeprefix("string_to_").lstrip("<").split(">")[0].upper()

    def _get_help_string(self, action: Action) -> str | None:
        if action.default in (None, SUPPRESS, [], "") or (action.nargs == "?" and action.default is False):
            return action.help
        return super()._get_help_string(action)


def format_help(parser: ArgumentParser, everything: bool) -> str:
    """
    Return the help of `trl-dataeff grpo`.

    Args:
        parser (`ArgumentParser`):
            Parser with every option.
        everything (`bool`):
            Whether to show all fields, or only the sections most runs need.
    """
    options = [action for action in parser._actions if not action.option_strings[0].startswith("--no_")]
    by_name = {action.dest: action for action in options}
    shown: set[str] = set()
    sections = []
    for group in groups():
        shown.update(group.names)
        if everything or group.short:
            sections.append(_section(parser, group.title, group.description, [by_name[n] for n in group.names]))
    rest = [action for action in options if action.dest not in shown]
    if everything:
        sections.append(_section(parser, "other fields of GRPOConfig", "As in TRL's GRPOTrainer.", rest))
    else:
        sections.append(
            f"{len(rest)} more fields of TRL's GRPOConfig (generation, vLLM, loss, optimizer, checkpoints, hub):\n"
            "  trl-dataeff grpo --help-all\n"
        )
    return "\n".join([USAGE, *sections, LAUNCH])


def _section(parser: ArgumentParser, title: str, description: str, actions: list[Action]) -> str:
    formatter: HelpFormatter = parser._get_formatter()  # type: ignore[assignment]
    formatter.start_section(f"{title} - {description.rstrip('.')}")
    formatter.add_arguments(actions)
    formatter.end_section()
    return formatter.format_help()
