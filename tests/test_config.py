"""Fields of the config: names, defaults and ranges."""

import dataclasses
import inspect

import pytest
from trl import GRPOConfig

from trl_dataeff import DataEfficientGRPOConfig
from trl_dataeff.selection import make_selector


BASE = {"use_cpu": True, "bf16": False, "report_to": "none", "per_device_train_batch_size": 8, "num_generations": 8}

# Names and defaults
DEFAULTS = {
    "selection": "auto",
    "selector_args": None,
    "dynamic_sampling": False,
    "max_rollout_rounds": 4,
    "rollout_margin": 1.0,
    "rollout_round_min": 0.25,
    "rollout_round_max": 1.5,
    "reward_range": None,
    "exploration": 0.05,
    "save_on_signal": False,
    "skip_nonfinite_steps": False,
    "vllm_reconnect": False,
    "reward_timeout": None,
    "replay_fraction": 0.5,
    "replay_capacity": 512,
    "replay_max_age": 20,
    "replay_clip": "behavior",
    "replay_ratio_cap": 2.0,
    "dots_objective": "effective",
    "dots_sharpness": 4.0,
    "dots_target": 0.5,
    "dots_temperature": 1e-3,
    "dots_predictor": "logistic",
    "dots_predictor_args": None,
    "dots_embedding": "policy",
    "dots_reference": "rolling",
    "dots_reference_size": 256,
    "dots_refresh_batches": 1,
    "history_prior": 4.0,
    "history_half_life": 20,
    "greso_p_init": 0.5,
    "greso_p_step": 0.01,
    "greso_p_min": 0.05,
    "greso_p_max": 0.95,
    "greso_target_zero_variance": 0.25,
    "greso_easy_share": 1 / 3,
}
NAN, INF = float("nan"), float("inf")
WRONG = {
    "selection": ["", None, 3],
    "selector_args": [["p_init"], 3],
    "dynamic_sampling": ["yes", 1, None],
    "max_rollout_rounds": [0, -1, 2.5, "4", True, None],
    "rollout_margin": [0.5, NAN, "x", None],
    "rollout_round_min": [0, 1.1, INF],
    "rollout_round_max": [0.5, INF, None],
    "reward_range": [[1, 0], [0], [0, 1, 2], [0, NAN], [-INF, 1], "01", 1.0, [0, "a"]],
    "exploration": [-0.1, 1.1, None],
    "save_on_signal": ["yes", 1, None],
    "skip_nonfinite_steps": ["yes", 0, None],
    "vllm_reconnect": ["no", 1, None],
    "reward_timeout": [0, -1, INF, "10"],
    "replay_fraction": [-0.5, 1.0, NAN],
    "replay_capacity": [0, 1.5, None],
    "replay_max_age": [0, -3, 2.5],
    "replay_clip": ["none", None],
    "replay_ratio_cap": [0.5, 0, INF],
    "dots_objective": ["entropy"],
    "dots_sharpness": [0, -1],
    "dots_target": [-0.1, 1.5],
    "dots_temperature": [0, -1e-3],
    "dots_predictor": ["", None, 3],
    "dots_predictor_args": [[1], 3],
    "dots_embedding": ["", None],
    "dots_reference": ["fixed"],
    "dots_reference_size": [0],
    "dots_refresh_batches": [0, 1.5],
    "history_prior": [0],
    "history_half_life": [0, NAN],
    "greso_p_init": [0, 1.5, 0.99],  # the last is above greso_p_max
    "greso_p_step": [-0.1, 2],
    "greso_p_min": [0, 0.6],
    "greso_p_max": [0.4, 1.2],
    "greso_target_zero_variance": [-0.1, 1.0],
    "greso_easy_share": [-0.1, 1.1],
}


def own_fields() -> set[str]:
    inherited = {field.name for field in dataclasses.fields(GRPOConfig)}
    return {field.name for field in dataclasses.fields(DataEfficientGRPOConfig)} - inherited


def test_fields_and_defaults():
    config = DataEfficientGRPOConfig("out", **BASE)
    assert own_fields() == set(DEFAULTS)
    assert {name: getattr(config, name) for name in DEFAULTS} == DEFAULTS


def test_every_field_is_tried_with_wrong_values():
    assert set(WRONG) == own_fields()


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_value_is_named_with_what_was_given(name, value):
    with pytest.raises(ValueError, match=name) as error:
        DataEfficientGRPOConfig("out", **BASE, **{name: value})
    assert repr(value).strip("[]") in str(error.value)


def test_help_and_types_are_there_for_every_field():
    for field in dataclasses.fields(DataEfficientGRPOConfig):
        if field.name in DEFAULTS:
            assert len(field.metadata["help"]) > 20, field.name
            field.metadata["help"] % {}  # argparse formats it


