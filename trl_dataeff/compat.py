"""What this package relies on in TRL's trainer, checked when ours is imported, before any training. So TRL's version
needs no upper bound: a release that differs is an error that names the method, and one that is merely untested is a
warning.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from types import CodeType, FunctionType
from typing import cast

import trl.trainer.utils
from packaging.version import Version


LOWEST_TRL = "1.14.2"
FIRST_UNTESTED_TRL = "1.17"
#: Methods that we override or call, and their parameters. "...": they may have others, with defaults
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
}
RETURNED = 8  # values of `_generate`: see `generation.recorder.TrlGeneration`
#: Attributes of the trainer that TRL's and Transformers' methods set, and methods that they call
USED = (
    "_step",
    "_buffered_inputs",
    "_metrics",
    "_logs",
    "_pending_metrics",
    "_pending_extra_logs",
    "_tokenizer",
    "_is_vlm",
    "eos_token_ids",
    "_standalone_tools",
    "_sync_tool_dicts",
    "_async_tool_dicts",
    "environment_factories",
    "_last_loaded_step",
    "scale_rewards",
    "multi_objective_aggregation",
    "mask_truncated_completions",
    "loss_type",
    "importance_sampling_level",
    "epsilon_low",
    "epsilon_high",
    "_entropy_bonus_enabled",
    "aux_loss_enabled",
    "_tr_loss",
    "top_entropy_quantile",
    "_total_loss_scalar",
    "_globalstep_last_logged",
    "_run_epoch",
    "create_scheduler",
    "create_model_card",
    "_get_output_dir",
    "_push_from_checkpoint",
)


# TRL's trainer

#: TRL's metrics whose values we replace, since TRL computes them over the groups that are trained on, replayed ones
#: included. The names are those in TRL's source
REPLACED_METRICS = (
    "reward",
    "reward_std",
    "rewards/{reward_func_name}/mean",
    "rewards/{reward_func_name}/std",
    "frac_reward_zero_std",
    "completions/mean_length",
    "completions/min_length",
    "completions/max_length",
    "completions/mean_terminated_length",
    "completions/min_terminated_length",
    "completions/max_terminated_length",
    "completions/clipped_ratio",
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
    "sampling/importance_sampling_ratio/min",
    "sampling/importance_sampling_ratio/mean",
    "sampling/importance_sampling_ratio/max",
)


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
    renamed = unlogged_metrics(trainer_class)
    if renamed:
        names = ", ".join(f"`{name}`" for name in renamed)
        warnings.warn(
            f"trl {trl_version} does not log {names}. trl computes these metrics over the groups that are trained on, "
            "replayed ones included, and trl_dataeff replaces them. Under other names they stay trl's. Training is "
            "not affected.",
            stacklevel=3,
        )


def differences(trainer_class: type) -> Iterator[str]:
    """A phrase for each difference of a trainer class from what we rely on.

    What has no source is taken to be right.
    """
    for name, expected in METHODS.items():
        method = getattr(trainer_class, name, None)
        if method is None:
            yield f"`{name}` does not exist"
            continue
        signature = inspect.signature(method)
        parameters = list(signature.parameters.values())[1:]
        if not _takes(parameters, expected.split(", ")):
            yield f"`{name}` takes {signature}, and not ({expected})"
    try:
        yield from _differences_in_source(trainer_class)
    except (OSError, TypeError):  # of classes without source
        return


def _differences_in_source(trainer_class: type) -> Iterator[str]:
    """Raises an `OSError` or a `TypeError` if the source of a class is not there."""
    if hasattr(trainer_class, "_generate"):
        source = inspect.getsource(inspect.unwrap(trainer_class._generate))
        nodes = ast.walk(ast.parse(textwrap.dedent(source)))
        returned = [node.value for node in nodes if isinstance(node, ast.Return)]
        lengths = {len(value.elts) for value in returned if isinstance(value, ast.Tuple)}
        for length in lengths - {RETURNED}:
            yield f"`_generate` returns {length} values, and not {RETURNED}"
    sources = _sources(trainer_class)
    for name in USED:
        if not re.search(rf"\bself\.{name}\b", sources):
            yield f"no method uses `self.{name}`"


def unlogged_metrics(trainer_class: type) -> list[str]:
    """
    Find the metrics of `REPLACED_METRICS` that a trainer class does not log.

    Args:
        trainer_class (`type`): the trainer class. If it has no source, it is taken to log all of them.

    Returns:
        `list[str]`: their names.
    """
    try:
        source = _sources(trainer_class)
    except (OSError, TypeError):
        return []
    unlogged = []
    for name in REPLACED_METRICS:
        quoted = re.escape(name).replace("reward_func_name", r"\w+")  # the name of TRL's variable does not matter
        if not re.search(rf'\b_metrics\[[^\]]+\]\[f?"{quoted}"\]', source):
            unlogged.append(name)
    return unlogged


def _sources(trainer_class: type) -> str:
    """The source of the modules of a class and of its bases. Raises an `OSError` or a `TypeError` if one has none."""
    modules = [sys.modules[base.__module__] for base in trainer_class.__mro__[:-1]]
    return "".join(inspect.getsource(module) for module in modules)


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


# Subclasses


#: Methods that decide which rows TRL's dataloader gives, and in which order
ORDER_METHODS = ("get_train_dataloader", "_get_train_sampler", "get_batch_samples")
#: Methods that get these rows before TRL generates: the place of the rows among their arguments, `self` being the
#: first, and the methods to which they pass the rows on
ROW_METHODS = {
    "training_step": (2, ("training_step", "_prepare_inputs")),
    "_prepare_inputs": (1, ("_prepare_inputs", "_generate_and_score_completions")),
}


def overrides(trainer_class: type, name: str) -> bool:
    """Whether a subclass has a method of its own in the place of TRL's, the Trainer's or ours."""
    method: FunctionType = getattr(trainer_class, name)
    package = method.__module__.partition(".")[0]
    return package not in ("transformers", "trl", "trl_dataeff")


def overrides_rewards(trainer_class: type) -> bool:
    """Whether a subclass has a `_calculate_rewards` of its own."""
    return overrides(trainer_class, "_calculate_rewards")


def replaces_generation(trainer_class: type, own: type) -> bool:
    """
    Whether a subclass's `_generate_and_score_completions` does not call the next class's, so that no batch is made by
    ours.

    Args:
        trainer_class (`type`): the class of the trainer.
        own (`type`): our class, from which it derives.
    """
    return not _leads_to(_above(trainer_class, own), "_generate_and_score_completions")


def row_hooks(trainer_class: type, own: type) -> list[str]:
    """
    The methods of a subclass that decide which rows TRL's dataloader gives, or that use these rows before TRL
    generates.

    Args:
        trainer_class (`type`): the class of the trainer.
        own (`type`): our class, from which it derives.

    Returns:
        `list[str]`: their names. A method without source is taken to pass its rows on as they are.
    """
    above = _above(trainer_class, own)
    hooks = [name for name in ORDER_METHODS if any(name in vars(base) for base in above)]
    for name, (place, next_methods) in ROW_METHODS.items():
        methods = [vars(base)[name] for base in above if name in vars(base)]
        if any(_uses_before_passing_on(method, place, next_methods) for method in methods):
            hooks.append(name)
    return hooks


def _uses_before_passing_on(method: FunctionType, place: int, next_methods: Sequence[str]) -> bool:
    """
    Whether a method uses an argument before its last call of the next methods, or passes on something else.

    Args:
        method (`FunctionType`): the method.
        place (`int`): place of the argument among those of the method, `self` being at 0.
        next_methods (`Sequence[str]`): names of the methods to which the argument is to be passed on.
    """
    method = inspect.unwrap(method)
    if getattr(method, "__name__", "") == "<lambda>":  # whose source may be a part of a statement
        return False
    try:
        source = inspect.getsource(method)
    except (OSError, TypeError):
        return False
    if source[0].isspace():
        source = "if True:\n" + source  # not dedented: a text of several lines may begin further left
    function = next(node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    if len(function.args.args) <= place:
        return False  # `*args`
    argument = function.args.args[place].arg
    passed_on: list[ast.expr] = []
    ends_of_calls = []
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in next_methods:
            passed_on += [*node.args, *(keyword.value for keyword in node.keywords)]
            ends_of_calls.append((cast(int, node.end_lineno), cast(int, node.end_col_offset)))
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id == argument and node not in passed_on:
            position = (node.lineno, node.col_offset)
            if not ends_of_calls or position < max(ends_of_calls):
                return True
    return False


def _above(trainer_class: type, own: type) -> Sequence[type]:
    """The classes whose methods are called before those of our class."""
    bases = trainer_class.__mro__
    return bases[: bases.index(own)]


def has_fused_head() -> bool:
    """Whether TRL's loss takes log-probs from the fused head that it adds to a model: from TRL 1.15 on."""
    return hasattr(trl.trainer.utils, "add_fused_lm_head")


