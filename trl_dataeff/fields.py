"""
The values that fields take: those of this package, of TRL's `GRPOConfig` and `ModelConfig`, and of Transformers'
`TrainingArguments`. One table, for the configuration, the trainer and the checks of recipes.

TRL's choices are plain strings, and it looks at most of them in the middle of a run. Of TRL's and Transformers' fields the
table refuses values with which a run would fail later, and those that are out of range by their documentation. What is
deliberately not here: what the configurations check themselves, and whatever needs a model, a dataset or a machine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class Problem(NamedTuple):
    """
    Something wrong with the values of fields.

    Attributes:
        message: what was given, what is allowed, and the way out.
        fields: the fields that it is about, the most likely cause first.
    """

    message: str
    fields: tuple[str, ...] = ()


class FieldError(ValueError):
    """
    Everything that is wrong with the fields of a configuration, one line per problem.

    Attributes:
        problems (`list[Problem]`): at least one.
    """

    def __init__(self, problems: Sequence[Problem]):
        super().__init__("\n".join(problem.message for problem in problems))
        self.problems = list(problems)


class Rule(NamedTuple):
    """Which values a field takes, and that in words: "it takes ..."."""

    ok: Callable[[Any], bool]
    takes: str


def listed(values: Sequence[str]) -> str:
    """Values in words: `"'a', 'b' or 'c'"`."""
    return " or ".join([", ".join(repr(v) for v in values[:-1]), repr(values[-1])])


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _choice(*values: str) -> Rule:
    return Rule(lambda v: isinstance(v, str) and v in values, listed(values))


def _number(ok: Callable[[float], bool], takes: str) -> Rule:
    return Rule(lambda v: is_number(v) and math.isfinite(v) and ok(v), takes)


def _integer(least: int) -> Rule:
    return Rule(lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= least, f"an integer >= {least}")


def _or_none(rule: Rule, meaning: str) -> Rule:
    return Rule(lambda v: v is None or rule.ok(v), f"{rule.takes}, or nothing for {meaning}")


def _is_mapping(value: Any) -> bool:
    if isinstance(value, str):  # TrainingArguments parses it
        try:
            value = json.loads(value)
        except ValueError:
            return False
    return isinstance(value, dict)


def _is_range(value: Any) -> bool:
    is_pair = isinstance(value, (list, tuple)) and len(value) == 2
    return is_pair and all(is_number(v) and math.isfinite(v) for v in value) and value[0] < value[1]


AT_LEAST_1 = _number(lambda v: v >= 1, "a number >= 1")
ABOVE_0 = _number(lambda v: v > 0, "a number > 0")
SHARE = _number(lambda v: 0 <= v <= 1, "a number in [0, 1]")
SHARE_BELOW_1 = _number(lambda v: 0 <= v < 1, "a number in [0, 1)")
SHARE_ABOVE_0 = _number(lambda v: 0 < v <= 1, "a number in (0, 1]")
NAME = Rule(lambda v: isinstance(v, str) and v != "", "a name or a path")
FLAG = Rule(lambda v: isinstance(v, bool), "True or False")
ARGUMENTS = Rule(lambda v: v is None or _is_mapping(v), "a dictionary of keyword arguments, or nothing")

#: Fields of `DataEfficientGRPOConfig`
OUR_FIELDS: dict[str, Rule] = {
    "selection": NAME,
    "selector_args": ARGUMENTS,
    "dynamic_sampling": FLAG,
    "max_rollout_rounds": _integer(1),
    "rollout_margin": AT_LEAST_1,
    "rollout_round_min": SHARE_ABOVE_0,
    "rollout_round_max": AT_LEAST_1,
    "reward_range": Rule(
        lambda v: v is None or _is_range(v),
        "two finite numbers (low, high) with low < high, or nothing for the lowest and highest total reward seen so far",
    ),
    "exploration": SHARE,
    "save_on_signal": FLAG,
    "skip_nonfinite_steps": FLAG,
    "vllm_reconnect": FLAG,
    "reward_timeout": _or_none(_number(lambda v: v > 0, "a number of seconds > 0"), "no limit"),
    "replay_fraction": SHARE_BELOW_1,
    "replay_capacity": _integer(1),
    "replay_max_age": _or_none(_integer(1), "no limit"),
    "replay_order": _choice("newest", "random"),
    "replay_clip": _choice("proximal", "behavior"),
    "replay_ratio_cap": AT_LEAST_1,
    "dots_objective": _choice("effective", "target"),
    "dots_sharpness": ABOVE_0,
    "dots_target": SHARE,
    "dots_temperature": ABOVE_0,
    "dots_predictor": NAME,
    "dots_predictor_args": ARGUMENTS,
    "dots_embedding": NAME,
    "dots_reference": _choice("rolling", "paper"),
    "dots_reference_size": _integer(1),
    "dots_refresh_batches": _integer(1),
    "history_prior": ABOVE_0,
    "history_half_lives": Rule(
        lambda v: v is None or (isinstance(v, list) and bool(v) and all(is_number(x) and 0 < x < math.inf for x in v)),
        "a list of one or more numbers of generation batches > 0, or nothing for 1, 3, 9 and 27",
    ),
    "greso_p_init": SHARE_ABOVE_0,
    "greso_p_step": SHARE,
    "greso_p_min": SHARE_ABOVE_0,
    "greso_p_max": SHARE_ABOVE_0,
    "greso_target_zero_variance": SHARE_BELOW_1,
    "greso_easy_share": SHARE,
    "greso_streak_half_life": Rule(
        lambda v: v is None or (is_number(v) and v > 0), "a number > 0, or nothing for the selector's default"
    ),
}

#: Choices of TRL's `GRPOConfig`
TRL_CHOICES: dict[str, tuple[str, ...]] = {
    "loss_type": ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("group", "batch", "none"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_mode": ("colocate", "server"),
    "vllm_model_impl": ("vllm", "transformers"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}

_AT_LEAST_0 = _number(lambda v: v >= 0, "a number >= 0")
_PORT = _number(lambda v: 1 <= v <= 65535, "a port, from 1 to 65535")
#: Numbers of TRL's and Transformers' configurations, and of LoRA. Nothing (`None`) and text are left to TRL
TRL_NUMBERS: dict[str, Rule] = {
    "learning_rate": _AT_LEAST_0,
    "weight_decay": _AT_LEAST_0,
    "adam_beta1": SHARE_BELOW_1,
    "adam_beta2": SHARE_BELOW_1,
    "adam_epsilon": _AT_LEAST_0,
    "num_train_epochs": _AT_LEAST_0,
    "warmup_steps": _AT_LEAST_0,
    "per_device_train_batch_size": _integer(1),
    "per_device_eval_batch_size": _integer(1),
    "gradient_accumulation_steps": _integer(1),
    "steps_per_generation": _integer(1),
    "generation_batch_size": _integer(1),
    "dataloader_num_workers": _integer(0),
    "seed": _number(lambda v: 0 <= v < 2**32, "an integer from 0 to 2**32 - 1"),
    "num_generations": _integer(2),
    "max_completion_length": _integer(1),
    "num_iterations": _integer(1),
    "temperature": ABOVE_0,
    "top_p": SHARE_ABOVE_0,
    "top_k": _number(lambda v: v >= -1, "an integer >= 1, or 0 for all tokens"),
    "min_p": SHARE,
    "repetition_penalty": ABOVE_0,
    "top_entropy_quantile": SHARE,
    "sapo_temperature_neg": ABOVE_0,
    "sapo_temperature_pos": ABOVE_0,
    "off_policy_mask_threshold": ABOVE_0,
    "ref_model_sync_steps": _integer(1),
    "vllm_server_port": _PORT,
    "vllm_group_port": _PORT,
    "vllm_server_timeout": _AT_LEAST_0,
    "vllm_gpu_memory_utilization": SHARE_ABOVE_0,
    "vllm_tensor_parallel_size": _integer(1),
    "lora_r": _integer(1),
    "lora_dropout": SHARE,
}


def field_problems(values: Mapping[str, Any]) -> list[Problem]:
    """
    Everything that is wrong with the values of fields, alone and together.

    Args:
        values (`dict`): values by field name; names that are not in the tables are passed over.
    """
    rules = {**OUR_FIELDS, **{name: _choice(*choices) for name, choices in TRL_CHOICES.items()}}
    problems = []
    for name, value in values.items():
        rule, judged = rules.get(name), True
        if name == "scale_rewards" and isinstance(value, bool):
            continue  # TRL's short forms
        if name in TRL_NUMBERS:
            rule, judged = TRL_NUMBERS[name], is_number(value)
        if rule is not None and judged and not rule.ok(value):
            problems.append(Problem(f"`{name}` is {value!r}; it takes {rule.takes}.", (name,)))
    wrong = {name for problem in problems for name in problem.fields}
    return problems + [p for p in _joint_problems(values, wrong) if not wrong.intersection(p.fields)]


def _joint_problems(values: Mapping[str, Any], wrong: set[str]) -> list[Problem]:
    """Fields that exclude one another. `wrong` ones may be of any type."""
    problems = []

    def given(*names: str) -> bool:
        return all(name in values and name not in wrong for name in names)

    names: tuple[str, ...] = ("rollout_round_min", "rollout_round_max")
    if given(*names) and values[names[0]] > values[names[1]]:
        message = (
            f"`rollout_round_min` ({values[names[0]]}) is above `rollout_round_max` ({values[names[1]]}); the first bounds "
            "the size of a round from below, the second from above."
        )
        problems.append(Problem(message, names))
    names = ("greso_p_init", "greso_p_min", "greso_p_max")
    if given(*names) and not values[names[1]] <= values[names[0]] <= values[names[2]]:
        low, init, high = (values[name] for name in ("greso_p_min", "greso_p_init", "greso_p_max"))
        message = f"`greso_p_min <= greso_p_init <= greso_p_max` must hold; got {low}, {init}, {high}."
        problems.append(Problem(message, names))
    names = ("save_on_signal", "enable_jit_checkpoint")
    if given(*names) and all(values[name] for name in names):
        message = (
            "`save_on_signal` and `enable_jit_checkpoint` both handle SIGTERM. Set one of them to False: `save_on_signal` "
            "saves after the present step, with the selection state."
        )
        problems.append(Problem(message, names))
    return problems + _joint_problems_of_trl(values, given)


def _joint_problems_of_trl(values: Mapping[str, Any], given: Callable[..., bool]) -> list[Problem]:
    """What TRL refuses only once the model is loaded, or the generator."""
    problems = []
    if given("sync_ref_model", "beta") and values["sync_ref_model"] and values["beta"] == 0:
        message = (
            "`sync_ref_model` is True and `beta` is 0: without the KL term there is no reference model to synchronize. Set "
            "`beta` above 0, or `sync_ref_model` to False."
        )
        problems.append(Problem(message, ("sync_ref_model", "beta")))
    names = ("vllm_importance_sampling_mode", "loss_type", "use_vllm", "vllm_importance_sampling_correction")
    mode, loss_type, *corrected = (values.get(name) for name in names)
    if given(*names) and loss_type == "vespo" and all(corrected) and not str(mode).startswith("token_"):
        message = (
            f"`vllm_importance_sampling_mode` is {mode!r}; with `loss_type='vespo'` it takes 'token_truncate' or "
            "'token_mask'."
        )
        problems.append(Problem(message, names[:2]))
    if given("top_k", "use_vllm") and values["top_k"] == -1 and not values["use_vllm"]:
        message = "`top_k` is -1; without `use_vllm` it takes an integer >= 1, or 0 for all tokens."
        problems.append(Problem(message, ("top_k",)))
    return problems


def group_problems(batch: int, steps: int, num_generations: int) -> list[Problem]:
    """
    Whether the groups of a process are whole: all completions of a prompt are scored and kept together.

    Args:
        batch (`int`): `per_device_train_batch_size`.
        steps (`int`): `steps_per_generation`.
        num_generations (`int`): G.
    """
    rows = batch * steps
    if rows % num_generations == 0:
        return []
    # The smallest per-device batch size, and the smallest number of steps, that make whole groups
    batch_unit = num_generations // math.gcd(num_generations, steps)
    step_unit = num_generations // math.gcd(num_generations, batch)
    would_do = _divisors("num_generations", rows)
    message = (
        "The completions of a prompt would be split between processes or batches: `per_device_train_batch_size` "
        f"({batch}) x `steps_per_generation` ({steps}) = {rows} is not divisible by `num_generations` ({num_generations}). "
        f"Make {would_do}`per_device_train_batch_size` a multiple of {batch_unit}, or `steps_per_generation` (by default "
        f"`gradient_accumulation_steps`) a multiple of {step_unit}."
    )
    names = ("num_generations", "per_device_train_batch_size", "steps_per_generation", "gradient_accumulation_steps")
    return [Problem(message, (*names, "generation_batch_size"))]


def evaluation_problems(batch: int, processes: int, num_generations: int) -> list[Problem]:
    """
    Whether an evaluation batch holds whole groups.

    Args:
        batch (`int`): `per_device_eval_batch_size`.
        processes (`int`): of the run.
        num_generations (`int`): of evaluation.
    """
    rows = batch * processes
    if rows % num_generations == 0:
        return []
    unit = num_generations // math.gcd(num_generations, processes)
    message = (
        f"`per_device_eval_batch_size` ({batch}) x {processes} processes = {rows} is not divisible by the completions per "
        f"prompt in evaluation, `num_generations_eval` or else `num_generations` ({num_generations}). Make "
        f"{_divisors('num_generations_eval', rows)}`per_device_eval_batch_size` a multiple of {unit}."
    )
    return [Problem(message, ("num_generations_eval", "per_device_eval_batch_size", "num_generations"))]


def _divisors(name: str, rows: int) -> str:
    divisors = [str(n) for n in range(2, rows + 1) if rows % n == 0]
    return f"`{name}` one of {', '.join(divisors)}, or " if divisors else ""
