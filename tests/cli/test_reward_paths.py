"""Reward functions by name and by dotted path."""

from __future__ import annotations

import sys

import pytest

from trl_dataeff.cli.grpo import check_columns, load_reward
from trl_dataeff.cli.main import main
from trl_dataeff.utils import UserError


def test_overlong_punishment_has_the_values_that_the_help_names():
    punish = load_reward("get_soft_overlong_punishment")
    assert punish(completion_ids=[[0] * n for n in (1024, 1152, 1280, 1281)]) == [0.0, -0.5, -1.0, -1.0]


def test_path_is_found_in_the_current_folder(write, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    write("my_rewards_for_a_test.py", "def brevity(completions, **kwargs):\n    return [1.0]\n")
    reward = load_reward("my_rewards_for_a_test.brevity")
    assert reward(completions=["a"]) == [1.0]
    with pytest.raises(UserError, match=r"has no function 'brevty'. Did you mean `brevity`"):
        load_reward("my_rewards_for_a_test.brevty")


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("numeric_awnser_reward", ["unknown", "Did you mean `numeric_answer_reward`", "dotted path"]),
        ("nowhere_to_be_found.reward", ["no module 'nowhere_to_be_found'", "PYTHONPATH"]),
        ("os.path.sep", ["no function 'sep'"]),
        ("broken_module_for_a_test.reward", ["ZeroDivisionError", "broken_module_for_a_test.py, line 2"]),
        ("missing_import_for_a_test.reward", ["ModuleNotFoundError", "not_installed_at_all"]),
    ],
)
def test_paths_that_lead_nowhere(name, parts, write, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    write("broken_module_for_a_test.py", "\n1 / 0\n")
    write("missing_import_for_a_test.py", "import not_installed_at_all\n")
    with pytest.raises(UserError) as error:
        load_reward(name)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("name", ["math_verify_reward", "accuracy_reward"])
def test_missing_math_verify_is_said_at_once(name, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    assert main(["grpo", "--reward_funcs", name]) == 2
    assert "pip install math-verify" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "row", "part"),
    [
        ("exact_answer_reward", {"prompt": "p", "label": 1}, "`answer` or `solution`"),
        ("accuracy_reward", {"prompt": [], "answer": 1}, "`solution`"),
        ("accuracy_reward", {"prompt": "p", "solution": 1}, "`prompt_as_chat`"),
        ("think_format_reward", {"prompt": "p"}, "`prompt_as_chat`"),
    ],
)
def test_dataset_that_a_reward_cannot_read(name, row, part):
    with pytest.raises(UserError) as error:
        check_columns([name], row)
    assert part in str(error.value)


def test_dataset_that_rewards_can_read():
    check_columns(["exact_answer_reward", "my.own"], {"prompt": "p", "solution": 1})
    check_columns(["accuracy_reward"], {"prompt": [{"role": "user"}], "solution": 1})
    check_columns(None, {"prompt": "p"})
