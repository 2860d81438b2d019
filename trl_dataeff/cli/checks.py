"""
What is refused before a dataset or a model is loaded: what the configurations do not see because it is about several of
them, reward functions, selectors and predictors; and on this machine paths that lead nowhere and packages that are missing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PretrainedConfig
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations
from transformers.utils import is_bitsandbytes_available, is_peft_available
from trl import ModelConfig, get_peft_config
from trl.import_utils import is_vllm_available

from trl_dataeff.cli.arguments import GRPOArguments
from trl_dataeff.cli.data import find_source, require_dataset
from trl_dataeff.cli.errors import UserError, listed
from trl_dataeff.cli.rewards import find_reward, load_rewards, require_packages
from trl_dataeff.config import DataEfficientGRPOConfig
from trl_dataeff.difficulty.loading import registered_predictors
from trl_dataeff.fields import Problem, field_problems
from trl_dataeff.validation import check_dots_predictor, check_selector


def check(arguments: GRPOArguments) -> None:
    """Raise a [`UserError`] with everything that is wrong. Reads no dataset and no model, asks no hub."""
    problems = [*problems_of(arguments), *problems_on_this_machine(arguments)]
    if problems:
        raise UserError(*(problem.message for problem in problems))


def problems_of(arguments: GRPOArguments) -> list[Problem]:
    """What would be wrong with these arguments on any machine, given a model and data that can be reached."""
    return [
        *_reward_problems(arguments),
        *_selection_problems(arguments.training),
        *_data_problems(arguments),
        *_model_problems(arguments.model, arguments.training),
        *_report_problems(arguments.training.report_to or []),
    ]


def problems_on_this_machine(arguments: GRPOArguments) -> list[Problem]:
    """What is missing here: local paths, and packages."""
    script, training, model, mixture = arguments
    problems: list[Problem] = []
    for name in script.reward_funcs or []:
        problems += _tried(("reward_funcs",), require_packages, name)
    if _predicts(training) and training.dots_predictor not in registered_predictors():
        problems += _tried(("dots_predictor", "dots_predictor_args"), check_dots_predictor, training)
    for entry in mixture.datasets:
        problems += _tried(("datasets",), find_source, entry.path, entry.data_files)
    if script.dataset_name and not mixture.datasets:
        problems += _tried(("dataset_name",), find_source, script.dataset_name)
    problems += _tried(("model_name_or_path",), _check_model_path, model.model_name_or_path)
    problems += _package_problems(training, model)
    return problems + _tried(("resume_from_checkpoint",), checkpoint_of, training)


def check_model(model: ModelConfig) -> None:
    """Check that the model has a configuration, here or on the Hub. Nothing else of it is read."""
    assert model.model_name_or_path is not None
    path = os.path.expanduser(model.model_name_or_path)
    try:
        config, _ = PretrainedConfig.get_config_dict(path, revision=model.model_revision)
    except OSError as error:
        raise UserError(f"The model {model.model_name_or_path!r} cannot be loaded: {error}") from error
    if not config:
        raise UserError(
            f"The model {model.model_name_or_path!r} cannot be loaded: it has no config.json. `model_name_or_path` is "
            "a Hub id, or a folder from `save_pretrained`."
        )


def checkpoint_of(training: DataEfficientGRPOConfig) -> str | bool | None:
    """
    Return what to resume from, as `train` takes it: a checkpoint, `True` for the latest complete one of the run in
    `output_dir` (given as `true` or `last`), or `None`.
    """
    wanted = training.resume_from_checkpoint
    if wanted is None or str(wanted).lower() == "false":
        return None
    if str(wanted).lower() in ("true", "last"):
        return True
    if not os.path.isdir(str(wanted)):
        raise UserError(
            f"The checkpoint {wanted!r} does not exist: there is no such folder (`resume_from_checkpoint`). `last` "
            "stands for the latest complete one in `output_dir`."
        )
    return str(wanted)


def _tried(names: tuple[str, ...], check: Callable[..., Any], *args: Any) -> list[Problem]:
    try:
        check(*args)
    except ValueError as error:
        return [Problem(message, names) for message in getattr(error, "messages", [str(error)])]
    return []


def _reward_problems(arguments: GRPOArguments) -> list[Problem]:
    names, reward_model = arguments.script.reward_funcs or [], arguments.script.reward_model_name_or_path
    weights = arguments.training.reward_weights
    if not names and not reward_model:
        return _tried(("reward_funcs",), load_rewards, None)
    problems = [problem for name in names for problem in _tried(("reward_funcs",), find_reward, name)]
    n = len(names) + bool(reward_model)
    if weights is not None and len(weights) != n:
        message = (
            f"`reward_weights` has {len(weights)} numbers for {n} rewards (`reward_model_name_or_path`, if set, comes "
            "first). Give one number for each."
        )
        problems.append(Problem(message, ("reward_weights", "reward_funcs")))
    return problems


def _predicts(training: DataEfficientGRPOConfig) -> bool:
    return training.selection == "auto" or "dots" in training.selection


def _selection_problems(training: DataEfficientGRPOConfig) -> list[Problem]:
    problems = [
        Problem(f"`selection` is {training.selection!r}: {problem.message}", problem.fields)
        for problem in _tried(("selection", "selector_args"), check_selector, training)
    ]
    if _predicts(training) and training.dots_predictor in registered_predictors():
        problems += _tried(("dots_predictor_args", "dots_predictor"), check_dots_predictor, training)
    return problems


def _data_problems(arguments: GRPOArguments) -> list[Problem]:
    script, training, mixture = arguments.script, arguments.training, arguments.dataset
    if not script.dataset_name and not mixture.datasets:
        return _tried(("dataset_name", "datasets"), require_dataset, script, mixture)
    name = "streaming" if mixture.datasets else "dataset_streaming"
    if not getattr(mixture if mixture.datasets else script, name):
        return []
    problems = []
    if training.max_steps <= 0:
        message = f"`{name}` needs `max_steps`: the length of a stream is not known."
        problems.append(Problem(message, (name, "max_steps")))
    if training.dynamic_sampling or training.selection not in ("auto", "uniform"):
        wrong = "dynamic_sampling" if training.dynamic_sampling else "selection"
        message = (
            f"`{name}` and `{wrong}` exclude one another: prompts of a stream cannot be chosen. Load the dataset without "
            "streaming, or set `selection: uniform` and `dynamic_sampling: false`."
        )
        problems.append(Problem(message, (name, wrong)))
    return problems


def _model_problems(model: ModelConfig, training: DataEfficientGRPOConfig) -> list[Problem]:
    problems = field_problems(vars(model))
    if model.use_peft and is_peft_available() and not problems:
        problems += _tried(("lora_task_type", "lora_target_modules", "use_peft"), get_peft_config, model)
    if not model.model_name_or_path:
        message = "No model: set `model_name_or_path` to a Hub id or a local folder."
        problems.append(Problem(message, ("model_name_or_path",)))
    for name in ("load_in_4bit", "load_in_8bit"):
        if getattr(model, name) and not model.use_peft:
            message = f"`{name}` needs `use_peft`: quantized weights cannot be trained, adapters on top of them can."
            problems.append(Problem(message, (name, "use_peft")))
    if model.use_peft and training.sync_ref_model:
        message = "`sync_ref_model` is not possible with `use_peft`: the reference is the model without its adapters."
        problems.append(Problem(message, ("sync_ref_model", "use_peft")))
    return problems


def _report_problems(names: Sequence[str]) -> list[Problem]:
    return [
        Problem(f"`report_to` is {name!r}; it takes 'none' or {listed(INTEGRATION_TO_CALLBACK)}.", ("report_to",))
        for name in names
        if name not in INTEGRATION_TO_CALLBACK
    ]


def _check_model_path(path: str | None) -> None:
    if path is None:
        return
    is_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if is_local and not os.path.isdir(os.path.expanduser(path)):
        raise UserError(f"The model {path!r} does not exist: there is no such folder (`model_name_or_path`).")


def _package_problems(training: DataEfficientGRPOConfig, model: ModelConfig) -> list[Problem]:
    problems = []
    if training.use_vllm and not is_vllm_available():
        message = (
            '`use_vllm` needs vLLM, which is not installed: pip install "trl-dataeff[vllm]". Without it, generation is '
            "slower but works: `--use_vllm false`."
        )
        problems.append(Problem(message, ("use_vllm",)))
    for name in ("load_in_4bit", "load_in_8bit"):
        if getattr(model, name) and not is_bitsandbytes_available():
            problems.append(Problem(f"`{name}` needs bitsandbytes: pip install bitsandbytes.", (name,)))
    if model.use_peft and not is_peft_available():
        problems.append(Problem("`use_peft` needs PEFT, which is not installed: pip install peft.", ("use_peft",)))
    installed = get_available_reporting_integrations()
    for name in training.report_to or []:
        if name in ("wandb", "trackio", "tensorboard", "mlflow") and name not in installed:
            message = f"`report_to` is {name!r}, which is not installed: pip install {name}."
            problems.append(Problem(message, ("report_to",)))
    return problems
