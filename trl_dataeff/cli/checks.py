"""
What is rejected before a dataset or a model is loaded: what the configurations do not see because it is about several of
them, reward functions, selectors and predictors; and on this machine paths that do not exist and packages that are not installed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

from transformers.utils import is_bitsandbytes_available
from trl import ModelConfig
from trl.import_utils import is_vllm_available
from trl.scripts.utils import DatasetConfig

from trl_dataeff.cli.arguments import GRPOArguments
from trl_dataeff.cli.rewards import NEED_MATH_VERIFY, REWARDS, check_name
from trl_dataeff.cli.sources import find_source, is_local, unwritable
from trl_dataeff.config import DataEfficientGRPOConfig
from trl_dataeff.difficulty.loading import is_predictor
from trl_dataeff.fields import Problem, field_problems
from trl_dataeff.rewards import require_math_verify
from trl_dataeff.utils import UserError, closest, listed
from trl_dataeff.validation import check_dots_predictor, check_selector


def all_problems(arguments: GRPOArguments) -> list[Problem]:
    """What is wrong with these arguments, on any machine and on this one. Reads no dataset and no model, asks no hub."""
    return [*problems_of(arguments), *problems_on_this_machine(arguments)]


def problems_of(arguments: GRPOArguments) -> list[Problem]:
    """What would be wrong with these arguments on any machine, given a model and data that can be reached."""
    found = (_reward_problems, _selection_problems, _data_problems, _model_problems, _report_problems)
    return [problem for problems in found for problem in problems(arguments)]


def problems_on_this_machine(arguments: GRPOArguments) -> list[Problem]:
    """What is missing here: local paths, and packages."""
    script, training, model, mixture = arguments
    problems = []
    for name in [name for name in script.reward_funcs or [] if name in NEED_MATH_VERIFY]:
        problems += _tried(require_math_verify, name, names=("reward_funcs",))
    if _predicts(training) and not is_predictor(training.dots_predictor):
        problems += _tried(check_dots_predictor, training, names=("dots_predictor", "dots_predictor_args"))
    for entry in mixture.datasets or [DatasetConfig(script.dataset_name or "")]:
        if entry.path:
            problems += _tried(find_source, entry, names=("datasets", "dataset_name"))
    name = model.model_name_or_path or ""
    if is_local(name) and not os.path.isdir(os.path.expanduser(name)):
        message = f"The model {name!r} does not exist: there is no such folder (`model_name_or_path`)."
        problems.append(Problem(message, ("model_name_or_path",)))
    if (reason := unwritable(training.output_dir or "")) is not None:
        message = f"`output_dir` is {training.output_dir!r}, and {reason}. The trained model is saved there."
        problems.append(Problem(message, ("output_dir",)))
    problems += _package_problems(training, model)
    return problems + _tried(checkpoint_of, training, names=("resume_from_checkpoint",))


def check_model(model: ModelConfig) -> None:
    """Raise a [`UserError`] if the model has no configuration, here or on the Hub. Nothing else of it is read."""
    from transformers import PretrainedConfig

    wrong = f"The model {model.model_name_or_path!r} cannot be loaded"
    path = os.path.expanduser(str(model.model_name_or_path))
    try:
        config, _ = PretrainedConfig.get_config_dict(path, revision=model.model_revision)
    except OSError as error:
        raise UserError(f"{wrong}: {error}") from error
    if not config:
        raise UserError(
            f"{wrong}: it has no config.json. `model_name_or_path` is a Hub id, or a folder from `save_pretrained`."
        )


def checkpoint_of(training: DataEfficientGRPOConfig) -> str | bool | None:
    """
    Return what to resume from, as `train` takes it: a checkpoint, `True` for the latest complete one of the run in
    `output_dir` (given as `true` or `last`), or `None`.
    """
    wanted = str(training.resume_from_checkpoint)
    if wanted.lower() in ("none", "false"):
        return None
    if wanted.lower() in ("true", "last"):
        return True
    if not os.path.isdir(os.path.expanduser(wanted)):
        raise UserError(
            f"The checkpoint {wanted!r} does not exist: there is no such folder (`resume_from_checkpoint`). `last` "
            "stands for the latest complete one in `output_dir`."
        )
    return os.path.expanduser(wanted)


def _tried(check: Callable[..., Any], *args: Any, names: tuple[str, ...]) -> list[Problem]:
    try:
        check(*args)
    except (ValueError, ImportError) as error:
        return [Problem(message, names) for message in getattr(error, "messages", [str(error)])]
    return []


def _reward_problems(arguments: GRPOArguments) -> Iterator[Problem]:
    names, model = arguments.script.reward_funcs or [], arguments.script.reward_model_name_or_path
    weights, n = arguments.training.reward_weights, len(names) + bool(model)
    if not n:
        known = f"one or more of {listed(REWARDS)}, or to the dotted path of a function"
        yield Problem(f"No reward: set `reward_funcs` to {known}.", ("reward_funcs",))
    for name in names:
        yield from _tried(check_name, name, names=("reward_funcs",))
    if n and weights is not None and len(weights) != n:
        message = (
            f"`reward_weights` has {len(weights)} numbers for {n} rewards (`reward_model_name_or_path`, if set, comes "
            "first). Give one number for each."
        )
        yield Problem(message, ("reward_weights", "reward_funcs"))


def _predicts(training: DataEfficientGRPOConfig) -> bool:
    return training.selection == "auto" or "dots" in training.selection


def _selection_problems(arguments: GRPOArguments) -> Iterator[Problem]:
    training = arguments.training
    yield from _tried(check_selector, training, names=("selection", "selector_args"))
    if _predicts(training) and is_predictor(training.dots_predictor):
        yield from _tried(check_dots_predictor, training, names=("dots_predictor_args", "dots_predictor"))


def _data_problems(arguments: GRPOArguments) -> Iterator[Problem]:
    script, training, _, mixture = arguments
    if not script.dataset_name and not mixture.datasets:
        message = (
            "No dataset: set `dataset_name` to a Hub id, a folder or a file (.parquet, .jsonl, .json, .csv), or give "
            "a mixture under `datasets`."
        )
        yield Problem(message, ("dataset_name", "datasets"))
    name = "streaming" if mixture.datasets else "dataset_streaming"
    if not getattr(mixture if mixture.datasets else script, name):
        return
    if training.max_steps <= 0:
        yield Problem(f"`{name}` needs `max_steps`: the length of a stream is not known.", (name, "max_steps"))
    in_rounds = [field for field in ("dynamic_sampling", "sequential_rollouts") if getattr(training, field)]
    if in_rounds or training.selection not in ("auto", "uniform"):
        wrong = [*in_rounds, "selection"][0]
        message = (
            f"`{name}` and `{wrong}` exclude one another: prompts of a stream cannot be chosen. Load the dataset without "
            "streaming, or set `selection: uniform`, `dynamic_sampling: false` and `sequential_rollouts: false`."
        )
        yield Problem(message, (name, wrong))


def _model_problems(arguments: GRPOArguments) -> Iterator[Problem]:
    model = arguments.model
    problems = field_problems(vars(model))
    yield from problems
    if model.use_peft and not problems:
        yield from _tried(_check_lora, model, names=("lora_task_type", "lora_target_modules", "use_peft"))
    if not model.model_name_or_path:
        message = "No model: set `model_name_or_path` to a Hub id or a local folder."
        yield Problem(message, ("model_name_or_path",))
    for name in ("load_in_4bit", "load_in_8bit"):
        if getattr(model, name) and not model.use_peft:
            message = f"`{name}` needs `use_peft`: quantized weights cannot be trained, adapters on top of them can."
            yield Problem(message, (name, "use_peft"))
    if model.use_peft and arguments.training.sync_ref_model:
        message = "`sync_ref_model` is not possible with `use_peft`: the reference is the model without its adapters."
        yield Problem(message, ("sync_ref_model", "use_peft"))


def _check_lora(model: ModelConfig) -> None:
    """What `get_peft_config` would reject; TRL's module that has it takes half a second to import."""
    from peft import LoraConfig

    LoraConfig(task_type=model.lora_task_type, target_modules=model.lora_target_modules, use_dora=model.use_dora)


