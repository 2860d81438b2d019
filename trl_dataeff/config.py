"""`DataEfficientGRPOConfig`: TRL's `GRPOConfig`, and the fields of this package."""

from __future__ import annotations

import copy
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, cast

from trl import GRPOConfig
from trl.trainer.utils import get_config_model_id

from trl_dataeff.utils import UserError, choice_problem, number_problem


@dataclass
class DataEfficientGRPOConfig(GRPOConfig):
    r"""
    Configuration of [`DataEfficientGRPOTrainer`].

    It takes every argument of [`~trl.GRPOConfig`], and the fields of this package, which control which prompts are
    rolled out, rollout replay, the update, and how a run ends. Each field has its help in its `metadata`. The command
    line and the documentation's page on the configuration show it.

    By default, training is that of [`~trl.GRPOTrainer`] up to rounding, with a faster update. With
    `compact_update=False`, it is that of [`~trl.GRPOTrainer`] to the last bit. Selection and replay are switched on
    with `selection="dots"` and `replay="fill"`.
    """

    if TYPE_CHECKING:  # TRL's annotations allow `None`, which `__post_init__` replaces or rejects
        output_dir: str = ""
        num_generations: int = 8
        generation_batch_size: int = 0
        steps_per_generation: int = 0
    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "selector_args"]  # noqa: RUF012

    # Parameters that control which prompts are rolled out
    selection: str = field(
        default="uniform",
        metadata={
            "help": 'Selector of the prompts. `"uniform"`: shuffled passes, as in `GRPOTrainer`. `"dots"`: prefers '
            "prompts whose groups are likely to have a gradient, after [arXiv "
            '2506.05316](https://huggingface.co/papers/2506.05316). `"dots_paper"`: as published there. `"greso"`: '
            "skips prompts with repeated zero-variance groups, [arXiv "
            "2506.02177](https://huggingface.co/papers/2506.02177). Any other value is the name of a registered "
            "selector, or the dotted path of a `Selector` class."
        },
    )
    selector_args: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Keyword arguments of the selector, as JSON values."},
    )
    prompt_embedding: str | None = field(
        default="policy",
        metadata={
            "help": 'Model that embeds the prompts for DOTS: `"policy"`, or the id or path of another model, which '
            "needs the extra `embeddings`. `None` (`null` in a recipe) embeds nothing: DOTS then knows prompts by "
            "`success_rate_column` and their own groups."
        },
    )
    success_rate_column: str | None = field(
        default=None,
        metadata={
            "help": "Column of the dataset with success rates in [0, 1] that any model had on the prompts. DOTS "
            "selects by it from the first batch on. Values may be missing."
        },
    )
    stratify_by: str | None = field(
        default=None,
        metadata={
            "help": "Column of the dataset with the kind of each prompt, such as its source. DOTS draws kinds by "
            "their shares of the dataset."
        },
    )
    reward_range: list[float] | None = field(
        default=None,
        metadata={
            "help": "Lowest and highest total reward, which map to success rates 0 and 1. If unset, those seen so far."
        },
    )
    max_rollout_rounds: int = field(
        default=1,
        metadata={
            "help": "Largest number of rounds of rollouts in a generation batch. Above 1, further rounds replace "
            "zero-variance groups until the batch is full (dynamic sampling, [arXiv "
            "2503.14476](https://huggingface.co/papers/2503.14476))."
        },
    )
    rollout_margin: float = field(
        default=1.0,
        metadata={
            "help": "Oversampling factor of a round, at least 1, with `max_rollout_rounds` above 1. The GRESO paper "
            "uses 1.25."
        },
    )

    # Parameters that control rollout replay
    replay: Literal["fill", "share", "off"] = field(
        default="off",
        metadata={
            "help": '`"off"`: nothing is replayed. `"fill"`: stored groups take the places of zero-variance groups. '
            '`"share"`: stored groups take `replay_fraction` of the places, and only the others are generated, as '
            "in [arXiv 2506.05316](https://huggingface.co/papers/2506.05316)."
        },
    )
    replay_fraction: float = field(
        default=0.5,
        metadata={"help": 'With `replay="share"`: share of the places that stored groups take, in (0, 1).'},
    )
    replay_capacity: int = field(
        default=512,
        metadata={"help": "Maximum number of groups in the replay buffer."},
    )
    replay_max_age: int | None = field(
        default=5,
        metadata={
            "help": "Age in generation batches beyond which a stored group is not replayed. `None` (`null` in a "
            "recipe) sets no limit."
        },
    )
    replay_order: Literal["newest", "random"] = field(
        default="newest",
        metadata={
            "help": 'Which stored groups are replayed first: `"newest"` ones, of those that were replayed least, or '
            '`"random"` ones.'
        },
    )
    replay_clip: Literal["proximal", "behavior"] = field(
        default="behavior",
        metadata={
            "help": 'Policy on which the clip of replayed groups is centred: `"behavior"`, the one that sampled '
            'them, or `"proximal"`, the one at the start of the generation batch.'
        },
    )
    replay_ratio_cap: float | None = field(
        default=2.0,
        metadata={
            "help": 'Upper bound on the ratio of a replayed token, at least 1. With `replay_clip="behavior"`, it '
            "bounds tokens with a negative advantage (dual clip, [arXiv "
            '1912.09729](https://huggingface.co/papers/1912.09729)); with `"proximal"`, it truncates pi_old / '
            "pi_behavior. `None` (`null` in a recipe) sets no bound."
        },
    )

    # Parameters that control the update
    compact_update: bool = field(
        default=True,
        metadata={
            "help": "Leave out of the update what cannot change the gradient: rows whose advantage is 0, padding, "
            "and repeated prompts. Every gradient is TRL's up to rounding. The first update computes the gradient of "
            "a few rows both ways, and a line says what is off."
        },
    )

    # Parameters that control how a run ends
    save_on_signal: bool = field(
        default=False,
        metadata={
            "help": "On SIGTERM or Ctrl-C, finish the present step, save a checkpoint, and end training with "
            "`SystemExit(143)` or `KeyboardInterrupt`."
        },
    )
    max_unscored_completions: int | None = field(
        default=512,
        metadata={
            "help": "Number of completions after which a run with selection, replay or several rounds ends with an "
            "error if none of them got a score. `None` (`null` in a recipe) sets no limit."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if cast(object, self.replay) is False:  # YAML reads an unquoted `off` so
            self.replay = "off"
        check_fields(self)


def check_fields(config: DataEfficientGRPOConfig) -> None:
    """
    Check the fields of this package.

    Args:
        config ([`DataEfficientGRPOConfig`]):
            Configuration whose fields are checked.

    Raises:
        UserError: If values are wrong, with one message for each. It names the field, its value, and what it takes.
    """
    problems = list(problems_of_fields(config))
    if problems:
        raise UserError(*problems)


def problems_of_fields(config: Any) -> Iterator[str]:
    """
    Find wrong values of the fields of this package.

    Args:
        config ([`DataEfficientGRPOConfig`]):
            Configuration, or another object with its fields as attributes.

    Yields:
        `str`: One message per problem.
    """
    if not isinstance(config.selection, str) or config.selection == "":
        yield f"`selection` is {config.selection!r}; it takes a name or a path."
    embedding = config.prompt_embedding
    if embedding is not None and (not isinstance(embedding, str) or embedding == ""):
        yield f"`prompt_embedding` is {embedding!r}; it takes 'policy', the id or path of a model, or `None`."
    for name in ("success_rate_column", "stratify_by"):
        value = getattr(config, name)
        if value is not None and (not isinstance(value, str) or value == ""):
            yield f"`{name}` is {value!r}; it takes the name of a column of the dataset."
    if not isinstance(config.selector_args, (dict, type(None))):
        yield (
            f"`selector_args` is {reprlib.repr(config.selector_args)}; it takes a mapping of keyword arguments (on "
            "the command line as JSON: '{\"sharpness\": 4}'; '{}' is none)."
        )
    problems = [
        _reward_range_problem(config.reward_range),
        number_problem(
            "max_unscored_completions", config.max_unscored_completions, "[1, inf)", integer=True, none=True
        ),
        number_problem("max_rollout_rounds", config.max_rollout_rounds, "[1, inf)", integer=True),
        number_problem("rollout_margin", config.rollout_margin, "[1, inf)"),
        choice_problem("replay", config.replay, ("fill", "share", "off")),
        number_problem("replay_fraction", config.replay_fraction, "(0, 1)"),
        number_problem("replay_capacity", config.replay_capacity, "[1, inf)", integer=True),
        number_problem("replay_max_age", config.replay_max_age, "[1, inf)", integer=True, none=True),
        choice_problem("replay_order", config.replay_order, ("newest", "random")),
        choice_problem("replay_clip", config.replay_clip, ("proximal", "behavior")),
        number_problem("replay_ratio_cap", config.replay_ratio_cap, "[1, inf]", none=True),
        choice_problem("compact_update", config.compact_update, (True, False)),
        choice_problem("save_on_signal", config.save_on_signal, (True, False)),
    ]
    yield from filter(None, problems)
    if config.save_on_signal and config.enable_jit_checkpoint:
        yield (
            "`save_on_signal` and `enable_jit_checkpoint` both handle SIGTERM. Set one of them to False: "
            "`save_on_signal` saves after the present step, with the selection state."
        )


def _reward_range_problem(reward_range: Any) -> str | None:
    if reward_range is None:
        return None
    takes = f"`reward_range` is {reward_range!r}; it takes two numbers (low, high), low < high, or `None`."
    if not isinstance(reward_range, (list, tuple)) or len(reward_range) != 2:
        return takes
    for bound in reward_range:
        problem = number_problem("reward_range", bound, "(-inf, inf)")
        if problem is not None:
            return problem
    low, high = reward_range
    return takes if low >= high else None


def own_fields(config: DataEfficientGRPOConfig) -> dict[str, Any]:
    """
    The values of the fields of this package that are read when a trainer is made, by name: all but `save_on_signal`,
    which is read when training begins.
    """
    others = {trl_field.name for trl_field in fields(GRPOConfig)} | {"save_on_signal"}
    names = [own_field.name for own_field in fields(DataEfficientGRPOConfig) if own_field.name not in others]
    return {name: copy.deepcopy(getattr(config, name)) for name in names}


def default_config(model: Any) -> DataEfficientGRPOConfig:
    """
    Return the configuration of a trainer that is made without one.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`]):
            Model that names the output folder, as in TRL.
    """
    model_id = model if isinstance(model, str) else get_config_model_id(model.config)
    model_name = model_id.split("/")[-1]
    return DataEfficientGRPOConfig(f"{model_name}-GRPO")


def with_own_fields(args: Any) -> DataEfficientGRPOConfig:
    """
    Return a configuration that has the fields of this package.

    Args:
        args ([`DataEfficientGRPOConfig`] or [`~trl.GRPOConfig`]):
            Configuration. A [`DataEfficientGRPOConfig`] is returned as it is. Another one stays as it is, and a copy
            of it is returned, in which the fields that it lacks have their defaults.

    Returns:
        [`DataEfficientGRPOConfig`]: The configuration.

    Raises:
        TypeError: If `args` is not a configuration of GRPO.
        ValueError: If a field of this package has a wrong value.
    """
    if not isinstance(args, GRPOConfig):
        raise TypeError(f"`args` must be a DataEfficientGRPOConfig or a GRPOConfig, got {type(args).__name__}.")
    if isinstance(args, DataEfficientGRPOConfig):
        check_fields(args)
        return args
    # Not constructed from the values of `args`: `GRPOConfig.__post_init__` derives fields from one another, and cannot
    # run twice
    config: Any = copy.copy(args)
    values = vars(config)
    for config_field in fields(DataEfficientGRPOConfig):
        values.setdefault(config_field.name, config_field.default)
    check_fields(config)
    return config
