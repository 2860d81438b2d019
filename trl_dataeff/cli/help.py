"""The help of `trl-dataeff grpo`: first the fields that most runs set, then those of this package, all others on demand.

The short help imports neither torch nor TRL's configuration, so that it is printed at once.
"""

from __future__ import annotations

from argparse import Action, ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import fields
from functools import partial
from typing import Any

from trl import DatasetMixtureConfig, ModelConfig

from trl_dataeff.cli.arguments import ON_BY_DEFAULT, DataEfficientGRPOScriptArguments
from trl_dataeff.cli.field_parser import FieldParser
from trl_dataeff.options import DataEfficientOptions


USAGE = "trl-dataeff grpo --config RECIPE [--field VALUE ...] [accelerate launch options]"
DESCRIPTION = """\
Train a language model with GRPO (TRL's GRPOTrainer), and generate fewer rollouts that carry no gradient.

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
MORE = """\
Every other field of TRL's GRPOConfig (generation, vLLM, loss, optimizer, checkpoints, hub):
  trl-dataeff grpo --help-all

"""
LAUNCH = """\
launch:
  --num_processes N, --accelerate_config fsdp2|zero2|zero3|multi_gpu|FILE, --mixed_precision bf16 and every other option
  of `accelerate launch` start several processes. Without any, one process trains, or one per GPU if there are several.
"""

#: Fields of `GRPOConfig` as the short help has them: what most runs set, and what rewards need
ESSENTIALS = {
    "output_dir": "Folder for checkpoints and the trained model.",
    "num_generations": "Completions per prompt, G. (default: 8)",
    "max_completion_length": "Maximum number of tokens in a completion. (default: 512)",
    "per_device_train_batch_size": "Completions per device in a forward and backward pass. (default: 8)",
    "gradient_accumulation_steps": "Forward and backward passes per optimizer step. (default: 1)",
    "steps_per_generation": "Forward and backward passes per generation batch; by default as `gradient_accumulation_steps`.",
    "learning_rate": "Peak learning rate. (default: 1e-06)",
    "max_steps": "Number of optimizer steps; if positive, it overrides `num_train_epochs`. (default: -1)",
    "num_train_epochs": "Number of epochs, each with as many steps as a pass over the dataset has. (default: 3.0)",
    "use_vllm": "Generate with vLLM.",
    "vllm_mode": "Where vLLM runs: 'colocate' (in the training processes) or 'server'. (default: colocate)",
    "use_cpu": "Train on the CPU, even if there is a GPU.",
    "logging_steps": "Log every N steps; a value below 1 is a fraction of all steps. (default: 10)",
    "save_steps": "Save a checkpoint every N steps; a value below 1 is a fraction of all steps. (default: 500)",
    "resume_from_checkpoint": "Checkpoint folder to resume from, or 'last' for the latest complete one in `output_dir`.",
    "report_to": "Experiment trackers: wandb, trackio, tensorboard, ..., or none. (default: none)",
    "push_to_hub": "Push the trained model to the Hub.",
}
REWARDS = {
    "reward_weights": "One weight per reward, in the order of `reward_funcs`; a reward model comes first.",
    "scale_rewards": "Divide advantages by the standard deviation of rewards in the 'group' or the 'batch', or 'none'. (default: group)",
}
FAULT_TOLERANCE = (*ON_BY_DEFAULT, "reward_timeout")
MIXTURE = ("datasets", "streaming", "test_split_size")
LORA = ("use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "load_in_4bit", "load_in_8bit")
DOTS = ("dots_", "history_", "exploration")


def own_fields(*prefixes: str) -> tuple[str, ...]:
    """Return our fields that start with one of the prefixes, or those that start with none, if no prefix is given."""
    every = ("replay_", "greso_", *DOTS, *FAULT_TOLERANCE)
    names = [f.name for f in fields(DataEfficientOptions)]
    return tuple(n for n in names if (n.startswith(prefixes) if prefixes else not n.startswith(every)))


def sections() -> dict[str, tuple[str, ...]]:
    """Return the fields of each section of the short help, by its title, in order."""
    script = [f.name for f in fields(DataEfficientGRPOScriptArguments)]
    dataset = [name for name in script if name.startswith(("dataset_", "prompt_", "system_", "answer_"))]
    return {
        "essentials - Fields that most runs set": ("model_name_or_path", *ESSENTIALS),
        "data efficiency - Which prompts are selected, and which rollouts are kept": own_fields(),
        "fault tolerance - The first three are on by default in this command": FAULT_TOLERANCE,
        "replay - Train on recent rollouts again": own_fields("replay_"),
        "DOTS - With `selection` 'dots': select prompts by predicted success rate": own_fields(*DOTS),
        "GRESO - With `selection` 'greso': skip prompts with repeated zero-variance groups": own_fields("greso_"),
        "rewards - How completions are scored; several rewards are added up": (
            "reward_funcs",
            "reward_model_name_or_path",
            *REWARDS,
        ),
        "dataset - One dataset, or a mixture (`datasets:` in a recipe)": (*dataset, *MIXTURE),
        "LoRA and quantisation - Train adapters instead of the whole model": LORA,
    }


def short_help() -> str:
    """Return the help of what most runs set."""
    parser = FieldParser((DataEfficientGRPOScriptArguments, DataEfficientOptions, ModelConfig, DatasetMixtureConfig))
    return _format(parser, sections(), MORE + LAUNCH)


def full_help() -> str:
    """Return the help of every field."""
    from trl_dataeff.cli.parser import TYPES

    parser, shown = FieldParser(TYPES), sections()
    known = {name for names in shown.values() for name in names}
    model = tuple(f.name for f in fields(ModelConfig) if f.name not in known)
    rest = tuple(name for name in parser.options if name not in known and name not in model)
    shown |= {
        "model - How the model is loaded": model,
        "other fields of GRPOConfig - As in TRL's GRPOTrainer": rest,
    }
    return _format(parser, shown, LAUNCH)


def _format(parser: FieldParser, shown: dict[str, tuple[str, ...]], epilog: str) -> str:
    style: Any = partial(RawDescriptionHelpFormatter, max_help_position=32)
    printed = ArgumentParser(
        usage=USAGE, description=DESCRIPTION, epilog=epilog, formatter_class=style, add_help=False
    )
    texts = ESSENTIALS | REWARDS
    for title, names in shown.items():
        group = printed.add_argument_group(title)
        for name in names:
            option = parser.options.get(name)
            described = {"help": texts[name], "metavar": "VALUE"} if option is None else _described(option)
            group.add_argument(f"--{name}", **described)
    return printed.format_help()


def _described(option: Action) -> dict[str, Any]:
    """How an option is shown: with its default only where there is one to tell."""
    text = option.help or ""
    if option.default not in (None, "", []) and (option.default is not False or option.nargs != "?"):
        text += " (default: %(default)s)"
    kind = getattr(option.type, "__name__", "value").removeprefix("string_to_").upper()
    default = getattr(option.default, "value", option.default)
    default = float(f"{default:.4g}") if isinstance(default, float) else default  # 1/3 is 0.3333
    metavar = None if option.choices else kind
    return {"help": text, "metavar": metavar, "nargs": option.nargs, "choices": option.choices, "default": default}
