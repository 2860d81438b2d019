"""What is refused before a dataset or a model is loaded: paths that lead nowhere, and packages that are not there."""

from __future__ import annotations

import os

from transformers import PretrainedConfig
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations
from transformers.utils import is_bitsandbytes_available
from trl import ModelConfig
from trl.import_utils import is_vllm_available

from trl_dataeff.cli.arguments import GRPOArguments
from trl_dataeff.cli.data import find_source
from trl_dataeff.cli.errors import UserError, listed
from trl_dataeff.cli.rewards import load_rewards
from trl_dataeff.config import DataEfficientGRPOConfig
from trl_dataeff.validation import check_selection


def check(arguments: GRPOArguments) -> None:
    """Check reward functions, selector, local files, and packages. Reads no dataset and no model, asks no hub."""
    rewards = load_rewards(arguments.script.reward_funcs, arguments.script.reward_model_name_or_path)
    weights = arguments.training.reward_weights
    if weights is not None and len(weights) != len(rewards):
        raise UserError(
            f"`reward_weights` has {len(weights)} numbers for {len(rewards)} rewards (`reward_model_name_or_path`, if "
            "set, comes first). Give one number for each."
        )
    try:
        check_selection(arguments.training, None)
    except ValueError as error:
        raise UserError(str(error)) from error
    for entry in arguments.dataset.datasets:
        find_source(entry.path, entry.data_files)
    if arguments.script.dataset_name and not arguments.dataset.datasets:
        find_source(arguments.script.dataset_name)
    _check_model_path(arguments.model.model_name_or_path)
    _check_packages(arguments)
    checkpoint_of(arguments.training)


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


def _check_model_path(path: str | None) -> None:
    if not path:
        raise UserError("No model: set `model_name_or_path` to a Hub id or a local folder.")
    is_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if is_local and not os.path.isdir(os.path.expanduser(path)):
        raise UserError(f"The model {path!r} does not exist: there is no such folder (`model_name_or_path`).")


def _check_packages(arguments: GRPOArguments) -> None:
    training, model = arguments.training, arguments.model
    if training.use_vllm and not is_vllm_available():
        raise UserError(
            '`use_vllm` needs vLLM, which is not installed: pip install "trl-dataeff[vllm]". Without it, generation '
            "is slower but works: `--use_vllm false`."
        )
    if (model.load_in_4bit or model.load_in_8bit) and not is_bitsandbytes_available():
        raise UserError("`load_in_4bit` and `load_in_8bit` need bitsandbytes: pip install bitsandbytes.")
    installed = get_available_reporting_integrations()
    for name in training.report_to or []:
        if name not in INTEGRATION_TO_CALLBACK:
            raise UserError(f"`report_to` is {name!r}; it takes 'none' or {listed(INTEGRATION_TO_CALLBACK)}.")
        if name in ("wandb", "trackio", "tensorboard", "mlflow") and name not in installed:
            raise UserError(f"`report_to` is {name!r}, which is not installed: pip install {name}.")
