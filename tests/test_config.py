"""Fields of the config: names, defaults and ranges."""

import copy
import dataclasses
import inspect

import pytest
import torch
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
    "sequential_rollouts": False,
    "reward_range": None,
    "exploration": 0.05,
    "advantage_baseline": "group",
    "baseline_strength": None,
    "save_on_signal": False,
    "skip_nonfinite_steps": False,
    "vllm_reconnect": False,
    "reward_timeout": None,
    "replay_fraction": 0.5,
    "fresh_groups": "fixed",
    "effective_target": 0.25,
    "replay_max_uses": None,
    "replay_max_movement": None,
    "replay_min_ess": 0.0,
    "replay_min_unclipped": 0.0,
    "replay_pause_ess": 0.9,
    "replay_capacity": 512,
    "replay_order": "newest",
    "replay_max_age": 5,
    "replay_weight": None,
    "replay_clip": "behavior",
    "replay_ratio_cap": 2.0,
    "dots_objective": "effective",
    "dots_sharpness": 4.0,
    "dots_threshold": 0.6,
    "dots_coverage": 0.7,
    "dots_target": 0.5,
    "dots_temperature": 1e-3,
    "dots_predictor": "logistic",
    "dots_predictor_args": None,
    "dots_embedding": "policy",
    "dots_reference": "rolling",
    "dots_reference_size": 256,
    "dots_refresh_batches": 1,
    "history_prior": 4.0,
    "history_from": None,
    "history_half_lives": None,
    "greso_p_init": 0.5,
    "greso_p_step": 0.01,
    "greso_p_min": 0.05,
    "greso_p_max": 0.95,
    "greso_target_zero_variance": 0.25,
    "greso_easy_share": 1 / 3,
    "greso_streak_half_life": None,
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
    "sequential_rollouts": ["yes", 1, None],
    "reward_range": [[1, 0], [0], [0, 1, 2], [0, NAN], [-INF, 1], "01", 1.0, [0, "a"]],
    "exploration": [-0.1, 1.1, None],
    "advantage_baseline": ["batch", None],
    "baseline_strength": [-1, INF, "4"],
    "save_on_signal": ["yes", 1, None],
    "skip_nonfinite_steps": ["yes", 0, None],
    "vllm_reconnect": ["no", 1, None],
    "reward_timeout": [0, -1, INF, "10"],
    "replay_fraction": [-0.5, 1.0, NAN],
    "fresh_groups": ["all", None],
    "effective_target": [0, -0.1, 1.5, NAN, None],
    "replay_max_uses": [0, -1, 1.5],
    "replay_max_movement": [0, -0.1, NAN],
    "replay_min_ess": [-0.1, 1.5, None],
    "replay_min_unclipped": [-0.1, 1.5, None],
    "replay_pause_ess": [-0.1, 1.5, None],
    "replay_capacity": [0, 1.5, None],
    "replay_max_age": [0, -3, 2.5],
    "replay_weight": [0, -0.1, 1.5],
    "replay_order": ["oldest", None],
    "replay_clip": ["none", None],
    "replay_ratio_cap": [0.5, 0, INF],
    "dots_objective": ["entropy"],
    "dots_sharpness": [0, -1],
    "dots_threshold": [0, 1.1],
    "dots_coverage": [-0.1, 1.5],
    "dots_target": [-0.1, 1.5],
    "dots_temperature": [0, -1e-3],
    "dots_predictor": ["", None, 3],
    "dots_predictor_args": [[1], 3],
    "dots_embedding": ["", None],
    "dots_reference": ["fixed"],
    "dots_reference_size": [0],
    "dots_refresh_batches": [0, 1.5],
    "history_prior": [0],
    "history_from": ["", 3],
    "history_half_lives": [[], [0.0], [1.0, NAN], 20],
    "greso_p_init": [0, 1.5, 0.99],  # the last is above greso_p_max
    "greso_p_step": [-0.1, 2],
    "greso_p_min": [0, 0.6],
    "greso_p_max": [0.4, 1.2],
    "greso_target_zero_variance": [-0.1, 1.0],
    "greso_easy_share": [-0.1, 1.1],
    "greso_streak_half_life": [0, -1, NAN, "10"],
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


def test_an_adaptive_number_of_fresh_groups_needs_replay():
    with pytest.raises(ValueError, match="`fresh_groups` is 'adaptive' and `replay_fraction` is 0"):
        DataEfficientGRPOConfig("out", **BASE, fresh_groups="adaptive", replay_fraction=0.0)