@pytest.mark.parametrize("name", ["selector_args", "dots_predictor_args"])
def test_arguments_are_a_dictionary_or_json_text(name):
    for given in ({"p_init": 0.3, "labels": ["a"]}, '{"p_init": 0.3, "labels": ["a"]}'):
        config = DataEfficientGRPOConfig("out", **BASE, **{name: given})
        assert getattr(config, name) == {"p_init": 0.3, "labels": ["a"]}
    with pytest.raises(ValueError, match=f"`{name}` is .*takes a dictionary of keyword arguments"):
        DataEfficientGRPOConfig("out", **BASE, **{name: ["p_init"]})


@pytest.mark.parametrize("name", ["uniform", "greso", "dots", "dots+greso"])
def test_arguments_of_the_built_in_selectors_come_from_their_fields(name):
    """Every argument of a built-in selector has a field, and `selector_args` wins over it."""
    config = DataEfficientGRPOConfig("out", **BASE)
    arguments = config.selector_arguments(name)
    make_selector(name, arguments)
    taken = {p.name for c in type(make_selector(name)).__mro__ for p in _keywords(c)}
    assert set(arguments) == taken - {"self"}
    changed = {"greso_p_init": 0.6, "dots_sharpness": 2.0, "exploration": 0.3, "shuffle_dataset": False}
    arguments = DataEfficientGRPOConfig("out", **BASE, **changed).selector_arguments(name)
    assert {"p_init": 0.6, "sharpness": 2.0, "exploration": 0.3, "shuffle": False}.items() >= {
        key: value for key, value in arguments.items() if key in ("p_init", "sharpness", "exploration", "shuffle")
    }.items()
    first = next(iter(arguments))
    config = DataEfficientGRPOConfig("out", **BASE, selector_args={first: "mine"})
    assert config.selector_arguments(name) == {
        **DataEfficientGRPOConfig("out", **BASE).selector_arguments(name),
        first: "mine",
    }


def _keywords(cls: type) -> list[inspect.Parameter]:
    found = inspect.signature(cls.__init__).parameters.values() if "__init__" in cls.__dict__ else []
    return [
        parameter for parameter in found if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]


def test_arguments_of_another_selector_are_selector_args_alone():
    config = DataEfficientGRPOConfig("out", **BASE, selection="mine", selector_args={"depth": 2}, greso_p_init=0.6)
    assert config.selector_arguments("mine") == {"depth": 2}
    assert DataEfficientGRPOConfig("out", **BASE).selector_arguments("mine") == {}


def test_two_handlers_of_sigterm_are_refused():
    DataEfficientGRPOConfig("out", **BASE, enable_jit_checkpoint=True)
    DataEfficientGRPOConfig("out", **BASE, save_on_signal=True)
    with pytest.raises(ValueError, match="`save_on_signal` and `enable_jit_checkpoint` both handle SIGTERM") as error:
        DataEfficientGRPOConfig("out", **BASE, save_on_signal=True, enable_jit_checkpoint=True)
    assert "Set one of them to False" in str(error.value)
    plain = GRPOConfig("out", **BASE, enable_jit_checkpoint=True)
    assert DataEfficientGRPOConfig.from_grpo_config(plain).enable_jit_checkpoint


def test_numbers_may_be_integers_and_ranges_tuples():
    config = DataEfficientGRPOConfig("out", **BASE, rollout_margin=2, reward_range=(0, 1), replay_max_age=5)
    assert config.rollout_margin == 2


@pytest.mark.parametrize(
    ("batch", "steps", "generations", "advice"),
    [(6, 2, 4, None), (6, 1, 4, "a multiple of 4"), (2, 3, 4, "`per_device_train_batch_size` a multiple of 4")],
)
def test_groups_split_between_processes_are_refused(monkeypatch, batch, steps, generations, advice):
    # On two processes, TRL accepts any of these
    monkeypatch.setattr(DataEfficientGRPOConfig, "world_size", property(lambda self: 2))
    fields = {
        **BASE,
        "per_device_train_batch_size": batch,
        "steps_per_generation": steps,
        "num_generations": generations,
    }
    if advice is None:
        DataEfficientGRPOConfig("out", **fields)
    else:
        with pytest.raises(ValueError, match=advice) as error:
            DataEfficientGRPOConfig("out", **fields)
        assert f"({batch})" in str(error.value)


class TestPlainConfig:
    def test_gets_the_defaults_and_keeps_its_own(self):
        plain = GRPOConfig("out", **BASE, learning_rate=3e-4, steps_per_generation=2)
        before = dict(plain.__dict__)
        config = DataEfficientGRPOConfig.from_grpo_config(plain)
        assert isinstance(config, DataEfficientGRPOConfig)
        assert {name: getattr(config, name) for name in DEFAULTS} == DEFAULTS
        for field in dataclasses.fields(GRPOConfig):
            assert getattr(config, field.name) == getattr(plain, field.name), field.name
        assert plain.__dict__ == before

    def test_ours_is_passed_through(self):
        config = DataEfficientGRPOConfig("out", **BASE)
        assert DataEfficientGRPOConfig.from_grpo_config(config) is config

    def test_subclass_fields_survive(self):
        @dataclasses.dataclass
        class Special(GRPOConfig):
            special: int = 3

        assert DataEfficientGRPOConfig.from_grpo_config(Special("out", **BASE, special=5)).special == 5