def _report_problems(arguments: GRPOArguments) -> Iterator[Problem]:
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    for name in arguments.training.report_to or []:
        if name not in INTEGRATION_TO_CALLBACK:
            hint = closest(name, INTEGRATION_TO_CALLBACK)
            message = f"`report_to` is {name!r}; it takes 'none' or {listed(INTEGRATION_TO_CALLBACK)}.{hint}"
            yield Problem(message, ("report_to",))


def _package_problems(training: DataEfficientGRPOConfig, model: ModelConfig) -> Iterator[Problem]:
    from transformers.integrations.integration_utils import get_available_reporting_integrations

    if training.use_vllm and not is_vllm_available():
        yield _missing("use_vllm", '"trl[vllm]"', "false")
    embeds = training.selection.startswith("dots") and training.dots_embedding != "policy"
    if embeds and find_spec("sentence_transformers") is None:
        yield _missing("dots_embedding", "sentence-transformers", "policy")
    for name in ("load_in_4bit", "load_in_8bit"):
        if getattr(model, name) and not is_bitsandbytes_available():
            yield _missing(name, "bitsandbytes", "false")
    installed = get_available_reporting_integrations()
    for name in training.report_to or []:
        if name in ("wandb", "trackio", "tensorboard", "mlflow") and name not in installed:
            yield _missing("report_to", name, "none")


def _missing(field: str, package: str, otherwise: str) -> Problem:
    message = (
        f"needs a package that is not installed: pip install {package}. Or run without it: `--{field} {otherwise}`."
    )
    return Problem(f"`{field}` {message}", (field,))
