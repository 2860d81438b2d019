"""
What this package relies on in TRL's trainer, checked when ours is imported, before any training. So TRL's version needs no upper
bound: a release that differs is an error that names the method, and one that is merely untested is a warning.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import version
from types import CodeType

from packaging.version import Version


TESTED_TRL = ("1.14.2", "1.17")  # the lowest release, and the first that is not tested
#: Methods that we override or call, and their parameters. "...": they may have others, with defaults
METHODS = {
    "__init__": "model, reward_funcs, args, train_dataset, environment_factory, ...",
    "_generate_and_score_completions": "inputs",
    "_generate": "prompts",
    "_calculate_rewards": "inputs, prompts, completions, completion_ids_list",
    "_compute_loss": "model, inputs",
    "_get_per_token_logps_and_entropies": "model, input_ids, attention_mask, logits_to_keep, batch_size, ...",
    "_log_completion_extra": "column, values, ...",
    "_save_checkpoint": "model, trial",
    "_load_optimizer_and_scheduler": "checkpoint",
    "train": "resume_from_checkpoint, ...",
}
RETURNED = 8  # values of `_generate`: see `capture.Generated`
#: Attributes of the trainer that TRL's and Transformers' methods set, and methods that they call
USED = """
    _step _buffered_inputs _metrics _logs _pending_metrics _pending_extra_logs _tokenizer _is_vlm eos_token_ids _standalone_tools
    _sync_tool_dicts _async_tool_dicts environment_factories _last_loaded_step _entropy_bonus_enabled aux_loss_enabled _tr_loss
    top_entropy_quantile _total_loss_scalar _globalstep_last_logged _run_epoch create_scheduler create_model_card _get_output_dir
    _push_from_checkpoint
"""

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
    """Raise an `ImportError` that names each difference of a class from what we rely on; warn if only TRL's version is new."""
    trl, tested = version("trl"), f"trl>={TESTED_TRL[0]},<{TESTED_TRL[1]}"
    if found := "; ".join(differences(trainer_class)):
        raise ImportError(
            f"trl_dataeff cannot extend `GRPOTrainer` of trl {trl} and transformers {version('transformers')}: {found}. Install "
            f"the versions that it is tested with (pip install '{tested}'), or a newer trl_dataeff."
        )
    if not Version(TESTED_TRL[0]) <= Version(Version(trl).base_version) < Version(TESTED_TRL[1]):
        warnings.warn(f"trl_dataeff is tested with {tested}, not with trl {trl}, whose methods match.", stacklevel=3)
    renamed = unlogged_metrics(trainer_class)
    if renamed:
        names = ", ".join(f"`{name}`" for name in renamed)
        warnings.warn(
            f"trl {trl} does not log {names}. trl computes these metrics over the groups that are trained on, "
            "replayed ones included, and trl_dataeff replaces them. Under other names they stay trl's. Training is not "
            "affected.",
            stacklevel=3,
        )


def differences(trainer_class: type) -> Iterator[str]:
    """A phrase for each difference of a trainer class from what we rely on. What has no source is taken to be right."""
    for name, expected in METHODS.items():
        method = getattr(trainer_class, name, None)
        signature = inspect.signature(method or (lambda: None))
        if not _takes(list(signature.parameters.values())[1:], expected.split(", ")):
            yield f"`{name}` takes {signature}, and not ({expected})" if method else f"`{name}` does not exist"
    with suppress(OSError, TypeError):
        generate = inspect.unwrap(getattr(trainer_class, "_generate", check))  # one that does not exist is named above
        tree = ast.parse(textwrap.dedent(inspect.getsource(generate)))
        values = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
        lengths = {len(value.elts) for value in values if isinstance(value, ast.Tuple)}
        yield from (f"`_generate` returns {length} values, and not {RETURNED}" for length in lengths - {RETURNED})
        source = "".join(inspect.getsource(sys.modules[base.__module__]) for base in trainer_class.__mro__[:-1])
        missing = [name for name in USED.split() if not re.search(rf"\bself\.{name}\b", source)]
        yield from (f"no method uses `self.{name}`" for name in missing)


def unlogged_metrics(trainer_class: type) -> list[str]:
    """
    Find the metrics of `REPLACED_METRICS` that a trainer class does not log.

    Args:
        trainer_class (`type`): the trainer class. If it has no source, it is taken to log all of them.

    Returns:
        `list[str]`: their names.
    """
    try:
        source = "".join(inspect.getsource(sys.modules[base.__module__]) for base in trainer_class.__mro__[:-1])
    except (OSError, TypeError):
        return []
    unlogged = []
    for name in REPLACED_METRICS:
        quoted = re.escape(name).replace("reward_func_name", r"\w+")  # the name of TRL's variable does not matter
        if not re.search(rf'\b_metrics\[[^\]]+\]\[f?"{quoted}"\]', source):
            unlogged.append(name)
    return unlogged


def _takes(parameters: list[inspect.Parameter], expected: list[str]) -> bool:
    required = {p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return required <= set(expected)  # it takes whatever is passed by position
    if expected[-1] == "...":
        return required <= set(expected) <= {p.name for p in parameters} | {"..."}
    return [p.name for p in parameters] == expected


def corrects_loss(trainer_class: type, own: type) -> bool:
    """
    Whether the loss of a trainer passes through the `_compute_loss` and the log-probs of `own`, our class. It does not where a
    subclass, or Unsloth's class in the place of TRL's, overrides a method on the way without calling the next class's.
    """
    bases = trainer_class.__mro__
    above, below = bases[: bases.index(own)], bases[bases.index(own) + 1 :]
    loss, logps = "_compute_loss", "_get_per_token_logps_and_entropies"
    ways = ((bases, "compute_loss", loss), (above, loss), (below, loss, logps), (above, logps))
    return all(_leads_to(*way) for way in ways)


def _leads_to(bases: Sequence[type], name: str, goal: str = "") -> bool:
    """Whether each class's method calls the next class's, up to one that calls `goal`, if it is given. By the names in its code."""
    for base in bases:
        code = getattr(inspect.unwrap(vars(base).get(name, base)), "__code__", None)
        names = set() if code is None else _names(code)
        if goal in names:
            return True
        if code is not None and name not in names:
            return False
    return not goal


def _names(code: CodeType) -> set[str]:
    return set(code.co_names).union(*(_names(part) for part in code.co_consts if isinstance(part, CodeType)))
