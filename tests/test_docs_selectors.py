"""The page `docs/selectors.md` runs as it stands."""

import re
from pathlib import Path

import pytest

from tests.factories.tiny import SMALL, plain_dataset, tiny_model, tiny_tokenizer
from tests.factories.training import mixed_reward
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer, Selector


PAGE = Path(__file__).parents[1] / "docs" / "selectors.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)


class TinyConfig(DataEfficientGRPOConfig):
    """The page's configuration, on this machine."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{**SMALL, "save_strategy": "steps", **kwargs})


def tiny_trainer(model, *args, **kwargs):
    return DataEfficientGRPOTrainer(model(), *args, processing_class=tiny_tokenizer(), **kwargs)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page's names after its code was run, and what each of its trainers logged."""
    folder = tmp_path_factory.mktemp("page")
    names = {"__name__": "page", "model": tiny_model, "reward": mixed_reward, "dataset": plain_dataset()}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("trl_dataeff.DataEfficientGRPOConfig", TinyConfig, raising=False)
        patch.setattr("trl_dataeff.DataEfficientGRPOTrainer", tiny_trainer, raising=False)
        trainers = []
        for block in BLOCKS:
            exec(compile(block, str(PAGE), "exec"), names)
            if names.get("trainer") is not None and names["trainer"] not in trainers:
                trainers.append(names["trainer"])
    return names, trainers


def test_both_trainers_used_the_selector(page):
    names, (by_instance, by_name) = page
    assert issubclass(names["LastRateSelector"], Selector)
    for trainer in (by_instance, by_name):
        assert type(trainer.selector) is names["LastRateSelector"]
        assert trainer.selector.floor == 0.05
        assert any("dataeff/selector/mean_rate" in log for log in trainer.state.log_history)
    assert (by_instance.state.global_step, by_name.state.global_step) == (4, 6)


def test_the_pages_own_test_passes(page):
    names, _ = page
    (mark,) = [mark for mark in names["test_last_rate_selector"].pytestmark if mark.name == "parametrize"]
    for make, check in mark.args[1]:
        check(make)
