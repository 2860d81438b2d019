"""The help of `trl-dataeff grpo`: this package's fields come first, and texts have no markup."""

import re

import pytest

from trl_dataeff.cli.data import DataEfficientGRPOScriptArguments
from trl_dataeff.cli.help import plain_text
from trl_dataeff.cli.options import TYPES, grpo_parser
from trl_dataeff.config import DataEfficientGRPOConfig


@pytest.fixture(scope="module")
def help_text() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        return grpo_parser().format_help()


def test_own_fields_come_first(help_text):
    shown = re.findall(r"^  --(\w+)", help_text, re.M)
    own = [*DataEfficientGRPOScriptArguments.__annotations__, *DataEfficientGRPOConfig.__annotations__]
    own_shown = [name for name in shown if name.removeprefix("no_") in own]
    assert shown[: len(own_shown) + 1] == ["config", *own_shown]
    assert {"selection", "replay", "compact_update", "prompt_column"} <= set(own_shown)
    known = {name for arguments_type in TYPES for name in arguments_type.__dataclass_fields__}
    assert known <= set(shown)


def test_the_description_fits_the_terminal_and_keeps_its_examples(help_text):
    description, _, _ = help_text.partition("\noptions:")
    _, _, text = description.partition("\n\n")
    prose = [line for line in text.splitlines() if not line.startswith(" ")]
    assert max(map(len, prose)) <= 80
    assert "\n  trl-dataeff grpo --config Qwen2.5-0.5B-Instruct/gsm8k/uniform --max_steps 20\n" in text


def test_texts_have_no_markup_and_addresses_can_be_copied(help_text):
    assert re.findall(r"\[[^\]]+\]\(|\[`~|:\w+:`", help_text) == []
    texts = [
        field.metadata["help"] for arguments_type in TYPES for field in arguments_type.__dataclass_fields__.values()
    ]
    addresses = set(re.findall(r"\]\((https://[^)]+)\)", " ".join(texts)))
    assert len(addresses) > 5
    assert all(address in help_text for address in addresses)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("as in [`~trl.GRPOTrainer`], see [`trl.GRPOConfig`]", "as in `GRPOTrainer`, see `GRPOConfig`"),
        ("the :class:`~transformers.Trainer`, :func:`f`", "the `Trainer`, `f`"),
        ("the [ScaleRL paper](https://a.b/c_d).", "the ScaleRL paper (https://a.b/c_d)."),
        ("one of [`all`, `no`] or `x[0]`(1): a", "one of [`all`, `no`] or `x[0]`(1): a"),
    ],
)
def test_plain_text(text, plain):
    assert plain_text(text) == plain
