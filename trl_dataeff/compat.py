"""The versions of TRL that this package is tested with, and the methods that it overrides or calls: checked when the
trainer is imported. So TRL's version needs no upper bound: a release in which a method takes other arguments is an
error that names it, and one that is merely untested is a warning.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from importlib.metadata import version

from packaging.version import Version


LOWEST_TRL = "1.14.2"
FIRST_UNTESTED_TRL = "1.17"
#: Methods that we override or call, and their parameters. "...": they may have others, with defaults. "*": any, since
#: we pass on what comes
METHODS = {
    "__init__": "model, reward_funcs, args, train_dataset, environment_factory, ...",
    "_generate_and_score_completions": "inputs",
    "_generate": "prompts",
    "_calculate_rewards": "inputs, prompts, completions, completion_ids_list",
    "_prepare_inputs": "generation_batch",
    "_compute_loss": "model, inputs",
    "_get_per_token_logps_and_entropies": "model, input_ids, attention_mask, logits_to_keep, batch_size, ...",
    "_log_completion_extra": "column, values, ...",
    "_save_checkpoint": "model, trial",
    "_load_optimizer_and_scheduler": "checkpoint",
    "train": "resume_from_checkpoint, ...",
    "training_step": "*",
    "create_scheduler": "*",
    "create_model_card": "*",
    "_run_epoch": "*",
    "_push_from_checkpoint": "checkpoint_folder",
    "_remove_unused_columns": "dataset, description",
}


def check(trainer_class: type) -> None:
    """
    Check TRL's trainer class. Warns if only TRL's version is new.

    Raises:
        `ImportError`: names each difference from what this package relies on.
    """
    trl_version = version("trl")
    transformers_version = version("transformers")
    tested = f"trl>={LOWEST_TRL},<{FIRST_UNTESTED_TRL}"
    found = "; ".join(differences(trainer_class))
    if found:
        raise ImportError(
            f"trl_dataeff cannot extend `GRPOTrainer` of trl {trl_version} and transformers "
            f"{transformers_version}: {found}. "
            f"Install the versions that it is tested with (pip install '{tested}'), or a newer trl_dataeff."
        )
    release = Version(Version(trl_version).base_version)
    if not Version(LOWEST_TRL) <= release < Version(FIRST_UNTESTED_TRL):
        warnings.warn(
            f"trl_dataeff is tested with {tested}, not with trl {trl_version}, whose methods match.", stacklevel=3
        )


def differences(trainer_class: type) -> Iterator[str]:
    """A phrase for each method of a trainer class that cannot be called or overridden as we do."""
    for name, expected in METHODS.items():
        method = getattr(trainer_class, name, None)
        if method is None:
            yield f"`{name}` does not exist"
            continue
        if expected == "*":
            continue
        signature = inspect.signature(method)
        parameters = list(signature.parameters.values())[1:]
        if not _takes(parameters, expected.split(", ")):
            yield f"`{name}` takes {signature}, and not ({expected})"


def _takes(parameters: list[inspect.Parameter], expected: list[str]) -> bool:
    """
    Whether a method with these parameters can be called with the `expected` ones, and overridden by one that has them.
    """
    names = {parameter.name for parameter in parameters}
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = {p.name for p in parameters if p.default is p.empty and p.kind not in variadic}
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return required <= set(expected)  # it takes whatever is passed by position
    if expected[-1] == "...":
        return required <= set(expected) <= names | {"..."}
    return [p.name for p in parameters] == expected
