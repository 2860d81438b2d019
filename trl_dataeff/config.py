"""`DataEfficientGRPOConfig`: TRL's `GRPOConfig`, and the fields of this package.

The fields are checked when the object is made, so that a wrong value ends in one message before a model is loaded.
What is deliberately not here: whatever needs the dataset, the model or plug-ins (see `validation.py`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from trl import GRPOConfig


AUTO_SELECTION = "dots"  # what "auto" stands for where prompts can be chosen and embedded


@dataclass
class DataEfficientGRPOConfig(GRPOConfig):
    r"""
    Configuration of [`DataEfficientGRPOTrainer`].

    Takes every argument of [`~trl.GRPOConfig`] and those below. With `selection="uniform"`,
    `dynamic_sampling=False` and `replay_fraction=0` training is that of [`~trl.GRPOTrainer`], to the last bit.

    Notation: B is the number of groups trained on per generation batch (`generation_batch_size / num_generations`), G is
    `num_generations`. A *group* is the G completions of one prompt; it is *zero-variance* if all of its scorable
    rewards are equal, else *effective*.
    """

    # Parameters that control which prompts are rolled out
    selection: str = field(
        default="auto",
        metadata={
            "help": "How prompts are selected: 'uniform' (shuffled passes, as `GRPOTrainer`), 'dots' (prompts whose groups "
            "are likely to carry a gradient, arXiv 2506.05316), 'greso' (skip prompts with repeated zero-variance groups, "
            "arXiv 2506.02177), 'dots+greso', the name of a registered selector, or 'auto': 'dots' for a map-style dataset "
            "of text prompts, else 'uniform'."
        },
    )
    selector_args: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Keyword arguments of the selector that `selection` names, for arguments that have no field of their "
            "own."
        },
    )
    dynamic_sampling: bool = field(
        default=False,
        metadata={
            "help": "Drop zero-variance groups once they are scored, and refill the batch with further rounds of "
            "rollouts. Saves optimizer steps at the price of more rollouts per step (DAPO, arXiv 2503.14476)."
        },
    )
    max_rollout_rounds: int = field(
        default=4,
        metadata={
            "help": "With `dynamic_sampling`: rounds of rollouts that one batch may take. A batch that is still short "
            "afterwards is completed by replay, then with zero-variance groups; training never stops for it."
        },
    )
    rollout_margin: float = field(
        default=1.0,
        metadata={
            "help": "With `dynamic_sampling`: oversampling of a round. A round rolls out "
            "ceil(margin * missing / (1 - z)) groups, z being the running share of zero-variance groups (GRESO "
            "paper: 1.25)."
        },
    )
    rollout_round_min: float = field(
        default=0.25,
        metadata={"help": "With `dynamic_sampling`: smallest round, as a share of the B groups of a batch."},
    )
    rollout_round_max: float = field(
        default=1.5,
        metadata={
            "help": "With `dynamic_sampling`: largest round, as a share of the B groups of a batch. A round is "
            "generated in one call: set it to 1.0 if generation runs out of memory."
        },
    )
    reward_range: list[float] | None = field(
        default=None,
        metadata={
            "help": "Two numbers, the lowest and the highest total reward: they map to success rate 0 and 1. If not "
            "set, the lowest and the highest seen so far."
        },
    )
    exploration: float = field(
        default=0.05,
        metadata={"help": "With 'dots': share of each round that is drawn uniformly, in [0, 1]."},
    )

    # Parameters that control fault tolerance, each off by default
    save_on_signal: bool = field(
        default=False,
        metadata={
            "help": "On SIGTERM or Ctrl-C, finish the present step, save a checkpoint, and end training with SystemExit(143) "
            "or KeyboardInterrupt."
        },
    )
    skip_nonfinite_steps: bool = field(
        default=False,
        metadata={"help": "Skip optimizer steps whose gradient is not finite; ten in a row end the run."},
    )
    vllm_reconnect: bool = field(
        default=False,
        metadata={
            "help": "With `vllm_mode='server'`: wait up to `vllm_server_timeout` for a server that was restarted, send it "
            "the present weights, and continue."
        },
    )
    reward_timeout: float | None = field(
        default=None,
        metadata={
            "help": "Seconds that one call of a reward function may take. Completions of a call that takes longer, and "
            "those with a non-numeric reward, then have no score, and training continues. Unset: no limit."
        },
    )

    # Parameters that control rollout replay
    replay_fraction: float = field(
        default=0.5,
        metadata={
            "help": "Share of each batch's groups that is replayed from recent rollouts, in [0, 1); 0 switches "
            "replay off."
        },
    )
    replay_capacity: int = field(default=512, metadata={"help": "Groups that the replay buffer holds."})
    replay_max_age: int | None = field(
        default=20,
        metadata={
            "help": "Optimizer steps after which a stored group is no longer replayed; the groups of the last batch "
            "always may. `None` (`null` in a recipe): no limit but `replay_capacity`."
        },
    )
    replay_clip: str = field(
        default="behavior",
        metadata={
            "help": "Where the clip of groups from an earlier policy is centred: 'proximal', on the policy at the start of "
            "the generation batch (pi_old), or 'behavior', on the policy that sampled them (arXiv 2506.05316)."
        },
    )
    replay_ratio_cap: float = field(
        default=2.0,
        metadata={"help": "With 'proximal': the ratio pi_old / pi_behavior is truncated here."},
    )

    # Parameters that control DOTS
    dots_objective: str = field(
        default="effective",
        metadata={
            "help": "Weight of a prompt with success rate p: 'effective', (1 - p^G - (1-p)^G)^sharpness, or 'target', "
            "exp(-|p - target| / temperature) as in the paper."
        },
    )
    dots_sharpness: float = field(default=4.0, metadata={"help": "Exponent of the 'effective' weight."})
    dots_target: float = field(default=0.5, metadata={"help": "Success rate that the 'target' weight prefers."})
    dots_temperature: float = field(default=1e-3, metadata={"help": "Temperature of the 'target' weight."})
    dots_predictor: str = field(
        default="logistic",
        metadata={
            "help": "'logistic', 'attention', the name of a registered predictor, or the path of a saved or published one."
        },
    )
    dots_predictor_args: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Keyword arguments of the predictor that `dots_predictor` names."}
    )
    dots_embedding: str = field(
        default="policy",
        metadata={"help": "'policy' (mean of the policy's last hidden states), or a model id or path."},
    )
    dots_reference: str = field(
        default="rolling",
        metadata={"help": "'rolling' (every recent group is a reference), or 'paper' (a random set each refresh)."},
    )
    dots_reference_size: int = field(default=256, metadata={"help": "Size of the reference set of 'paper'."})
    dots_refresh_batches: int = field(
        default=1, metadata={"help": "Generation batches between two refreshes of predictions."}
    )
    history_prior: float = field(
        default=4.0,
        metadata={"help": "Strength of the predictor's prior against a prompt's own history, in completions."},
    )
    history_half_life: float = field(
        default=20.0, metadata={"help": "Generation batches after which a prompt's own evidence counts half."}
    )

    # Parameters that control GRESO
    greso_p_init: float = field(default=0.5, metadata={"help": "Keep probability per zero-variance visit, at first."})
    greso_p_step: float = field(default=0.01, metadata={"help": "By how much a keep probability moves per step."})
    greso_p_min: float = field(default=0.05, metadata={"help": "Lower bound of the keep probabilities."})
    greso_p_max: float = field(default=0.95, metadata={"help": "Upper bound of the keep probabilities."})
    greso_target_zero_variance: float = field(
        default=0.25, metadata={"help": "Share of zero-variance groups that the controller steers to."}
    )
    greso_easy_share: float = field(
        default=1 / 3, metadata={"help": "Part of `greso_target_zero_variance` that falls to easy prompts."}
    )

    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "selector_args", "dots_predictor_args"]  # noqa: RUF012

    def __post_init__(self):
        super().__post_init__()
        self._check_dataeff_fields()

    def selector_arguments(self, name: str) -> dict[str, Any]:
        """
        Keyword arguments of the selector `name`: fields of this configuration for the built-in ones, and `selector_args`,
        which win.
        """
        fields_of = {argument: getattr(self, field) for argument, field in _SELECTOR_FIELDS.get(name, {}).items()}
        assert not isinstance(self.selector_args, str)  # TrainingArguments parses JSON text
        return fields_of | (self.selector_args or {})

    @classmethod
    def from_grpo_config(cls, args: GRPOConfig) -> DataEfficientGRPOConfig:
        """Return a copy of `args` with the defaults of this class for the fields it lacks. `args` is not changed, and
        later changes of it have no effect.

        `GRPOConfig.__post_init__` derives fields from one another and cannot run twice, so the object is filled, not
        constructed.
        """
        if isinstance(args, cls):
            return args
        config = cls.__new__(cls)
        config.__dict__.update(copy.copy(args.__dict__))
        for f in fields(cls):
            if f.name not in config.__dict__:
                config.__dict__[f.name] = f.default  # none of this class's own fields has a factory
        config._check_dataeff_fields()
        return config

    def _check_dataeff_fields(self) -> None:
        for name, allowed in _CHOICES.items():
            _check_choice(name, getattr(self, name), allowed)
        for name, (ok, takes) in _NUMBERS.items():
            if getattr(self, name) is None and name in _OPTIONAL:
                continue
            _check_number(name, getattr(self, name), ok, takes)
        for name, takes in _INTEGERS.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"`{name}` is {value!r}; it takes {takes}.")
        for name in ("selection", "dots_predictor", "dots_embedding"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ValueError(f"`{name}` is {value!r}; it takes a name or a path.")
        for name in ("selector_args", "dots_predictor_args"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, dict):
                raise ValueError(f"`{name}` is {value!r}; it takes a dictionary of keyword arguments.")
        for name in ("dynamic_sampling", "save_on_signal", "skip_nonfinite_steps", "vllm_reconnect"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"`{name}` is {getattr(self, name)!r}; it takes True or False.")
        if self.save_on_signal and self.enable_jit_checkpoint:
            raise ValueError(
                "`save_on_signal` and `enable_jit_checkpoint` both handle SIGTERM. Set one of them to False: "
                "`save_on_signal` saves after the present step, with the selection state."
            )
        self._check_ranges()
        self._check_groups_are_whole()

    def _check_ranges(self) -> None:
        if self.rollout_round_min > self.rollout_round_max:
            raise ValueError(
                f"`rollout_round_min` ({self.rollout_round_min}) is above `rollout_round_max` "
                f"({self.rollout_round_max}); the first bounds the size of a round from below, the second from above."
            )
        if not self.greso_p_min <= self.greso_p_init <= self.greso_p_max:
            raise ValueError(
                "`greso_p_min <= greso_p_init <= greso_p_max` must hold; got "
                f"{self.greso_p_min}, {self.greso_p_init}, {self.greso_p_max}."
            )
        if self.reward_range is not None:
            value = self.reward_range
            if (
                not isinstance(value, (list, tuple))
                or len(value) != 2
                or not all(_is_number(v) and math.isfinite(v) for v in value)
                or not value[0] < value[1]
            ):
                raise ValueError(
                    f"`reward_range` is {value!r}; it takes two finite numbers (low, high) with low < high, or "
                    "nothing for the lowest and highest total reward seen so far."
                )

    def _check_groups_are_whole(self) -> None:
        """All completions of a prompt are scored and kept together, so a rank must hold whole groups."""
        rows = self.per_device_train_batch_size * self.steps_per_generation
        if rows % self.num_generations != 0:
            g, s = self.num_generations, self.steps_per_generation
            # The smallest per-device batch size, and the smallest number of steps, that make whole groups
            batch_unit, step_unit = g // math.gcd(g, s), g // math.gcd(g, self.per_device_train_batch_size)
            raise ValueError(
                "The completions of a prompt would be split between processes: `per_device_train_batch_size` "
                f"({self.per_device_train_batch_size}) x `steps_per_generation` ({s}) = {rows} is not divisible by "
                f"`num_generations` ({g}). Make `per_device_train_batch_size` a multiple of {batch_unit}, or "
                f"`steps_per_generation` a multiple of {step_unit}."
            )


_DOTS_FIELDS = {
    **{
        name: f"dots_{name}"
        for name in ("objective", "sharpness", "target", "temperature", "predictor", "predictor_args")
    },
    **{name: f"dots_{name}" for name in ("reference", "reference_size", "refresh_batches")},
    **{name: name for name in ("exploration", "history_prior", "history_half_life")},
}
_GRESO_FIELDS = {
    name: f"greso_{name}" for name in ("p_init", "p_step", "p_min", "p_max", "target_zero_variance", "easy_share")
}
#: For each built-in selector: its arguments, and the fields that they come from
_SELECTOR_FIELDS: dict[str, dict[str, str]] = {
    "uniform": {"shuffle": "shuffle_dataset"},
    "greso": _GRESO_FIELDS,
    "dots": _DOTS_FIELDS,
    "dots+greso": {**_DOTS_FIELDS, **_GRESO_FIELDS},
}
_CHOICES: dict[str, tuple[str, ...]] = {
    "replay_clip": ("proximal", "behavior"),
    "dots_objective": ("effective", "target"),
    "dots_reference": ("rolling", "paper"),
}
_NUMBERS: dict[str, tuple[Callable[[float], bool], str]] = {
    "rollout_margin": (lambda v: v >= 1, "a number >= 1"),
    "rollout_round_min": (lambda v: 0 < v <= 1, "a number in (0, 1]"),
    "rollout_round_max": (lambda v: v >= 1, "a number >= 1"),
    "exploration": (lambda v: 0 <= v <= 1, "a number in [0, 1]"),
    "reward_timeout": (lambda v: v > 0, "a number of seconds > 0, or nothing for no limit"),
    "replay_fraction": (lambda v: 0 <= v < 1, "a number in [0, 1)"),
    "replay_ratio_cap": (lambda v: v >= 1, "a number >= 1"),
    "dots_sharpness": (lambda v: v > 0, "a number > 0"),
    "dots_target": (lambda v: 0 <= v <= 1, "a number in [0, 1]"),
    "dots_temperature": (lambda v: v > 0, "a number > 0"),
    "history_prior": (lambda v: v > 0, "a number > 0"),
    "history_half_life": (lambda v: v > 0, "a number > 0"),
    "greso_p_init": (lambda v: 0 < v <= 1, "a number in (0, 1]"),
    "greso_p_step": (lambda v: 0 <= v <= 1, "a number in [0, 1]"),
    "greso_p_min": (lambda v: 0 < v <= 1, "a number in (0, 1]"),
    "greso_p_max": (lambda v: 0 < v <= 1, "a number in (0, 1]"),
    "greso_target_zero_variance": (lambda v: 0 <= v < 1, "a number in [0, 1)"),
    "greso_easy_share": (lambda v: 0 <= v <= 1, "a number in [0, 1]"),
}
_INTEGERS = {
    "max_rollout_rounds": "an integer >= 1",
    "replay_capacity": "an integer >= 1",
    "replay_max_age": "an integer >= 1, or nothing for no limit",
    "dots_reference_size": "an integer >= 1",
    "dots_refresh_batches": "an integer >= 1",
}
_OPTIONAL = ("replay_max_age", "reward_timeout")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_number(name: str, value: Any, ok: Callable[[float], bool], takes: str) -> None:
    if not _is_number(value) or not math.isfinite(value) or not ok(value):
        raise ValueError(f"`{name}` is {value!r}; it takes {takes}.")


def _check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"`{name}` is {value!r}; it takes {_listed(allowed)}.")


def _listed(values: tuple[str, ...]) -> str:
    return " or ".join([", ".join(repr(v) for v in values[:-1]), repr(values[-1])])
