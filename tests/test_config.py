"""Fields of the config: defaults, ranges, and what becomes of a config that the trainer is given."""

import dataclasses
import inspect

import pytest
from trl import GRPOConfig, TrlParser

from trl_dataeff import DataEfficientGRPOConfig
from trl_dataeff.config import with_own_fields


BASE = {"use_cpu": True, "bf16": False, "report_to": "none", "per_device_train_batch_size": 8, "num_generations": 8}
NAN = float("nan")
INF = float("inf")
# By field, values that are refused
WRONG = {
    "selection": ["", None, 3],
    "selector_args": [["p_init"], 3],
    "prompt_embedding": ["", 3],
    "success_rate_column": ["", 3],
    "stratify_by": ["", ["kind"]],
    "reward_range": [[1, 0], [0], [0, 1, 2], [0, NAN], [-INF, 1], "01", [0, "a"]],
    "max_rollout_rounds": [0, -1, 2.5, "4", True, None],
    "rollout_margin": [0.5, NAN, "x", None],
    "replay": ["on", True, 0.5, None],
    "replay_fraction": [0, -0.5, 1.0, NAN],
    "replay_capacity": [0, 1.5, None],
    "replay_max_age": [0, -3, 2.5],
    "replay_order": ["oldest", None],
    "replay_clip": ["none", None],
    "replay_ratio_cap": [0.5, 0, NAN],
    "compact_update": ["yes", 1, None],
    "save_on_signal": ["yes", 1, None],
    "max_unscored_completions": [0, -1, 2.5, "512", True],
}
INHERITED = {field.name for field in dataclasses.fields(GRPOConfig)}
OWN = [field for field in dataclasses.fields(DataEfficientGRPOConfig) if field.name not in INHERITED]
DEFAULTS = {field.name: field.default for field in OWN}


def test_every_field_has_its_help_and_refuses_wrong_values():
    assert set(WRONG) == set(DEFAULTS)
    for field in OWN:
        assert len(field.metadata["help"]) > 20
        assert set(field.metadata) == {"help"}, "argparse takes all of it"


def test_the_command_shows_the_help_of_every_field_with_its_default():
    parser = TrlParser(DataEfficientGRPOConfig, prog="command")
    shown = "".join(parser.format_help().split())  # argparse breaks lines at hyphens too
    for field in OWN:
        text = field.metadata["help"].replace("%%", "%") + f" (default: {field.default})"
        assert "".join(text.split()) in shown


def test_the_docstring_repeats_the_description_of_no_field():
    text = inspect.getdoc(DataEfficientGRPOConfig)
    for field in OWN:
        assert f"{field.name} (" not in text


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, wrong in WRONG.items() for value in wrong])
def test_a_wrong_value_is_named_with_what_was_given(name, value):
    with pytest.raises(ValueError, match=name):
        DataEfficientGRPOConfig("out", **BASE, **{name: value})


def test_all_wrong_values_are_named_at_once():
    with pytest.raises(ValueError, match="`max_rollout_rounds`") as refused:
        DataEfficientGRPOConfig("out", **BASE, max_rollout_rounds=0, replay="fil", reward_range=[1, 0])
    assert [name in str(refused.value) for name in ("`replay`", "`reward_range`", "`replay_clip`")] == [
        True,
        True,
        False,
    ]


def test_values_on_the_bounds_are_taken():
    bounds = {"replay_max_age": None, "replay_ratio_cap": None, "rollout_margin": 2, "reward_range": (0, 1)}
    config = DataEfficientGRPOConfig("out", **BASE, **bounds)
    assert {name: getattr(config, name) for name in bounds} == bounds
    assert DataEfficientGRPOConfig("out", **BASE, replay=False).replay == "off", "as YAML reads an unquoted `off`"
    json_text = DataEfficientGRPOConfig("out", **BASE, selector_args='{"p_init": 0.3}')
    assert json_text.selector_args == {"p_init": 0.3}


def test_two_handlers_of_sigterm_are_refused():
    DataEfficientGRPOConfig("out", **BASE, enable_jit_checkpoint=True)
    with pytest.raises(ValueError, match="`enable_jit_checkpoint`"):
        DataEfficientGRPOConfig("out", **BASE, save_on_signal=True, enable_jit_checkpoint=True)


@dataclasses.dataclass
class Special(GRPOConfig):
    """With a field of its own, and a `__post_init__`."""

    special: int = 3

    def __post_init__(self):
        super().__post_init__()
        self.doubled = 2 * self.special


def test_a_plain_config_stays_as_it_is_and_values_under_our_names_are_kept_and_checked():
    plain = GRPOConfig("out", **BASE)
    before = dict(vars(plain))
    own = with_own_fields(plain)
    assert {name: getattr(own, name) for name in DEFAULTS} == DEFAULTS
    assert vars(plain) == before
    given = Special("out", **BASE, special=5)
    given.replay_fraction = 0.25
    own = with_own_fields(given)
    assert (own.special, own.doubled, own.replay_fraction) == (5, 10, 0.25)
    assert {name: getattr(own, name) for name in DEFAULTS} == DEFAULTS | {"replay_fraction": 0.25}
    given.replay_ratio_cap = 0.5
    with pytest.raises(ValueError, match="`replay_ratio_cap`"):
        with_own_fields(given)


def test_our_own_configuration_is_kept_as_the_object_that_it_is():
    """As TRL keeps it: a script may change it after the trainer was made."""
    own = DataEfficientGRPOConfig("out", **BASE)
    assert with_own_fields(own) is own