@pytest.mark.parametrize("name", ["selector_args", "dots_predictor_args"])
def test_arguments_are_a_dictionary_or_json_text(name):
    for given in ({"p_init": 0.3, "labels": ["a"]}, '{"p_init": 0.3, "labels": ["a"]}'):
        config = DataEfficientGRPOConfig("out", **BASE, **{name: given})
        assert getattr(config, name) == {"p_init": 0.3, "labels": ["a"]}
    with pytest.raises(ValueError, match=f"`{name}` is .*takes a mapping"):
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
    assert DataEfficientGRPOConfig.upgrade(plain).enable_jit_checkpoint


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


@dataclasses.dataclass
class Special(GRPOConfig):
    """With a field and methods of its own."""

    special: int = 3

    def __post_init__(self):
        super().__post_init__()
        self.doubled = 2 * self.special

    def set_run_name(self):
        self.run_name = f"special-{self.special}"


class TestPlainConfig:
    """A `GRPOConfig` that is given to the trainer."""

    def test_gets_the_defaults_and_keeps_its_own(self):
        plain = GRPOConfig("out", **BASE, learning_rate=3e-4, steps_per_generation=2)
        before = dict(plain.__dict__)
        config = DataEfficientGRPOConfig.upgrade(plain)
        assert type(config) is DataEfficientGRPOConfig
        assert {name: getattr(config, name) for name in DEFAULTS} == DEFAULTS
        assert {name: getattr(config, name) for name in before} == before

    @pytest.mark.parametrize("kind", [GRPOConfig, DataEfficientGRPOConfig, Special])
    def test_what_its_owner_changes_later_is_seen(self, kind):
        given = kind("out", **BASE)
        config = DataEfficientGRPOConfig.upgrade(given)
        given.learning_rate, given.replay_fraction = 0.5, 0.25
        assert (config.learning_rate, config.replay_fraction) == (0.5, 0.25)
        assert config is given

    def test_methods_and_fields_of_a_subclass_survive(self):
        config = DataEfficientGRPOConfig.upgrade(Special("out", **BASE, special=5))
        config.set_run_name()
        assert (config.special, config.doubled, config.run_name) == (5, 10, "special-5")
        assert isinstance(config, Special)
        assert isinstance(config, DataEfficientGRPOConfig)
        assert config.selector_arguments("greso")["p_init"] == 0.5
        assert config.special == config.to_dict()["special"]
        assert str(config).startswith("DataEfficientSpecial(")

    def test_values_of_its_own_under_our_names_are_kept_and_checked(self):
        given = Special("out", **BASE)
        given.replay_fraction = 0.25
        assert DataEfficientGRPOConfig.upgrade(given).replay_fraction == 0.25
        given.exploration = 7
        with pytest.raises(ValueError, match="`exploration` is 7"):
            DataEfficientGRPOConfig.upgrade(given)

    def test_one_that_is_refused_stays_as_it_is(self):
        given = GRPOConfig("out", **BASE)
        given.loss_type = "nonsense"
        before = dict(given.__dict__)
        with pytest.raises(ValueError, match="`loss_type` is 'nonsense'"):
            DataEfficientGRPOConfig.upgrade(given)
        assert type(given) is GRPOConfig
        assert given.__dict__ == before

    @pytest.mark.parametrize("kind", [GRPOConfig, Special])
    def test_it_is_saved_copied_and_replaced_as_any_other(self, kind, tmp_path):
        config = DataEfficientGRPOConfig.upgrade(kind("out", **BASE, seed=5))
        config.replay_fraction = 0.25
        torch.save(config, tmp_path / "training_args.bin")
        loaded = torch.load(tmp_path / "training_args.bin", weights_only=False)
        replaced = dataclasses.replace(config, generation_batch_size=None)  # TRL takes one of the two
        for other in (loaded, copy.copy(config), copy.deepcopy(config), replaced):
            assert type(other) is type(config)
            assert other is not config
            assert other.to_dict() == config.to_dict()
        assert config.to_dict()["replay_fraction"] == 0.25
        with pytest.raises(ValueError, match="`replay_fraction` is 2"):
            dataclasses.replace(config, generation_batch_size=None, replay_fraction=2)

    def test_objects_of_one_class_get_one_class(self):
        first, second = (DataEfficientGRPOConfig.upgrade(Special("out", **BASE)) for _ in range(2))
        assert type(first) is type(second)
        assert DataEfficientGRPOConfig.upgrade(first) is first
