"""
The values that fields take: those of this package, of TRL's `GRPOConfig` and `ModelConfig`, and of Transformers'
`TrainingArguments`. One table, for the configuration, the trainer and the checks of recipes.

TRL's choices are plain strings, and it looks at most of them in the middle of a run. Of TRL's and Transformers' fields the
table rejects values with which a run would fail later, and those that are out of range by their documentation. What is
deliberately not here: what the configurations check themselves, and whatever needs a model, a dataset or a machine.
"""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from trl_dataeff.options import DataEfficientOptions


class Problem(NamedTuple):
    """
    Something wrong with the values of fields.

    Attributes:
        message: what was given, what is allowed, and the fix.
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


class Range(NamedTuple):
    """Finite numbers between two bounds, which belong to it if they are not open."""

    low: float
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False
    integer: bool = False
    infinite: bool = False  # takes `inf` too

    def __contains__(self, value: Any) -> bool:
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        kind = isinstance(value, int) or not self.integer
        return above and below and kind and (self.infinite or math.isfinite(value))

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"{'>' if self.low_open else '>='} {self.low}"
        return f"in {'(' if self.low_open else '['}{self.low}, {self.high}{')' if self.high_open else ']'}"


COUNT = Range(1, integer=True)
PORT = Range(1, 65535, integer=True)
AT_LEAST_0, AT_LEAST_1 = Range(0), Range(1)
ABOVE_0 = Range(0, low_open=True)
SHARE, SHARE_BELOW_1, SHARE_ABOVE_0 = Range(0, 1), Range(0, 1, high_open=True), Range(0, 1, low_open=True)

#: The numbers that fields take, each item of a list too: ours, those of TRL's and Transformers' configurations, of LoRA
RANGES: dict[str, Range] = {
    "max_rollout_rounds": COUNT,
    "rollout_margin": AT_LEAST_1,
    "rollout_round_min": SHARE_ABOVE_0,
    "rollout_round_max": AT_LEAST_1,
    "exploration": SHARE,
    "baseline_strength": AT_LEAST_0,
    "reward_timeout": ABOVE_0,
    "replay_fraction": SHARE_BELOW_1,
    "effective_target": SHARE_ABOVE_0,
    "replay_max_uses": COUNT,
    "replay_weight": SHARE_ABOVE_0,
    "replay_capacity": COUNT,
    "replay_max_age": COUNT,
    "replay_max_movement": ABOVE_0,
    "replay_min_ess": SHARE,
    "replay_min_unclipped": SHARE,
    "replay_pause_ess": SHARE,
    "replay_ratio_cap": AT_LEAST_1,
    "dots_sharpness": ABOVE_0,
    "dots_threshold": SHARE_ABOVE_0,
    "dots_coverage": SHARE,
    "dots_target": SHARE,
    "dots_temperature": ABOVE_0,
    "dots_reference_size": COUNT,
    "dots_refresh_batches": COUNT,
    "history_prior": ABOVE_0,
    "history_half_lives": ABOVE_0,
    "greso_p_init": SHARE_ABOVE_0,
    "greso_p_step": SHARE,
    "greso_p_min": SHARE_ABOVE_0,
    "greso_p_max": SHARE_ABOVE_0,
    "greso_target_zero_variance": SHARE_BELOW_1,
    "greso_easy_share": SHARE,
    "greso_streak_half_life": ABOVE_0._replace(infinite=True),
    "learning_rate": AT_LEAST_0,
    "weight_decay": AT_LEAST_0,
    "adam_beta1": SHARE_BELOW_1,
    "adam_beta2": SHARE_BELOW_1,
    "adam_epsilon": AT_LEAST_0,
    "num_train_epochs": AT_LEAST_0,
    "warmup_steps": AT_LEAST_0,
    "per_device_train_batch_size": COUNT,
    "per_device_eval_batch_size": COUNT,
    "gradient_accumulation_steps": COUNT,
    "steps_per_generation": COUNT,
    "generation_batch_size": COUNT,
    "dataloader_num_workers": Range(0, integer=True),
    "seed": Range(0, 2**32 - 1, integer=True),
    "num_generations": Range(2, integer=True),
    "max_completion_length": COUNT,
    "num_iterations": COUNT,
    "temperature": ABOVE_0,
    "top_p": SHARE_ABOVE_0,
    "top_k": Range(-1, integer=True),
    "min_p": SHARE,
    "repetition_penalty": ABOVE_0,
    "top_entropy_quantile": SHARE,
    "sapo_temperature_neg": ABOVE_0,
    "sapo_temperature_pos": ABOVE_0,
    "off_policy_mask_threshold": ABOVE_0,
    "ref_model_sync_steps": COUNT,
    "vllm_server_port": PORT,
    "vllm_group_port": PORT,
    "vllm_server_timeout": AT_LEAST_0,
    "vllm_gpu_memory_utilization": SHARE_ABOVE_0,
    "vllm_tensor_parallel_size": COUNT,
    "lora_r": COUNT,
    "lora_dropout": SHARE,
}

#: Choices of TRL's `GRPOConfig`, which annotates them as text; ours are annotated with `Literal`
TRL_CHOICES: dict[str, tuple[str, ...]] = {
    "loss_type": ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("group", "batch", "none"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_mode": ("colocate", "server"),
    "vllm_model_impl": ("vllm", "transformers"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}

#: Types of the fields of `DataEfficientOptions`. Types of TRL's fields, `None` and text in the place of numbers are left to it
OUR_TYPES: dict[str, Any] = typing.get_type_hints(DataEfficientOptions)


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of an annotated type. An integer is a number too, a bool is neither; a tuple is a list."""
    origin, args = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, member) for member in args)
    if origin is typing.Literal:
        return any(value == choice and type(value) is type(choice) for choice in args)
    if origin is list:
        return isinstance(value, (list, tuple)) and all(fits(item, args[0]) for item in value)
    if origin in (int, float):
        return isinstance(value, int if origin is int else (int, float)) and not isinstance(value, bool)
    if isinstance(origin, type) and issubclass(origin, Enum):
        return value in [*origin, *(member.value for member in origin)]
    return origin is typing.Any or isinstance(value, origin)


