import copy

import pytest

from tests.golden.comparison import ROOT, first_difference, record_case
from tests.golden.training import STEPS, train_case


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return train_case("selection and replay", tmp_path_factory.mktemp("recorded"))


def test_a_process_of_its_own_trains_the_same(recorded):
    again = record_case("selection and replay", ROOT)
    assert first_difference(recorded, again) is None
    assert len(recorded["loss"]) == STEPS
    assert len(recorded["prompts"]) >= STEPS


def test_another_setting_is_a_difference(recorded, tmp_path):
    other = train_case("proximal clip", tmp_path)
    assert first_difference(recorded, other).startswith("DIFFERENT: ")


@pytest.mark.parametrize("part", ["prompts", "loss", "grad_norm", "entropy", "learning_rate", "weights"])
def test_each_part_is_compared(recorded, part):
    changed = copy.deepcopy(recorded)
    changed[part][-1] = "changed"
    assert f"'{part}' {len(recorded[part]) - 1}: " in first_difference(recorded, changed)
    del changed[part][-1]
    assert f"{len(changed[part])} now" in first_difference(recorded, changed)


def test_a_package_that_fails_is_reported_with_its_error(tmp_path):
    package = tmp_path / "trl_dataeff"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('no such thing')")
    with pytest.raises(SystemExit, match="no such thing"):
        record_case("off", tmp_path)
