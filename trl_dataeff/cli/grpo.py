"""`trl-dataeff grpo`: read a recipe, train, save.

From Python: `trainer = train(parse(["--config", "recipe.yaml", "--max_steps", "20"]))`.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trl_dataeff.rewards as our_rewards
from trl_dataeff.cli.data import load_data
from trl_dataeff.cli.launch import launch, needs_launch
from trl_dataeff.cli.parser import GRPOArguments, read
from trl_dataeff.config import DataEfficientGRPOConfig
from trl_dataeff.utils import UserError, closest, listed


if TYPE_CHECKING:
    from trl_dataeff.trainer import DataEfficientGRPOTrainer

RewardFunction = Callable[..., Any]

_OF_SOLUTION = ("accuracy_reward", "reasoning_accuracy_reward")  # TRL's, which compare with the column `solution`
#: Reward functions that can be given by name; TRL's, whose import takes a while, by the path that they are imported from.
REWARDS: dict[str, RewardFunction | str] = {
    **{name: getattr(our_rewards, name) for name in our_rewards.__all__},
    **{name: f"trl.rewards.{name}" for name in (*_OF_SOLUTION, "think_format_reward", "get_soft_overlong_punishment")},
}
#: Columns of which each needs one.
COLUMNS = {
    **dict.fromkeys(our_rewards.__all__, ("answer", "solution")),
    **dict.fromkeys(_OF_SOLUTION, ("solution",)),
}
NEED_MATH_VERIFY = ("math_verify_reward", *_OF_SOLUTION)
_NEED_CHAT = (*_OF_SOLUTION, "think_format_reward")


def run(argv: list[str]) -> int:
    """Run the sub-command with what follows its name, here or through `accelerate launch`, and return its exit code."""
    # First without looking at the machine: what is wrong with the recipe is said once, before processes are started.
    arguments, launch_args = read(argv or ["--help"], portable=True)
    check(arguments)
    if needs_launch(launch_args, arguments.training.use_cpu):
        return launch(launch_args, argv)
    train(parse(argv))
    return 0


def parse(argv: list[str]) -> GRPOArguments:
    """
    Return what a command line (what follows `trl-dataeff grpo`) and its recipe say; wrong input is a [`UserError`]. Options
    of `accelerate launch` are checked and left out.
    """
    return read(argv)[0]


def train(arguments: GRPOArguments) -> DataEfficientGRPOTrainer:
    """
    Train with what `parse` returns, save the model and, if `push_to_hub` is set, push it. With `save_on_signal`, a run that a
    signal stops writes a checkpoint and then raises `KeyboardInterrupt` or `SystemExit(143)`.
    """
    from trl_dataeff.cli.console import progress_shown

    trainer = make_trainer(arguments)
    say = trainer.accelerator.print
    try:
        with progress_shown(trainer, arguments.script.plain):
            trainer.train(resume_from_checkpoint=checkpoint_of(arguments.training))
    except (KeyboardInterrupt, SystemExit):
        if trainer.stopped_by is not None:
            trainer.end()
        raise
    say("✅ Training completed.")
    trainer.save_model(arguments.training.output_dir)
    say(f"💾 Model saved to {arguments.training.output_dir}.")
    say(f"📊 What the run did: trl-dataeff report {arguments.training.output_dir}")
    if arguments.training.push_to_hub:
        trainer.push_to_hub(dataset_name=arguments.script.dataset_name)
        say(f"🤗 Model pushed to the Hub in https://huggingface.co/{trainer.hub_model_id}.")
    trainer.end()  # finishes trackers and destroys the process group
    return trainer


def make_trainer(arguments: GRPOArguments) -> DataEfficientGRPOTrainer:
    """Make the trainer: rewards, then data, then the model, so that what is quick to find wrong comes first."""
    from trl import get_peft_config, get_quantization_config

    from trl_dataeff.trainer import DataEfficientGRPOTrainer

    script, training, model, mixture = arguments
    check(arguments)
    path = os.path.expanduser(str(model.model_name_or_path))
    _check_model(path, model.model_revision)
    rewards: list[Any] = [load_reward(name) for name in script.reward_funcs or []]
    if script.reward_model_name_or_path:
        rewards.insert(0, script.reward_model_name_or_path)
    try:
        peft_config = get_peft_config(model)
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
            model=path,
            reward_funcs=rewards,
            args=training,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            quantization_config=get_quantization_config(model),
            peft_config=peft_config,
        )
    except UserError:
        raise
    except (ValueError, ImportError, OSError) as error:  # of Transformers, PEFT and TRL, about what they were given
        raise UserError(str(error)) from error


def _check_model(path: str, revision: str | None) -> None:
    """Raise a [`UserError`] if the model has no configuration, here or on the Hub. Nothing else of it is read."""
    from transformers import PretrainedConfig

    if path.startswith((".", "/", "~")) and not Path(path).exists():
        raise UserError(f"The model {path!r} does not exist: there is no such folder.")
    try:
        config, _ = PretrainedConfig.get_config_dict(path, revision=revision)
    except (OSError, ValueError) as error:
        raise UserError(f"The model {path!r} cannot be loaded: {error}") from error
    if not config:
        raise UserError(
            f"The model {path!r} has no config.json. `model_name_or_path` is a Hub id, or a folder from `save_pretrained`."
        )


def check(arguments: GRPOArguments) -> None:
    """Raise a [`UserError`] for what is wrong on this machine, before data and model are loaded."""
    if found := [*problems_of(arguments), *_problems_here(arguments)]:
        raise UserError(*found)


def problems_of(arguments: GRPOArguments) -> Iterator[str]:
    """What would be wrong with these arguments on any machine, given a model and data that can be reached."""
    from trl_dataeff.validation import resolve_selector

    script, training, model, mixture = arguments
    names, weights = script.reward_funcs or [], training.reward_weights
    n = len(names) + bool(script.reward_model_name_or_path)
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


def _problems_here(arguments: GRPOArguments) -> Iterator[str]:
    """What is missing on this machine."""
    from transformers.integrations.integration_utils import get_available_reporting_integrations

    from trl_dataeff.rewards import require_math_verify

    training = arguments.training
    for name in [name for name in arguments.script.reward_funcs or [] if name in NEED_MATH_VERIFY]:
        yield from _message_of(require_math_verify, name)
    try:
        Path(str(training.output_dir)).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=training.output_dir).close()
    except OSError as error:
        yield f"`output_dir` is {training.output_dir!r}, where nothing can be saved: {error}."
    installed = get_available_reporting_integrations()
    for name in training.report_to or []:
        if name not in installed:
            yield f"`report_to` is {name!r}, which is not installed; it takes `none` or {listed(installed)}."
    if "wandb" in (training.report_to or []) and "wandb" in installed and not _logged_in():
        yield "`report_to` is 'wandb', which has no login: run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline."
    yield from _message_of(checkpoint_of, training)


def _logged_in() -> bool:
    """Whether wandb needs no login, has one, or can ask for it."""
    import wandb

    if wandb.setup().settings.mode in ("offline", "disabled") or sys.stdin.isatty():
        return True
    try:
        return bool(wandb.login(verify=False))
    except wandb.errors.UsageError:
        return False


def _message_of(function: Any, *args: Any) -> Iterator[str]:
    try:
        function(*args)
    except (ValueError, ImportError) as error:
        yield str(error)


def checkpoint_of(training: DataEfficientGRPOConfig) -> str | bool | None:
    """
    Return what to resume from, as `train` takes it: a checkpoint, `True` for the latest complete one of the run in
    `output_dir` (given as `true` or `last`), or `None`.
    """
    wanted = str(training.resume_from_checkpoint)
    words = {"none": None, "false": None, "true": True, "last": True}
    if wanted.lower() in words:
        return words[wanted.lower()]
    if not os.path.isdir(os.path.expanduser(wanted)):
        raise UserError(
            f"The checkpoint {wanted!r} does not exist: there is no such folder (`resume_from_checkpoint`). `last` "
            "stands for the latest complete one in `output_dir`."
        )
    return os.path.expanduser(wanted)


def load_reward(name: str) -> RewardFunction:
    """Return a reward function by its name or dotted path; a name or path that leads to none is a [`UserError`]."""
    reward = REWARDS.get(name, name)
    function = _imported(reward) if isinstance(reward, str) else reward
    if name == "get_soft_overlong_punishment":
        function = function(max_completion_len=1280, soft_punish_cache=256)
    return function


def check_columns(names: list[str] | None, row: dict[str, Any]) -> None:
    """Raise a [`UserError`] if a reward function reads what this row of the dataset does not have."""
    for name in names or []:
        columns = COLUMNS.get(name, ())
        if columns and not any(column in row for column in columns):
            raise UserError(
                f"`{name}` reads the column {' or '.join(f'`{c}`' for c in columns)}, but the dataset has {listed(row)}. "
                "Name the column with the gold answers as `answer_column`."
            )
        if name in _NEED_CHAT and isinstance(row["prompt"], str):
            raise UserError(
                f"`{name}` reads conversations, but the dataset has prompts of plain text. Set `prompt_as_chat`."
            )


def _imported(path: str) -> RewardFunction:
    module_name, _, function_name = path.rpartition(".")
    if not module_name:
        raise UserError(
            f"The reward function {path!r} is unknown.{closest(path, REWARDS)} Known are {listed(REWARDS)}; any other "
            "is given by its dotted path, as in `my_rewards.brevity`."
        )
    wrong = f"The reward function {path!r} cannot be imported"
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {error} ({place.filename}, line {place.lineno})."
        if isinstance(error, ModuleNotFoundError) and error.name in (module_name, module_name.partition(".")[0]):
            reason = (
                f"there is no module {error.name!r}, neither installed nor in {Path.cwd()}. Start the command in the "
                f"folder that has {error.name}.py, or set PYTHONPATH."
            )
        raise UserError(f"{wrong}: {reason}") from error
    function: RewardFunction | None = getattr(module, function_name, None)
    if not callable(function):
        hint = closest(function_name, [name for name in dir(module) if not name.startswith("_")])
        raise UserError(f"{wrong}: the module {module_name!r} has no function {function_name!r}.{hint}")
    return function


if __name__ == "__main__":  # a process that `accelerate launch` or torchrun started
    from trl_dataeff.cli.main import main

    raise SystemExit(main(["grpo", *sys.argv[1:]]))