def in_words(hint: Any, numbers: Range | None = None) -> str:
    """An annotated type in words: `"an integer >= 1 or nothing"`."""
    origin, args = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(in_words(member, numbers) for member in args))
    if origin is typing.Literal:
        return choices_in_words(args)
    within = f" {numbers}" if numbers and {origin, *args} & {int, float} else ""
    if origin is list:
        return f"a list of {_PLURALS.get(args[0], 'mappings')}{within}"
    return _WORDS.get(origin, getattr(origin, "__name__", str(origin))) + within


_WORDS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    dict: "a mapping (dictionary)",
    type(None): "nothing",
}
_PLURALS = {bool: "true/false", int: "integers", float: "numbers", str: "texts"}


def choices_in_words(values: Sequence[str]) -> str:
    """Values in words: `"'a', 'b' or 'c'"`."""
    return " or ".join(filter(None, [", ".join(repr(v) for v in values[:-1]), repr(values[-1])]))


def field_problems(values: Mapping[str, Any]) -> list[Problem]:
    """
    Everything that is wrong with the values of fields, alone and together.

    Args:
        values (`dict`): values by field name; names that are not in the tables are passed over.
    """
    taken = {name: _takes(name, value) for name, value in values.items()}
    problems = [Problem(f"`{n}` is {values[n]!r}; it takes {takes}.", (n,)) for n, takes in taken.items() if takes]
    wrong = {name for problem in problems for name in problem.fields}
    return problems + [p for p in _joint_problems(values, wrong) if not wrong.intersection(p.fields)]


def _takes(name: str, value: Any) -> str | None:
    """What a field takes, if that is not `value`."""
    hint, numbers = OUR_TYPES.get(name, int if name in RANGES and RANGES[name].integer else float), RANGES.get(name)
    if name in OUR_TYPES and not fits(value, hint):
        return in_words(hint, numbers)
    items = value if isinstance(value, (list, tuple)) else [value]
    if numbers and not all(item in numbers for item in items if fits(item, float)):
        return in_words(hint, numbers)
    if name in TRL_CHOICES and value not in TRL_CHOICES[name] and not (name == "scale_rewards" and fits(value, bool)):
        return choices_in_words(TRL_CHOICES[name])  # True and False are TRL's short forms
    if name in OUR_TYPES and value in ("", []):
        return "a name or a path" if value == "" else f"{in_words(hint, numbers)}, but not an empty list"
    if name == "reward_range" and value is not None:
        is_range = len(value) == 2 and all(map(math.isfinite, value)) and value[0] < value[1]
        return None if is_range else "two finite numbers (low, high) with low < high, or nothing"
    if name in ("selector_args", "dots_predictor_args") and isinstance(value, str) and not _is_json_mapping(value):
        return "a mapping (dictionary) of keyword arguments, also as JSON text"  # which TrainingArguments parses
    return None


def _is_json_mapping(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


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
    names = ("fresh_groups", "replay_fraction")
    if given(*names) and values[names[0]] == "adaptive" and values[names[1]] == 0:
        message = (
            "`fresh_groups` is 'adaptive' and `replay_fraction` is 0: without replay every group of a batch is generated. Set "
            "`replay_fraction` above 0, or `fresh_groups` to 'fixed'."
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
    for other, does in (
        ("dynamic_sampling", "drops them, which would bias what is left"),
        ("sequential_rollouts", "stops groups that look like them"),
    ):
        names = ("advantage_baseline", other)
        if given(*names) and values[names[0]] == "tracked" and values[other]:
            message = (
                f"`advantage_baseline='tracked'` and `{other}=True` are both set: the first gives zero-variance groups a "
                f"gradient, the second {does}. Set `{other}=False`, or `advantage_baseline='group'`."
            )
            problems.append(Problem(message, names))
    names = ("advantage_baseline", "multi_objective_aggregation")
    if given(*names) and values[names[0]] == "tracked" and values[names[1]] != "sum_then_normalize":
        message = (
            f"`advantage_baseline` is 'tracked' and `multi_objective_aggregation` is {values[names[1]]!r}: total rewards are "
            "predicted, and there each function is normalised in its group instead. Set `multi_objective_aggregation` to "
            "'sum_then_normalize', or `advantage_baseline` to 'group'."
        )
        problems.append(Problem(message, names))
    return problems + _joint_problems_of_trl(values, given)


def _joint_problems_of_trl(values: Mapping[str, Any], given: Callable[..., bool]) -> list[Problem]:
    """What TRL rejects only once the model is loaded, or the generator."""
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
