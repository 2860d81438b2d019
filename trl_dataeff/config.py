"""`DataEfficientGRPOConfig`: TRL's `GRPOConfig`, and the fields of this package."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, cast

from trl import GRPOConfig
from trl.trainer.utils import get_config_model_id

from trl_dataeff.utils import check_choice, check_number


AUTO_SELECTION = "dots"  # what "auto" stands for where prompts can be chosen and embedded


@dataclass
class DataEfficientGRPOConfig(GRPOConfig):
    r"""
    Configuration of [`DataEfficientGRPOTrainer`]. Takes every argument of [`~trl.GRPOConfig`], and the following. With
    `selection="uniform"`, `replay="off"` and `skip_zero_advantage=False` training is that of [`~trl.GRPOTrainer`], to the
    last bit.

    Notation: B is the number of groups trained on per generation batch (`generation_batch_size / num_generations`), G is
    `num_generations`. A *group* is the G completions of one prompt; it is *zero-variance* if all of its scorable
    rewards are equal, else *effective*.

    Parameters:
        > Parameters that control which prompts are rolled out

        selection (`str`, *optional*, defaults to `"auto"`):
            `"uniform"` (shuffled passes, as [`~trl.GRPOTrainer`]), `"dots"` (prompts whose groups are likely to carry a
            gradient, after [arXiv 2506.05316](https://huggingface.co/papers/2506.05316)), `"dots_paper"` (as published there,
            with reference rollouts), `"greso"` (skip prompts with repeated
            zero-variance groups, [arXiv 2506.02177](https://huggingface.co/papers/2506.02177)), the name of a
            [registered][`register_selector`] selector, the dotted path of a [`Selector`] class
            (`"my_module.MySelector"`), or `"auto"`: `"dots"`; `"uniform"` for a stream, prompts from an environment
            or tools that may answer with images, `"greso"` for a policy whose shards cannot embed prompts.
        selector_args (`dict[str, Any]` or `str`, *optional*):
            Keyword arguments of the selector, JSON values: see [`DotsSelector`], [`PaperDotsSelector`] and [`GresoSelector`].
        prompt_embedding (`str`, *optional*, defaults to `"policy"`):
            Model that embeds the prompts for DOTS: `"policy"` (mean of the policy's last hidden states), or the id or
            path of another model, which needs the extra `embeddings`.
        reward_range (`list[float]`, *optional*):
            Lowest and highest total reward, which map to success rates 0 and 1; if unset, the lowest and highest seen so
            far.
        max_rollout_rounds (`int`, *optional*, defaults to `1`):
            Rounds of rollouts per generation batch. Above 1, further rounds replace zero-variance groups until the batch is
            full (dynamic sampling, DAPO, [arXiv 2503.14476](https://huggingface.co/papers/2503.14476)): fewer optimizer
            steps at the price of more rollouts per step.
        rollout_margin (`float`, *optional*, defaults to `1.0`):
            With `max_rollout_rounds` above 1: oversampling factor, at least 1. A round rolls out `ceil(margin * missing /
            (1 - z))` groups, where z is the running share of zero-variance groups, within 0.25 B and 1.5 B (the GRESO
            paper uses 1.25).

        > Parameters that control rollout replay

        replay (`str`, *optional*, defaults to `"fill"`):
            `"fill"`: stored groups take the places of zero-variance groups, so that a step generates as many rollouts as
            with [`~trl.GRPOTrainer`]. `"share"`: `replay_fraction` of the places is replayed and only the others are
            generated, as in [arXiv 2506.05316](https://huggingface.co/papers/2506.05316). `"off"`: nothing is replayed.
        replay_fraction (`float`, *optional*, defaults to `0.5`):
            With `replay="share"`: share of the places that is replayed, in (0, 1), once the buffer holds enough groups.
        replay_capacity (`int`, *optional*, defaults to `512`):
            Maximum number of groups in the replay buffer, which holds the newest group of each prompt if it is effective.
        replay_max_age (`int`, *optional*, defaults to `5`):
            Generation batches after which a stored group is no longer replayed; `None` (`null` in a recipe) sets no limit
            other than `replay_capacity`.
        replay_order (`str`, *optional*, defaults to `"newest"`):
            Which stored groups are replayed: `"newest"` (the least replayed first, then the newest) or `"random"` (as in the
            DOTS paper).
        replay_clip (`str`, *optional*, defaults to `"behavior"`):
            Where the clip of groups from an earlier policy is centred: `"proximal"`, on the policy at the start of the
            generation batch (pi_old), or `"behavior"`, on the policy that sampled them
            ([arXiv 2506.05316](https://huggingface.co/papers/2506.05316)).
        replay_ratio_cap (`float`, *optional*, defaults to `2.0`):
            Bound on the ratio of a replayed token, at least 1: with `"behavior"`, a token with a negative advantage has
            no gradient beyond it (dual clip, [arXiv 1912.09729](https://huggingface.co/papers/1912.09729); not for
            `loss_type="vespo"`, whose weight vanishes by itself); with `"proximal"`, pi_old / pi_behavior is truncated
            at it. `None` (`null` in a recipe) sets no bound.

        > Parameters that control the update

        skip_zero_advantage (`bool`, *optional*, defaults to `True`):
            Leave rows whose advantage is exactly 0 out of the forward and backward pass. Only rounding changes. No row is left
            out where that would not be exact (`beta > 0`, an entropy bonus, a router loss, `top_entropy_quantile < 1`), nor with
            images. Each micro-batch keeps at least one row (with `loss_type="bnpo"`, of its own): with
            `per_device_train_batch_size=1`, the loss skips none. TRL's pass for old log-probs keeps all rows with
            `multi_objective_aggregation="normalize_then_sum"`, of streams, of environments and of vision-language models.

        > Parameters that control how a run ends

        save_on_signal (`bool`, *optional*, defaults to `False`):
            On SIGTERM or Ctrl-C, finish the present step, save a checkpoint, and end training with `SystemExit(143)` or
            `KeyboardInterrupt`.
    """

    if TYPE_CHECKING:  # TRL's annotations allow `None`, which `__post_init__` replaces or rejects
        output_dir: str = ""
        num_generations: int = 8
        generation_batch_size: int = 0
        steps_per_generation: int = 0
    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "selector_args"]  # noqa: RUF012

    # Parameters that control which prompts are rolled out
    selection: str = "auto"
    selector_args: dict[str, Any] | str | None = None
    prompt_embedding: str = "policy"
    reward_range: list[float] | None = None
    max_rollout_rounds: int = 1
    rollout_margin: float = 1.0

    # Parameters that control rollout replay
    replay: Literal["fill", "share", "off"] = "fill"
    replay_fraction: float = 0.5
    replay_capacity: int = 512
    replay_max_age: int | None = 5
    replay_order: Literal["newest", "random"] = "newest"
    replay_clip: Literal["proximal", "behavior"] = "behavior"
    replay_ratio_cap: float | None = 2.0

    # Parameters that control the update
    skip_zero_advantage: bool = True

    # Parameters that control how a run ends
    save_on_signal: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if cast(object, self.replay) is False:  # YAML reads an unquoted `off` so
            self.replay = "off"
        check_fields(self)


# The docstring is the one description of a field: it becomes the help text of the command. argparse formats `%`
for _, _name, _text in re.findall(r"(?m)^( +)(\w+) \(.+\):\n((?:\1    .+\n)+)", DataEfficientGRPOConfig.__doc__ or ""):
    _help = " ".join(_text.split()).replace("%", "%%")
    DataEfficientGRPOConfig.__dataclass_fields__[_name].metadata = MappingProxyType({"help": _help})


def check_fields(config: DataEfficientGRPOConfig) -> None:
    """Raise a `ValueError` that names a field of this package, its value, and what it takes."""
    for name in ("selection", "prompt_embedding"):
        if not isinstance(getattr(config, name), str) or not getattr(config, name):
            raise ValueError(f"`{name}` is {getattr(config, name)!r}; it takes a name or a path.")
    for name in ("skip_zero_advantage", "save_on_signal"):
        check_choice(name, getattr(config, name), (True, False))
    check_choice("replay", config.replay, ("fill", "share", "off"))
    check_choice("replay_order", config.replay_order, ("newest", "random"))
    check_choice("replay_clip", config.replay_clip, ("proximal", "behavior"))
    if not isinstance(config.selector_args, (dict, type(None))):
        raise ValueError(
            f"`selector_args` is {config.selector_args!r}; it takes a mapping of keyword arguments (on the command line as "
            "JSON: '{\"threshold\": 0.5}'; '{}' is none)."
        )
    span = config.reward_range
    if span is not None:
        bounds = span if isinstance(span, (list, tuple)) else ()
        for bound in bounds:
            check_number("reward_range", bound, "(-inf, inf)")
        if len(bounds) != 2 or not bounds[0] < bounds[1]:
            raise ValueError(f"`reward_range` is {span!r}; it takes two numbers (low, high), low < high, or `None`.")
    check_number("max_rollout_rounds", config.max_rollout_rounds, "[1, inf)", integer=True)
    check_number("rollout_margin", config.rollout_margin, "[1, inf)")
    check_number("replay_fraction", config.replay_fraction, "(0, 1)")
    check_number("replay_capacity", config.replay_capacity, "[1, inf)", integer=True)
    check_number("replay_max_age", config.replay_max_age, "[1, inf)", integer=True, none=True)
    check_number("replay_ratio_cap", config.replay_ratio_cap, "[1, inf]", none=True)
    if config.save_on_signal and config.enable_jit_checkpoint:
        raise ValueError(
            "`save_on_signal` and `enable_jit_checkpoint` both handle SIGTERM. Set one of them to False: `save_on_signal` saves after "
            "the present step, with the selection state."
        )


def own_copy(args: Any, model: Any = None) -> DataEfficientGRPOConfig:
    """
    A copy of a configuration with the fields of this package, at their defaults where `args` lacks them; a plain `GRPOConfig` becomes
    a [`DataEfficientGRPOConfig`]. Without `args`, the defaults, with the output folder that TRL names after the `model`.

    `GRPOConfig.__post_init__` derives fields from one another and cannot run twice, so nothing is constructed from `args`.
    """
    if args is None:
        name = model if isinstance(model, str) else get_config_model_id(model.config)
        return DataEfficientGRPOConfig(f"{name.split('/')[-1]}-GRPO")
    if not isinstance(args, GRPOConfig):
        raise TypeError(f"`args` must be a DataEfficientGRPOConfig or a GRPOConfig, got {type(args).__name__}.")
    own: Any = copy.copy(args)
    if type(args) is GRPOConfig:
        own.__class__ = DataEfficientGRPOConfig
    for field in fields(DataEfficientGRPOConfig):
        own.__dict__.setdefault(field.name, field.default)
    check_fields(own)
    return own