def corrects_loss(trainer_class: type, own: type) -> bool:
    """Whether the loss of a trainer passes through our `_compute_loss` and our log-probs. It does not where a
    subclass, or Unsloth's class in the place of TRL's, overrides a method on the way without calling the next class's.

    Args:
        trainer_class (`type`): the class of the trainer.
        own (`type`): our class, from which it derives.
    """
    bases = trainer_class.__mro__
    above = _above(trainer_class, own)
    below = bases[len(above) + 1 :]
    loss = "_compute_loss"
    logps = "_get_per_token_logps_and_entropies"
    return (
        _leads_to(bases, "compute_loss", goal=loss)
        and _leads_to(above, loss)
        and _leads_to(below, loss, goal=logps)
        and _leads_to(above, logps)
    )


def _leads_to(bases: Sequence[type], name: str, goal: str = "") -> bool:
    """Whether each class's method calls the next class's, up to one that calls `goal`, if it is given. By the names
    in its code.
    """
    for base in bases:
        method = vars(base).get(name)
        if method is None:
            continue
        code = getattr(inspect.unwrap(method), "__code__", None)
        if code is None:
            continue
        called = _names(code)
        if goal in called:
            return True
        if name not in called:
            return False
    return not goal


def _names(code: CodeType) -> set[str]:
    """The names in a function's code, and in that of functions within it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names
