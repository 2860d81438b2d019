"""`DataEfficientGRPOConfig`: TRL's `GRPOConfig`, and the fields of this package.

The fields are checked when the object is made, so that wrong values end in one message before a model is loaded.
What is deliberately not here: our fields (see `options.py`), the values that fields take (see `fields.py`), and whatever
needs the dataset, the model or plug-ins (see `validation.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from trl import GRPOConfig

from trl_dataeff.fields import FieldError, Problem, evaluation_problems, field_problems, group_problems
from trl_dataeff.options import DataEfficientOptions


AUTO_SELECTION = "dots"  # what "auto" stands for where prompts can be chosen and embedded


@dataclass
class DataEfficientGRPOConfig(DataEfficientOptions, GRPOConfig):
    r"""
    Configuration of [`DataEfficientGRPOTrainer`].

    Takes every argument of [`~trl.GRPOConfig`] and of [`~trl_dataeff.options.DataEfficientOptions`]. With
    `selection="uniform"`, `dynamic_sampling=False` and `replay_fraction=0` training is that of [`~trl.GRPOTrainer`], to
    the last bit.
    """

    if TYPE_CHECKING:  # TRL's annotations allow `None`, which `__post_init__` replaces or rejects
        output_dir: str = ""
        num_generations: int = 8
        generation_batch_size: int = 0
        steps_per_generation: int = 0
        max_completion_length: int = 256
    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "selector_args", "dots_predictor_args"]  # noqa: RUF012

    def __post_init__(self) -> None:
        # Before TRL derives fields from one another, and divides by them
        _reject(field_problems(vars(self)))
        try:
            super().__post_init__()
        except ValueError:
            _reject(self._group_problems())  # which say what numbers would do
            raise
        _reject(self._group_problems())

    def selector_arguments(self, name: str) -> dict[str, Any]:
        """
        Keyword arguments of the selector `name`: fields of this configuration for the built-in ones, and `selector_args`,
        which win.
        """
        fields_of = {argument: getattr(self, field) for argument, field in _SELECTOR_FIELDS.get(name, {}).items()}
        assert not isinstance(self.selector_args, str)  # TrainingArguments parses JSON text
        return fields_of | (self.selector_args or {})

    @classmethod
    def upgrade(cls, args: GRPOConfig) -> DataEfficientGRPOConfig:
        """
        Give `args`, the object itself, this class with the defaults of the fields that it lacks, and check it. What its
        owner changes later is seen, and an object of a subclass of `GRPOConfig` keeps its methods: it gets a class that
        derives from both. If a value is invalid, `args` stays as it is.

        `GRPOConfig.__post_init__` derives fields from one another and cannot run twice, so nothing is constructed.
        """
        kind = type(args) if isinstance(args, cls) else _joined_with(type(args))
        upgraded = object.__new__(kind)
        # None of this class's own fields has a factory
        upgraded.__dict__.update(
            {f.name: f.default for f in fields(cls) if f.name not in args.__dict__} | args.__dict__
        )
        _reject([*field_problems(vars(upgraded)), *upgraded._group_problems()])
        args.__dict__.update(upgraded.__dict__)
        args.__class__ = kind
        return args  # type: ignore[return-value]

    def _group_problems(self) -> list[Problem]:
        if self.steps_per_generation is None:
            return []  # TRL rejects `generation_batch_size`
        problems = group_problems(self.per_device_train_batch_size, self.steps_per_generation, self.num_generations)
        if self.do_eval and self.eval_strategy != "no":
            completions = self.num_generations_eval or self.num_generations
            problems += evaluation_problems(self.per_device_eval_batch_size, self.world_size, completions)
        return problems


def _reject(problems: list[Problem]) -> None:
    if problems:
        raise FieldError(problems) from None


_JOINED: dict[Any, type[DataEfficientGRPOConfig]] = {GRPOConfig: DataEfficientGRPOConfig}


def _joined_with(kind: Any) -> type[DataEfficientGRPOConfig]:
    """The class of this package for objects of the class `kind`, whose own methods and fields come first."""
    if kind in _JOINED:
        return _JOINED[kind]
    # A class that is made here cannot be found by its name: `training_args.bin` holds `kind`
    namespace = {
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        "__reduce__": lambda self: (_empty_joined_with, (kind,), self.__dict__),
    }
    joined: Any = type(f"DataEfficient{kind.__name__}", (kind, DataEfficientGRPOConfig), namespace)
    return _JOINED.setdefault(kind, dataclass(repr=False, eq=False)(joined))


def _empty_joined_with(kind: Any) -> DataEfficientGRPOConfig:
    """What pickle fills with the fields."""
    return object.__new__(_joined_with(kind))


_DOTS_FIELDS = {
    **{
        name: f"dots_{name}"
        for name in (
            "objective",
            "sharpness",
            "threshold",
            "coverage",
            "target",
            "temperature",
            "predictor",
            "predictor_args",
        )
    },
    **{name: f"dots_{name}" for name in ("reference", "reference_size", "refresh_batches")},
    **{name: name for name in ("exploration", "history_prior")},
    "half_lives": "history_half_lives",
    "shuffle": "shuffle_dataset",
}
_GRESO_FIELDS = {
    name: f"greso_{name}"
    for name in ("p_init", "p_step", "p_min", "p_max", "target_zero_variance", "easy_share", "streak_half_life")
}
#: For each built-in selector: its arguments, and the fields that they come from
_SELECTOR_FIELDS: dict[str, dict[str, str]] = {
    "uniform": {"shuffle": "shuffle_dataset"},
    "greso": _GRESO_FIELDS,
    "dots": _DOTS_FIELDS,
    "dots+greso": {**_DOTS_FIELDS, **_GRESO_FIELDS},
}
